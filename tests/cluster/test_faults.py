"""The fault table: what is lost, in which phase, and what the client and the survivors see (real processes).

Times are those of docs/operations.md with room for a loaded machine: a killed process is known within 1 s, a silent
one within 3 s; here each cell allows a second more, for the test's own polling.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.cluster import Cluster, scripted_cluster, until, worker_pid

SLOW: dict[str, Any] = {
    "answer": [f" t{i}" for i in range(50)],
    "eos": False,
    "decode_ms": 10,
    "prefill_ms_per_row": 4,
    "faults": [{"kind": "slow", "phase": "open", "node": 4, "contains": None, "ms": 600}],
}
KILLED_S, SILENT_S = 2.0, 4.0
LONG_PROMPT = "word " * 60
Fault = Callable[[Cluster], Awaitable[None]]


async def killed(cluster: Cluster) -> None:
    cluster.nodes[1].signal(signal.SIGKILL)


async def stopped(cluster: Cluster) -> None:
    cluster.nodes[1].signal(signal.SIGSTOP)


async def link_cut(cluster: Cluster) -> None:
    """Node 0 does not reach Node 1 any more; both live, and everybody else reaches both."""
    cluster.proxies[1].dark = True


async def garbled(cluster: Cluster) -> None:
    async def rule(number: int, body: bytes) -> list[bytes] | None:
        return [body[: len(body) // 2]]

    cluster.proxies[1].rule = rule


async def worker_killed(cluster: Cluster) -> None:
    psutil.Process(worker_pid(await cluster.node_info(1))).kill()


async def worker_stopped(cluster: Cluster) -> None:
    psutil.Process(worker_pid(await cluster.node_info(1))).suspend()


async def phase_of(cluster: Cluster) -> str:
    answer = await cluster.http.get(f"{cluster.gateway.url}/v1/route-sessions")
    sessions = answer.json()["sessions"]
    if not sessions:
        return "none"
    newest = sessions[0]
    if newest["phase"] == "prefill" and newest["prefill"]["done"] == 0:
        return "starting"
    return str(newest["phase"])


FAULTS: dict[str, tuple[Fault, set[str], float]] = {
    "killed": (killed, {"node_lost"}, KILLED_S),
    "stopped": (stopped, {"node_lost"}, SILENT_S),
    "link cut": (link_cut, {"seam_lost"}, 6.0),
    "garbled": (garbled, {"seam_lost", "seam_invalid"}, KILLED_S),
    "worker killed": (worker_killed, {"engine_lost"}, KILLED_S),
    "worker stopped": (worker_stopped, {"engine_lost"}, SILENT_S),
}


@pytest.mark.parametrize("phase", ["opening", "prefill", "decode"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_cell(tmp_path: Path, fault: str, phase: str) -> None:
    if phase == "opening" and fault in ("link cut", "garbled"):
        phase = "routing"  # no step crosses the link while a session is opened: the cut is there before it
    strike, codes, limit_s = FAULTS[fault]
    async with scripted_cluster(tmp_path, script=SLOW, inline=False, proxied=(1,)) as cluster:
        struck = time.monotonic()
        if phase == "routing":
            await strike(cluster)
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
            await strike(cluster)
        answer = await request
        took = time.monotonic() - struck
        error = error_of(answer)
        assert error["code"] in codes, error
        assert took < limit_s, f"{took:.2f} s"
        check_error(cluster, error, phase)
        survivors = [0, 2] if fault in ("killed", "stopped") else [0, 1, 2] if "worker" not in fault else [0, 2]
        assert await cluster.until_free(survivors) < 2.0
        await check_next(cluster, fault)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The one error of an answer, streamed or not; a stream has nothing behind it."""
    if answer.headers["content-type"].startswith("application/json"):
        assert answer.status_code >= 500
        assert answer.headers.get("x-should-retry") == "false" or answer.status_code != 502
        return dict(answer.json()["error"])
    assert answer.status_code == 200
    events = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert "[DONE]" not in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert sum('"error"' in event for event in events) == 1
    return dict(httpx.Response(200, content=events[-1][6:].encode()).json()["error"])


def check_error(cluster: Cluster, error: dict[str, Any], phase: str) -> None:
    assert {"message", "type", "param", "code", "retryable"} <= set(error)
    names = [node.facts["node"] for node in cluster.nodes]
    assert error.get("node") == names[1] or (error.get("from"), error.get("to")) == (names[0], names[1]), error
    if phase != "routing":
        # A worker that was stopped is known by its silence: the session may have gone on to its next phase by then.
        assert error["phase"] in ({phase, "prefill"} if phase == "opening" else {phase}), error
    if error["code"] == "node_lost":
        assert error["layers"] == [2, 4]


async def check_next(cluster: Cluster, fault: str) -> None:
    """The request after it: refused at once with what is missing, or served where a route is whole again."""
    if fault in ("killed", "stopped"):
        started = time.monotonic()
        answer = await cluster.ask("next")
        assert time.monotonic() - started < 1.0
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["missing"]) == (503, "model_unavailable", [[2, 4]]), error
    if fault == "stopped":
        cluster.nodes[1].signal(signal.SIGCONT)
    for proxy in cluster.proxies.values():
        proxy.dark = False
        proxy.rule = _clean
    if fault != "killed":

        async def served() -> bool:
            return (await cluster.ask("again", max_tokens=2)).status_code == 200

        await until(served, 15)
        await cluster.until_free()


async def _clean(number: int, body: bytes) -> list[bytes] | None:
    return [body]


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
