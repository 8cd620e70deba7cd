"""A proxy in front of one Node, which sees every request that the Node gets and may spoil steps.

It reads HTTP/1.1 by itself: what it counts and changes does not depend on the code under test. One upstream
connection for each client connection; session streams pass through as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass
class Seen:
    """Step requests that passed, by number of body bytes, in order."""

    bodies: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(self.bodies)


Rule = Callable[[int, bytes], Awaitable[list[bytes] | None]]
"""(number of the step request, body) -> bodies to deliver in its place, each its own request; None: cut the
connection without an answer. The answer of the last delivery goes back; of none, an empty 202."""


async def pass_on(number: int, body: bytes) -> list[bytes] | None:
    return [body]


class StepProxy:
    """`async with StepProxy(port_of_node) as proxy`: `proxy.url` is what the Node advertises."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.rule: Rule = pass_on
        self.dark = False
        """Black hole for steps: connections stay open, nothing of a step passes, nothing comes back."""
        self.target: tuple[str, int] | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> StepProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=128 << 20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self.tasks):
            task.cancel()
        for task in list(self.tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        up_writer: asyncio.StreamWriter | None = None
        relay: asyncio.Task[None] | None = None
        try:
            assert self.target is not None
            up_reader, up_writer = await asyncio.open_connection(*self.target, limit=128 << 20)
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = _LENGTH.search(head)
                body = await reader.readexactly(int(found.group(1))) if found else b""
                if head.startswith(b"POST /v1/steps "):
                    answer = await self._step(head, body, up_reader, up_writer)
                    if answer is None:
                        return
                    writer.write(answer)
                    await writer.drain()
                    continue
                if self.dark and head.startswith((b"GET /healthz", b"GET /v1/node")):
                    await asyncio.sleep(3600)
                up_writer.write(head + body)
                await up_writer.drain()
                if head.startswith(b"POST /v1/sessions "):
                    # From here on a plain pipe: the stream, and whatever the connection is used for after it.
                    relay = asyncio.create_task(_copy(up_reader, writer))
                    self.tasks.add(relay)
                    while data := await reader.read(65536):
                        up_writer.write(data)
                        await up_writer.drain()
                    return
                writer.write(await _answer(up_reader))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
            pass
        finally:
            if relay is not None:
                relay.cancel()
                self.tasks.discard(relay)
            for w in (writer, up_writer):
                if w is not None:
                    w.transport.abort()
            self.tasks.discard(task)

    async def _step(
        self, head: bytes, body: bytes, up_reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter
    ) -> bytes | None:
        number = len(self.seen.bodies)
        self.seen.bodies.append(len(body))
        if self.dark:
            await asyncio.sleep(3600)
        bodies = await self.rule(number, body)
        if bodies is None:
            return None
        answer = b'HTTP/1.1 202 Accepted\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n{"rejected":[]}'
        for each in bodies:
            up_writer.write(_LENGTH.sub(b"\r\ncontent-length: %d" % len(each), head) + each)
            await up_writer.drain()
            answer = await _answer(up_reader)
        return answer


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    found = _LENGTH.search(head)
    return head + (await reader.readexactly(int(found.group(1))) if found else b"")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes as they come, until one side is gone; then the other is cut too."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
