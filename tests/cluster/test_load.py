"""Many sessions at once: nothing starves, nothing grows, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.cluster import Cluster, Process, scripted_cluster, until

ANSWER = [f" t{i}" for i in range(12)]
TEXT = "".join(ANSWER)


def parts(cluster: Cluster) -> list[Process]:
    return [cluster.tracker, cluster.gateway, *cluster.nodes]


async def tasks_of(cluster: Cluster, url: str) -> int:
    answer = await cluster.control("GET", f"{url}/metrics")
    found = re.search(r"^shardline_\w+_tasks ([0-9.]+)$", answer.text, re.MULTILINE)
    assert found, answer.text
    return int(float(found.group(1)))


async def footprint(cluster: Cluster) -> dict[str, Any]:
    """Of each process: open files, threads, tasks; connections between the parts count as files."""
    counted = {}
    for part in parts(cluster):
        process = psutil.Process(part.pid)
        tasks = 0 if part is cluster.tracker else await tasks_of(cluster, part.url)
        counted[part.name] = (process.num_fds(), process.num_threads(), tasks)
    return counted


async def one(cluster: Cluster, http: httpx.AsyncClient, leaves: float | None, number: int) -> str | None:
    body = cluster.body(f"question {number}", stream=number % 2 == 0, max_tokens=12)
    url = f"{cluster.gateway.url}/v1/chat/completions"
    try:
        async with asyncio.timeout(leaves):
            answer = await http.post(url, json=body)
    except TimeoutError:
        return None
    assert answer.status_code == 200, answer.text
    if number % 2 == 0:
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
        return "".join(re.findall(r'"content":"([^"]*)"', answer.text))
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.timeout(300)
async def test_a_thousand_sessions_a_third_leave_and_nothing_is_left(tmp_path: Path) -> None:
    # A key is closed after the client's idle time: short here, so that pooled connections are gone when counted.
    settings = {"client_idle_s": 1.0, "server_idle_s": 4.0, "queue_limit": 1000}
    async with scripted_cluster(tmp_path, script={"answer": ANSWER, "decode_ms": 0.5}, settings=settings) as cluster:
        rng = random.Random(7)
        limits = httpx.Limits(max_connections=40, max_keepalive_connections=0)
        gate = asyncio.Semaphore(32)
        async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as http:
            await one(cluster, http, None, 1)
            await cluster.until_free()
            await asyncio.sleep(2.5)
            before = await footprint(cluster)
            texts: list[str | None] = []

            async def run(number: int) -> None:
                async with gate:
                    leaves = rng.uniform(0.001, 0.25) if rng.random() < 1 / 3 else None
                    texts.append(await one(cluster, http, leaves, number))

            async with asyncio.TaskGroup() as tasks:
                for number in range(1000):
                    tasks.create_task(run(number))
        assert {text for text in texts if text is not None} == {TEXT}
        assert sum(text is not None for text in texts) >= 600
        await cluster.until_free()

        async def as_before() -> bool:
            now = await footprint(cluster)
            return all(
                now[name][i] <= before[name][i] + slack for name in before for i, slack in ((0, 2), (1, 0), (2, 2))
            )

        try:
            await until(as_before, 15)
        except AssertionError:
            raise AssertionError(f"before {before}, after {await footprint(cluster)}") from None


@pytest.mark.timeout(180)
async def test_long_prompts_beside_decoding_sessions_with_a_slow_tail(tmp_path: Path) -> None:
    """The prefill lane exerts back-pressure, the decode lane is never blocked, and memory stays flat."""
    script = {
        "answer": ANSWER,
        "eos": False,
        "decode_ms": 1,
        "prefill_ms_per_row": 0.05,
        "layout": [["hidden", "F32", [512]]],
        "faults": [
            {"kind": "slow", "phase": "decode", "node": 4, "ms": 9},
            {"kind": "slow", "phase": "prefill", "node": 4, "ms": 8},
        ],
        "context_length": 8192,
    }
    settings = {"queue_bytes": 4 << 20}
    async with scripted_cluster(tmp_path, script=script, settings=settings) as cluster:
        await cluster.text("warm", max_tokens=2)
        before = [psutil.Process(p.pid).memory_info().rss for p in cluster.nodes]
        async with asyncio.TaskGroup() as tasks:
            short = [tasks.create_task(cluster.ask(f"short {i}", max_tokens=60)) for i in range(8)]
            long = [tasks.create_task(cluster.ask("word " * 800 + str(i), max_tokens=4)) for i in range(8)]
        for task, tokens in [*((t, 60) for t in short), *((t, 4) for t in long)]:
            answer = task.result()
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == tokens
        await cluster.until_free()
        after = [psutil.Process(p.pid).memory_info().rss for p in cluster.nodes]
        # 8 prompts of 4,000 rows of 2 KiB would be 64 MiB, were they queued.
        assert all(b - a < 40 << 20 for a, b in zip(before, after, strict=True)), (before, after)
