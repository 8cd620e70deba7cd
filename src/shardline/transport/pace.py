"""A limit on bytes in a second, shared by all who send or ask.

Owns the order: who comes first goes first, nobody starves. Shown by tests/transport/test_piece_server.py.
"""

from __future__ import annotations

import asyncio


class Pace:
    """`bytes_per_s` 0: no limit."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def take(self, count: int) -> None:
        """Returns when `count` more bytes may go; longest `count` and all before it at that rate."""
        if self._bytes_per_s:
            await asyncio.sleep(self.place(asyncio.get_running_loop().time(), count))

    def place(self, now: float, count: int) -> float:
        """Seconds from `now` until `count` bytes may go; whoever asks next comes behind them."""
        if not self._bytes_per_s:
            return 0.0
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._bytes_per_s
        return begin - now
