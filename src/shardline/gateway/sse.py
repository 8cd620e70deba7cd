"""Server-sent events: bytes of events, and a response that is a stream of them.

Owns the framing, the headers that keep proxies from holding events back, and the limit on a client that does not
read. It does not know what the events say. Whoever writes, writes whole events: a reader never gets half of one
unless the connection breaks. Shown by tests/gateway/test_sse.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Send

from shardline.errors import ShardlineError

T = TypeVar("T")
_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"
LAST_EVENT_ID = re.compile(r"[0-9]{0,18}")
"""What a reader that comes back may send as `Last-Event-ID`; an empty one is none."""
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def data(value: Any) -> bytes:
    """One event with `value` as JSON, which has no line break in it."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def numbered(number: int, payload: bytes) -> bytes:
    """One event with an id, by which a reader can come back (`Last-Event-ID`)."""
    return b"id: %d\ndata: %b\n\n" % (number, payload)


def named(name: str, payload: bytes) -> bytes:
    """One event of a kind of its own; `payload` has no line break in it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def comment(name: str, value: Any = None) -> bytes:
    """A line that every reader skips; it keeps the connection alive on the way."""
    return b": " + name.encode() + (b"" if value is None else b" " + _encoder.encode(value)) + b"\n\n"


class EventResponse:
    """The response to one request, as a stream of events. `start`, `write` …, `end`; without `end` it is broken off."""

    def __init__(self, send: Send, *, stall_s: float, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._send = send
        self._stall_s = stall_s
        self._headers = [*HEADERS, *headers]
        self.started = False

    async def start(self) -> None:
        """Status 200 and the headers: from now on an error can only be an event."""
        self.started = True
        await self._bounded({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def write(self, events: bytes) -> None:
        """Returns when the client's side has room; raises `slow_client` when it has none for too long."""
        await self._bounded({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        await self._bounded({"type": "http.response.body", "body": b"", "more_body": False})

    async def _bounded(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise ShardlineError(
                "slow_client", f"the client took nothing for {self._stall_s:g} s", limit="client_stall"
            ) from None


async def or_silence(items: AsyncIterator[T], silence_s: float) -> AsyncGenerator[T | None, None]:
    """The items, and None whenever none came for `silence_s`. The wait for the next item goes on meanwhile.

    Close it (`contextlib.aclosing`): it closes the generator of the items.
    """
    waiting: asyncio.Task[T] | None = None
    try:
        while True:
            if waiting is None:
                waiting = asyncio.create_task(_next(items))
            done, _ = await asyncio.wait({waiting}, timeout=silence_s)
            if not done:
                yield None
                continue
            try:
                item = waiting.result()
            except StopAsyncIteration:
                return
            finally:
                waiting = None
            yield item
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait({waiting})
            _ = waiting.cancelled() or waiting.exception()  # looked at: whoever closes this wants no more of it
        if isinstance(items, AsyncGenerator):
            await items.aclose()


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)
