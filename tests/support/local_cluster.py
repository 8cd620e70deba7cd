"""A whole cluster inside the test's own event loop: real sockets, real HTTP, no processes.

For tests that look into a Node or a session from outside and inside at once. Tests of processes, signals and the
command line use tests/support/cluster.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shardline.gateway.generate import RouteGenerations, RunningGeneration
from shardline.gateway.generate_api import FinishedEvent, GenerationRequest, TokensEvent
from shardline.node import run as node_run
from shardline.options import NodeOptions, StartPhase, TrackerOptions
from shardline.settings import Settings
from shardline.telemetry.records import Records
from shardline.tracker import run as tracker_run
from shardline.transport.carrier import HttpCarrier
from shardline.transport.http_client import HttpClient
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import NodeInfo, Sampling

CREDENTIAL = "test-credential-" + "x" * 32
SCRIPT: dict[str, Any] = {
    "model": "scripted",
    "n_layers": 6,
    "answer": [" alpha", " beta", " gamma", " delta", " epsilon", " zeta", " eta", " theta"],
}


class Role:
    """One running role and what it announced."""

    def __init__(self) -> None:
        self.url = ""
        self.node = ""
        self.phases: list[str] = []
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def __call__(self, phase: StartPhase, /, **facts: str | int) -> None:
        self.phases.append(phase)
        self.url = str(facts.get("url", self.url))
        self.node = str(facts.get("node", self.node))
        self._changed.set()

    async def until(self, phase: str) -> None:
        async with asyncio.timeout(10):
            while phase not in self.phases:
                if self.task is not None and self.task.done():
                    self.task.result()
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=10)


class LocalCluster:
    """`nodes[i]` in the order of their layer ranges."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.tracker = Role()
        self.nodes: list[Role] = []
        self.client = HttpClient(settings, credential=CREDENTIAL)
        self.model = SCRIPT["model"]
        self.generations: RouteGenerations
        self.tracker_client: TrackerClient
        self.script = folder / "script.json"
        self.content_id = ""

    async def start_tracker(self, port: int = 0, host: str = "127.0.0.1") -> None:
        options = TrackerOptions(
            settings=self.settings,
            host=host,
            port=port,
            credential=CREDENTIAL,
            state_dir=self.folder,
            announce=self.tracker,
        )
        self.tracker.task = asyncio.create_task(tracker_run.run(options))
        await self.tracker.until("ready")

    async def start_node(self, first: int | None, last: int | None, **more: Any) -> Role:
        role = Role()
        options = NodeOptions(
            settings=self.settings,
            tracker_url=more.pop("tracker_url", self.tracker.url),
            model=str(more.pop("model", self.script)),
            engine="scripted",
            host=more.pop("host", "127.0.0.1"),
            port=more.pop("port", 0),
            credential=CREDENTIAL,
            state_dir=self.folder,
            first=first,
            last=last,
            inline=more.pop("inline", True),
            announce=role,
            **more,
        )
        role.task = asyncio.create_task(node_run.run(options))
        self.nodes.append(role)
        return role

    def start(self, prompt: int | list[int] = 10, max_tokens: int = 8, **sampling: Any) -> RunningGeneration:
        tokens = [65] * prompt if isinstance(prompt, int) else prompt
        return self.generations.start(
            GenerationRequest(
                model=self.model,
                content_id=self.content_id,
                prompt=tokens,
                max_tokens=max_tokens,
                sampling=Sampling(temperature=0, **sampling),
                stop=(),
                key_id="anyone",
            )
        )

    async def generate(self, prompt: int | list[int] = 10, max_tokens: int = 8) -> tuple[list[int], FinishedEvent]:
        """Token ids of one whole generation, and how it ended."""
        return await read(self.start(prompt, max_tokens))

    async def info(self, number: int) -> NodeInfo:
        url = f"{self.nodes[number].url}/v1/node"
        return await self.client.json("GET", url, NodeInfo)

    async def until_free(self, numbers: Sequence[int] | None = None) -> None:
        async with asyncio.timeout(5):
            for number in range(len(self.nodes)) if numbers is None else numbers:
                while True:
                    kv = (await self.info(number)).kv
                    if (kv.used_tokens, kv.reserved_tokens, kv.sessions) == (0, 0, 0):
                        break
                    await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for role in [*self.nodes, self.tracker]:
            if role.task is not None and not role.task.done():
                await role.end()
        await self.client.aclose()


async def read(generation: RunningGeneration) -> tuple[list[int], FinishedEvent]:
    ids: list[int] = []
    async for event in generation:
        if isinstance(event, TokensEvent):
            ids += [token.id for token in event.tokens]
        elif isinstance(event, FinishedEvent):
            return ids, event
    raise AssertionError("the generation ended without a word")


@asynccontextmanager
async def local_cluster(
    folder: Path,
    *,
    layers: Sequence[tuple[int, int]] = ((0, 2), (2, 4), (4, 6)),
    script: dict[str, Any] | None = None,
    settings: Settings | None = None,
    **node_options: Any,
) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(folder, settings or Settings(drain_s=0.5))
    cluster.script.write_text(json.dumps({**SCRIPT, **(script or {})}))
    running: asyncio.Task[None] | None = None
    try:
        cluster.content_id = f"mac1-{hashlib.sha256(cluster.script.read_bytes()).hexdigest()}"
        await cluster.start_tracker()
        for first, last in layers:
            await cluster.start_node(first, last, **node_options)
        for node in cluster.nodes:
            await node.until("ready")
        cluster.tracker_client = TrackerClient(cluster.client, cluster.tracker.url)
        cluster.generations = RouteGenerations(
            tracker=cluster.tracker_client,
            client=cluster.client,
            carrier=HttpCarrier(cluster.client),
            records=Records(cluster.settings),
            settings=cluster.settings,
        )
        running = asyncio.create_task(cluster.generations.run())
        await asyncio.sleep(0)
        yield cluster
    finally:
        if running is not None:
            await cluster.generations.drain()
            running.cancel()
            await asyncio.wait({running})
        await cluster.stop()
