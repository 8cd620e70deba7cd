"""Who makes way when a server has as many connections as it may: one of those that keep it waiting.

Owns the order in which connections wait for their clients (silent, idle, or in the middle of a request), and the
choice among them. Connections whose request is being served are not in it. Pure: the clock is an argument. Shown by
tests/transport/test_crowd.py.
"""

from __future__ import annotations

from itertools import islice
from typing import Generic, Protocol, TypeVar

PATIENCE_S = 0.05
"""Nobody makes way before it has had this long: the request of an honest client comes right behind its connection."""
LOOK = 32
"""So many of the oldest are compared; a server that is full has no time for more."""


class Waited(Protocol):
    """Somebody that is waited for."""

    @property
    def heard(self) -> int:
        """Bytes that came from it since it is waited for."""
        ...


T = TypeVar("T", bound=Waited)


class Crowd(Generic[T]):
    """Connections that are waited for, the one that has been longest first. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._since: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def waits(self, member: T, now: float) -> None:
        """It is the client's turn, from now on."""
        self._since.pop(member, None)
        self._since[member] = now

    def works(self, member: T) -> None:
        """It is the server's turn, or the connection is gone."""
        self._since.pop(member, None)

    def pick(self, now: float) -> T | None:
        """Who makes way: of the oldest, the one that has sent least. None: nobody has had its time yet."""
        oldest = [member for member, since in islice(self._since.items(), LOOK) if now - since >= PATIENCE_S]
        return min(oldest, key=lambda member: member.heard, default=None)
