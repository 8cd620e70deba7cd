from __future__ import annotations

import asyncio
import itertools
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.connection import Connection
from shardline.transport.http_client import BeforeResponse, BrokenResponse, HttpClient, LineStream, NotOurPeer, TimedOut
from tests.transport.loopback import FakeTransport, Wire, answer, client_of, scripted, sockets, until

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def opened(client: HttpClient, url: str, **options: object):  # type: ignore[no-untyped-def]
    return client.stream("POST", url, timeout_s=2.0, limit="open", **options)  # type: ignore[arg-type]


async def test_lines_then_the_connection_serves_again() -> None:
    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            wire.send(HEAD + chunk(b'{"a":1}\n{"b"') + chunk(b":2}\n\n") + END)

    async with scripted(script) as peer, client_of() as client:
        for _ in range(3):
            async with opened(client, peer.url) as stream:
                assert stream.status == 200
                assert [line async for line in stream] == [b'{"a":1}', b'{"b":2}', b""]
        assert peer.connections == 1 and client.connections == 1


async def test_each_line_comes_when_it_is_sent() -> None:
    step = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD)
        for i in range(3):
            await step.wait()
            step.clear()
            wire.send(chunk(b"%d\n" % i))
        wire.send(END)

    async with scripted(script) as peer, client_of() as client, opened(client, peer.url) as stream:
        for i in range(3):
            step.set()
            assert await anext(stream) == b"%d" % i
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@given(
    st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    st.lists(st.integers(0, 1000), max_size=12),
    st.lists(st.integers(0, 1000), max_size=12),
    st.booleans(),
)
def test_lines_are_the_same_however_they_are_cut(
    lines: list[bytes], chunk_cuts: list[int], read_cuts: list[int], callbacks: bool
) -> None:
    body = b"".join(line + b"\n" for line in lines)
    raw = HEAD + b"".join(chunk(part) for part in _cut(body, chunk_cuts) if part) + END

    async def main() -> list[bytes]:
        got: list[bytes] = []
        ends: list[Exception | None] = []
        connection = Connection("peer", 1 << 15, lambda c, keep: None, lambda c: None)
        connection.connection_made(FakeTransport())
        on_line = got.append if callbacks else None
        stream = LineStream(connection, on_line=on_line, on_end=ends.append, idle_s=1.0, late_s=0.5)
        connection.send(stream, [b"request"])
        for part in _cut(raw, read_cuts):
            if part:
                connection.data_received(part)
        assert ends == [None]
        return got + [line async for line in stream]

    assert asyncio.run(main()) == lines


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    points = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(points)]


async def test_callbacks_are_called_for_each_line_and_once_at_the_end() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD + chunk(b"a\nb\n"))
        await asyncio.sleep(0.01)
        wire.send(chunk(b"c\n") + END)

    async with scripted(script) as peer, client_of() as client:
        got: list[object] = []
        async with opened(client, peer.url, on_line=got.append, on_end=got.append) as stream:
            assert await stream.ended() is None
        assert got == [b"a", b"b", b"c", None]
        assert client.connections == 1


async def test_a_broken_stream_gives_its_lines_and_then_the_failure() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD + chunk(b"whole\nhalf"))
        await asyncio.sleep(0.01)
        wire.reset()

    async with scripted(script) as peer, client_of() as client:
        async with opened(client, peer.url) as stream:
            assert await anext(stream) == b"whole"
            with pytest.raises(BrokenResponse):
                await anext(stream)
        ends: list[object] = []
        async with opened(client, peer.url, on_line=ends.append, on_end=ends.append) as stream:
            assert isinstance(await stream.ended(), BrokenResponse)
        assert ends[0] == b"whole" and isinstance(ends[1], BrokenResponse) and len(ends) == 2
        await until(lambda: client.connections == 0)


async def test_a_stream_that_ends_within_a_line_is_broken() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD + chunk(b"whole\nhalf") + END)

    async with scripted(script) as peer, client_of() as client, opened(client, peer.url) as stream:
        assert await anext(stream) == b"whole"
        with pytest.raises(BrokenResponse, match="within a line"):
            await anext(stream)


async def test_a_stream_left_early_closes_its_connection() -> None:
    left = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD + chunk(b"a\n"))
        await wire.reader.read()
        left.set()

    before = sockets()
    async with scripted(script) as peer, client_of() as client:
        got: list[object] = []
        async with opened(client, peer.url) as stream:
            assert await anext(stream) == b"a"
        with pytest.raises(BrokenResponse, match="left"):
            await anext(stream)
        async with asyncio.timeout(2):
            await left.wait()
        left.clear()
        async with opened(client, peer.url, on_line=got.append, on_end=got.append):
            await until(lambda: got == [b"a"])
        async with asyncio.timeout(2):
            await left.wait()
        assert got == [b"a"]
        await until(lambda: client.connections == 0)
    await until(lambda: sockets() == before)


async def test_cancelling_the_reader_closes_the_connection() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD)
        await wire.reader.read()

    async with scripted(script) as peer, client_of() as client:

        async def read() -> None:
            async with opened(client, peer.url) as stream:
                async for _ in stream:
                    pass

        task = asyncio.get_running_loop().create_task(read())
        await until(lambda: peer.connections == 1)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await until(lambda: client.connections == 0)


