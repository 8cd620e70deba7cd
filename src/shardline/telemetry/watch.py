"""Which records of one key have changed since its owner last asked: notes of ids, nothing of what a record says.

Shown by tests/telemetry/test_records.py.
"""

from __future__ import annotations

import asyncio


class Watch:
    """Which records of one key have changed since its owner last asked; however many did, no record is there twice."""

    def __init__(self, key_id: str) -> None:
        self.key_id = key_id
        self._ids: dict[str, None] = {}
        self._some = asyncio.Event()

    def note(self, record_id: str) -> None:
        self._ids[record_id] = None
        self._some.set()

    async def changed(self) -> list[str]:
        """Their ids, the one that changed first first; waits until there is one."""
        await self._some.wait()
        self._some.clear()
        ids, self._ids = list(self._ids), {}
        return ids
