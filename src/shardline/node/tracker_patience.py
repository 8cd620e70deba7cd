"""Asking a Tracker that may be away, for as long as it is: the start of a Node waits for it, its operator is told.

Owns that one loop; what is asked, and how often, is the caller's. Shown by tests/cluster/test_from_nothing.py and
tests/node/test_tracker_patience.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from shardline.errors import ShardlineError
from shardline.options import Announce

T = TypeVar("T")

log = structlog.get_logger(__name__)


async def answered(ask: Callable[[], Awaitable[T]], announce: Announce, *, pause_s: float, command: str) -> T:
    """What `ask` gives, asked again every `pause_s` while it raises `tracker_unreachable`; its other errors end this.

    `waiting` is announced once for each new reason. `command`: what starts a Tracker, for the advice in the log.
    """
    said = ""
    while True:
        try:
            return await ask()
        except ShardlineError as error:
            if error.code != "tracker_unreachable":
                raise
            if error.message != said:
                said = error.message
                advice = f"start one: {command}; or name it: --tracker URL, or --join LINE"
                log.warning("tracker_unreachable", reason=said, advice=advice, goes_on="asking")
                announce("waiting", reason=said)
        await asyncio.sleep(pause_s)
