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
        if not self._bytes_per_s:
            return
        now = asyncio.get_running_loop().time()
        begin = max(now, self._free_at)
        self._free_at = begin + count / self._bytes_per_s
        await asyncio.sleep(begin - now)
