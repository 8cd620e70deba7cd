"""Clients that end their side of a connection and listen on, and those that leave: on the wire both look alike."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from shardline.transport.bodies import ClientLeft
from shardline.transport.http_server import ErrorBoundary, HttpServer, read_body, send_json
from tests.transport.loopback import serving, until

POST = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"


class App:
    """`/short` answers without listening for a departure; `/long` works until the client leaves; `/stream` as well,
    after its answer has begun."""

    def __init__(self) -> None:
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive, scope, 1 << 20)
        if scope["path"] == "/short":
            await asyncio.sleep(0.03)
            await send_json(send, {"size": len(body)})
            return
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun\n", "more_body": True})
        self.running += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.running -= 1
        raise ClientLeft


async def ask(server: HttpServer, data: bytes) -> bytes:
    """Send `data`, end our side, and read whatever comes."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("size", [0, 3, 300_000])
async def test_a_short_request_is_answered_to_whoever_listens_still(size: int) -> None:
    async with serving(ErrorBoundary(App())) as server:
        answer = await ask(server, POST % (b"/short", size, bytes(size)))
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b'{"size":%d}' % size)
        await until(lambda: server.connections == 0)


async def test_long_work_ends_at_once_and_says_why() -> None:
    app = App()
    async with serving(ErrorBoundary(app)) as server:
        answer = await ask(server, POST % (b"/long", 2, b"ab"))
        assert answer.startswith(b"HTTP/1.1 499 ")
        error = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "cancelled" and app.running == 0
        await until(lambda: server.connections == 0)


@pytest.mark.parametrize("path", [b"/long", b"/stream"])
@pytest.mark.parametrize("how", ["end", "close", "reset"])
async def test_whoever_leaves_in_the_middle_is_noticed_at_once(path: bytes, how: str) -> None:
    app = App()
    async with serving(ErrorBoundary(app)) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(POST % (path, 0, b""))
        await until(lambda: app.running == 1)
        if path == b"/stream":
            await reader.readuntil(b"begun\n")
        if how == "end":
            writer.write_eof()
        elif how == "close":
            writer.close()
        else:
            writer.transport.abort()
        await until(lambda: app.running == 0 and server.connections == 0)
        writer.close()


@pytest.mark.parametrize("data", [b"", b"POST / HTTP/1.1\r\nhost", POST % (b"/short", 9, b"half")])
async def test_what_can_never_be_whole_is_closed(data: bytes) -> None:
    async with serving(ErrorBoundary(App())) as server:
        assert await ask(server, data) == b""
        await until(lambda: server.connections == 0)


async def test_a_connection_between_two_requests_ends_with_its_client() -> None:
    async with serving(ErrorBoundary(App())) as server:
        with socket.create_connection((server.host, server.port)):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(POST % (b"/short", 0, b""))
            await reader.readuntil(b"}")
            writer.write_eof()
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
