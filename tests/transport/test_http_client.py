from __future__ import annotations

import asyncio
import itertools
import time

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.settings import PROTOCOL, Settings
from shardline.transport.connection import Connection
from shardline.transport.http_client import (
    BeforeResponse,
    BrokenResponse,
    ConnectFailed,
    HttpClient,
    HttpFailure,
    NotOurPeer,
    Response,
    TimedOut,
)
from tests.transport.loopback import FakeTransport, Wire, answer, client_of, scripted, sockets, until


class Answer(msgspec.Struct):
    value: int


async def echo(wire: Wire) -> None:
    """Answers every request with its length."""
    while True:
        request = await wire.request()
        wire.send(answer(b'{"value":%d}' % len(request.partition(b"\r\n\r\n")[2])))


async def once(client: HttpClient, url: str, **options: object) -> Response:
    given: dict[str, object] = {"body": b"hello", "timeout_s": 5.0, "limit": "step", **options}
    return await client.request("POST", url, **given)  # type: ignore[arg-type]


# What is sent.


async def test_request_head_and_vectored_body() -> None:
    seen: list[bytes] = []

    async def script(wire: Wire) -> None:
        while True:
            seen.append(await wire.request())
            wire.send(answer())

    async with scripted(script) as peer, client_of(credential="a-credential") as client:
        pieces = [b"one", memoryview(bytearray(b"two")), memoryview(b"\0\0\0\0\0\0\x80?").cast("f"), b""]
        await once(client, peer.url + "/v1/steps?x=1", body=pieces, content_type="text/x", headers={"x-a": "b"})
        await once(client, peer.url + "/v1/node", authorize=False)
        await client.request("GET", peer.url + "/", timeout_s=5, limit="control")
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert body == b"onetwo\0\0\0\0\0\0\x80?"
    assert head.split(b"\r\n") == [
        b"POST /v1/steps?x=1 HTTP/1.1",
        b"host: 127.0.0.1:%d" % peer.port,
        b"shardline-protocol: %d" % PROTOCOL,
        b"authorization: Bearer a-credential",
        b"content-length: 14",
        b"content-type: text/x",
        b"x-a: b",
    ]
    assert b"authorization" not in seen[1]
    assert b"content-length" not in seen[2] and b"encoding" not in seen[2]


@pytest.mark.parametrize("name, value", [("x", "a\r\nb: c"), ("x y", "a"), ("x", "a\0"), ("", "a"), ("x", "☃")])
async def test_header_fields_cannot_be_injected(name: str, value: str) -> None:
    async with client_of() as client:
        with pytest.raises(ValueError):
            await once(client, "http://127.0.0.1:1/", headers={name: value})
    with pytest.raises(ValueError):
        HttpClient(Settings(), credential="a\r\nb: c")


async def test_only_methods_whose_answers_have_bodies() -> None:
    async with client_of() as client:
        with pytest.raises(ValueError):
            await client.request("HEAD", "http://127.0.0.1:1/", timeout_s=1, limit="x")


# What is received.


class Told:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.data = b""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.calls.append((status, headers))

    def body(self, data: bytes) -> None:
        self.data += data

    def end(self) -> None:
        self.calls.append("end")

    def lost(self, failure: Exception) -> None:
        self.calls.append(type(failure))


