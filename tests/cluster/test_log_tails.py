"""The last log lines of real Nodes, read by a Gateway for whoever looks: a lost worker, a killed Node, a stranger."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.cluster import Cluster, scripted_cluster

DIARY = "What I would not tell anybody"


class Logs:
    """The log lines of a `/v1/live`, by Node."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self.texts: defaultdict[str, list[str]] = defaultdict(list)
        self._lines = lines

    async def until(self, node: str, words: str) -> None:
        async with asyncio.timeout(15):
            while not any(words in text for text in self.texts[node]):
                self._take(await anext(self._lines), await anext(self._lines))

    def _take(self, name: str, data: str) -> None:
        if name == "event: log":
            event: dict[str, Any] = json.loads(data.removeprefix("data: "))
            self.texts[event["node"]] += [line["text"] for line in event["lines"]]


@asynccontextmanager
async def logs_of(cluster: Cluster) -> AsyncIterator[Logs]:
    async with cluster.http.stream("GET", f"{cluster.gateway.url}/v1/live") as response:
        assert response.status_code == 200
        yield Logs(aiter(_not_empty(response)))


async def _not_empty(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line and not line.startswith(":"):
            yield line


async def test_the_last_words_of_a_worker_and_of_a_killed_node(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path, layers=("0:3", "3:6"), inline=False) as cluster:
        nodes = [node.facts["node"] for node in cluster.nodes]
        async with logs_of(cluster) as logs:
            for node in nodes:
                await logs.until(node, "shard_state state=ready")
            await cluster.text(DIARY)
            await logs.until(nodes[1], "session_opened")
            for child in psutil.Process(cluster.nodes[0].pid).children():
                child.kill()
            await logs.until(nodes[0], "worker_lost")
            await logs.until(nodes[0], "worker_started")
            cluster.nodes[1].signal(signal.SIGKILL)
            await cluster.nodes[1].process.wait()
        async with logs_of(cluster) as later:
            for node in nodes:
                await later.until(node, "shard_state state=ready")
            assert later.texts[nodes[1]] == logs.texts[nodes[1]]
        told = json.dumps(logs.texts)
        assert DIARY not in told and cluster.credential() not in told


async def test_a_log_is_told_to_the_credential_only(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path, layers=("0:6",)) as cluster:
        url = f"{cluster.nodes[0].url}/v1/log"
        assert (await cluster.http.get(url)).status_code == 401
        whole = (await cluster.control("GET", url)).json()
        assert whole["lines"][0]["n"] == 1
        last = whole["lines"][-1]["n"]
        rest = (await cluster.control("GET", f"{url}?boot={whole['boot']}&after={last}")).json()
        assert rest["lines"] == []
        for wrong in ("after=-1", "after=1e9", "boot=../x", f"after={'9' * 20}"):
            assert (await cluster.control("GET", f"{url}?{wrong}")).status_code == 400, wrong
