from __future__ import annotations

import asyncio

import pytest

from shardline.errors import ShardlineError
from shardline.transport import body_room
from shardline.transport.body_room import BodyRoom, Place
from tests.transport.loopback import until


async def test_a_sum_is_bounded_and_room_comes_back() -> None:
    room = BodyRoom(100)
    first, second = room.take_now(60), room.take_now(40)
    assert first is not None and second is not None and room.take_now(1) is None
    room.give(first)
    room.give(first)
    assert room.used == 40
    assert await room.take(60, 1.0) is not None and room.used == 100


async def test_what_is_larger_than_the_room_has_all_of_it() -> None:
    room = BodyRoom(100)
    place = await room.take(1000, 1.0)
    assert room.used == 100
    room.give(place)
    assert room.used == 0


async def test_first_come_first_served() -> None:
    room = BodyRoom(100)
    held = await room.take(100, 1.0)
    order: list[int] = []

    async def wait(number: int, size: int) -> Place:
        place = await room.take(size, 5.0)
        order.append(number)
        return place

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait(number, size)) for number, size in enumerate((80, 10, 90))]
        await asyncio.sleep(0)
        assert room.take_now(0) is None, "others wait already"
        room.give(held)
        await until(lambda: order == [0, 1])
        for task in tasks[:2]:
            room.give(await task)
        room.give(await tasks[2])
    assert order == [0, 1, 2] and room.used == 0


async def test_waiting_has_a_limit_and_says_what_to_raise() -> None:
    room = BodyRoom(100)
    held = await room.take(100, 1.0)
    with pytest.raises(ShardlineError) as caught:
        await room.take(50, 0.01)
    assert caught.value.code == "resources_exhausted" and caught.value.details["retry_after"] > 0
    assert "body_memory_bytes" in caught.value.message
    room.give(held)
    assert room.used == 0 and room.take_now(100) is not None


async def test_whoever_leaves_the_queue_holds_nothing() -> None:
    room = BodyRoom(100)
    held = await room.take(100, 1.0)
    waiting = [asyncio.create_task(room.take(100, 5.0)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    # Given room and cancelled in one moment: it goes to the next.
    room.give(held)
    waiting[1].cancel()
    room.give(await waiting[2])
    assert waiting[1].cancelled() and room.used == 0


async def test_the_slowest_body_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room, "PATIENCE_S", 0.02)
    monkeypatch.setattr(body_room, "SLOW_BYTES_PER_S", 1000)
    room = BodyRoom(100)

    async def read(received: int) -> str:
        place = await room.take(50, 1.0)
        place.received = received
        try:
            async with asyncio.timeout(5) as place.reading:
                await asyncio.Event().wait()
        except TimeoutError:
            return "made way"
        finally:
            room.give(place)
        return "read"

    fast, slow = asyncio.create_task(read(1_000_000)), asyncio.create_task(read(3))
    await until(lambda: room.used == 100)
    await room.take(50, 5.0)
    assert await slow == "made way" and not fast.done()
    fast.cancel()
    await asyncio.wait([fast])
