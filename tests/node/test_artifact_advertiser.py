"""What the Tracker is told of pieces, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.types import Receive, Scope, Send

from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError
from shardline.node import artifact_advertiser
from shardline.node.artifact_advertiser import Advertised, Advertiser
from shardline.node.info import Identity
from shardline.settings import Settings
from shardline.transport.bodies import read_json, send_json
from shardline.transport.boundary import ErrorBoundary
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import serve
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.artifacts import ADVERTISEMENT_DOMAIN, ADVERTISEMENT_S, Advertisement
from shardline.wire.bitmap import Pieces
from shardline.wire.messages import Signed
from shardline.wire.tickets import public_bytes, verify
from tests.support.stores import described, filled, layered_model
from tests.transport.loopback import until

SETTINGS = Settings()


class Ear:
    """Takes advertisements as a Tracker does, and may refuse them."""

    def __init__(self) -> None:
        self.heard: list[Advertisement] = []
        self.refusals = 0
        self.known = -1
        self.identity = Identity(key=Ed25519PrivateKey.generate(), url="http://127.0.0.1:1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"] == f"/v1/nodes/{self.identity.node_id}/pieces"
        signed = await read_json(receive, scope, Signed, 1 << 20)
        if self.refusals:
            self.refusals -= 1
            raise ShardlineError("unknown_node", "register first")
        key = public_bytes(self.identity.key)
        said = verify(key, ADVERTISEMENT_DOMAIN, signed.statement, Advertisement)
        if said.sequence <= self.known:
            raise ShardlineError("invalid_value", "it is not newer", param="sequence", known=self.known)
        self.heard.append(said)
        await send_json(send, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return layered_model(tmp_path / "model", layers=4)


@pytest.fixture
def artifact(tmp_path: Path, model: Path) -> Iterator[StoredArtifact]:
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(described(model, tmp_path / "bundle")) as made:
        filled(made, model, {0: [0, 1]})
        yield made
    store.close()


@asynccontextmanager
async def advertising(ear: Ear, artifact: StoredArtifact, epoch: list[str | None]) -> AsyncIterator[None]:
    server = await serve(ErrorBoundary(ear), settings=SETTINGS, host="127.0.0.1", port=0, lifespan="off")
    client = HttpClient(SETTINGS)
    advertiser = Advertiser(
        identity=ear.identity,
        tracker=TrackerClient(client, server.url),
        epoch=lambda: epoch[0],
        artifacts=[Advertised(artifact)],
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(advertiser.run())
        try:
            yield
        finally:
            running.cancel()
            await client.aclose()
            await server.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_advertiser, "LOOK_S", 0.02)
    monkeypatch.setattr(artifact_advertiser, "ADVERTISE_PAUSE_S", 0.05)


async def test_at_first_on_change_and_after_each_registration(artifact: StoredArtifact, model: Path) -> None:
    ear = Ear()
    epoch: list[str | None] = [None]
    async with advertising(ear, artifact, epoch):
        await asyncio.sleep(0.05)
        assert ear.heard == [], "nobody knows this Node yet"
        epoch[0] = "a"
        await until(lambda: len(ear.heard) == 1)
        assert ear.heard[0].files[0].pieces == Pieces.of(artifact.files[0].count, [0, 1]).to_bytes()
        filled(artifact, model, {0: [2]})
        await until(lambda: len(ear.heard) == 2)
        assert ear.heard[1].files[0].pieces == Pieces.of(artifact.files[0].count, [0, 1, 2]).to_bytes()
        epoch[0] = "b"
        await until(lambda: len(ear.heard) == 3)
        file = artifact.files[0]
        file.commit(Pieces(file.count), file.held())
        await until(lambda: len(ear.heard) == 4)
        assert ear.heard[3].files == [], "what was found damaged is taken back"
    assert all(told.expires - time.time() < ADVERTISEMENT_S for told in ear.heard)
    sequences = [told.sequence for told in ear.heard]
    assert sequences == sorted(set(sequences))


async def test_what_has_not_changed_is_told_again_before_it_lapses(
    artifact: StoredArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_advertiser, "ADVERTISE_EVERY_S", 0.1)
    ear = Ear()
    async with advertising(ear, artifact, ["a"]):
        await until(lambda: len(ear.heard) >= 3)


async def test_a_refusal_is_not_the_end(artifact: StoredArtifact) -> None:
    ear = Ear()
    ear.refusals = 2
    async with advertising(ear, artifact, ["a"]):
        await until(lambda: len(ear.heard) == 1)


async def test_a_clock_that_was_set_back_keeps_no_pieces_from_others(artifact: StoredArtifact) -> None:
    """An earlier life of this Node has advertised in what is the future now."""
    ear = Ear()
    ear.known = int(time.time() * 1e3) + 86_400_000
    async with advertising(ear, artifact, ["a"]):
        await until(lambda: len(ear.heard) == 1)
        assert ear.heard[0].sequence == ear.known + 1
