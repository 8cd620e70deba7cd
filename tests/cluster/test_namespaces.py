"""Machines with addresses of their own: the printed line, a route over them, and links between Nodes that are cut."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.demo_model import demo_model
from tests.support.machines import Machines, machines
from tests.support.namespaces import Host, why_not

REASON = why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(180)]
WORDS: dict[str, Any] = {"answer": [" alpha", " beta", " gamma", " delta"]}
ENDLESS: dict[str, Any] = {
    "answer": [f" t{i}" for i in range(50)],
    "eos": False,
    "decode_ms": 10,
    "prefill_ms_per_row": 4,
}
LONG_PROMPT = "word " * 300
SILENT_S, LINK_S = 4.0, 5.0
"""A silent machine is told within 3 s, a silent link between two that live within 4 s (docs/operations.md: the limit
`push`, and a look whether the link carries); a second more for a machine that is busy with the test."""


async def test_the_printed_line_makes_a_route_over_two_machines(tmp_path: Path) -> None:
    async with machines(tmp_path, 3, WORDS) as cluster:
        await cluster.serve()
        first, second = cluster.hosts[1:]
        line = await cluster.printed_line()
        assert line.startswith("shardline node --join 'https://10.77.0.1:7070/#")
        head = await cluster.node(first, "0:3", line=line)
        await cluster.node(second, "3:6")
        answer = await cluster.ask()
        assert answer.json()["choices"][0]["message"]["content"] == " alpha beta gamma delta"
        hops = (await cluster.record(answer.headers["shardline-route-session"]))["route"]["hops"]
        assert [cluster.nodes[hop["node"]] for hop in hops] == [first, second]

        # The line was used: nobody else gets in with it. Its own machine needs no other, after any restart.
        thief = await cluster.type(second, f"{line} --model {cluster.script} --layers 0:3 --engine scripted --inline")
        assert "this token was used before" in await thief.whole()
        await head.end()
        await cluster.node(first, "0:3", line=line.partition("#")[0] + "'")
        assert (await cluster.ask()).status_code == 200

        # A fresh line, on demand.
        invited = await (await cluster.type(cluster.hosts[0], "shardline invite")).whole()
        assert invited.startswith("shardline node --join 'https://10.77.0.1:7070/#")
        assert invited.strip() != line


@pytest.mark.smollm2
@pytest.mark.torch
async def test_a_real_model_over_two_machines(tmp_path: Path) -> None:
    async with machines(tmp_path, 3, WORDS) as cluster:
        cluster.script = demo_model()
        cluster.model = cluster.script.stem
        await cluster.serve()
        await cluster.node(cluster.hosts[1], "0:15", "--engine torch --threads 1")
        await cluster.node(cluster.hosts[2], "15:30", "--engine torch --threads 1")
        answer = (await cluster.ask("What is a shard?", max_tokens=8)).json()
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["message"]["content"].strip()


async def tails(cluster: Machines, session: str) -> tuple[str, str]:
    """Node ids of head and tail of a session's route."""
    hops = (await cluster.record(session))["route"]["hops"]
    return hops[0]["node"], hops[-1]["node"]


async def started(cluster: Machines) -> None:
    """One Node with the first layers, two with the others."""
    await cluster.serve()
    await cluster.node(cluster.hosts[1], "0:3")
    await cluster.node(cluster.hosts[2], "3:6")
    await cluster.node(cluster.hosts[3], "3:6")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_link_between_two_nodes_is_cut(tmp_path: Path, phase: str) -> None:
    async with machines(tmp_path, 4, ENDLESS) as cluster:
        await started(cluster)
        async with cluster.streamed("hello" if phase == "decode" else LONG_PROMPT, max_tokens=1000) as stream:
            if phase == "decode":
                await stream.read_tokens(5)
            else:
                await asyncio.sleep(0.5)  # far from the end: the prompt takes seconds
            assert (await cluster.record(stream.session_id))["phase"] == phase
            head, tail = await tails(cluster, stream.session_id)
            cluster.nodes[head].cut(cluster.nodes[tail])
            at = time.monotonic()
            await stream.read_all()
        assert stream.error is not None and stream.error_at is not None
        print(f"{phase}: {stream.error['code']} after {stream.error_at - at:.2f} s")
        assert stream.error["code"] == "seam_lost"
        assert {stream.error["from"], stream.error["to"]} == {head, tail}
        assert stream.error_at - at < LINK_S
        print(f"free after {await cluster.until_free():.2f} s more")

        # The next request takes the other tail; without it there is none, and that is said at once.
        answer = await cluster.ask(max_tokens=3)
        assert answer.status_code == 200
        other = (await tails(cluster, answer.headers["shardline-route-session"]))[1]
        assert other != tail
        cluster.nodes[other].down()
        await until_gone(cluster, other)
        at = time.monotonic()
        refused = await cluster.ask(max_tokens=3)
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["missing"]
        assert time.monotonic() - at < 1.0


async def until_gone(cluster: Machines, node: str) -> None:
    async with asyncio.timeout(15):
        while any(n["id"] == node and n["state"] == "ready" for n in await cluster.listed()):
            await asyncio.sleep(0.2)


async def test_a_machine_falls_silent(tmp_path: Path) -> None:
    async with machines(tmp_path, 4, ENDLESS) as cluster:
        await started(cluster)
        async with cluster.streamed(max_tokens=1000) as stream:
            await stream.read_tokens(5)
            _, tail = await tails(cluster, stream.session_id)
            lost: Host = cluster.nodes[tail]
            lost.down()
            at = time.monotonic()
            await stream.read_all()
        assert stream.error is not None and stream.error_at is not None
        print(f"{stream.error['code']} after {stream.error_at - at:.2f} s")
        assert stream.error["code"] in ("node_lost", "seam_lost")
        assert stream.error_at - at < SILENT_S
        answer = await cluster.ask(max_tokens=3)
        assert answer.status_code == 200
        assert (await tails(cluster, answer.headers["shardline-route-session"]))[1] != tail
        await cluster.until_free()
