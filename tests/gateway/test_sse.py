"""Framing of events, silence, and a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.gateway import sse


def test_one_event_is_one_line() -> None:
    assert sse.data({"a": "x\ny\r\u2028"}) == b'data: {"a":"x\\ny\\r\xe2\x80\xa8"}\n\n'
    assert sse.numbered(3, b"{}") == b"id: 3\ndata: {}\n\n"
    assert sse.comment("shardline", {"a": "\n"}) == b': shardline {"a":"\\n"}\n\n'
    assert sse.comment("shardline") == b": shardline\n\n"


async def test_a_response_from_start_to_end() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    response = sse.EventResponse(send, stall_s=1, headers=[(b"x-a", b"b")])
    assert not response.started
    await response.start()
    await response.write(b"data: 1\n\n")
    await response.end()
    assert response.started
    headers = dict(sent[0]["headers"])
    assert sent[0]["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert (headers[b"cache-control"], headers[b"x-accel-buffering"], headers[b"x-a"]) == (b"no-cache", b"no", b"b")
    assert b"content-length" not in headers
    assert [message.get("more_body") for message in sent] == [None, True, False]


async def test_a_client_that_takes_nothing() -> None:
    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ShardlineError) as caught:
        await sse.EventResponse(send, stall_s=0.01).write(b"x")
    assert caught.value.code == "slow_client"
    assert caught.value.details["limit"] == "client_stall"


async def test_silence_is_told_and_nothing_is_lost() -> None:
    loud = asyncio.Event()

    async def items() -> AsyncIterator[int]:
        yield 1
        await loud.wait()
        yield 2

    heard: list[int | None] = []
    async with aclosing(sse.or_silence(items(), 0.01)) as sounds:
        async for item in sounds:
            heard.append(item)
            if heard.count(None) == 2:
                loud.set()
    assert heard[0] == 1 and heard[-1] == 2
    assert heard.count(None) >= 2


async def test_leaving_closes_the_items() -> None:
    closed = asyncio.Event()

    async def items() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.set()

    async with aclosing(sse.or_silence(items(), 0.01)) as sounds:
        async for item in sounds:
            if item is None:
                break
    assert closed.is_set()


async def test_leaving_does_not_hear_what_goes_wrong_behind() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        finally:
            raise ShardlineError("internal", "too late")

    async with aclosing(sse.or_silence(items(), 0.01)) as sounds:
        async for item in sounds:
            if item is None:
                break


async def test_a_failure_of_the_items_comes_through() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        raise ShardlineError("internal", "x")

    async with aclosing(sse.or_silence(items(), 1)) as sounds:
        with pytest.raises(ShardlineError):
            async for _ in sounds:
                pass
