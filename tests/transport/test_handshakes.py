"""Strangers who open connections to an HTTPS listener and say nothing, or say what is no TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from starlette.types import Receive, Scope, Send

from shardline.settings import Settings
from shardline.transport.bodies import send_json
from shardline.transport.handshakes import TlsListener
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import bind
from tests.support.certificates import authority, party
from tests.transport.loopback import serving, sockets, until

NODE = "n-bbbbbbbbbbbbbbbb"


class Shaken(asyncio.Protocol):
    """Says hello to whoever has shaken hands."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        stream.write(b"hello\n")
        stream.close()


@contextlib.asynccontextmanager
async def door(folder: Path, limit: int, handshake_s: float = 20.0) -> AsyncIterator[tuple[TlsListener, int]]:
    sock = bind("127.0.0.1", 0)
    tls = party(authority(folder), "tracker").server(strangers=True)
    listener = TlsListener(sock, Shaken, tls, limit=limit, handshake_s=handshake_s)
    listener.start()
    try:
        yield listener, sock.getsockname()[1]
    finally:
        await listener.close()
        sock.close()


async def hello(folder: Path, port: int, source: str = "127.0.0.1") -> bytes:
    tls: ssl.SSLContext = party(authority(folder), NODE).client
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, local_addr=(source, 0))
    try:
        async with asyncio.timeout(5):
            return await reader.readline()
    finally:
        writer.close()


async def silent(port: int, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    found = []
    for _ in range(count):
        found.append(socket.create_connection(("127.0.0.1", port), source_address=(source, 0)))
        await asyncio.sleep(0)
    return found


async def test_silent_strangers_are_bounded_in_number_and_keep_nobody_out(tmp_path: Path) -> None:
    before = sockets()
    async with door(tmp_path, limit=8) as (listener, port):
        crowd = await silent(port, 40)
        most = 0
        for _ in range(3):
            assert await hello(tmp_path, port) == b"hello\n"
            most = max(most, len(listener))
        assert 0 < most <= 8
        for sock in crowd:
            sock.close()
        await until(lambda: len(listener) == 0)
    await until(lambda: sockets() == before)


async def test_the_network_with_most_handshakes_makes_way(tmp_path: Path) -> None:
    """A slow one from elsewhere is not what ends, although it is the oldest."""
    async with door(tmp_path, limit=4) as (listener, port):
        (slow,) = await silent(port, 1, "127.0.0.2")
        await until(lambda: len(listener) == 1)
        crowd = await silent(port, 20)
        assert await hello(tmp_path, port, "127.0.0.3") == b"hello\n"
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):
            slow.recv(1)
        for sock in (slow, *crowd):
            sock.close()


async def test_what_is_no_handshake_and_what_takes_too_long(tmp_path: Path) -> None:
    before = sockets()
    async with door(tmp_path, limit=8, handshake_s=0.2) as (listener, port):
        noisy, quiet = await silent(port, 2)
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: len(listener) == 0)
        noisy.close()
        quiet.close()
        assert await hello(tmp_path, port) == b"hello\n"
    await until(lambda: sockets() == before)


async def test_the_end_of_a_listener_ends_its_handshakes(tmp_path: Path) -> None:
    before = sockets()
    async with door(tmp_path, limit=8) as (listener, port):
        crowd = await silent(port, 3)
        await until(lambda: len(listener) == 3)
    assert len(listener) == 0
    for sock in crowd:
        sock.close()
    await until(lambda: sockets() == before)


async def test_a_server_with_silent_strangers_serves_and_stops(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {})

    own = authority(tmp_path)
    async with serving(app, tls=party(own, NODE).server()) as server:
        crowd = await silent(server.port, 30)
        client = HttpClient(Settings(), tls=party(own, "gateway-1"))
        answer = await client.request("GET", f"https://{NODE}@127.0.0.1:{server.port}/", timeout_s=5, limit="x")
        assert answer.status == 200
        await client.aclose()
        for sock in crowd:
            sock.close()
