"""A response that is a stream of lines, as a session stream is: one JSON object a line, open for a long time.

Owns the cutting into lines, their length limit and the back-pressure of a slow reader. It does not decode lines.
Two forms: `async for line in stream`, or callbacks called straight from the socket's read. Shown by
tests/transport/test_lines.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from shardline.errors import ShardlineError
from shardline.transport.answers import error_of
from shardline.transport.connection import Connection
from shardline.transport.deadlines import Deadline
from shardline.transport.failures import BrokenResponse, TimedOut

LINE_BYTES = 1 << 20
"""Longest line; a longer one breaks the stream."""
ERROR_BYTES = 1 << 20
BUFFER_BYTES = 256 << 10
"""Unread lines beyond this stop the reading from the socket, until half of them are taken."""


class LineStream:
    """One streamed response. Made by `HttpClient.stream`; `status` and `headers` are there when it is entered."""

    def __init__(
        self,
        connection: Connection,
        *,
        on_line: Callable[[bytes], None] | None,
        on_end: Callable[[Exception | None], None] | None,
        idle_s: float | None,
        late_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[LineStream] = loop.create_future()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._loop = loop
        self._connection: Connection | None = connection
        self._peer = connection.peer
        self._on_line = on_line
        self._on_end = on_end
        self._idle_s = idle_s
        self._late_s = late_s
        self._tail = bytearray()
        self._lines: deque[bytes] = deque()
        self._buffered = 0
        self._ended = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # What a caller uses.

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """The next line without its newline. Raises what broke the stream, or `TimedOut` after `idle_s`."""
        while not self._lines:
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            await self._wait(self._idle_s, "heartbeat")
        line = self._lines.popleft()
        self._buffered -= len(line)
        if self._connection is not None and self._buffered <= BUFFER_BYTES // 2:
            self._connection.resume()
        return line

    async def ended(self) -> Exception | None:
        """Wait for the end of the stream (callback form); what broke it, None for a clean end."""
        while not self._ended:
            await self._wait(None, "session")
        return self._failure

    async def error_body(self, timeout_s: float = 5.0) -> bytes:
        """The whole body of an answer with status >= 400 (at most 1 MiB)."""
        if self.status < 400:
            raise RuntimeError("error_body is for status >= 400")
        due = self._loop.time() + timeout_s
        while not self._ended:
            await self._wait(max(0.0, due - self._loop.time()), "control")
        if self._failure is not None:
            raise self._failure
        return bytes(self._tail)

    async def error(self, timeout_s: float = 5.0) -> ShardlineError:
        """The error object of an answer with status >= 400; raises `NotOurPeer` where there is none."""
        return error_of(self._peer, self.status, self.headers, await self.error_body(timeout_s))

    def leave(self) -> None:
        """Close the connection if the stream has not ended. No callback is called any more."""
        self._on_line = self._on_end = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave(self)
        if not self._ended:
            self._ended = True
            self._failure = BrokenResponse(self._peer, "the stream was left by its reader")
            self._wake()

    # Sink of the connection.

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        if not self.opened.done():
            self.opened.set_result(self)

    def body(self, data: bytes) -> None:
        tail = self._tail
        if self.status >= 400:
            tail += data
            if len(tail) > ERROR_BYTES:
                raise BrokenResponse(self._peer, f"error body is longer than {ERROR_BYTES} bytes")
            return
        if self.status != 200:
            return  # a redirect, which nobody follows, or a part: what it says is no answer
        lines = data.split(b"\n")
        if len(lines) > 1:
            if tail:
                tail += lines[0]
                lines[0] = bytes(tail)
                tail.clear()
            rest = lines.pop()
            self._deliver(lines)
        else:
            rest = data
        tail += rest
        if len(tail) > LINE_BYTES:
            raise BrokenResponse(self._peer, f"a line is longer than {LINE_BYTES} bytes")

    def end(self) -> None:
        failure = None
        if self._tail and self.status < 400:
            failure = BrokenResponse(self._peer, "the stream ended within a line")
        self._close(failure)

    def lost(self, failure: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(failure)
            self._on_end = None
        self._close(failure)

    def _deliver(self, lines: list[bytes]) -> None:
        if self._on_line is not None:
            for line in lines:
                on_line = self._on_line
                if on_line is None:
                    return
                on_line(line)
            return
        self._lines.extend(lines)
        self._buffered += sum(map(len, lines))
        if self._buffered > BUFFER_BYTES and self._connection is not None:
            self._connection.pause()
        self._wake()

    def _close(self, failure: Exception | None) -> None:
        self._connection = None
        self._ended = True
        self._failure = failure
        self._wake()
        on_end, self._on_end, self._on_line = self._on_end, None, None
        if on_end is not None:
            on_end(failure)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, timeout_s: float | None, limit: str) -> None:
        waiter = self._waiter = self._loop.create_future()
        deadline = None
        if timeout_s is not None:
            late = TimedOut(self._peer, limit, timeout_s)
            deadline = Deadline(self._loop, self._loop.time() + timeout_s, self._late_s, partial(_fail, waiter, late))
        try:
            await waiter
        finally:
            self._waiter = None
            if deadline is not None:
                deadline.cancel()


def _fail(waiter: asyncio.Future[None], failure: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(failure)
