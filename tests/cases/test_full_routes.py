"""Reported bugs of such servers, tried on a whole cluster: endless answers, full pools, full queues, a busy slot.

Capacity is given in KV tokens: a Node of 64 holds one session of prompt and answer together 64, and no second one.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec

from shardline.settings import Settings
from tests.support.api_cluster import COUNTING, ApiCluster, api_cluster, until
from tests.support.cluster import Stream

SLOW = {**COUNTING, "decode_ms": 5}
ALL = "".join(f" t{i}" for i in range(60))
QUICK = Settings(drain_s=0.5, keep_alive_comment_s=0.1, telemetry_comment_s=0.05)


async def sessions_of(cluster: ApiCluster, number: int) -> int:
    return (await cluster.info(number)).kv.sessions


async def test_a_model_that_never_ends(tmp_path: Path) -> None:
    """No end of generation, no cap, context 64, room for one session: it ends with `length` at the end of the context.
    Of those who come meanwhile the first is served after it, the next one is told to come again."""
    settings = msgspec.structs.replace(QUICK, queue_limit=1)
    script = {**SLOW, "context_length": 64}
    async with api_cluster(tmp_path, script=script, settings=settings, kv_tokens=64) as cluster:
        async with cluster.streamed("pp") as endless:
            await endless.read_tokens(2)
            second = asyncio.create_task(cluster.answer("pp"))
            await cluster.in_phase("queued")
            third = await cluster.ask("pp")
            assert (third.status_code, third.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(third.headers["retry-after"]) >= 1
            await endless.read_all()
        assert (endless.finish_reason, endless.done) == ("length", True)
        assert endless.text == ALL + " t0 t1"
        assert (await second)["usage"]["completion_tokens"] == 62


async def test_a_pool_with_holes(tmp_path: Path) -> None:
    """Room for 256 tokens, four sessions of 60, the first and the third end: one of 110 fits now. One more does not,
    and is refused before any byte of a stream. Nobody who runs is harmed."""
    settings = Settings(drain_s=0.5, queue_wait_s=0.4)
    async with api_cluster(tmp_path, script=SLOW, settings=settings, kv_tokens=256) as cluster:
        async with asyncio.TaskGroup() as tasks:
            running = []
            for number in range(4):
                running.append(tasks.create_task(cluster.ask("p" * 10, max_tokens=50)))
                await until(lambda number=number: _has(cluster, number + 1))  # type: ignore[misc]
            ids = [session["id"] for session in reversed(await cluster.sessions())]
            for number in (0, 2):
                await cluster.http.delete(f"{cluster.url}/v1/route-sessions/{ids[number]}")
            await until(lambda: _has(cluster, 2))
            large = tasks.create_task(cluster.ask("p" * 60, max_tokens=50))
            await until(lambda: _has(cluster, 3))
            refused = await cluster.ask("p" * 60, max_tokens=50, stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "capacity")
        assert int(refused.headers["retry-after"]) >= 1
        assert [task.result().status_code for task in running] == [499, 200, 499, 200]
        for task in (running[1], running[3], large):
            assert task.result().json()["choices"][0]["text"] == ALL[: len("".join(f" t{i}" for i in range(50)))]
        await cluster.until_free()


async def _has(cluster: ApiCluster, sessions: int) -> bool:
    """Both Nodes have so many sessions."""
    return [await sessions_of(cluster, 0), await sessions_of(cluster, 1)] == [sessions, sessions]


async def test_one_node_has_no_memory_for_a_session(tmp_path: Path) -> None:
    """The second Node is out of memory after the first has opened: both are closed at once, the client is told which
    Node it was, and nothing stays reserved."""
    fault = {"kind": "oom", "phase": "open", "node": 3, "flag": "once"}
    async with api_cluster(tmp_path, script={**SLOW, "faults": [fault]}, relayed=(1,)) as cluster:
        await cluster.text(max_tokens=1)
        (tmp_path / "once").touch()
        cluster.relays[1].hold()
        asked = asyncio.create_task(cluster.ask(max_tokens=30))

        async def first_is_open() -> bool:
            return await sessions_of(cluster, 0) == 1

        await until(first_is_open)
        cluster.relays[1].release()
        answer = await asked
        error = answer.json()["error"]
        assert answer.status_code == 502 and answer.headers["x-should-retry"] == "false"
        assert (error["code"], error["node"], error["layers"]) == (
            "engine_out_of_memory",
            cluster.nodes[1].node,
            [3, 6],
        )
        assert error["phase"] == "opening"
        await cluster.until_free()
        assert await cluster.text(max_tokens=2) == " t0 t1"


async def test_two_run_four_wait_four_are_refused(tmp_path: Path) -> None:
    """Ten at once where two have room and four may wait: six are served in order, four get 429. Those who wait see
    their place, and hear something while they do."""
    settings = msgspec.structs.replace(QUICK, queue_limit=4)
    async with api_cluster(tmp_path, script={**SLOW, "decode_ms": 8}, settings=settings, kv_tokens=64) as cluster:
        started: list[int] = []
        refused: list[Any] = []

        async def ask(number: int) -> Stream | None:
            async with cluster.streamed("pp", max_tokens=30) as stream:
                if stream.response.status_code != 200:
                    await stream.response.aread()
                    refused.append(stream.response)
                    return None
                await stream.read_tokens(1)
                started.append(number)
                await stream.read_all()
            return stream

        async with asyncio.TaskGroup() as tasks:
            asked = []
            for number in range(10):
                asked.append(tasks.create_task(ask(number)))
                if number < 6:
                    await until(lambda number=number: _known(cluster, number))  # type: ignore[misc]
            positions = {s["queue"]["position"] for s in await cluster.sessions() if s["phase"] == "queued"}
            assert positions >= {1, 2, 3, 4}
        streams = [task.result() for task in asked]
        assert [stream is not None for stream in streams] == [True] * 6 + [False] * 4
        assert started[2:] == [2, 3, 4, 5] and sorted(started[:2]) == [0, 1]
        for answer in refused:
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        for stream in streams[2:6]:
            assert stream is not None and stream.finish_reason == "length"
            waiting = [comment for comment in stream.comments if '"phase":"queued"' in comment]
            assert len(waiting) >= 2 and re.search(r'"position":[1-4],', waiting[-1])


async def _known(cluster: ApiCluster, number: int) -> bool:
    """Request `number` has its place: the first two run, the others are queued behind them."""
    known = await cluster.sessions()
    if len(known) != number + 1:
        return False
    newest = known[0]
    return newest["phase"] == "decode" if number < 2 else newest["queue"]["position"] == number - 1


async def test_a_second_request_does_not_touch_the_first(tmp_path: Path) -> None:
    """Room for one. A streams 50 tokens; B comes at the tenth and leaves at once; C comes and stays: A is whole, C
    begins after A, and B's place is nobody's."""
    async with api_cluster(tmp_path, script=SLOW, settings=QUICK, kv_tokens=64) as cluster:
        async with cluster.streamed("pp", max_tokens=50) as a:
            await a.read_tokens(10)
            b = asyncio.create_task(cluster.ask("pp", max_tokens=50))
            await cluster.in_phase("queued")
            b.cancel()
            await asyncio.wait({b})
            c = asyncio.create_task(cluster.read("pp", max_tokens=50, stop="2"))

            async def c_is_next() -> bool:
                known = await cluster.sessions()
                return len(known) == 3 and known[0]["queue"]["position"] == 1

            await until(c_is_next)
            assert (await cluster.sessions())[1]["phase"] == "cancelled"
            await a.read_all()
        assert (a.text, a.finish_reason) == ("".join(f" t{i}" for i in range(50)), "length")
        assert (await c).text == " t0 t1 t"
        first, second = await cluster.record(a.session_id), await cluster.record(c.result().session_id)
        opened = second["created"] + second["queue"]["waited_ms"] / 1e3
        assert opened >= first["ended"] - 0.2, "about half a second of A was left when C came"
        await cluster.until_free()


async def test_two_requests_in_the_same_moment_and_one_is_cancelled(tmp_path: Path) -> None:
    """Two at once on the same Nodes, and a cancel of one from a third connection: the other is whole."""
    async with api_cluster(tmp_path, script=SLOW) as cluster:
        async with asyncio.TaskGroup() as tasks:
            pair = [tasks.create_task(cluster.ask("pp", max_tokens=50)) for _ in range(2)]
            await until(lambda: _has(cluster, 2))
            victim = (await cluster.sessions())[0]["id"]
            await cluster.http.delete(f"{cluster.url}/v1/route-sessions/{victim}")
        answers = sorted((task.result() for task in pair), key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [200, 499]
        assert answers[0].json()["usage"]["completion_tokens"] == 50
        assert answers[1].json()["error"]["code"] == "cancelled"
        await cluster.until_free()
