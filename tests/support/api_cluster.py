"""A whole cluster inside the test's own event loop with a Gateway in front: what a client of the API sees of it.

Sockets and HTTP are real, processes are not. Nodes may stand behind a `Relay`. For a look into sessions without the
API there is tests/support/local_cluster.py; signals and the command line need tests/support/cluster.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from shardline.gateway import run as gateway_run
from shardline.options import GatewayOptions
from shardline.settings import Settings
from shardline.transport.tracker_client import TrackerClient
from tests.support.cluster import Stream
from tests.support.local_cluster import CREDENTIAL, SCRIPT, LocalCluster, Role
from tests.support.relay import Relay, free_port

Json = dict[str, Any]
COUNTING: Json = {"answer": [f" t{i}" for i in range(60)], "eos": False}
"""A model that says t0, t1 … t59 and begins again, for ever."""
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


class ApiCluster(LocalCluster):
    """`relays[i]` stands in front of Node i, where it was asked for."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        self.gateway = Role()
        self.relays: dict[int, Relay] = {}
        # Every request on a connection of its own: none is closed under a test's feet.
        self.http = httpx.AsyncClient(timeout=30, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    @property
    def url(self) -> str:
        return self.gateway.url

    async def start_gateway(self, **more: Any) -> None:
        options = GatewayOptions(
            settings=self.settings,
            tracker_url=self.tracker.url,
            host=more.pop("host", "127.0.0.1"),
            port=0,
            credential=CREDENTIAL,
            state_dir=self.folder,
            announce=self.gateway,
            **more,
        )
        self.gateway.task = asyncio.create_task(gateway_run.run(options))
        await self.gateway.until("ready")

    async def start_behind_relay(self, first: int, last: int, **more: Any) -> Role:
        """A Node that everybody, the Tracker too, reaches through a relay only."""
        port = free_port()
        relay = self.relays[len(self.nodes)] = await Relay(port).__aenter__()
        return await self.start_node(first, last, port=port, advertise_url=relay.url, **more)

    # ---- asking ----------------------------------------------------------------------------------------------

    def body(self, prompt: str | list[int] = "Hi", **fields: Any) -> Json:
        return {"model": self.model, "prompt": prompt, "temperature": 0, **fields}

    async def ask(self, prompt: str | list[int] = "Hi", **fields: Any) -> httpx.Response:
        """`POST /v1/completions`."""
        return await self.http.post(self.url + TEXT, json=self.body(prompt, **fields))

    async def answer(self, prompt: str | list[int] = "Hi", **fields: Any) -> Json:
        """The whole answer, which must be there."""
        answer = await self.ask(prompt, **fields)
        assert answer.status_code == 200, answer.text
        return {**answer.json(), "session": answer.headers["shardline-route-session"]}

    async def text(self, prompt: str | list[int] = "Hi", **fields: Any) -> str:
        return str((await self.answer(prompt, **fields))["choices"][0]["text"])

    @asynccontextmanager
    async def streamed(self, prompt: str | list[int] = "Hi", *, url: str = "", **fields: Any) -> AsyncIterator[Stream]:
        body = self.body(prompt, stream=True, **fields)
        async with self.http.stream("POST", (url or self.url) + TEXT, json=body) as response:
            yield Stream(response)

    async def read(self, prompt: str | list[int] = "Hi", **fields: Any) -> Stream:
        """A stream, read to its end."""
        async with self.streamed(prompt, **fields) as stream:
            await stream.read_all()
        return stream

    async def sessions(self) -> list[Json]:
        """Newest first."""
        return list((await self.http.get(f"{self.url}/v1/route-sessions")).json()["sessions"])

    async def record(self, session: str) -> Json:
        answer = await self.http.get(f"{self.url}/v1/route-sessions/{session}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def in_phase(self, phase: str) -> Json:
        """The newest session, once it is in `phase`."""

        async def reached() -> bool:
            known = await self.sessions()
            return bool(known) and known[0]["phase"] == phase

        await until(reached)
        return (await self.sessions())[0]

    async def get(self, path: str) -> tuple[int, Json]:
        answer = await self.http.get(self.url + path)
        return answer.status_code, answer.json()

    async def kv_used(self) -> list[int]:
        """Tokens in the engine's caches, Node by Node."""
        return [(await self.info(number)).kv.used_tokens for number in range(len(self.nodes))]

    async def stop(self) -> None:
        await self.http.aclose()
        if self.gateway.task is not None and not self.gateway.task.done():
            await self.gateway.end()
        # What is held back must not hold the Nodes' goodbye up.
        for relay in self.relays.values():
            relay.release()
        await super().stop()
        for relay in self.relays.values():
            await relay.__aexit__()


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def api_cluster(
    folder: Path,
    *,
    layers: Sequence[tuple[int, int]] = ((0, 3), (3, 6)),
    script: Json | None = None,
    settings: Settings | None = None,
    relayed: Sequence[int] = (),
    api_keys: Sequence[str] = (),
    **node_options: Any,
) -> AsyncIterator[ApiCluster]:
    """Tracker, one Node for each of `layers`, Gateway; ready to be asked."""
    cluster = ApiCluster(folder, settings or Settings(drain_s=0.5))
    cluster.script.write_text(json.dumps({**SCRIPT, **(script or {})}))
    try:
        await cluster.start_tracker()
        for number, (first, last) in enumerate(layers):
            start = cluster.start_behind_relay if number in relayed else cluster.start_node
            await start(first, last, **node_options)
        cluster.tracker_client = TrackerClient(cluster.client, cluster.tracker.url)
        await cluster.start_gateway(api_keys=tuple(api_keys))
        for node in cluster.nodes:
            await node.until("ready")
        yield cluster
    finally:
        await cluster.stop()