RESPONSES = [
    (answer(b'{"a":1}', extra=b"x-a: b\r\nX-A: c\r\n"), b'{"a":1}'),
    (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nt: u\r\n\r\n",
        b"abc0123456789",
    ),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\na: b\r\n\r\n" + answer(b"x"), b"x"),
    (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    (answer(b""), b""),
]


def fresh_connection(told: Told) -> tuple[Connection, FakeTransport, list[bool]]:
    kept: list[bool] = []
    connection = Connection("peer", 32 << 10, lambda c, keep: kept.append(keep), lambda c: None)
    transport = FakeTransport()
    connection.connection_made(transport)
    connection.send(told, [b"request"])
    return connection, transport, kept


@given(st.sampled_from(RESPONSES), st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_a_response_means_the_same_however_it_is_split(
    response: tuple[bytes, bytes], cuts: list[int], each_byte: bool
) -> None:
    raw, body = response
    whole = Told()
    fresh_connection(whole)[0].data_received(raw)
    points = sorted({0, len(raw), *(range(len(raw)) if each_byte else (cut % len(raw) for cut in cuts))})
    told = Told()
    connection, _, kept = fresh_connection(told)
    for _ in range(2):
        for start, stop in itertools.pairwise(points):
            connection.data_received(raw[start:stop])
        assert (told.calls, told.data, kept) == (whole.calls, body, [True])
        assert told.calls[-1] == "end"
        # Once more on the same connection: nothing of the first response is left in it.
        told.calls.clear()
        told.data = b""
        kept.clear()
        connection.send(told, [b"request"])


@given(st.binary(max_size=300))
def test_no_bytes_from_a_peer_raise_out_of_a_connection(noise: bytes) -> None:
    told = Told()
    connection, transport, _ = fresh_connection(told)
    connection.data_received(noise)
    connection.data_received(b"HTTP/1.1 " + noise)
    if not transport.closed:
        connection.connection_lost(None)
    assert told.calls.count("end") + sum(isinstance(call, type) for call in told.calls) <= 1


@given(st.sampled_from(RESPONSES[:3]), st.integers(1, 400))
def test_a_response_that_breaks_off_is_never_taken_for_whole(response: tuple[bytes, bytes], cut: int) -> None:
    raw = response[0]
    told = Told()
    connection, _, _ = fresh_connection(told)
    connection.data_received(raw[: cut % (len(raw) - 1) + 1][: len(raw) - 1])
    connection.connection_lost(None)
    assert told.calls[-1] is BrokenResponse and "end" not in told.calls


async def test_keep_alive_uses_one_connection() -> None:
    async with scripted(echo) as peer, client_of() as client:
        for size in (0, 1, 70_000, 5):
            response = await once(client, peer.url, body=b"x" * size)
            assert msgspec.json.decode(response.body) == {"value": size}
        assert peer.connections == 1 and client.connections == 1


async def test_concurrent_requests_use_a_connection_each_and_no_more() -> None:
    async with scripted(echo) as peer, client_of() as client:
        for _ in range(3):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(once(client, peer.url))
        assert peer.connections <= 20 and client.connections == peer.connections


async def test_a_connection_that_the_peer_ends_is_not_used_again() -> None:
    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            wire.send(answer(extra=b"connection: close\r\n"))

    async with scripted(script) as peer, client_of() as client:
        await once(client, peer.url)
        await once(client, peer.url)
        assert peer.connections == 2


@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"\0garbage"])
async def test_bytes_behind_a_response_cost_the_connection(extra: bytes) -> None:
    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            wire.send(answer(b"mine") + (extra if wire.number == 0 else b""))

    async with scripted(script) as peer, client_of() as client:
        for _ in range(3):
            assert (await once(client, peer.url)).body == b"mine"
        assert peer.connections == 2


async def test_bytes_that_nobody_asked_for_cost_the_connection() -> None:
    say = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(b"%d" % wire.number))
        await say.wait()
        wire.send(answer(b"a forged answer to the next request"))
        await wire.request()
        wire.send(answer(b"late"))

    async with scripted(script) as peer, client_of() as client:
        assert (await once(client, peer.url)).body == b"0"
        say.set()
        await until(lambda: client.connections == 0)
        say.clear()
        assert (await once(client, peer.url)).body == b"1"


async def test_idle_connections_are_dropped() -> None:
    async with scripted(echo) as peer, client_of(Settings(client_idle_s=0.05)) as client:
        await once(client, peer.url)
        assert client.connections == 1
        await until(lambda: client.connections == 0)
        await once(client, peer.url)
        assert peer.connections == 2


async def test_an_answer_that_overtakes_its_request_costs_the_connection() -> None:
    async def script(wire: Wire) -> None:
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.send(answer(b"{}", status="413 Too Large"))
        await wire.reader.read()

    async with scripted(script) as peer, client_of() as client:
        response = await once(client, peer.url, body=bytes(32 << 20))
        assert response.status == 413
        await until(lambda: client.connections == 0)


async def test_no_redirect_is_followed_and_no_cookie_kept() -> None:
    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            assert b"cookie" not in request.lower()
            wire.send(answer(status="302 Found", extra=b"location: http://127.0.0.1:1/\r\nset-cookie: a=b\r\n"))

    async with scripted(script) as peer, client_of() as client:
        for _ in range(2):
            assert (await once(client, peer.url)).status == 302
        with pytest.raises(NotOurPeer):
            await client.json("GET", peer.url, Answer)


# Limits on what a peer may send.


@pytest.mark.parametrize(
    "raw",
    [
        answer(bytes(101)),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"33\r\n"
        + bytes(51)
        + b"\r\n33\r\n"
        + bytes(51)
        + b"\r\n",
    ],
)
async def test_answers_have_a_limit(raw: bytes) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(raw)
        await wire.reader.read()

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(BrokenResponse, match="100"):
            await once(client, peer.url, max_body=100)
        await until(lambda: client.connections == 0)


