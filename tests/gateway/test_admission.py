"""The queue in front of full routes: order, bounds, and who tries when."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.admission import Admission
from shardline.settings import Settings

SETTINGS = Settings(queue_limit=4, queue_wait_s=0.4)


class Places:
    """A route with `free` places; refuses when there is none, as a Node does."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.order: list[int] = []

    async def take(self, number: int) -> int:
        await asyncio.sleep(0)
        if self.free < 1:
            raise ShardlineError("kv_exhausted", "no KV is free")
        self.free -= 1
        self.order.append(number)
        return number


def unmoved(place: int | None) -> None: ...


async def test_nobody_waits_while_there_is_room() -> None:
    admission, places = Admission(SETTINGS), Places(2)
    assert await admission.admit(lambda: places.take(1), unmoved) == 1
    assert await admission.admit(lambda: places.take(2), unmoved) == 2
    assert admission.waiting == 0


async def test_ten_at_once_two_run_four_wait_four_are_refused() -> None:
    admission, places = Admission(msgspec.structs.replace(SETTINGS, queue_wait_s=5.0)), Places(2)
    refused: list[ShardlineError] = []

    async def one(number: int) -> None:
        try:
            await admission.admit(lambda: places.take(number), unmoved)
        except ShardlineError as error:
            refused.append(error)

    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(one(number))
        while len(refused) < 4:
            await asyncio.sleep(0)
        assert admission.waiting == 4
        for _ in range(4):
            places.free += 1
            admission.freed()
            before = len(places.order)
            while len(places.order) == before:
                await asyncio.sleep(0.001)
    assert places.order == [0, 1, 2, 3, 4, 5]
    assert {error.code for error in refused} == {"queue_full"}
    assert all(error.fault.status == 429 and error.details["retry_after"] >= 1 for error in refused)


async def test_waiting_ends_with_a_503_that_says_when_to_come_again() -> None:
    admission, places = Admission(SETTINGS), Places(0)
    seen: list[int | None] = []
    with pytest.raises(ShardlineError) as caught:
        await admission.admit(lambda: places.take(1), seen.append)
    assert caught.value.code == "capacity"
    assert caught.value.fault.status == 503
    assert caught.value.details["retry_after"] >= 1
    assert "no KV is free" in caught.value.message
    assert (seen[0], seen[-1], admission.waiting) == (1, None, 0)


async def test_a_fault_that_waiting_does_not_cure_is_raised_at_once() -> None:
    async def attempt() -> None:
        raise ShardlineError("model_unavailable", "layers 3:6 are missing")

    admission = Admission(SETTINGS)
    with pytest.raises(ShardlineError, match="3:6"):
        await admission.admit(attempt, unmoved)
    assert admission.waiting == 0


async def test_one_that_leaves_the_queue_frees_its_place() -> None:
    admission, places = Admission(msgspec.structs.replace(SETTINGS, queue_wait_s=5.0)), Places(0)
    first = asyncio.ensure_future(admission.admit(lambda: places.take(1), unmoved))  # noqa: TID251 - cancelled below
    second = asyncio.ensure_future(admission.admit(lambda: places.take(2), unmoved))  # noqa: TID251
    while admission.waiting < 2:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    places.free = 1
    admission.freed()
    assert await second == 2
    assert admission.waiting == 0


async def test_a_call_is_passed_on_to_whoever_has_come_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is freed for the head; before it looks, an earlier arrival that was refused takes its place in front."""
    monkeypatch.setattr("shardline.gateway.admission._RETRY_S", (60.0, 60.0))
    admission, places = Admission(msgspec.structs.replace(SETTINGS, queue_wait_s=30.0)), Places(0)
    slow = asyncio.Event()

    async def refused_late() -> int:
        await slow.wait()
        return await places.take(1)

    async with asyncio.TaskGroup() as tasks:
        early = tasks.create_task(admission.admit(refused_late, unmoved))
        await asyncio.sleep(0)
        late = tasks.create_task(admission.admit(lambda: places.take(2), unmoved))
        while admission.waiting < 1:
            await asyncio.sleep(0)
        slow.set()
        while admission.waiting < 2:
            await asyncio.sleep(0)
        places.free = 2
        # The call went to the later one, as when it was the head still.
        admission._queue[1].turn.set()
        async with asyncio.timeout(5):
            assert await early == 1
        assert await late == 2
    assert places.order == [1, 2]


async def test_a_queue_is_used_while_somebody_tries() -> None:
    admission = Admission(SETTINGS)
    trying = asyncio.Event()
    done = asyncio.Event()

    async def attempt() -> None:
        trying.set()
        await done.wait()

    assert not admission.used
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(admission.admit(attempt, unmoved))
        await trying.wait()
        assert admission.used and admission.waiting == 0
        done.set()
    assert not admission.used
