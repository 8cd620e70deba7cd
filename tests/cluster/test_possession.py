"""Real Tracker, real seeder, in a cluster with keys: advertised, asked for blocks, known again after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from shardline.node import seeder
from shardline.options import SeederOptions, TrackerOptions
from shardline.settings import Settings
from shardline.transport.addresses import split_url
from shardline.transport.http_client import HttpClient
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.artifacts import Challenge, Seeder
from tests.support.keyed_cluster import CREDENTIAL, KeyedCluster, url_of
from tests.support.local_cluster import Role
from tests.support.stores import described, layered_model

SETTINGS = Settings(drain_s=0.5, store_reserve_bytes=0)


class OfferingCluster(KeyedCluster):
    """Its Tracker offers a model that lies beside its description."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SETTINGS)
        self.bundle = described(layered_model(folder / "model", layers=4, layer_bytes=1 << 18), folder / "bundle")
        self.seeder = Role()

    def tracker_options(self, port: int, host: str) -> TrackerOptions:
        return replace(super().tracker_options(port, host), artifacts=(self.bundle.folder,), allow_unsigned=True)

    async def start(self) -> None:  # type: ignore[override]
        await self.start_tracker()
        own = self.own("gateway-test")
        self.client = HttpClient(self.settings, credential=CREDENTIAL, tls=own.tls)
        options = SeederOptions(
            settings=self.settings,
            tracker_url=self.tracker.url,
            host="127.0.0.1",
            port=0,
            credential="",
            state_dir=self.folder / "machine",
            store=self.folder / "machine" / "artifacts",
            bundles=(self.bundle.folder,),
            look_in=(self.folder / "model",),
            allow_unsigned=True,
            join=self.tracker.lines[-1],
            announce=self.seeder,
        )
        self.seeder.task = asyncio.create_task(seeder.run(options))
        self.nodes.append(self.seeder)
        await self.seeder.until("ready")

    async def until_proven(self) -> Seeder:
        tracker = TrackerClient(self.client, self.tracker.url)
        async with asyncio.timeout(30):
            while True:
                (found,) = (await tracker.artifacts()).artifacts
                if found.seeders and found.seeders[0].proven is not None:
                    return found.seeders[0]
                await asyncio.sleep(0.02)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[OfferingCluster]:
    made = OfferingCluster(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def test_a_seeder_proves_itself_and_again_to_a_tracker_that_was_restarted(cluster: OfferingCluster) -> None:
    first = await cluster.until_proven()
    assert (first.proven, first.servable) == (True, [(0, 4)])
    port = split_url(cluster.tracker.url).port
    await cluster.tracker.end()
    await cluster.start_tracker(port)
    again = await cluster.until_proven()
    assert (again.node, again.proven, again.held_bytes) == (first.node, True, first.held_bytes)


async def test_nobody_but_the_tracker_may_ask_for_blocks(cluster: OfferingCluster) -> None:
    await cluster.until_proven()
    challenge = Challenge(content_id=cluster.bundle.manifest.content_id, blocks=[(0, 0)])
    with pytest.raises(ShardlineError) as caught:
        await cluster.client.json("POST", f"{url_of(cluster.seeder)}/v1/possession", dict, body=challenge)
    assert caught.value.code == "forbidden"
