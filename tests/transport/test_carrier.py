"""One set of tests for both carriers, then what only the network can do to one of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.carrier import EMPTY_ACK, STEP_TYPE, STEPS_PATH, Carrier, HttpCarrier, MemoryCarrier
from shardline.transport.http_client import BeforeResponse, ConnectFailed, NotOurPeer, TimedOut
from shardline.transport.http_server import ControlGate, ErrorBoundary, header, read_body, send_json
from shardline.wire.messages import Reject, StepAck
from tests.transport.loopback import Wire, answer, client_of, scripted, serving, until

Hop = Callable[[bytes], Awaitable[StepAck]]
CREDENTIAL = "the-cluster-credential"
SETTINGS = Settings(step_body_bytes=64 << 20)


def step_endpoint(hop: Hop) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (scope["method"], scope["path"]) == ("POST", STEPS_PATH)
        assert header(scope, b"content-type") == STEP_TYPE
        body = await read_body(receive, scope, SETTINGS.step_body_bytes)
        await send_json(send, await hop(body), 202)

    return ErrorBoundary(ControlGate(app, credential=CREDENTIAL))


@dataclass
class Link:
    carrier: Carrier
    url: str


@contextlib.asynccontextmanager
async def over_http(hop: Hop) -> AsyncIterator[Link]:
    async with serving(step_endpoint(hop), SETTINGS) as server, client_of(SETTINGS, CREDENTIAL) as client:
        yield Link(HttpCarrier(client), server.url)


@contextlib.asynccontextmanager
async def in_memory(hop: Hop) -> AsyncIterator[Link]:
    carrier = MemoryCarrier(SETTINGS.step_body_bytes)
    carrier.hops["http://127.0.0.1:1"] = hop
    yield Link(carrier, "http://127.0.0.1:1")


both = pytest.mark.parametrize("linked", [over_http, in_memory])
Linked = Callable[[Hop], contextlib.AbstractAsyncContextManager[Link]]


class Keeping:
    """A hop that keeps what it got."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    async def __call__(self, body: bytes) -> StepAck:
        self.got.append(body)
        return StepAck()


async def push(link: Link, *pieces: bytes | memoryview, timeout_s: float = 10.0) -> StepAck:
    return await link.carrier.push(link.url, pieces, timeout_s=timeout_s, limit="push")


def test_the_usual_answer_is_what_the_struct_says() -> None:
    assert msgspec.json.encode(StepAck()) == EMPTY_ACK


