"""One task's fault is not its neighbours'."""

from __future__ import annotations

import asyncio

import pytest

from shardline.telemetry.contained import contained


async def test_a_fault_stays_where_it_happened_and_is_told() -> None:
    told: list[Exception] = []

    async def broken() -> None:
        raise KeyError("to")

    async def fine() -> None:
        await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(contained(broken(), "broken", told.append))
        neighbour = tasks.create_task(fine())
    assert neighbour.done()
    assert isinstance(told[0], KeyError)


async def test_cancelling_goes_through() -> None:
    async def waiting() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(contained(waiting(), "waiting"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
