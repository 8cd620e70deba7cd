"""The fault table: what is lost, in which phase, and what the client and the survivors see (real processes).

On the scripted engine; with llama.cpp in test_llama_faults.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, scripted_cluster, until
from tests.support.fault_table import FAULTS, SILENT_S, check_error, check_next, error_of, phase_of

SLOW: dict[str, Any] = {
    "answer": [f" t{i}" for i in range(50)],
    "eos": False,
    "decode_ms": 10,
    "prefill_ms_per_row": 4,
    "faults": [{"kind": "slow", "phase": "open", "node": 4, "contains": None, "ms": 600}],
}
LONG_PROMPT = "word " * 60


@pytest.mark.timeout(180)
@pytest.mark.parametrize("phase", ["opening", "prefill", "decode"])
async def test_one_fault_after_another(tmp_path: Path, phase: str) -> None:
    """In one cluster: each finds it whole again. Only what is killed does not come back."""
    async with scripted_cluster(tmp_path, script=SLOW, inline=False, proxied=(1,)) as cluster:
        for fault in sorted(FAULTS, key="killed".__eq__):
            print(f"{fault} in {phase}")
            await check_cell(cluster, fault, phase)


async def check_cell(cluster: Cluster, fault: str, phase: str) -> None:
    row = FAULTS[fault]
    if phase == "opening" and row.at_link:
        phase = "routing"
    struck = time.monotonic()
    if phase == "routing":
        await row.strike(cluster)
    request = asyncio.create_task(
        cluster.http.post(
            f"{cluster.gateway.url}/v1/chat/completions",
            json=cluster.body(LONG_PROMPT, max_tokens=1000, stream=phase == "decode"),
        )
    )
    if phase != "routing":

        async def reached() -> bool:
            return await phase_of(cluster) == phase

        await until(reached, 10)
        struck = time.monotonic()
        await row.strike(cluster)
    answer = await request
    took = time.monotonic() - struck
    error = error_of(answer)
    assert error["code"] in row.codes, error
    assert took < row.within_s, f"{took:.2f} s"
    check_error(cluster, error, phase, [2, 4])
    survivors = [0, 1, 2] if row.at_link else [0, 2]
    assert await cluster.until_free(survivors) < 2.0
    await check_next(cluster, fault, [2, 4])


async def test_a_route_around_a_lost_node(tmp_path: Path) -> None:
    """With a spare Node for the same layers, the next request is served, and the lost Node is not asked."""
    layers = ["0:2", "2:4", "4:6", "2:4"]
    async with scripted_cluster(tmp_path, script=SLOW, layers=layers) as cluster:
        async with cluster.streamed(max_tokens=1000) as stream:
            await stream.read_tokens(2)
            used = (await cluster.session(stream.session_id))["route"]["hops"][1]["node"]
            lost = next(i for i in (1, 3) if cluster.nodes[i].facts["node"] == used)
            cluster.nodes[lost].signal(signal.SIGKILL)
            await stream.read_all()
        assert stream.error is not None and stream.error["code"] == "node_lost"
        for _ in range(3):
            answer = await cluster.ask("next", max_tokens=2)
            assert answer.status_code == 200, answer.text
            hops = (await cluster.session(answer.headers["shardline-route-session"]))["route"]["hops"]
            assert hops[1]["node"] == cluster.nodes[4 - lost].facts["node"]


async def test_the_request_that_finds_the_head_gone_is_told_its_layers(tmp_path: Path) -> None:
    """No session was there to notice it, and the Tracker still waits for its heartbeat."""
    async with scripted_cluster(tmp_path, layers=("0:3", "3:6")) as cluster:
        await cluster.text("warm")
        cluster.nodes[0].signal(signal.SIGKILL)
        await cluster.nodes[0].process.wait()
        answer = await cluster.ask("right then")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["missing"]) == (503, "model_unavailable", [[0, 3]])
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_worker_that_is_started_again_is_no_reason_to_start_nodes(tmp_path: Path) -> None:
    """Killed while nothing runs; its next start takes a while."""
    script = {"load_ms": 1500}
    async with scripted_cluster(tmp_path, layers=("0:3", "3:6"), script=script, inline=False) as cluster:
        await cluster.text("warm")
        os.kill((await cluster.node_info(1))["health"]["pid"], signal.SIGKILL)
        refused: list[dict[str, Any]] = []

        async def served_again() -> bool:
            answer = await cluster.ask("once more")
            if answer.status_code == 200:
                return True
            refused.append(answer.json()["error"])
            # A session that began before the Node saw its engine end is lost with it; the next ones are told to wait.
            assert answer.status_code == 502 or int(answer.headers["retry-after"]) <= 2, refused[-1]
            return False

        await until(served_again, 15)
        assert all("Start" not in error["advice"] for error in refused), refused


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_lost_gateway_frees_every_node(tmp_path: Path, number: signal.Signals, phase: str) -> None:
    async with scripted_cluster(tmp_path, script=SLOW) as cluster:
        request = asyncio.create_task(cluster.ask(LONG_PROMPT, max_tokens=2000))

        async def reached() -> bool:
            return await phase_of(cluster) == phase

        await until(reached, 10)
        cluster.gateway.signal(number)
        assert await cluster.until_free() < SILENT_S
        request.cancel()
        await asyncio.wait({request})


async def test_sessions_outlive_the_tracker(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path, script=SLOW) as cluster:
        async with cluster.streamed(max_tokens=100) as stream:
            await stream.read_tokens(2)
            cluster.tracker.signal(signal.SIGKILL)
            await stream.read_all()
        assert (stream.error, stream.finish_reason, stream.done) == (None, "length", True)
        started = time.monotonic()
        answer = await cluster.ask("next")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "tracker_unreachable")
        assert time.monotonic() - started < 6
        await cluster.until_free()


async def test_telemetry_is_there_while_every_node_is_stopped(tmp_path: Path) -> None:
    """The first event leaves before any Node is asked, even to tokenise; and the request still ends in time."""
    async with scripted_cluster(tmp_path, layers=("0:3", "3:6")) as cluster:
        await cluster.text("warm")
        for node in cluster.nodes:
            node.signal(signal.SIGSTOP)
        request = asyncio.create_task(cluster.ask("anybody there?", stream=True))
        async with asyncio.timeout(2):
            while (
                len(sessions := (await cluster.http.get(f"{cluster.gateway.url}/v1/route-sessions")).json()["sessions"])
                < 2
            ):
                await asyncio.sleep(0.02)
        newest = sessions[0]
        assert (newest["phase"], newest["route"]) == ("queued", None)
        url = f"{cluster.gateway.url}/v1/route-sessions/{newest['id']}/telemetry"
        async with cluster.http.stream("GET", url) as events, asyncio.timeout(2):
            async for line in events.aiter_lines():
                if line.startswith("data: "):
                    assert '"phase":"queued"' in line
                    break
        answer = await asyncio.wait_for(request, 12)
        assert answer.status_code in (502, 503, 504), answer.text
        assert (await cluster.session(newest["id"]))["phase"] == "failed"
        for node in cluster.nodes:
            node.signal(signal.SIGCONT)

        async def served() -> bool:
            return (await cluster.ask("again")).status_code == 200

        await until(served, 10)


async def test_requests_beside_a_silent_head_are_answered_in_time(tmp_path: Path) -> None:
    """Many at once: none waits for another's time with the head that does not answer."""
    async with scripted_cluster(tmp_path, layers=("0:3", "3:6")) as cluster:
        await cluster.text("warm")
        cluster.nodes[0].signal(signal.SIGSTOP)
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            requests = [tasks.create_task(cluster.ask(f"question {i}")) for i in range(12)]
        assert time.monotonic() - started < 8
        for request in requests:
            error = request.result().json()["error"]
            assert request.result().status_code in (502, 503, 504), error
            assert error["code"] in ("text_unavailable", "model_unavailable", "node_lost"), error
