"""A cluster of real processes on the scripted engine: asked by HTTP, ended by signals."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import scripted_cluster, until, worker_pid

LONG = {"answer": [f" t{i}" for i in range(50)], "eos": False}


async def test_a_question_over_three_nodes(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path) as cluster:
        assert await cluster.text("hello") == " alpha beta gamma delta epsilon zeta eta theta"
        async with cluster.streamed("hello") as stream:
            await stream.read_all()
        assert stream.text == " alpha beta gamma delta epsilon zeta eta theta"
        assert (stream.done, stream.finish_reason, stream.error) == (True, "stop", None)
        record = await cluster.session(stream.session_id)
        assert record["phase"] == "completed"
        assert [hop["layers"] for hop in record["route"]["hops"]] == [[0, 2], [2, 4], [4, 6]]
        await cluster.until_free()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_every_part_ends_cleanly_with_an_open_stream(tmp_path: Path, number: signal.Signals) -> None:
    settings = {"drain_s": 0.5}
    async with scripted_cluster(tmp_path, script={**LONG, "decode_ms": 20}, settings=settings, inline=False) as cluster:
        async with cluster.streamed(max_tokens=4000) as stream:
            await stream.read_tokens(2)
            parts = [cluster.gateway, *cluster.nodes, cluster.tracker]
            family = [p for part in parts for p in psutil.Process(part.pid).children(recursive=True)]
            for part in parts:
                part.signal(number)
                async with asyncio.timeout(10):
                    assert await part.process.wait() == 0, part.log.read_text()[-2000:]
            await stream.read_all()
        assert not stream.done
        assert stream.error is not None
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def test_an_engine_worker_that_is_killed_comes_back(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path, script={**LONG, "decode_ms": 10}, inline=False) as cluster:
        async with cluster.streamed(max_tokens=4000) as stream:
            await stream.read_tokens(3)
            psutil.Process(worker_pid(await cluster.node_info(1))).kill()
            killed = time.monotonic()
            await stream.read_all()
        assert stream.error is not None and stream.error_at is not None
        assert stream.error["code"] == "engine_lost"
        assert stream.error["node"] == cluster.nodes[1].facts["node"]
        assert stream.error_at - killed < 5
        await cluster.until_free()

        async def answers() -> bool:
            return (await cluster.ask(max_tokens=2)).status_code == 200

        await until(answers, 15)
