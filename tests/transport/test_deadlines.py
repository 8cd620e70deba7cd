from __future__ import annotations

import asyncio
import time

from shardline.transport.deadlines import Deadline
from tests.transport.loopback import until


async def test_expires_once_when_it_is_due() -> None:
    loop = asyncio.get_running_loop()
    fired: list[float] = []
    due = loop.time() + 0.01
    Deadline(loop, due, 0.5, lambda: fired.append(loop.time()))
    await until(lambda: bool(fired))
    await asyncio.sleep(0.02)
    assert len(fired) == 1 and fired[0] >= due


async def test_cancelled_before_and_within_the_read_pass() -> None:
    loop = asyncio.get_running_loop()
    fired: list[None] = []
    early = Deadline(loop, loop.time() + 0.01, 0.5, lambda: fired.append(None))
    early.cancel()
    late = Deadline(loop, loop.time(), 0.5, lambda: fired.append(None))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.sleep(0.05)
    assert fired == []


async def test_a_timer_that_is_late_gives_one_more_interval() -> None:
    loop = asyncio.get_running_loop()
    fired: list[float] = []
    Deadline(loop, loop.time() + 0.01, 0.04, lambda: fired.append(loop.time()))
    time.sleep(0.1)  # noqa: ASYNC251  (the process is stopped for a while)
    awake = loop.time()
    await until(lambda: bool(fired))
    await asyncio.sleep(0.05)
    assert len(fired) == 1 and fired[0] - awake >= 0.035
