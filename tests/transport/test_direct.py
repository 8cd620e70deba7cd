"""The direct lane: the same answers as the ordinary way, at any split of the bytes, with the same limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.bodies import read_body, send_json
from shardline.transport.boundary import ErrorBoundary
from shardline.transport.direct import Headers
from shardline.transport.http_server import HttpServer, bind

HEAD = b"POST /direct HTTP/1.1\r\nhost: x\r\nkey: yes\r\n"


class Lane:
    """Takes bodies that say what should come of them."""

    path = b"/direct"
    limit = 100

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.release = asyncio.Event()

    def admits(self, headers: Headers) -> bool:
        return (b"key", b"yes") in headers

    def take(self, body: bytes) -> bytes | Coroutine[None, None, bytes]:
        self.taken.append(body)
        if body == b"refuse":
            raise ShardlineError("frame_invalid", "as asked")
        if body == b"break":
            raise RuntimeError("a secret in the message")
        if body.startswith(b"later"):
            return self._later(body)
        return b'{"direct":true}'

    async def _later(self, body: bytes) -> bytes:
        await self.release.wait()
        if body == b"later refuse":
            raise ShardlineError("queue_overflow", "as asked")
        return b'{"later":true}'


async def ordinary(scope: Scope, receive: Receive, send: Send) -> None:
    await read_body(receive, scope, Lane.limit)
    await send_json(send, {"direct": False}, 200)


@asynccontextmanager
async def serving(lane: Lane, settings: Settings | None = None) -> AsyncIterator[HttpServer]:
    server = HttpServer(
        ErrorBoundary(ordinary),
        sock=bind("127.0.0.1", 0),
        settings=settings or Settings(),
        lifespan="off",
        direct=lane,
    )
    await server.start()
    try:
        yield server
    finally:
        lane.release.set()
        await server.stop(0.5)


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[Pair]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), await reader.readexactly(length)


def request(body: bytes, extra: bytes = b"") -> bytes:
    return HEAD + extra + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_any_split_of_the_bytes_and_the_connection_serves_again() -> None:
    lane = Lane()
    whole = request(b"hello")
    async with serving(lane) as server, connected(server) as (reader, writer):
        for at in range(1, len(whole), 7):
            writer.write(whole[:at])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(whole[at:])
            assert await answer(reader) == (202, b'{"direct":true}')
        assert set(lane.taken) == {b"hello"}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /direct HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi", 200),  # not admitted
        (HEAD.replace(b"/direct", b"/other") + b"content-length: 2\r\n\r\nhi", 200),
        (HEAD.replace(b"POST", b"PUT") + b"content-length: 2\r\n\r\nhi", 200),
        (HEAD.replace(b"/direct", b"/direct?x=1") + b"content-length: 2\r\n\r\nhi", 200),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", 200),
        (HEAD + b"content-length: 0\r\n\r\n", 200),
        (HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\nhi", 415),
        (HEAD + b"content-length: 101\r\n\r\n", 413),
    ],
)
async def test_what_is_not_plain_goes_the_ordinary_way(sent: bytes, status: int) -> None:
    lane = Lane()
    async with serving(lane) as server, connected(server) as (reader, writer):
        writer.write(sent)
        assert (await answer(reader))[0] == status
        assert lane.taken == []


async def test_refusals_keep_the_connection_and_faults_leak_nothing() -> None:
    async with serving(Lane()) as server, connected(server) as (reader, writer):
        writer.write(request(b"refuse"))
        status, body = await answer(reader)
        assert (status, b"frame_invalid" in body) == (400, True)
        writer.write(request(b"break"))
        status, body = await answer(reader)
        assert (status, b"internal" in body, b"secret" in body) == (500, True, False)
        writer.write(request(b"fine"))
        assert (await answer(reader))[0] == 202


async def test_an_answer_that_comes_later() -> None:
    lane = Lane()
    async with serving(lane) as server, connected(server) as (reader, writer):
        writer.write(request(b"later"))
        while not lane.taken:
            await asyncio.sleep(0)
        lane.release.set()
        assert await answer(reader) == (202, b'{"later":true}')
        writer.write(request(b"later refuse"))
        assert (await answer(reader))[0] == 503
        writer.write(request(b"now"))
        assert await answer(reader) == (202, b'{"direct":true}')


async def test_a_request_ahead_of_an_answer_is_refused_and_changes_nothing() -> None:
    lane = Lane()
    async with serving(lane) as server, connected(server) as (reader, writer):
        writer.write(request(b"later") + request(b"now"))
        status, _ = await answer(reader)
        assert status == 400
        assert lane.taken == [b"later"]
        async with asyncio.timeout(5):
            assert await reader.read() == b""


async def test_a_client_that_leaves_while_its_answer_is_due() -> None:
    lane = Lane()
    async with serving(lane) as server:
        async with connected(server) as (_, writer):
            writer.write(request(b"later"))
            while not lane.taken:
                await asyncio.sleep(0)
        async with asyncio.timeout(5):
            while server.connections:
                await asyncio.sleep(0.01)
        lane.release.set()
        async with connected(server) as (reader, writer):
            writer.write(request(b"now"))
            assert (await answer(reader))[0] == 202


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline.transport.guard.BODY_GRACE_S", 0.1)
    lane = Lane()
    async with serving(lane) as server, connected(server) as (reader, writer):
        writer.write(HEAD + b"content-length: 50\r\n\r\nhalf")
        async with asyncio.timeout(5):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readuntil(b"\r\n\r\n")
        assert lane.taken == []


async def test_an_idle_connection_is_closed_after_the_idle_time() -> None:
    async with serving(Lane(), Settings(server_idle_s=0.2)) as server, connected(server) as (reader, writer):
        writer.write(request(b"hello"))
        await answer(reader)
        async with asyncio.timeout(5):
            assert await reader.read() == b""


async def test_a_head_that_is_known_lets_in_only_what_it_is_the_head_of() -> None:
    lane = Lane()
    async with serving(lane) as server, connected(server) as (reader, writer):
        for body in (b"first", b"again", b"third", b"longer than these", b"fifth"):
            writer.write(request(body))
            assert await answer(reader) == (202, b'{"direct":true}')
        assert lane.taken == [b"first", b"again", b"third", b"longer than these", b"fifth"]
        writer.write(request(b"later"))
        await asyncio.sleep(0.02)
        lane.release.set()
        assert await answer(reader) == (202, b'{"later":true}')
        writer.write(request(b"sixth").replace(b"key: yes", b"key: not"))
        assert (await answer(reader))[0] == 200
        writer.write(request(b"whole") + request(b"ahead"))
        assert [(await answer(reader))[0] for _ in range(2)] == [202, 202]
        assert lane.taken[-3:] == [b"later", b"whole", b"ahead"]
