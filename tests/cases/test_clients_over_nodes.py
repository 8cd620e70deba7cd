"""Reported bugs of such servers, tried on a whole cluster: clients that leave or do not read, proxies that lose
patience, connections that close at the wrong moment. What the Gateway does by itself is in tests/gateway/."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shardline.settings import Settings
from tests.support.api_cluster import COUNTING, TEXT, ApiCluster, api_cluster, until
from tests.support.relay import Relay

SLOW = {**COUNTING, "decode_ms": 5}
QUICK = Settings(drain_s=0.5, keep_alive_comment_s=0.1, telemetry_comment_s=0.05)


class RawClient:
    """A socket that sends one request and may go in any way."""

    def __init__(self, cluster: ApiCluster, *, receive_buffer: int | None = None) -> None:
        self._address = ("127.0.0.1", int(cluster.url.rsplit(":", 1)[1]))
        self._body = cluster.body
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.setblocking(False)
        self.received = b""

    async def ask(self, prompt: str = "Hi", **fields: Any) -> None:
        raw = json.dumps(self._body(prompt, **fields)).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.sock, self._address)
        await loop.sock_sendall(self.sock, f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)

    async def read_events(self, count: int) -> None:
        while self.received.count(b"data: ") < count:
            chunk = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
            assert chunk, self.received
            self.received += chunk

    def leave(self, *, reset: bool) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_every_node(tmp_path: Path, stream: bool, reset: bool) -> None:
    """After three events, or in the middle of an answer that is not streamed: within about a second no Node holds
    anything of it, and the account says `cancelled`, not `failed`."""
    async with api_cluster(tmp_path, script=SLOW) as cluster:
        client = RawClient(cluster)
        await client.ask(stream=stream, max_tokens=2000)
        if stream:
            await client.read_events(3)
        session = (await cluster.in_phase("decode"))["id"]
        assert min(await cluster.kv_used()) > 0
        client.leave(reset=reset)
        async with asyncio.timeout(2):
            await cluster.until_free()
        record = await cluster.record(session)
        assert (record["phase"], record["failure"]) == ("cancelled", None)
        assert await cluster.text(max_tokens=2) == " t0 t1"


async def test_a_hundred_that_leave_then_one_that_stays(tmp_path: Path) -> None:
    """Each leaves after 0 to 50 ms, in whatever phase that is. The one that stays is answered, nothing is left, and
    nothing spins."""
    settings = msgspec.structs.replace(QUICK, client_idle_s=0.2, server_idle_s=0.6, queue_limit=200)
    async with api_cluster(tmp_path, script=SLOW, settings=settings) as cluster:
        await cluster.text(max_tokens=2)
        await asyncio.sleep(0)
        rng = random.Random(51)

        async def come_and_go(number: int) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.05):
                    await cluster.ask("question " * 10, max_tokens=50, stream=number % 2 == 0)

        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(come_and_go(number))
                await asyncio.sleep(rng.random() * 0.005)
        assert await cluster.text(max_tokens=3) == " t0 t1 t2"
        await cluster.until_free()
        assert {s["phase"] for s in await cluster.sessions()} <= {"cancelled", "completed"}
        # Connections and their tasks go with the idle time; what runs for good is some tasks a part.
        await until(lambda: _few_tasks(40))
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(0.5)
        assert (time.process_time() - cpu) / (time.monotonic() - began) < 0.5


async def _few_tasks(count: int) -> bool:
    return len(asyncio.all_tasks()) <= count


async def test_the_connection_to_the_first_node_is_cut(tmp_path: Path) -> None:
    """In decode: exactly one end, an error that names the Node; nothing looks like a whole answer, streamed or not."""
    async with api_cluster(tmp_path, script=SLOW, relayed=(0,)) as cluster:
        for stream in (True, False):
            if stream:
                async with cluster.streamed(max_tokens=2000) as read:
                    await read.read_tokens(3)
                    cluster.relays[0].cut()
                    await read.read_all()
                assert (read.done, read.finish_reason) == (False, None)
                error = read.error
            else:
                asked = asyncio.create_task(cluster.ask(max_tokens=2000))
                await cluster.in_phase("decode")
                cluster.relays[0].cut()
                answer = await asked
                assert answer.status_code == 502 and "choices" not in answer.json()
                error = answer.json()["error"]
            assert error is not None
            assert error["code"] in ("node_lost", "seam_lost") and error["phase"] == "decode"
            assert cluster.nodes[0].node in (error.get("node"), error.get("to")), error
            await cluster.until_free()

            async def served() -> bool:
                return (await cluster.ask(max_tokens=1)).status_code == 200

            await until(served)


# ---- proxies in front --------------------------------------------------------------------------------------------


async def test_a_proxy_that_closes_silent_connections(tmp_path: Path) -> None:
    """A prefill of more than a second behind a proxy with an idle limit of a part of that: comments keep the stream
    alive, and a failure in that prefill comes as an event. Without comments the proxy does cut: it is one."""
    assert Settings().keep_alive_comment_s <= 10
    fault = {"kind": "error", "phase": "prefill", "node": 3, "step": 4, "contains": "!"}
    script = {**COUNTING, "prefill_ms_per_row": 8, "faults": [fault]}
    settings = msgspec.structs.replace(QUICK, prefill_chunk_max=16)
    async with api_cluster(tmp_path, script=script, settings=settings) as cluster:
        async with Relay(int(cluster.url.rsplit(":", 1)[1]), idle_s=0.35) as proxy:
            async with cluster.streamed("p" * 80, url=proxy.url, max_tokens=2) as stream:
                await stream.read_all()
            assert (stream.text, stream.done, stream.error) == (" t0 t1", True, None)
            assert len(stream.comments) >= 5
            async with cluster.streamed("!" + "p" * 79, url=proxy.url, max_tokens=2) as stream:
                await stream.read_all()
            assert stream.error is not None and not stream.done
            assert (stream.error["code"], stream.error["phase"], stream.text) == ("engine_error", "prefill", "")
            with pytest.raises(httpx.RemoteProtocolError):
                await cluster.http.post(proxy.url + TEXT, json=cluster.body("q" * 80, max_tokens=2))
        await cluster.until_free()


async def test_errors_before_the_first_token_have_their_status(tmp_path: Path) -> None:
    """With `stream` true: no JSON, an unknown model, a prompt past the context, a Node that refuses the session, and
    no route."""
    fault = {"kind": "error", "phase": "open", "node": 3, "flag": "once"}
    script = {**COUNTING, "context_length": 64, "faults": [fault]}
    async with api_cluster(tmp_path, script=script) as cluster:
        head = {"content-type": "application/json"}
        broken = await cluster.http.post(cluster.url + TEXT, content=b'{"stream":true,', headers=head)
        unknown = await cluster.ask(stream=True, model="no-such")
        long = await cluster.ask("p" * 65, stream=True)
        (tmp_path / "once").touch()
        refused = await cluster.ask(stream=True)
        await cluster.nodes[1].end()
        no_route = await cluster.ask(stream=True)
        codes = [(a.status_code, a.json()["error"]["code"]) for a in (broken, unknown, long, refused, no_route)]
        assert codes == [
            (400, "invalid_json"),
            (404, "model_not_found"),
            (400, "context_length_exceeded"),
            (502, "engine_error"),
            (503, "model_unavailable"),
        ]
        assert no_route.json()["error"]["missing"] == [[3, 6]] and int(no_route.headers["retry-after"]) >= 1


# ---- slow readers, idle connections ------------------------------------------------------------------------------


async def test_a_client_that_reads_nothing(tmp_path: Path) -> None:
    """A receive buffer of 1,024 bytes and many megabytes of text: others are served meanwhile, and after the limit the
    session is over on every Node although its generation was not."""
    script: dict[str, Any] = {"answer": ["x" * 8192], "eos": False, "decode_ms": 2}
    settings = msgspec.structs.replace(QUICK, client_stall_s=0.5)
    async with api_cluster(tmp_path, script=script, settings=settings) as cluster:
        client = RawClient(cluster, receive_buffer=1024)
        await client.ask(stream=True, max_tokens=4000)
        session = (await cluster.in_phase("decode"))["id"]
        for _ in range(3):
            answer = await cluster.answer(max_tokens=2)
            assert answer["usage"]["completion_tokens"] == 2
        async with asyncio.timeout(8):
            await cluster.until_free()
        record = await cluster.record(session)
        assert record["phase"] in ("cancelled", "failed") and record["decode"]["tokens"] < 4000
        client.leave(reset=True)


async def test_connections_that_close_as_a_step_is_written(tmp_path: Path) -> None:
    """Every seventh step meets a connection that is closed as it is written, as an idle limit does it: it is sent once
    more on a fresh one. No session dies of it, and no step is lost or computed twice."""
    lost = 0
    steps = itertools.count(1)

    def swallows(data: bytes) -> bool:
        nonlocal lost
        meets = data.startswith(b"POST /v1/steps ") and next(steps) % 7 == 0
        lost += meets
        return meets

    async with api_cluster(tmp_path, script={**COUNTING, "decode_ms": 1}, relayed=(0, 1)) as cluster:
        for relay in cluster.relays.values():
            relay.swallows = swallows
        answer = await cluster.answer(max_tokens=120)
        assert answer["choices"][0]["text"] == "".join(f" t{i}" for i in range(60)) * 2
        forward, back = (await cluster.record(answer["session"]))["seams"]
        assert (forward["decode"]["rows"], back["decode"]["rows"]) == (119, 119)
        assert lost > 30


async def test_idle_limits_as_long_as_the_time_between_two_steps(tmp_path: Path) -> None:
    """Servers close idle connections after just that, and nobody's pool knows of it: a step meets a connection that is
    open, closed, or closing."""
    settings = msgspec.structs.replace(QUICK, server_idle_s=0.012, client_idle_s=30.0)
    async with api_cluster(tmp_path, script=SLOW, settings=settings, relayed=(0, 1)) as cluster:
        assert await cluster.text(max_tokens=60) == "".join(f" t{i}" for i in range(60))
        assert cluster.relays[1].accepted > 5, "connections were closed between steps"
