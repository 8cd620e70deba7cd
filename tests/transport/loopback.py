"""Peers for transport tests: a TCP server that follows a script, and our own server around an application."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import psutil
from starlette.types import ASGIApp

from shardline.settings import Settings
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import HttpServer, serve

Script = Callable[["Wire"], Awaitable[None]]


class FakeTransport(asyncio.Transport):
    """Where bytes go when there is no socket: nowhere."""

    def __init__(self) -> None:
        super().__init__({})
        self.closed = False

    def writelines(self, pieces: object) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


@dataclass
class Wire:
    """One accepted connection of a scripted peer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    """0 for the first connection."""

    async def request(self) -> bytes:
        """Read one request with its body; what was read."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return head + await self.reader.readexactly(length)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def reset(self) -> None:
        self.writer.transport.abort()


@dataclass
class Peer:
    url: str
    port: int
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Peer]:
    """A peer on loopback that runs `script` for each connection, then closes it."""
    peer = Peer("", 0)
    tasks: set[asyncio.Task[None]] = set()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, peer.connections)
        peer.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await script(wire)
        writer.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve_one(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    peer.port = server.sockets[0].getsockname()[1]
    peer.url = f"http://127.0.0.1:{peer.port}"
    try:
        yield peer
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)


def answer(body: bytes = b"{}", status: str = "200 OK", kind: bytes = b"application/json", extra: bytes = b"") -> bytes:
    """One whole response."""
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s\r\n%s" % (
        status.encode(),
        kind,
        len(body),
        extra,
        body,
    )


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, settings: Settings | None = None, **options: object) -> AsyncIterator[HttpServer]:
    """Our server around `app`, stopped at the end."""
    server = await serve(app, settings=settings or Settings(), lifespan="off", **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        await server.stop(limit_s=0.2)


@contextlib.asynccontextmanager
async def client_of(settings: Settings | None = None, credential: str | None = None) -> AsyncIterator[HttpClient]:
    client = HttpClient(settings or Settings(), credential=credential)
    try:
        yield client
    finally:
        await client.aclose()


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait until `condition` holds; fail after `limit_s`."""
    due = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > due:
            raise AssertionError("condition did not come true in time")
        await asyncio.sleep(0.005)


def sockets() -> int:
    """Open sockets of this process."""
    return len(psutil.Process().net_connections(kind="inet"))
