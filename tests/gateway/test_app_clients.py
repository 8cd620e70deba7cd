"""Clients as they are: they leave at any moment, do not read, lie about sizes, and come in storms."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardline.gateway.template import Templates
from shardline.settings import Settings
from tests.support.gateway_stand import Act, Open, Piece, Stand, Wait, chat, say, standing

SETTINGS = Settings(keep_alive_comment_s=0.05, telemetry_comment_s=0.02, client_stall_s=0.4, control_s=1.0)


@pytest.fixture
async def stand(tmp_path: Path, shared_templates: Templates) -> AsyncIterator[Stand]:
    made = Stand(settings=SETTINGS, pieces=[b"x" * 16384])
    async with standing(tmp_path, stand=made, templates=shared_templates, context_length=100_000):
        yield made


async def connect(stand: Stand, *, receive_buffer: int | None = None) -> socket.socket:
    host, port = stand.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


def head(size: int, path: str = "/v1/chat/completions") -> bytes:
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    return f"POST {path} HTTP/1.1\r\n{fields}".encode()


async def send_request(sock: socket.socket, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    await asyncio.get_running_loop().sock_sendall(sock, head(len(raw)) + raw)


def hang_up(sock: socket.socket, *, reset: bool) -> None:
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def hangs(where: str) -> Sequence[Act]:
    never = asyncio.Event()
    if where == "queued":
        return [Wait(never), Open()]
    if where == "prefill":
        return [Open(), Wait(never)]
    return [*say(b"a", b"b", b"c"), Wait(never)]


@pytest.mark.parametrize("where", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_frees_everything(
    stand: Stand, where: str, stream: bool, reset: bool, n: int
) -> None:
    stand.script = lambda request: hangs(where)
    sock = await connect(stand)
    await send_request(sock, chat(stream=stream, n=n))
    await until(lambda: len(stand.generations) == n)
    if stream and where == "decode":
        received = b""
        while b'"c"' not in received:
            received += await asyncio.get_running_loop().sock_recv(sock, 65536)
    await until(lambda: all(generation.phase in (where, "decode") for generation in stand.generations))
    loop = asyncio.get_running_loop()
    left = loop.time()
    hang_up(sock, reset=reset)
    await until(lambda: all(generation.over for generation in stand.generations))
    assert loop.time() - left < 1.0
    assert all(generation.cancelled is not None for generation in stand.generations)
    assert not any(generation.stopped for generation in stand.generations)


async def test_a_storm_of_leavers_then_a_good_request(stand: Stand) -> None:
    rng = random.Random(7)
    places = ["queued", "prefill", "decode"]
    stand.script = lambda request: hangs(rng.choice(places))

    async def come_and_go() -> None:
        sock = await connect(stand)
        await send_request(sock, chat(stream=rng.random() < 0.5, n=rng.choice([1, 1, 2])))
        await asyncio.sleep(rng.random() * 0.05)
        hang_up(sock, reset=rng.random() < 0.5)

    before = len(asyncio.all_tasks())
    for _ in range(5):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(come_and_go())
    await until(lambda: all(generation.over for generation in stand.generations))
    stand.script = lambda request: say(b"o", b"k")
    assert (await stand.chat()).json()["choices"][0]["message"]["content"] == "ok"
    await stand.http.aclose()
    await until(lambda: len(asyncio.all_tasks()) <= before + 1)


async def test_a_client_that_does_not_read(stand: Stand) -> None:
    """What waits for it is bounded, others are not slowed down, and after the limit its connection is closed."""
    stand.script = lambda request: [Piece(b"x" * 16384)] * 2000
    with await connect(stand, receive_buffer=4096) as sock:
        before = len(asyncio.all_tasks())
        await send_request(sock, chat(stream=True, max_tokens=2000))
        await until(lambda: len(stand.generations) == 1)
        stand.script = lambda request: say(b"o", b"k")
        for _ in range(5):
            assert (await stand.chat()).json()["choices"][0]["message"]["content"] == "ok"
        await until(lambda: stand.generations[0].over and len(asyncio.all_tasks()) <= before)
        received = b""
        async with asyncio.timeout(10):
            while chunk := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
                received += chunk
        assert 0 < len(received) < 2000 * 16384
        assert b"[DONE]" not in received


async def test_a_stalled_client_frees_a_generation_that_runs_on(stand: Stand) -> None:
    never = asyncio.Event()
    stand.script = lambda request: [*[Piece(b"x" * 16384)] * 1000, Wait(never)]
    sock = await connect(stand, receive_buffer=4096)
    await send_request(sock, chat(stream=True, max_tokens=2000))
    await until(lambda: len(stand.generations) == 1)
    await until(lambda: stand.generations[0].over)
    assert stand.generations[0].cancelled is not None
    sock.close()


async def test_a_slow_client_that_comes_back_gets_whole_events(stand: Stand) -> None:
    """Four-byte characters, cut by nobody: neither the buffers nor the pause divide an event."""
    stand.script = lambda request: say(*["😀".encode()[i : i + 1] for _ in range(3000) for i in range(4)])
    sock = await connect(stand, receive_buffer=4096)
    await send_request(sock, chat(stream=True, max_tokens=20_000))
    await asyncio.sleep(0.05)
    raw = b""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        while b"[DONE]" not in raw[-200:]:
            raw += await loop.sock_recv(sock, 4096)
    sock.close()
    body = _dechunked(raw.partition(b"\r\n\r\n")[2])
    events = [json.loads(block[6:]) for block in body.split(b"\n\n") if block.startswith(b"data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "😀" * 3000


def _dechunked(raw: bytes) -> bytes:
    out = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        if not size:
            break
        out += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return out


async def test_a_body_that_is_announced_too_large(stand: Stand) -> None:
    sock = await connect(stand)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, head(1 << 30))
    async with asyncio.timeout(5):
        answer = await loop.sock_recv(sock, 65536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"body_too_large"' in answer
    sock.close()


async def test_a_client_that_leaves_within_its_body(stand: Stand) -> None:
    sock = await connect(stand)
    await asyncio.get_running_loop().sock_sendall(sock, head(100) + b"{")
    await asyncio.sleep(0.02)
    sock.close()
    assert (await stand.complete()).status_code == 200
    assert len(stand.generations) == 1


async def test_a_reader_of_telemetry_that_leaves(stand: Stand) -> None:
    stand.sessions["rs-1"] = ("anybody", [(i, b"silence") for i in range(10**6)])
    before = len(asyncio.all_tasks())
    async with stand.http.stream("GET", f"{stand.url}/v1/route-sessions/rs-1/telemetry") as answer:
        async for line in answer.aiter_lines():
            if line.startswith(":"):
                break
    await stand.http.aclose()
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_one_connection_for_many_requests(stand: Stand) -> None:
    stand.script = lambda request: say(b"o", b"k")
    sock = await connect(stand)
    loop = asyncio.get_running_loop()
    for number in range(3):
        await send_request(sock, chat(stream=number % 2 == 0))
        received = b""
        async with asyncio.timeout(5):
            while not (b"0\r\n\r\n" in received[-5:] or b'"telemetry"' in received):
                received += await loop.sock_recv(sock, 65536)
        assert b"200 OK" in received
    sock.close()
