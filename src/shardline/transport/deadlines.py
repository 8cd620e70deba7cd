"""A deadline that blames nobody else for our own pause.

Owns one rule: a party is judged late only after what waits on its socket was read, and a timer that itself fires
late (the process was stopped, the machine slept) gives one more interval. Shown by tests/transport/test_deadlines.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

READ_PASS_S = 0.005
"""Between the timer and the verdict: at least one pass of the loop over its sockets."""


class Deadline:
    """Calls `expired` once at `due` (loop time) or a little later, unless it is cancelled before."""

    __slots__ = ("_due", "_expired", "_handle", "_late_s", "_loop")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, due: float, late_s: float, expired: Callable[[], object]
    ) -> None:
        self._loop = loop
        self._due = due
        self._late_s = late_s
        self._expired = expired
        self._handle: asyncio.TimerHandle = loop.call_at(due, self._fire)

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        late = self._loop.time() - self._due > self._late_s
        self._handle = self._loop.call_later(self._late_s if late else READ_PASS_S, self._expired)