@pytest.mark.parametrize("field", [b"x: " + b"y" * 1000 + b"\r\n", b"a" * 500 + b"\r\n"])
async def test_an_endless_head_is_cut_off(field: bytes) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            wire.send(field)
            await wire.writer.drain()

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises((BrokenResponse, NotOurPeer)):
            await once(client, peer.url)


async def test_too_many_header_fields() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(extra=b"".join(b"x-%d: y\r\n" % i for i in range(200))))
        await wire.reader.read()

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(BrokenResponse, match="100 header"):
            await once(client, peer.url)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nuntil I close",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"\x16\x03\x01\x02\x00",
    ],
)
async def test_what_does_not_speak_our_http_is_not_our_peer(raw: bytes) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(raw)
        await wire.reader.read()

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(NotOurPeer, match="not our peer"):
            await once(client, peer.url)
        await until(lambda: client.connections == 0)


# Where it failed.


async def test_refused_connection() -> None:
    async with scripted(echo) as peer:
        pass
    async with client_of() as client:
        with pytest.raises(ConnectFailed) as caught:
            await once(client, peer.url, retry_once=True)
        assert caught.value.peer == f"127.0.0.1:{peer.port}"


async def test_connect_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*args: object, **options: object) -> None:
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    if not hasattr(loop, "_selector"):
        pytest.skip("uvloop's methods cannot be replaced")
    monkeypatch.setattr(loop, "create_connection", never)
    async with client_of(Settings(connect_s=0.02)) as client:
        with pytest.raises(ConnectFailed, match="limit connect"):
            await once(client, "http://127.0.0.1:1/")


@pytest.mark.parametrize("reset", [True, False])
async def test_broken_before_the_response_on_a_fresh_connection(reset: bool) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        if reset:
            wire.reset()

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(BeforeResponse) as caught:
            await once(client, peer.url)
        assert caught.value.reused is False
        assert peer.connections == 1
        with pytest.raises(BeforeResponse):
            await once(client, peer.url, retry_once=True)
        assert peer.connections == 3


async def test_a_reused_connection_that_breaks_is_replaced_once_with_the_same_bytes() -> None:
    seen: list[bytes] = []

    async def script(wire: Wire) -> None:
        seen.append(await wire.request())
        wire.send(answer(b"%d" % wire.number))
        seen.append(await wire.request())
        wire.reset()

    async with scripted(script) as peer, client_of() as client:
        assert (await once(client, peer.url, body=b"first")).body == b"0"
        assert (await once(client, peer.url, body=b"second")).body == b"1"
        assert [raw.partition(b"\r\n\r\n")[2] for raw in seen] == [b"first", b"second", b"second"]
        assert peer.connections == 2


async def test_nothing_is_sent_a_third_time() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        if wire.number == 0:
            wire.send(answer())
            await wire.request()

    async with scripted(script) as peer, client_of() as client:
        await once(client, peer.url)
        with pytest.raises(BeforeResponse) as caught:
            await once(client, peer.url, retry_once=True)
        assert caught.value.reused is False
        assert peer.connections == 2


async def test_broken_after_the_first_byte_is_not_repeated() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(b"0123456789")[:-3])
        await asyncio.sleep(0.01)
        wire.reset()

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(BrokenResponse):
            await once(client, peer.url, retry_once=True)
        assert peer.connections == 1


async def test_timed_out_names_its_limit_and_closes() -> None:
    closed = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(b"HTTP/1.1 200 OK\r\n" if wire.number else b"")
        await wire.reader.read()
        closed.set()

    async with scripted(script) as peer, client_of() as client:
        for _ in range(2):
            with pytest.raises(TimedOut, match=r"limit prefill_chunk \(0.05 s\)") as caught:
                await once(client, peer.url, timeout_s=0.05, limit="prefill_chunk", retry_once=True)
            assert caught.value.limit == "prefill_chunk"
            async with asyncio.timeout(2):
                await closed.wait()
            closed.clear()
        assert client.connections == 0 and peer.connections == 2


async def test_a_pause_of_our_own_is_not_held_against_the_peer(threaded_peer: str) -> None:
    async with client_of(Settings(late_timer_s=0.05)) as client:
        request = asyncio.get_running_loop().create_task(once(client, threaded_peer, timeout_s=0.3))
        await until(lambda: client.connections == 1)
        time.sleep(0.6)  # noqa: ASYNC251  (the answer comes while we are stopped, past the limit)
        assert (await request).body == b"ok"


# Cancelling and closing.


async def test_cancelling_a_caller_closes_its_connection() -> None:
    arrived = asyncio.Event()
    left = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        arrived.set()
        await wire.reader.read()
        left.set()

    async with scripted(script) as peer, client_of() as client:
        task = asyncio.get_running_loop().create_task(once(client, peer.url))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(2):
            await left.wait()
        assert client.connections == 0


