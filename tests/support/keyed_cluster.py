"""A cluster with keys inside the test's own event loop: HTTPS, certificates and lines for joining, on loopback.

The same as local_cluster.py otherwise, whose `LocalCluster` it extends.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shardline.gateway.generate import RouteGenerations
from shardline.node import run as node_run
from shardline.options import NodeOptions, StartPhase, TrackerOptions
from shardline.settings import Settings
from shardline.telemetry.records import Records
from shardline.tracker import run as tracker_run
from shardline.transport.authority import AUTHORITY_FILE, Authority
from shardline.transport.carrier import HttpCarrier
from shardline.transport.http_client import HttpClient
from shardline.transport.membership import OwnMembership
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import NodeInfo
from tests.support.local_cluster import CREDENTIAL, SCRIPT, LocalCluster, Role


class KeyedRole(Role):
    """A Tracker that says lines for joining."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __call__(self, phase: StartPhase, /, **facts: str | int) -> None:
        if phase == "inviting":
            self.lines.append(str(facts["line"]))
        super().__call__(phase, **facts)


class KeyedCluster(LocalCluster):
    """`folder` is the state folder of the Tracker's machine; each Node has one of its own below it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        super().__init__(folder, settings)
        self.tracker: KeyedRole = KeyedRole()

    @property
    def authority(self) -> Authority:
        return Authority.made(self.folder / AUTHORITY_FILE, time.time())

    def own(self, party: str) -> OwnMembership:
        """What a process with the Tracker's state folder makes for itself."""
        return OwnMembership(self.authority, party, self.settings, [])

    def tracker_options(self, port: int, host: str) -> TrackerOptions:
        return TrackerOptions(
            settings=self.settings,
            host=host,
            port=port,
            credential=CREDENTIAL,
            state_dir=self.folder,
            keys=True,
            announce=self.tracker,
        )

    async def start_tracker(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.tracker = KeyedRole()
        self.tracker.task = asyncio.create_task(tracker_run.run(self.tracker_options(port, host)))
        await self.tracker.until("ready")

    async def start_node(self, first: int | None, last: int | None, **more: Any) -> Role:
        """With the last line that the Tracker said, or `join`."""
        role = Role()
        state_dir = self.folder / f"machine-{len(self.nodes)}"
        options = NodeOptions(
            settings=more.pop("settings", self.settings),
            tracker_url="",
            model=str(self.script),
            engine="scripted",
            host="127.0.0.1",
            port=more.pop("port", 0),
            credential="",
            state_dir=more.pop("state_dir", state_dir),
            first=first,
            last=last,
            inline=True,
            join=more.pop("join", None) or self.tracker.lines[-1],
            announce=role,
            **more,
        )
        role.task = asyncio.create_task(node_run.run(options))
        self.nodes.append(role)
        return role

    async def info(self, number: int) -> NodeInfo:
        role = self.nodes[number]
        return await self.client.json("GET", f"{url_of(role)}/v1/node", NodeInfo)


def url_of(role: Role) -> str:
    """The URL of a Node with its name in it."""
    return role.url.replace("https://", f"https://{role.node}@", 1)


@asynccontextmanager
async def keyed_cluster(
    folder: Path,
    *,
    layers: Sequence[tuple[int, int]] = ((0, 2), (2, 4), (4, 6)),
    script: dict[str, Any] | None = None,
    settings: Settings | None = None,
    **node_options: Any,
) -> AsyncIterator[KeyedCluster]:
    cluster = KeyedCluster(folder, settings or Settings(drain_s=0.5))
    cluster.script.write_text(json.dumps({**SCRIPT, **(script or {})}))
    running: list[asyncio.Task[None]] = []
    try:
        cluster.content_id = f"mac1-{hashlib.sha256(cluster.script.read_bytes()).hexdigest()}"
        await cluster.start_tracker()
        for first, last in layers:
            node = await cluster.start_node(first, last, **node_options)
            await node.until("ready")
        own = cluster.own("gateway-test")
        cluster.client = HttpClient(cluster.settings, credential=CREDENTIAL, tls=own.tls)
        cluster.tracker_client = TrackerClient(cluster.client, cluster.tracker.url)
        cluster.generations = RouteGenerations(
            tracker=cluster.tracker_client,
            client=cluster.client,
            carrier=HttpCarrier(cluster.client),
            records=Records(cluster.settings),
            settings=cluster.settings,
        )
        running = [asyncio.create_task(work) for work in (cluster.generations.run(), own.renew())]
        await asyncio.sleep(0)
        yield cluster
    finally:
        if running:
            await cluster.generations.drain()
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        await cluster.stop()
