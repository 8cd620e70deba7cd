"""Memory for the large request bodies of one process: a bound on their sum, first come, first served.

Owns who has room, who waits for it, and which unfinished body makes way for those that wait. It reads nothing:
bodies.py and the direct lane ask here. Small bodies need no room: their sum is bounded by the number of connections.
Shown by tests/transport/test_body_room.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from shardline.errors import ShardlineError

SMALL_BYTES = 64 << 10
"""A body up to this size needs no room."""
PATIENCE_S = 2.0
"""When somebody has waited so long, the slowest of the bodies that have been coming for so long makes way, …"""
SLOW_BYTES_PER_S = 256 << 10
"""… if it comes slower than this."""


@dataclass(eq=False, slots=True)
class Place:
    """The room of one body. `reading` is the timer of its reading: it ends at once if the body has to make way."""

    size: int
    since: float
    received: int = 0
    reading: asyncio.Timeout | None = None


@dataclass(slots=True)
class BodyRoom:
    """Room for `total` bytes."""

    total: int
    used: int = 0
    _places: set[Place] = field(default_factory=set)
    _waiting: deque[tuple[int, asyncio.Future[Place]]] = field(default_factory=deque)

    def take_now(self, size: int) -> Place | None:
        """Room for `size` bytes (at most for `total`); None if there is none, or others wait for it."""
        size = min(size, self.total)
        if self._waiting or self.used + size > self.total:
            return None
        return self._grant(size)

    async def take(self, size: int, limit_s: float) -> Place:
        """Room for `size` bytes; raises `resources_exhausted` when there is none for `limit_s`."""
        place = self.take_now(size)
        if place is not None:
            return place
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Place] = loop.create_future()
        self._waiting.append((min(size, self.total), turn))
        impatient = loop.call_later(min(PATIENCE_S, limit_s / 2), self._hurry_slowest)
        try:
            async with asyncio.timeout(limit_s):
                return await turn
        except TimeoutError:
            self._leave(turn)
            raise self._full(size) from None
        except BaseException:
            self._leave(turn)
            raise
        finally:
            impatient.cancel()

    def give(self, place: Place) -> None:
        """The body is used up."""
        if place in self._places:
            self._places.remove(place)
            self.used -= place.size
            self._admit()

    def _grant(self, size: int) -> Place:
        place = Place(size, asyncio.get_running_loop().time())
        self._places.add(place)
        self.used += size
        return place

    def _admit(self) -> None:
        """Room for those that wait first, as far as it goes."""
        while self._waiting and self.used + self._waiting[0][0] <= self.total:
            size, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(self._grant(size))

    def _leave(self, turn: asyncio.Future[Place]) -> None:
        """Who waited goes; perhaps it was given room in the same moment."""
        if turn.done() and not turn.cancelled():
            self.give(turn.result())
        else:
            self._waiting = deque(item for item in self._waiting if item[1] is not turn)
            self._admit()

    def _hurry_slowest(self) -> None:
        now = asyncio.get_running_loop().time()
        slow = [
            place
            for place in self._places
            if place.reading is not None
            and (age := now - place.since) >= PATIENCE_S
            and place.received < SLOW_BYTES_PER_S * age
        ]
        if slow:
            slowest = min(slow, key=lambda place: place.received / (now - place.since))
            timer, slowest.reading = slowest.reading, None
            if timer is not None:
                timer.reschedule(now)

    def _full(self, size: int) -> ShardlineError:
        return ShardlineError(
            "resources_exhausted",
            f"no memory for a body of {size} bytes: body_memory_bytes ({self.total}) are in use",
            retry_after=2,
        )
