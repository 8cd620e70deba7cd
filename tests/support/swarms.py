"""Nodes of one swarm on loopback, each with a store, a Swarm and a BitTorrent process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from shardline.artifact.bundle import Bundle
from shardline.artifact.store import StoredArtifact
from shardline.node.swarm import Swarm
from shardline.settings import Settings
from shardline.transport.tls import ClusterTls
from shardline.wire.artifacts import Source
from tests.support.stores import filled, store_at

WAIT_S = 30.0
SETTINGS = Settings(worker_backoff_s=0.1)


class Named:
    """What a Tracker would say: who is in the swarm, to all others. `unseen`: names that it does not tell."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.unseen: set[str] = set()
        self.others: list[Source] = []
        """Who is no member of this process."""

    def sources(self, asker: str) -> list[Source]:
        return self.others + [
            Source(node=name, url="http://127.0.0.1:9", bittorrent=f"{member.host}:{member.swarm.port}")
            for name, member in self.members.items()
            if name not in (asker, *self.unseen) and member.swarm.port is not None
        ]


class Member:
    """One Node."""

    def __init__(self, name: str, host: str, swarm: Swarm, artifact: StoredArtifact) -> None:
        self.name = name
        self.host = host
        self.swarm = swarm
        self.artifact = artifact
        self.banned: list[str] = []


@asynccontextmanager
async def member(
    named: Named,
    name: str,
    bundle: Bundle,
    folder: Path,
    *,
    model: Path | None = None,
    pieces: Mapping[int, Iterable[int]] | None = None,
    host: str = "127.0.0.1",
    tls: ClusterTls | None = None,
    settings: Settings = SETTINGS,
) -> AsyncIterator[Member]:
    """A Node that runs. With `model` it has its pieces (all, if not said which)."""
    artifact = store_at(folder / name).add(bundle)
    if model is not None:
        filled(artifact, model, pieces)
    banned: list[str] = []

    async def sources(content_id: str) -> Sequence[Source]:
        return named.sources(name)

    swarm = Swarm(settings, host, sources, environment=os.environ, tls=tls, on_banned=banned.append)
    swarm.put(artifact)
    made = Member(name, host, swarm, artifact)
    made.banned = banned
    named.members[name] = made
    async with asyncio.TaskGroup() as group:
        task = group.create_task(swarm.run())
        try:
            async with asyncio.timeout(WAIT_S):
                await swarm.settled.wait()
            yield made
        finally:
            named.members.pop(name, None)
            await swarm.take(artifact.content_id)
            task.cancel()
    artifact.close()


async def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    async with asyncio.timeout(wait_s):
        while not condition():
            await asyncio.sleep(0.02)