async def test_cancelling_at_any_moment_never_mixes_answers() -> None:
    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            await asyncio.sleep(0)
            wire.send(answer(request.partition(b"\r\n\r\n")[2]))

    async with scripted(script) as peer, client_of() as client:
        for turns in range(30):
            task = asyncio.get_running_loop().create_task(once(client, peer.url, body=b"cancelled"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert (await once(client, peer.url, body=b"%d" % turns)).body == b"%d" % turns
        # Whatever is still open is idle and whole.
        assert client.connections == 1


async def test_cancelling_while_connecting_leaves_nothing_behind() -> None:
    before = sockets()
    async with scripted(echo) as peer, client_of() as client:
        for turns in range(12):
            tasks = [asyncio.get_running_loop().create_task(once(client, peer.url)) for _ in range(20)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await until(lambda: client.connections <= 20)
        # Whatever is counted is open: it can be used, or closed.
        async with asyncio.TaskGroup() as group:
            for _ in range(client.connections + 1):
                group.create_task(once(client, peer.url))
    await until(lambda: sockets() == before)


async def test_closing_the_client_ends_everything_and_leaves_no_socket() -> None:
    before = sockets()
    async with scripted(echo) as peer:
        client = HttpClient(Settings())
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(once(client, peer.url))

        async def hang(wire: Wire) -> None:
            await wire.request()
            await wire.reader.read()

        async with scripted(hang) as silent:
            task = asyncio.get_running_loop().create_task(once(client, silent.url))
            await until(lambda: silent.connections == 1)
            await client.aclose()
            with pytest.raises(HttpFailure):
                await task
        assert client.connections == 0
        with pytest.raises(ConnectFailed, match="closed"):
            await once(client, peer.url)
        await client.aclose()
    await until(lambda: sockets() == before)


# JSON.


async def test_json_answers_and_errors() -> None:
    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            if b"/error " in request:
                error = ShardlineError("model_unavailable", "layers 3 to 7 are missing", missing=[[3, 7]])
                wire.send(answer(msgspec.json.encode({"error": error.body()}), status="503 Service Unavailable"))
            else:
                assert b"content-type: application/json" in request and request.endswith(b'{"value":4}')
                wire.send(answer(b'{"value":5}', kind=b"Application/JSON; charset=utf-8"))

    async with scripted(script) as peer, client_of() as client:
        assert await client.json("POST", peer.url + "/x", Answer, body=Answer(4)) == Answer(5)
        assert await client.json("POST", peer.url + "/x", type(None), body=Answer(4)) is None
        with pytest.raises(ShardlineError) as caught:
            await client.json("GET", peer.url + "/error", Answer)
        error = caught.value
        assert (error.code, error.message, error.details) == (
            "model_unavailable",
            "layers 3 to 7 are missing",
            {"missing": [[3, 7]]},
        )


@pytest.mark.parametrize("status", ["200 OK", "403 Forbidden", "502 Bad Gateway", "503 Service Unavailable"])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"text/html", b"<html>Proxy error</html>"),
        (b"application/json", b"<html>"),
        (b"application/json", b'"no object"'),
        (b"application/json", b'{"error":"text"}'),
        (b"application/json", b"[" * 100_000),
        (b"application/json", b""),
    ],
)
async def test_an_answer_that_is_not_ours_is_called_that(status: str, kind: bytes, body: bytes) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(body, status=status, kind=kind))

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(NotOurPeer, match="not our peer"):
            await client.json("GET", peer.url, Answer)


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with scripted(echo) as peer, client_of() as client:
        assert await client.json("POST", peer.url, Answer, body=Answer(1)) == Answer(11)
        assert await client.json("POST", peer.url.replace("127.0.0.1", "localhost"), Answer, body=Answer(1)) == Answer(
            11
        )


async def test_a_checked_address_is_dialled_instead_of_the_name() -> None:
    seen: list[bytes] = []

    async def script(wire: Wire) -> None:
        seen.append(await wire.request())
        wire.send(answer())

    async with scripted(script) as peer, client_of() as client:
        response = await once(client, f"http://node.invalid:{peer.port}/", address=("127.0.0.1", peer.port))
        assert response.status == 200
        assert b"host: node.invalid:%d" % peer.port in seen[0]


@profile(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200_000))
async def test_bodies_arrive_as_they_were_sent(body: bytes) -> None:
    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            wire.send(answer(request.partition(b"\r\n\r\n")[2]))

    async with scripted(script) as peer, client_of() as client:
        assert (await once(client, peer.url, body=body)).body == body
