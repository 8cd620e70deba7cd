"""The last telemetry events of one Route Session, kept small: each is packed by what it repeats of an earlier one.

Owns their numbers, their bytes and how many are kept. It does not know what an event says: bytes in, the same bytes
out. Shown by tests/telemetry/test_events.py.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

_OBJECTS_BYTES = 200
"""What the objects around a packed event take."""
_WINDOW_BITS = -13
"""Plain deflate; a window of 8 KiB sees all of an event of a route of some 20 Nodes."""


@dataclass(frozen=True, slots=True)
class _Kept:
    seq: int
    pattern: bytes
    """An earlier event, or this one; shared by all that resemble it."""
    packed: bytes
    begins: bool
    """The pattern is this event."""


class EventLog:
    """At most `limit` events, the newest."""

    def __init__(self, limit: int) -> None:
        self.seq = 0
        """Of the newest event; the first has 1."""
        self.size = 0
        """Bytes in memory, about."""
        self._limit = limit
        self._events: deque[_Kept] = deque()
        self._pattern: bytes | None = None

    def renew(self) -> None:
        """The events from here on are unlike those before."""
        self._pattern = None

    def append(self, event: bytes) -> None:
        self.seq += 1
        begins = self._pattern is None
        pattern = self._pattern = event if self._pattern is None else self._pattern
        kept = _Kept(self.seq, pattern, _pack(event, pattern), begins)
        self._events.append(kept)
        self.size += len(kept.packed) + _OBJECTS_BYTES + (len(pattern) if begins else 0)
        if len(self._events) > self._limit:
            self._drop_oldest()

    def after(self, seq: int) -> list[tuple[int, bytes]]:
        """The events with a number above `seq`, oldest first."""
        newer = min(len(self._events), max(0, self.seq - seq))
        first = len(self._events) - newer
        return [(kept.seq, _unpack(kept)) for i, kept in enumerate(self._events) if i >= first]

    def halve(self) -> None:
        """Forget the older half; the newest event stays."""
        for _ in range(len(self._events) // 2):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._events.popleft()
        self.size -= len(oldest.packed) + _OBJECTS_BYTES
        # Those that share a pattern stand side by side.
        if self._events and self._events[0].begins:
            self.size -= len(oldest.pattern)


def _pack(event: bytes, pattern: bytes) -> bytes:
    packer = zlib.compressobj(level=6, wbits=_WINDOW_BITS, memLevel=5, zdict=pattern)
    return packer.compress(event) + packer.flush()


def _unpack(kept: _Kept) -> bytes:
    return zlib.decompressobj(wbits=_WINDOW_BITS, zdict=kept.pattern).decompress(kept.packed)
