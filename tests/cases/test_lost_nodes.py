"""Reported bugs of such servers, tried on whole clusters: Nodes that die, fall silent, leave, or are only slow.

The fault table (phase by fault) is tests/cluster/test_faults.py; here are the shapes of reports that it does not have.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shardline.settings import Settings
from tests.support.api_cluster import COUNTING, ApiCluster, api_cluster
from tests.support.cluster import scripted_cluster, until

SLOW: dict[str, Any] = {**COUNTING, "decode_ms": 10}
QUICK = Settings(drain_s=0.5, beat_interval_s=0.1, beat_timeout_s=0.6, push_s=0.4, late_timer_s=0.3)
"""Silence is a loss after 0.6 s instead of 2.5."""


# ---- gone --------------------------------------------------------------------------------------------------------


def dies(cluster: ApiCluster, number: int) -> None:
    """What everybody else sees when a process is killed: its connections are reset, and new ones are refused."""
    cluster.relays[number].refuses = True
    cluster.relays[number].cut()


def dies_at_step(cluster: ApiCluster, number: int, at: int) -> None:
    """The Node dies as step `at` (from 0) arrives, which it then never gets."""
    steps = itertools.count()

    def swallows(data: bytes) -> bool:
        if data.startswith(b"POST /v1/steps ") and next(steps) == at:
            dies(cluster, number)
            return True
        return False

    cluster.relays[number].swallows = swallows


@pytest.mark.parametrize("spare", [False, True])
async def test_gone_in_prefill_then_five_more_at_once(tmp_path: Path, spare: bool) -> None:
    """A prompt of four chunks; the middle Node dies between the second and the third. That request ends with
    `node_lost`, the Node and the phase, and is not tried again. Of the five behind it each is refused at once with
    the missing layers, or served by the other Node that has them. The survivors are free."""
    layers = [(0, 2), (2, 4), (4, 6), *([(2, 4)] if spare else [])]
    relayed = (1, 3) if spare else (1,)
    script = {**COUNTING, "prefill_ms_per_row": 1}
    settings = Settings(drain_s=0.5, prefill_chunk_max=16)
    async with api_cluster(tmp_path, layers=layers, script=script, settings=settings, relayed=relayed) as cluster:
        for number in relayed:
            dies_at_step(cluster, number, 2)
        answer = await cluster.ask("p" * 64, max_tokens=4)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["phase"]) == (502, "node_lost", "prefill"), error
        assert error["layers"] == [2, 4] and answer.headers["x-should-retry"] == "false"
        lost = next(number for number in relayed if cluster.nodes[number].node == error["node"])
        for number in relayed:
            cluster.relays[number].swallows = lambda data: False
        async with asyncio.TaskGroup() as tasks:
            more = [tasks.create_task(cluster.ask("p" * 64, max_tokens=4)) for _ in range(5)]
        if spare:
            assert [task.result().status_code for task in more] == [200] * 5
            assert {task.result().json()["choices"][0]["text"] for task in more} == {" t0 t1 t2 t3"}
        else:
            assert [refusal(task.result()) for task in more] == [(503, "model_unavailable", [[2, 4]])] * 5
        assert [session["phase"] for session in await cluster.sessions()].count("completed") == (5 if spare else 0)
        await cluster.until_free([number for number in range(len(layers)) if number != lost])


@pytest.mark.parametrize("lost", ["head", "tail", "middle and tracker"])
async def test_gone_in_decode(tmp_path: Path, lost: str) -> None:
    """The first Node, the last one, and a middle one together with the Tracker, after the fifth token: the text so far
    was delivered, one error event ends the stream, Gateway and survivors live and are free."""
    number = {"head": 0, "tail": 2}.get(lost, 1)
    layers = [(0, 2), (2, 4), (4, 6)]
    async with api_cluster(tmp_path, layers=layers, script=SLOW, relayed=(number,)) as cluster:
        async with cluster.streamed(max_tokens=1000) as stream:
            await stream.read_tokens(5)
            if "tracker" in lost:
                await cluster.tracker.end()
            dies(cluster, number)
            await asyncio.wait_for(stream.read_all(), 4)
        assert stream.error is not None
        assert (stream.error["code"], stream.error["node"]) == ("node_lost", cluster.nodes[number].node)
        assert (stream.finish_reason, stream.done) == (None, False)
        assert stream.text.startswith(" t0 t1 t2 t3 t4") and stream.error["tokens_delivered"] >= 5
        await cluster.until_free([other for other in range(3) if other != number])
        assert (await cluster.get("/healthz"))[0] == 200
        expected = "tracker_unreachable" if "tracker" in lost else "model_unavailable"
        assert refusal(await cluster.ask("next"))[:2] == (503, expected)


# ---- silent ------------------------------------------------------------------------------------------------------


async def served_again(cluster: ApiCluster) -> None:
    async def served() -> bool:
        return (await cluster.ask(max_tokens=1)).status_code == 200

    await until(served, 10)
    await cluster.until_free()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_node_without_power(tmp_path: Path, phase: str) -> None:
    """Nothing of a Node arrives any more, and nothing is closed, as when its cable is pulled: `node_lost` after the
    limit of silence. When the cable is back the Node has nothing left of the session, and serves."""
    script = {**SLOW, "prefill_ms_per_row": 5}
    settings = msgspec.structs.replace(QUICK, prefill_chunk_max=16)
    layers = [(0, 2), (2, 4), (4, 6)]
    async with api_cluster(tmp_path, layers=layers, script=script, settings=settings, relayed=(1,)) as cluster:
        asked = asyncio.create_task(cluster.read("p" * 100, max_tokens=1000))
        await cluster.in_phase(phase)
        cluster.relays[1].hold()
        stream = await asyncio.wait_for(asked, 5)
        assert stream.error is not None and not stream.done
        assert (stream.error["code"], stream.error["node"]) == ("node_lost", cluster.nodes[1].node)
        assert (stream.error["phase"], stream.error["layers"]) == (phase, [2, 4])
        await cluster.until_free([0, 2])
        cluster.relays[1].release()
        await served_again(cluster)


async def test_a_node_that_stops_reading_within_a_body(tmp_path: Path) -> None:
    """Half of a step's bytes get through, then no more, while the Node still speaks: the link is at fault."""
    # The Gateway's beats are held up there, too: they may be missing for longer than a push.
    settings = msgspec.structs.replace(QUICK, beat_timeout_s=2.5)
    async with api_cluster(tmp_path, script=SLOW, settings=settings, relayed=(1,)) as cluster:
        async with cluster.streamed(max_tokens=1000) as stream:
            await stream.read_tokens(3)
            cluster.relays[1].pass_bytes = 300
            await asyncio.wait_for(stream.read_all(), 5)
        assert stream.error is not None
        assert stream.error["code"] == "seam_lost", stream.error
        assert (stream.error["from"], stream.error["to"]) == (cluster.nodes[0].node, cluster.nodes[1].node)
        assert stream.error["limit"] == "push"
        cluster.relays[1].pass_bytes = None
        cluster.relays[1].cut()
        await served_again(cluster)


