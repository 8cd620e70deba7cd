"""The fault table's parts that do not depend on the engine: what strikes Node 1 of three, and what must follow."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tests.support.cluster import Cluster, until, worker_pid

KILLED_S, SILENT_S, CUT_S = 2.0, 4.0, 6.0
"""A killed process is known within 1 s, a silent one within 3 s, and a push has 2.5 s after a connection of 2 s; a
second more for the test's own polling on a loaded machine."""
Strike = Callable[[Cluster], Awaitable[None]]


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


def worker_struck(number: signal.Signals) -> Strike:
    async def strike(cluster: Cluster) -> None:
        psutil.Process(worker_pid(await cluster.node_info(1))).send_signal(number)

    return strike


@dataclass(frozen=True)
class Fault:
    strike: Strike
    codes: frozenset[str]
    within_s: float
    words: tuple[str, ...] = ()
    """Of the error's message: how the worker ended, and its last log lines."""
    at_link: bool = False
    """It strikes what no step crosses while a session is opened; then it is there before the request."""
    at_worker: bool = False
    """The Node outlives it."""


FAULTS = {
    "killed": Fault(killed, frozenset({"node_lost"}), KILLED_S),
    "stopped": Fault(stopped, frozenset({"node_lost"}), SILENT_S),
    "link cut": Fault(link_cut, frozenset({"seam_lost"}), CUT_S, at_link=True),
    "garbled": Fault(garbled, frozenset({"seam_lost", "seam_invalid"}), KILLED_S, at_link=True),
    "worker killed": Fault(worker_struck(signal.SIGKILL), frozenset({"engine_lost"}), KILLED_S, at_worker=True),
    "worker stopped": Fault(worker_struck(signal.SIGSTOP), frozenset({"engine_lost"}), SILENT_S, at_worker=True),
}


async def phase_of(cluster: Cluster) -> str:
    """Of the newest session; "starting" while no prompt token is computed."""
    answer = await cluster.http.get(f"{cluster.gateway.url}/v1/route-sessions")
    sessions = answer.json()["sessions"]
    if not sessions:
        return "none"
    newest = sessions[0]
    if newest["phase"] == "prefill" and newest["prefill"]["done"] == 0:
        return "starting"
    return str(newest["phase"])


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The one error of an answer, streamed or not; a stream has nothing behind it."""
    if answer.headers["content-type"].startswith("application/json"):
        assert answer.status_code >= 500, answer.text
        assert answer.headers.get("x-should-retry") == "false" or answer.status_code != 502
        return dict(answer.json()["error"])
    assert answer.status_code == 200
    events = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert "[DONE]" not in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert sum('"error"' in event for event in events) == 1
    return dict(httpx.Response(200, content=events[-1][6:].encode()).json()["error"])


def check_error(cluster: Cluster, error: dict[str, Any], phase: str, layers: list[int]) -> None:
    """`layers`: of Node 1."""
    assert {"message", "type", "param", "code", "retryable"} <= set(error)
    names = [node.facts["node"] for node in cluster.nodes]
    assert error.get("node") == names[1] or (error.get("from"), error.get("to")) == (names[0], names[1]), error
    if phase != "routing":
        # A worker that was stopped is known by its silence: the session may have gone on to its next phase by then.
        assert error["phase"] in ({phase, "prefill"} if phase == "opening" else {phase}), error
    if error["code"] == "node_lost":
        assert error["layers"] == layers


async def check_next(cluster: Cluster, fault: str, layers: list[int]) -> None:
    """The request after it: refused at once with what is missing, or served where a route is whole again."""
    if fault in ("killed", "stopped"):
        started = time.monotonic()
        answer = await cluster.ask("next")
        assert time.monotonic() - started < 1.0
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["missing"]) == (503, "model_unavailable", [layers]), error
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
