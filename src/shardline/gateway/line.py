"""The open stream of one hop, as its Route Session sees it: when it was heard, how far it is, how it ended.

Owns the facts alone; what follows from them is session.py's. Shown by tests/gateway/test_session.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shardline.wire.messages import Hop, Opened


@dataclass(slots=True)
class Line:
    """The open stream of one hop."""

    hop: Hop
    heard: float
    position: int = 0
    """How far its engine has come."""
    answer: Opened | None = None
    ended: bool = False
    """No more lines will come: closed, failed or broken."""
    failed: bool = False
    """The Node said itself that it gave the session up: it lives."""
    closed: bool = False
    """The Node said `closed`: its KV is free."""
    task: asyncio.Task[None] | None = None

    @property
    def opened(self) -> bool:
        return self.answer is not None