async def test_a_node_that_is_slow_but_alive(tmp_path: Path) -> None:
    """A step that takes longer than silence may last, in prefill and in decode: it is waited for."""
    faults = [
        {"kind": "slow", "phase": "prefill", "node": 3, "step": 0, "ms": 1000},
        {"kind": "slow", "phase": "decode", "node": 3, "step": 1, "ms": 1000},
    ]
    async with api_cluster(tmp_path, script={**COUNTING, "faults": faults}, settings=QUICK) as cluster:
        stream = await cluster.read(max_tokens=4)
        assert (stream.text, stream.done, stream.error) == (" t0 t1 t2 t3", True, None)


# ---- leaving -----------------------------------------------------------------------------------------------------


async def test_a_node_leaves_while_one_streams_and_one_waits(tmp_path: Path) -> None:
    """SIGTERM: the Tracker knows it first, so nothing new is given to it; the running answer is whole; the one that
    waits is told what is missing; the process ends with 0."""
    settings = {"drain_s": 8}
    arguments = ["--kv-tokens", "96"]
    script = {**SLOW, "decode_ms": 8}
    async with scripted_cluster(tmp_path, script=script, settings=settings, node_arguments=arguments) as cluster:
        async with cluster.streamed(max_tokens=50) as stream:
            await stream.read_tokens(5)
            waits = asyncio.create_task(cluster.ask(max_tokens=50))

            async def is_queued() -> bool:
                sessions = (await cluster.http.get(f"{cluster.gateway.url}/v1/route-sessions")).json()["sessions"]
                return bool(sessions[0]["queue"]["position"] == 1)

            await until(is_queued)
            cluster.nodes[1].signal(signal.SIGTERM)
            waited = await waits
            new = await cluster.ask()
            assert stream.error is None and not stream.done, "both were refused while the first one ran"
            await stream.read_all()
        assert (stream.text, stream.finish_reason) == ("".join(f" t{i}" for i in range(50)), "length")
        for answer in (waited, new):
            assert refusal(answer) == (503, "model_unavailable", [[2, 4]])
            assert int(answer.headers["retry-after"]) >= 1
        assert await asyncio.wait_for(cluster.nodes[1].process.wait(), 5) == 0
        await cluster.until_free([0, 2])


def refusal(answer: httpx.Response) -> tuple[int, str, Any]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error.get("missing")
