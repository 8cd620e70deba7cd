"""Large bodies straight into memory: the same however they come, and the connection is as good as after any answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from shardline.settings import Settings
from shardline.transport.answers import Response
from shardline.transport.bodies import header, send_body
from shardline.transport.connection import Connection
from shardline.transport.failures import BrokenResponse, TimedOut
from shardline.transport.http_client import HttpClient
from tests.support.certificates import authority, party
from tests.transport.loopback import FakeTransport, Wire, answer, client_of, scripted, serving, until

BODY = bytes(range(256)) * 40
NODE_A, NODE_B = "n-aaaaaaaaaaaaaaaa", "n-bbbbbbbbbbbbbbbb"


class Placed:
    """A sink with a place for the body."""

    def __init__(self, size: int) -> None:
        self.place = bytearray(size)
        self.calls: list[object] = []

    def head(self, status: int, headers: dict[str, str]) -> memoryview:
        return memoryview(self.place)

    def body(self, data: bytes) -> None:
        self.calls.append("body")

    def end(self) -> None:
        self.calls.append("end")

    def lost(self, failure: Exception) -> None:
        self.calls.append(type(failure))


class LoopTransport(FakeTransport):
    """Gives what comes to its protocol, as loops do for either kind."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self.protocol: asyncio.BaseProtocol = protocol
        self.paused = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def come(self, data: bytes) -> None:
        while data and not self.closed:
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                room = self.protocol.get_buffer(-1)
                count = min(len(room), len(data))
                memoryview(room)[:count] = data[:count]
                self.protocol.buffer_updated(count)
                data = data[count:]
            else:
                assert isinstance(self.protocol, asyncio.Protocol)
                self.protocol.data_received(data)
                data = b""


@given(st.lists(st.integers(0, len(BODY) + 90), max_size=12), st.booleans(), st.booleans())
def test_a_body_lies_in_its_place_however_it_is_split(cuts: list[int], again: bool, close: bool) -> None:
    kept: list[bool] = []
    connection = Connection("peer", 32 << 10, lambda c, keep: kept.append(keep), lambda c: None)
    transport = LoopTransport(connection)
    connection.connection_made(transport)
    raw = answer(BODY, extra=b"connection: close\r\n" if close else b"")
    for _ in range(1 + (again and not close)):
        sink = Placed(len(BODY))
        connection.send(sink, [b"request"])
        edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
        for start, end in pairwise(edges):
            transport.come(raw[start:end])
        assert sink.place == BODY
        assert sink.calls == ["end"]
        assert transport.protocol is connection
    assert set(kept) == {not close}


@given(st.integers(0, len(BODY) - 1))
def test_a_connection_that_ends_within_the_body(have: int) -> None:
    connection = Connection("peer", 32 << 10, lambda c, keep: None, lambda c: None)
    transport = LoopTransport(connection)
    connection.connection_made(transport)
    sink = Placed(len(BODY))
    connection.send(sink, [b"request"])
    raw = answer(BODY)
    transport.come(raw[: len(raw) - len(BODY) + have])
    transport.protocol.connection_lost(None)
    assert sink.calls == [BrokenResponse]
    assert connection.lost


def test_a_place_of_another_length_is_our_own_fault() -> None:
    connection = Connection("peer", 32 << 10, lambda c, keep: None, lambda c: None)
    transport = LoopTransport(connection)
    connection.connection_made(transport)
    sink = Placed(len(BODY) - 1)
    connection.send(sink, [b"request"])
    transport.come(answer(BODY))
    assert sink.calls == [ValueError]
    assert transport.closed


async def filled(client: HttpClient, url: str, into: bytearray, timeout_s: float = 5.0) -> tuple[Response, bool]:
    return await client.fill(
        url, memoryview(into), headers={}, timeout_s=timeout_s, limit="pieces", max_body=16 << 20, retry_once=True
    )


@asynccontextmanager
async def gives(*raw: bytes) -> AsyncIterator[tuple[HttpClient, str]]:
    """A client, and where each request gets the next of these bytes."""

    async def script(wire: Wire) -> None:
        for one in raw:
            await wire.request()
            wire.send(one)
            await wire.writer.drain()
        await wire.request()

    async with scripted(script) as peer, client_of() as client:
        yield client, peer.url + "/"


async def test_one_connection_serves_many() -> None:
    large = bytes(range(256)) * 40_000
    async with gives(answer(large), answer(b"{}"), answer(large), answer(b"{}")) as (client, url):
        for _ in range(2):
            into = bytearray(len(large))
            response, done = await filled(client, url, into)
            assert (response.status, response.body, done) == (200, b"", True)
            assert into == large
            assert await client.json("GET", url, dict[str, int]) == {}
        assert client.connections == 1


@pytest.mark.parametrize("what", ["shorter", "longer", "chunked", "refused", "nothing"])
async def test_another_answer_is_as_any_other(what: str) -> None:
    raw = {
        "shorter": answer(BODY[:-1]),
        "longer": answer(BODY + b"x"),
        "chunked": b"HTTP/1.1 206 P\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        "refused": answer(BODY, status="404 Not Found"),
        "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
    }[what]
    async with gives(raw, answer(BODY)) as (client, url):
        into = bytearray(len(BODY))
        response, done = await filled(client, url, into)
        assert not done
        assert not any(into)
        assert len(response.body) == {"shorter": len(BODY) - 1, "longer": len(BODY) + 1, "nothing": 0}.get(
            what, len(BODY)
        )
        assert (await filled(client, url, into))[1]
        assert client.connections == 1


async def test_more_than_the_body_ends_the_connection() -> None:
    async with gives(answer(BODY) + b"more", answer(BODY)) as (client, url):
        into = bytearray(len(BODY))
        assert (await filled(client, url, into))[1]
        assert into == BODY
        await until(lambda: client.connections == 0)


async def test_a_body_that_does_not_come_to_its_end() -> None:
    """Nothing is written into the memory once the caller has it back."""

    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(BODY)[:-5])
        await wire.request()

    async with scripted(script) as peer, client_of() as client:
        into = bytearray(len(BODY))
        with pytest.raises(TimedOut, match="pieces"):
            await filled(client, peer.url + "/", into, timeout_s=0.1)
        assert into[:-5] == BODY[:-5] and not any(into[-5:])
        await until(lambda: client.connections == 0)


async def test_cancelled_within_the_body() -> None:
    begun = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(BODY)[:-5])
        begun.set()
        await wire.request()

    async with scripted(script) as peer, client_of() as client:
        into = bytearray(len(BODY))
        task = asyncio.get_running_loop().create_task(filled(client, peer.url + "/", into))
        await begun.wait()
        await until(lambda: any(into))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await until(lambda: client.connections == 0)


async def test_over_tls(tmp_path: Path) -> None:
    """From 1 byte to more than any buffer between; both ends with the keys of one cluster."""
    content = bytes(range(251)) * 20_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        count = int(header(scope, b"x-count") or "0")
        await send_body(send, 206, content[:count])

    own = authority(tmp_path)
    async with serving(app, tls=party(own, NODE_B).server()) as server:
        client = HttpClient(Settings(), tls=party(own, NODE_A))
        for count in (1, 100, 16384, 70_000, 300_000, len(content)):
            into = bytearray(count)
            response, done = await client.fill(
                f"https://{NODE_B}@127.0.0.1:{server.port}/",
                memoryview(into),
                headers={"x-count": str(count)},
                timeout_s=5,
                limit="pieces",
                max_body=16 << 20,
            )
            assert (response.status, done) == (206, True)
            assert into == content[:count]
        assert client.connections == 1
        await client.aclose()