async def test_no_head_in_time_and_broken_before_the_head() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        if wire.number == 0:
            await wire.reader.read()

    async with scripted(script) as peer, client_of() as client:
        ends: list[object] = []
        with pytest.raises(TimedOut, match="limit open"):
            async with client.stream("POST", peer.url, timeout_s=0.05, limit="open", on_end=ends.append):
                raise AssertionError("not entered")
        with pytest.raises(BeforeResponse):
            async with opened(client, peer.url, on_end=ends.append):
                raise AssertionError("not entered")
        assert ends == []


async def test_the_limit_of_opening_does_not_bound_the_stream() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD)
        await asyncio.sleep(0.1)
        wire.send(chunk(b"late\n") + END)

    async with (
        scripted(script) as peer,
        client_of() as client,
        client.stream("POST", peer.url, timeout_s=0.05, limit="open") as stream,
    ):
        assert [line async for line in stream] == [b"late"]


async def test_silence_has_a_limit_where_one_is_given() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD)
        await wire.reader.read()

    async with scripted(script) as peer, client_of() as client, opened(client, peer.url, idle_s=0.03) as stream:
        with pytest.raises(TimedOut) as caught:
            await anext(stream)
        assert caught.value.limit == "heartbeat"


async def test_a_pause_of_our_own_is_no_silence_of_the_peer(threaded_peer: str) -> None:
    async with (
        client_of(Settings(late_timer_s=0.05)) as client,
        opened(client, threaded_peer + "/lines", idle_s=0.3) as stream,
    ):
        line = asyncio.get_running_loop().create_task(anext(stream))
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251  (the line comes while we are stopped, past the limit)
        assert await line == b"alive"


async def test_refusals_carry_their_error_object_and_no_line() -> None:
    error = ShardlineError("ticket_used", "this ticket was used")

    async def script(wire: Wire) -> None:
        while True:
            await wire.request()
            raw = answer(msgspec.json.encode({"error": error.body()}), status="409 Conflict")
            wire.send(raw[:-10])
            await asyncio.sleep(0.01)
            wire.send(raw[-10:])

    async with scripted(script) as peer, client_of() as client:
        got: list[object] = []
        async with opened(client, peer.url, on_line=got.append, on_end=got.append) as stream:
            assert stream.status == 409
            caught = await stream.error()
            assert (caught.code, caught.message) == ("ticket_used", "this ticket was used")
        assert got == [None]
        async with opened(client, peer.url) as stream:
            assert msgspec.json.decode(await stream.error_body())["error"]["code"] == "ticket_used"
        assert client.connections == 1 and peer.connections == 1


async def test_a_refusal_that_is_not_ours() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(b"<html>", status="502 Bad Gateway", kind=b"text/html"))

    async with scripted(script) as peer, client_of() as client, opened(client, peer.url) as stream:
        with pytest.raises(NotOurPeer):
            await stream.error()


async def test_a_refusal_that_does_not_end() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(answer(b"12345", status="502 Bad Gateway")[:-2])
        await wire.reader.read()

    async with scripted(script) as peer, client_of() as client, opened(client, peer.url) as stream:
        with pytest.raises(TimedOut):
            await stream.error_body(timeout_s=0.03)


async def test_an_endless_line_breaks_the_stream() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD)
        while True:
            wire.send(chunk(bytes(65536)))
            await wire.writer.drain()

    async with scripted(script) as peer, client_of() as client, opened(client, peer.url) as stream:
        with pytest.raises(BrokenResponse, match="line is longer"):
            await anext(stream)


async def test_a_slow_reader_holds_the_sender_up_and_loses_nothing() -> None:
    sent = 0
    line = b"x" * 999 + b"\n"
    total = 20_000

    async def script(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        wire.send(HEAD)
        wire.writer.transport.set_write_buffer_limits(65536)
        for _ in range(total // 20):
            wire.send(chunk(line * 20))
            await wire.writer.drain()
            sent += 20
        wire.send(END)

    async with scripted(script) as peer, client_of() as client, opened(client, peer.url) as stream:
        assert len(await anext(stream)) == 999
        # Nothing is read: the sender must come to a halt, long before it has sent all.
        last = -1
        while sent != last:
            last = sent
            await asyncio.sleep(0.05)
        assert sent < total
        count = 1
        async for got in stream:
            assert len(got) == 999
            count += 1
        assert count == total
        assert client.connections == 1


async def test_an_exception_of_the_callback_ends_the_stream_and_is_told() -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        wire.send(HEAD + chunk(b"a\nb\n"))
        await wire.reader.read()

    def on_line(line: bytes) -> None:
        raise ValueError("not understood")

    async with scripted(script) as peer, client_of() as client:
        ends: list[object] = []
        async with opened(client, peer.url, on_line=on_line, on_end=ends.append) as stream:
            assert isinstance(await stream.ended(), ValueError)
        assert len(ends) == 1 and isinstance(ends[0], ValueError)
        await until(lambda: client.connections == 0)
