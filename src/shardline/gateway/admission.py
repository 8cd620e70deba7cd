"""Who may try to open a session next, when the routes are full: one queue a model, first come, first served.

While nobody waits, requests try at once and beside one another. One that is refused for want of capacity takes its
place by its arrival number; from then on only the head of the queue tries, each time something was freed or a short
pause has passed. Bounded in length and in time. Knows nothing of routes. Shown by tests/gateway/test_admission.py.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shardline.errors import ShardlineError
from shardline.settings import Settings

T = TypeVar("T")

CAPACITY_CODES = frozenset({"kv_exhausted", "capacity", "draining", "shard_unready"})
"""Refusals that waiting can cure."""
_RETRY_S = (0.25, 2.0)
"""The head of the queue tries again by itself after so long, and at most so long: other Gateways free places too."""


class _Place:
    """A request in the queue. Ordered by arrival."""

    __slots__ = ("arrival", "turn")

    def __init__(self, arrival: int) -> None:
        self.arrival = arrival
        self.turn = asyncio.Event()

    def __lt__(self, other: _Place) -> bool:
        return self.arrival < other.arrival


class Admission:
    """The queue of one model."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queue: list[_Place] = []
        self._arrivals = 0
        self._inside = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def used(self) -> bool:
        """Somebody tries, or waits to try."""
        return self._inside > 0

    def freed(self) -> None:
        """A session has ended: the head may try again."""
        if self._queue:
            self._queue[0].turn.set()

    async def admit(self, attempt: Callable[[], Awaitable[T]], moved: Callable[[int | None], None]) -> T:
        """Run `attempt` until it is not refused for capacity. `moved(place)` hears the place in the queue, 1 is next.

        Raises `queue_full` at once when the queue is full, `capacity` after `queue_wait_s`, and whatever else
        `attempt` raises.
        """
        self._inside += 1
        try:
            return await self._admit(attempt, moved)
        finally:
            self._inside -= 1

    async def _admit(self, attempt: Callable[[], Awaitable[T]], moved: Callable[[int | None], None]) -> T:
        self._arrivals += 1
        place = _Place(self._arrivals)
        refusal: ShardlineError | None = None
        if not self._queue:
            try:
                return await attempt()
            except ShardlineError as error:
                if error.code not in CAPACITY_CODES:
                    raise
                refusal = error
        if len(self._queue) >= self._settings.queue_limit:
            raise ShardlineError(
                "queue_full", f"{len(self._queue)} requests wait already, the limit", retry_after=self._retry_after()
            )
        insort(self._queue, place)
        try:
            return await self._wait_turn(place, attempt, moved, refusal)
        finally:
            self._queue.remove(place)
            moved(None)
            self.freed()

    async def _wait_turn(
        self,
        place: _Place,
        attempt: Callable[[], Awaitable[T]],
        moved: Callable[[int | None], None],
        refusal: ShardlineError | None,
    ) -> T:
        deadline = time.monotonic() + self._settings.queue_wait_s
        pause, most = _RETRY_S
        while (left := deadline - time.monotonic()) > 0:
            position = self._queue.index(place) + 1
            moved(position)
            try:
                async with asyncio.timeout(min(left, pause)):
                    await place.turn.wait()
            except TimeoutError:
                pass
            called = place.turn.is_set()
            place.turn.clear()
            if self._queue[0] is not place:
                if called:
                    self.freed()  # an earlier arrival has come in front since: it is called instead
                continue
            pause = min(most, 2 * pause)
            try:
                return await attempt()
            except ShardlineError as error:
                if error.code not in CAPACITY_CODES:
                    raise
                refusal = error
        reason = f": {refusal.message}" if refusal is not None else ""
        raise ShardlineError(
            "capacity",
            f"no route became free in {self._settings.queue_wait_s:g} s{reason}",
            limit="queue",
            retry_after=self._retry_after(),
        )

    def _retry_after(self) -> int:
        return max(1, min(60, round(self._settings.queue_wait_s / 2)))