@both
async def test_steps_arrive_in_order_and_as_often_as_they_are_pushed(linked: Linked) -> None:
    hop = Keeping()
    async with linked(hop) as link:
        for i in range(50):
            assert await push(link, b"step ", memoryview(b"%d" % (i // 2))) == StepAck()
    assert hop.got == [b"step %d" % (i // 2) for i in range(50)]


@both
@pytest.mark.parametrize("size", [1, 8192, 1 << 20, SETTINGS.step_body_bytes])
async def test_bodies_up_to_the_limit(linked: Linked, size: int) -> None:
    hop = Keeping()
    body = random.Random(size).randbytes(min(size, 1 << 20)) * max(1, size >> 20)
    async with linked(hop) as link:
        await push(link, body[: size // 2], memoryview(body)[size // 2 :])
    assert hop.got == [body]


@both
async def test_a_body_over_the_limit_is_refused_and_the_next_passes(linked: Linked) -> None:
    hop = Keeping()
    async with linked(hop) as link:
        with pytest.raises(ShardlineError) as caught:
            await push(link, bytes(SETTINGS.step_body_bytes + 1))
        assert caught.value.code == "body_too_large"
        await push(link, b"next")
    assert hop.got == [b"next"]


@both
async def test_rejects_are_returned(linked: Linked) -> None:
    ack = StepAck(rejected=[Reject(entry=1, code="seam_gap", message="3 came after 1")])

    async def hop(body: bytes) -> StepAck:
        return ack

    async with linked(hop) as link:
        assert await push(link, b"x") == ack


@both
async def test_a_refusal_of_the_hop_is_raised(linked: Linked) -> None:
    async def hop(body: bytes) -> StepAck:
        raise ShardlineError("frame_invalid", "not a step document", offset=3)

    async with linked(hop) as link:
        with pytest.raises(ShardlineError) as caught:
            await push(link, b"x")
    assert (caught.value.code, caught.value.message) == ("frame_invalid", "not a step document")
    assert caught.value.details["offset"] == 3


@both
async def test_a_silent_hop_runs_into_the_limit(linked: Linked) -> None:
    async def hop(body: bytes) -> StepAck:
        await asyncio.Event().wait()
        return StepAck()

    async with linked(hop) as link:
        with pytest.raises(TimedOut) as caught:
            await push(link, b"x", timeout_s=0.05)
    assert caught.value.limit == "push"


@both
async def test_an_unknown_hop(linked: Linked) -> None:
    async with linked(Keeping()) as link:
        with pytest.raises(ConnectFailed):
            await link.carrier.push("http://127.0.0.1:9", [b"x"], timeout_s=2, limit="push")


@both
async def test_cancelled_pushes_harm_no_later_one(linked: Linked) -> None:
    hop = Keeping()
    async with linked(hop) as link:
        for turns in range(20):
            task = asyncio.get_running_loop().create_task(push(link, bytes(70_000)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert await push(link, b"%d" % turns) == StepAck()
    assert [body for body in hop.got if len(body) < 9] == [b"%d" % i for i in range(20)]


@both
async def test_many_at_once(linked: Linked) -> None:
    hop = Keeping()
    async with linked(hop) as link, asyncio.TaskGroup() as group:
        for i in range(100):
            group.create_task(push(link, b"%d" % i))
    assert sorted(hop.got, key=int) == [b"%d" % i for i in range(100)]


@both
@profile(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.binary(max_size=3000), min_size=1, max_size=6))
async def test_pieces_are_put_together(linked: Linked, pieces: list[bytes]) -> None:
    hop = Keeping()
    async with linked(hop) as link:
        await push(link, *pieces)
    assert hop.got == [b"".join(pieces)]


# The network alone.


@pytest.mark.parametrize("retry", [True, False])
async def test_an_idle_close_just_as_a_step_is_written_is_not_a_failure(retry: bool) -> None:
    hop = Keeping()
    idle = Settings(server_idle_s=0.005)
    async with serving(step_endpoint(hop), idle) as server, client_of(SETTINGS, CREDENTIAL) as client:
        carrier = HttpCarrier(client)
        rng = random.Random(60)
        for i in range(200):
            body = b"%d" % i
            if retry:
                await carrier.push(server.url, [body], timeout_s=5, limit="push")
            else:
                response = await client.request(
                    "POST", server.url + STEPS_PATH, body=body, content_type=STEP_TYPE, timeout_s=5, limit="push"
                )
                assert response.status == 202
            # The server's limit, a little less, a little more.
            await asyncio.sleep(0.005 + rng.uniform(-0.001, 0.0015))
    assert sorted(set(hop.got), key=int) == [b"%d" % i for i in range(200)]


async def test_a_connection_closed_in_the_middle_of_a_body_is_tried_once_more() -> None:
    got: list[int] = []

    async def script(wire: Wire) -> None:
        if wire.number == 0:
            got.append(len(await wire.reader.readexactly(100_000)))
            wire.reset()
            return
        got.append(len((await wire.request()).partition(b"\r\n\r\n")[2]))
        wire.send(answer(EMPTY_ACK, status="202 Accepted"))

    async with scripted(script) as peer, client_of() as client:
        body = bytes(8 << 20)
        assert await HttpCarrier(client).push(peer.url, [body], timeout_s=5, limit="push") == StepAck()
        assert got == [100_000, len(body)]


async def test_a_hop_that_closes_every_time_fails_after_the_second() -> None:
    async def script(wire: Wire) -> None:
        await wire.reader.readexactly(1000)
        wire.reset()

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(BeforeResponse):
            await HttpCarrier(client).push(peer.url, [bytes(1 << 20)], timeout_s=5, limit="push")
        assert peer.connections == 2


async def test_the_same_bytes_are_sent_again_when_the_answer_is_lost() -> None:
    got: list[bytes] = []

    async def script(wire: Wire) -> None:
        got.append(await wire.request())
        if wire.number:
            wire.send(answer(EMPTY_ACK, status="202 Accepted"))

    async with scripted(script) as peer, client_of() as client:
        assert await HttpCarrier(client).push(peer.url, [b"a", b"b"], timeout_s=5, limit="push") == StepAck()
    assert len(got) == 2 and got[0] == got[1]


async def test_a_slow_reader_gets_the_whole_body() -> None:
    size = 4 << 20

    async def script(wire: Wire) -> None:
        await wire.reader.readuntil(b"\r\n\r\n")
        left = size
        while left:
            left -= len(await wire.reader.read(131_072))
            await asyncio.sleep(0.002)
        wire.send(answer(EMPTY_ACK, status="202 Accepted"))
        await wire.reader.read()

    async with scripted(script) as peer, client_of() as client:
        assert await HttpCarrier(client).push(peer.url, [bytes(size)], timeout_s=10, limit="push") == StepAck()
        assert client.connections == 1


async def test_a_reader_that_stops_runs_into_the_limit() -> None:
    async def script(wire: Wire) -> None:
        await wire.reader.readuntil(b"\r\n\r\n")
        await asyncio.Event().wait()

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(TimedOut):
            await HttpCarrier(client).push(peer.url, [bytes(32 << 20)], timeout_s=0.1, limit="push")
        await until(lambda: client.connections == 0)


@pytest.mark.parametrize("status", ["200 OK", "202 Accepted", "503 Service Unavailable"])
async def test_a_hop_that_is_something_else(status: str) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(b"<html>", status=status, kind=b"text/html"))

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(NotOurPeer):
            await HttpCarrier(client).push(peer.url, [b"x"], timeout_s=5, limit="push")
