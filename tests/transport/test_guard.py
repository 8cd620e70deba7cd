"""What strangers may do to a server with bytes: silence, dribbling, floods, nonsense; others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from shardline.settings import Settings
from shardline.transport.crowd import PATIENCE_S
from shardline.transport.guard import CONNECTIONS, SPARE_FILES, GuardLimits
from shardline.transport.http_server import ErrorBoundary, HttpServer, read_body, send_json
from tests.transport.loopback import client_of, serving, sockets, until

LIMIT = 1000
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/unread":
        await send_json(send, {"unread": True})
        return
    await send_json(send, {"size": len(await read_body(receive, scope, LIMIT, grace_s=0.2))})


APP = ErrorBoundary(echo)


@contextlib.asynccontextmanager
async def raw(server: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def say(server: HttpServer, data: bytes, limit_s: float = 5.0) -> bytes:
    """Send `data`; all that comes back until the server closes."""
    async with raw(server) as (reader, writer), asyncio.timeout(limit_s):
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""


async def write_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    """Write piece by piece, until the server closes; fail if it never does."""
    for piece in pieces:
        if reader.at_eof() or reader.exception() is not None:
            return
        writer.write(piece)
        await asyncio.sleep(0.005)
    raise AssertionError("the connection stayed open")


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_in(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return str(msgspec.json.decode(body)["error"]["code"])


async def is_served(server: HttpServer) -> None:
    async with client_of() as client:
        response = await client.request("POST", server.url, body=b"abc", timeout_s=5, limit="x")
        assert response.body == b'{"size":3}'


async def test_silent_connections_are_closed_and_hold_nobody_up() -> None:
    before = sockets()
    async with serving(APP, Settings(header_s=1.0)) as server:
        silent = [socket.create_connection((server.host, server.port)) for _ in range(300)]
        await is_served(server)
        await until(lambda: server.connections == 300)
        await is_served(server)
        await until(lambda: server.connections == 0)
        for sock in silent:
            sock.close()
    await until(lambda: sockets() == before)


async def test_dribbled_heads_are_closed() -> None:
    async with serving(APP, Settings(header_s=0.15)) as server:
        for start in (b"", POST + b"content-length: 0\r\n\r\n"):
            async with raw(server) as (reader, writer):
                writer.write(start)
                if start:
                    await reader.readuntil(b"}")
                await write_until_closed(reader, writer, [bytes([byte]) for byte in POST + b"x" * 1000])
        await until(lambda: server.connections == 0)


async def test_line_ends_between_requests_do_not_keep_a_connection() -> None:
    async with serving(APP, Settings(header_s=0.15)) as server, raw(server) as (reader, writer):
        writer.write(POST + b"content-length: 0\r\n\r\n")
        await reader.readuntil(b"}")
        await write_until_closed(reader, writer, [b"\r\n"] * 1000)


async def test_the_time_for_a_head_does_not_run_while_a_request_is_served() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive, scope, LIMIT)
        await asyncio.sleep(0.1)
        await send_json(send, {})

    async with serving(slow, Settings(header_s=0.05)) as server, client_of() as client:
        for _ in range(2):
            response = await client.request("POST", server.url, body=b"x" * 900, timeout_s=5, limit="x")
            assert response.status == 200
        assert server.connections == 1


async def test_an_idle_connection_lives_for_its_own_time() -> None:
    async with serving(APP, Settings(header_s=0.02, server_idle_s=0.3)) as server, client_of() as client:
        await client.request("POST", server.url, timeout_s=5, limit="x")
        await asyncio.sleep(0.05)
        assert server.connections == 1
        await until(lambda: server.connections == 0)


@pytest.mark.parametrize(
    "head",
    [
        POST + b"x: " + b"y" * 64_000 + b"\r\n\r\n",
        POST + b"".join(b"x%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
        POST + b"".join(b"x%d: y\r\n" % i for i in range(101)) + b"\r\n",
        b"GET /" + b"a" * 64_000 + b" HTTP/1.1\r\n\r\n",
        POST + b"y" * 64_000,
    ],
)
async def test_heads_have_a_limit(head: bytes) -> None:
    async with serving(APP) as server:
        answer = await say(server, head)
        assert not answer or (status_of(answer), error_in(answer)) == (431, "headers_too_large")
        await is_served(server)
        await until(lambda: server.connections == 0)


async def test_a_large_head_is_told_so() -> None:
    # Small enough that nothing is unread when the server closes, so that the answer cannot be lost to a reset.
    async with serving(APP, Settings(header_bytes=1000)) as server:
        answer = await say(server, POST + b"x: " + b"y" * 1000 + b"\r\n\r\n")
        assert (status_of(answer), error_in(answer)) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"CONNECT host:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 99999999999999999999999\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
        POST + b"a\0b: c\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_answered_with_an_error_object(data: bytes) -> None:
    async with serving(APP) as server:
        answer = await say(server, data)
        assert (status_of(answer), error_in(answer)) == (400, "invalid_value")
        await is_served(server)


async def test_an_upgrade_is_not_served() -> None:
    async with serving(APP) as server:
        answer = await say(server, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert status_of(answer) == 400


@profile(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([POST, b"\r\n", b"\r\n\r\n", b"0"])), max_size=8))
async def test_no_bytes_break_the_server(pieces: list[bytes]) -> None:
    async with serving(APP, Settings(header_s=0.05)) as server:
        with contextlib.suppress(TimeoutError):
            await say(server, b"".join(pieces), limit_s=1)
        await is_served(server)


async def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent() -> None:
    async with serving(APP) as server, raw(server) as (reader, writer):
        writer.write(POST + b"content-length: 1000000000\r\n\r\n")
        answer = await reader.readuntil(b"}}")
        assert (status_of(answer), error_in(answer)) == (413, "body_too_large")
        # Whoever goes on sending is read for a moment, so that the answer arrives, and then cut off.
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                writer.write(bytes(65536))
                await writer.drain()
        await until(lambda: server.connections == 0)


async def test_an_endless_body_is_cut_off() -> None:
    async with serving(APP) as server, raw(server) as (_, writer):
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                writer.write(b"8000\r\n" + bytes(32768) + b"\r\n")
                await writer.drain()
        await is_served(server)


async def test_a_body_that_stops_is_given_up() -> None:
    async with serving(APP) as server, raw(server) as (reader, writer):
        writer.write(POST + b"content-length: 100\r\n\r\nabc")
        answer = await reader.readuntil(b"}}")
        assert (status_of(answer), error_in(answer)) == (408, "slow_body")


async def test_an_unread_body_that_comes_after_all_leaves_the_connection_good() -> None:
    async with serving(APP) as server, raw(server) as (reader, writer):
        for _ in range(3):
            writer.write(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
            await reader.readuntil(b"}")
            writer.write(b"later")
            await asyncio.sleep(0.01)
        assert server.connections == 1


async def test_requests_sent_ahead_are_answered_in_order_up_to_a_limit() -> None:
    ahead = b"".join(POST + b"content-length: %d\r\n\r\n%s" % (i, b"x" * i) for i in range(6))
    async with serving(APP) as server:
        async with raw(server) as (reader, writer):
            writer.write(ahead)
            for i in range(6):
                assert b'{"size":%d}' % i in await reader.readuntil(b"}")
        await say(server, (POST + b"content-length: 0\r\n\r\n") * 10_000)
        await is_served(server)


async def test_connections_are_bounded_and_newcomers_in_earnest_get_in() -> None:
    async with serving(APP, connections=20) as server:
        silent = [await asyncio.open_connection(server.host, server.port) for _ in range(60)]
        try:
            await until(lambda: server.connections <= 20)
            await asyncio.sleep(PATIENCE_S)
            await is_served(server)
        finally:
            for _, writer in silent:
                writer.close()


async def patient(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"size": len(await read_body(receive, scope, LIMIT))})


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"", None),
        (POST, "slow_body"),
        (POST + b"content-length: 100\r\n\r\nabc", "slow_body"),
        (POST + b"content-length: 0\r\n\r\n", None),
    ],
)
async def test_whoever_keeps_a_full_server_waiting_makes_way(sent: bytes, told: str | None) -> None:
    async with serving(ErrorBoundary(patient), connections=16) as server:
        slow = [await asyncio.open_connection(server.host, server.port) for _ in range(16)]
        try:
            for _, writer in slow:
                writer.write(sent)
            await until(lambda: server.connections == 16)
            for _ in range(3):
                await asyncio.sleep(PATIENCE_S)
            await is_served(server)
            await is_served(server)
            async with asyncio.timeout(5):
                answer = await slow[0][0].read()
            if told is not None:
                assert (status_of(answer), error_in(answer)) == (408, told)
            assert server.connections >= 14
        finally:
            for _, writer in slow:
                writer.close()


async def test_a_client_that_has_just_connected_does_not_make_way() -> None:
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await send_json(send, {})

    async with serving(slow, connections=16) as server, client_of() as client, asyncio.TaskGroup() as group:
        busy = [group.create_task(client.request("POST", server.url, timeout_s=5, limit="x")) for _ in range(15)]
        await until(lambda: server.connections == 15)
        async with raw(server) as (reader, writer):
            await until(lambda: server.connections == 16)
            async with raw(server) as (refused, late):
                late.write(POST + b"content-length: 0\r\n\r\n")
                answer = await refused.read()
                assert (status_of(answer), error_in(answer)) == (503, "too_many_connections")
            writer.write(POST + b"content-length: 0\r\n\r\n")
            await asyncio.sleep(0.02)
            go.set()
            assert status_of(await reader.readuntil(b"{}")) == 200
        for task in busy:
            assert (await task).status == 200


def test_connections_leave_files_for_what_their_requests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 1024))
    assert GuardLimits(10, 1000).connections == (1024 - SPARE_FILES) // 4
    monkeypatch.setattr("resource.getrlimit", lambda which: (65536, 65536))
    assert GuardLimits(10, 1000).connections == CONNECTIONS


async def test_when_all_connections_work_the_next_is_refused_and_they_are_served() -> None:
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await send_json(send, {})

    async with serving(slow, connections=16) as server, client_of() as client, asyncio.TaskGroup() as group:
        busy = [group.create_task(client.request("POST", server.url, timeout_s=5, limit="x")) for _ in range(16)]
        await until(lambda: server.connections == 16)
        await asyncio.sleep(0.02)
        for size in (0, 900):
            answer = await say(server, POST + b"content-length: %d\r\n\r\n" % size + bytes(size))
            assert (status_of(answer), error_in(answer)) == (503, "too_many_connections")
        silent = [await asyncio.open_connection(server.host, server.port) for _ in range(40)]
        await until(lambda: server.connections <= 2 * 16)
        for _, writer in silent:
            writer.close()
        await until(lambda: server.connections == 16)
        go.set()
        for task in busy:
            assert (await task).status == 200
