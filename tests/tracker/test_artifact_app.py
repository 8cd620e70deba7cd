"""The artifact plane of a Tracker over HTTP, on loopback: the description, advertisements, sources, a challenge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from shardline.artifact.bundle import load_bundle
from shardline.artifact.possession import answer
from shardline.artifact.signing import SIGNATURE_BYTES_LIMIT
from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.app import create_app
from shardline.tracker.bundle_files import TO_ONE, BundleFiles
from shardline.tracker.examination import ask_with
from shardline.tracker.offers import Offer
from shardline.tracker.state import TrackerState, dial_with
from shardline.transport.bodies import read_json, send_body, send_json
from shardline.transport.boundary import ControlGate, ErrorBoundary
from shardline.transport.http_client import HttpClient, Response
from shardline.transport.http_server import serve
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.artifacts import POSSESSION_PATH, Challenge, Seeder
from shardline.wire.bitmap import Pieces
from shardline.wire.messages import Signed
from tests.support.artifacts import safetensors_folder, signed_bundle
from tests.support.stores import ANYBODY
from tests.tracker.artifact_values import LAYERS, HeldHere, Offered, advertisement, statement
from tests.tracker.cluster_values import SigningNode

CREDENTIAL = "correct horse"
SETTINGS = Settings(dial_back_s=1.0, tracker_expiry_s=5.0)


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Offered:
    return Offered.made(tmp_path_factory.mktemp("offered"))


@pytest.fixture(scope="module")
def folder_offer(tmp_path_factory: pytest.TempPathFactory) -> Offer:
    """A signed one with small files."""
    folder = tmp_path_factory.mktemp("folder")
    return Offer.of(signed_bundle(safetensors_folder(folder / "model"), folder / "bundle"))


class Cluster:
    def __init__(self, url: str, state: TrackerState, client: HttpClient) -> None:
        self.url = url
        self.state = state
        self.client = client
        self.tracker = TrackerClient(client, url)

    async def raw(self, method: str, path: str, **named: object) -> Response:
        return await self.client.request(method, self.url + path, timeout_s=5.0, limit="control", **named)  # type: ignore[arg-type]

    async def advertise(self, node: SigningNode, offered: Offered) -> None:
        said = advertisement(node, offered, self.state.clock.unix())
        await self.tracker.advertise(node.id, Signed(statement=statement(node, said)))


@pytest.fixture
async def cluster(offered: Offered, folder_offer: Offer) -> AsyncIterator[Cluster]:
    client, plain = HttpClient(SETTINGS, credential=CREDENTIAL), HttpClient(SETTINGS)
    state = TrackerState(
        SETTINGS,
        dial=dial_with(plain, SETTINGS),
        loopback=True,
        offers=[offered.offer, folder_offer],
        ask=ask_with(client, SETTINGS),
    )
    server = await serve(create_app(state, CREDENTIAL), settings=SETTINGS)
    try:
        yield Cluster(server.url, state, client)
    finally:
        for each in (client, plain):
            await each.aclose()
        await server.stop()


@asynccontextmanager
async def holder(cluster: Cluster, offered: Offered, has: Pieces) -> AsyncIterator[SigningNode]:
    """A Node that is registered, and shows what it has to whoever knows the credential."""
    node = SigningNode("", [])

    async def possession(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == POSSESSION_PATH:
            challenge = await read_json(receive, scope, Challenge, 1 << 20)
            await send_body(send, 200, answer([HeldHere(offered, has)], challenge.blocks), b"application/octet-stream")
        else:
            await send_json(send, node.prove(scope["query_string"].decode().removeprefix("nonce=")))

    gate = ControlGate(possession, credential=CREDENTIAL, is_open=lambda scope: scope["path"] == "/v1/node")
    server = await serve(ErrorBoundary(gate), settings=SETTINGS, lifespan="off")
    node.url = server.url
    try:
        nonce = await cluster.tracker.nonce()
        registration = node.register_statement(nonce.nonce, cluster.state.clock.unix())
        await cluster.tracker.register(Signed(statement=registration))
        yield node
    finally:
        await server.stop(0.2)


async def test_a_node_gets_the_whole_description_file_by_file(
    cluster: Cluster, offered: Offered, folder_offer: Offer, tmp_path: Path
) -> None:
    signed = folder_offer.bundle
    for bundle, names in (
        (offered.bundle, ["manifest.json", "model.torrent"]),
        (
            signed,
            [
                "manifest.json",
                "model.torrent",
                "artifact.sig",
                *(f"files/{entry.path}" for entry in signed.manifest.small_files),
            ],
        ),
    ):
        copy = tmp_path / bundle.manifest.content_id
        for name in names:
            raw = await cluster.tracker.bundle_file(bundle.manifest.content_id, name, 16 << 20)
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(raw)
        assert load_bundle(copy, ANYBODY).manifest == bundle.manifest
    assert len(signed.manifest.small_files) > 3


async def refused(work: object) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        await work  # type: ignore[misc]
    return caught.value


async def test_no_other_file_is_given(cluster: Cluster, offered: Offered, folder_offer: Offer) -> None:
    (folder_offer.bundle.folder / "notes.txt").write_text("mine")
    for path in (
        "notes.txt",
        "artifact.sig/",
        "files",
        "files/",
        "../bundle/manifest.json",
        "files/../manifest.json",
        "%2e%2e/model/config.json",
        "files/training.log",
        "/etc/passwd",
    ):
        assert (await cluster.raw("GET", f"/v1/artifacts/{folder_offer.content_id}/bundle/{path}")).status == 404, path
    # Not signed: there is no signature to give.
    error = await refused(cluster.tracker.bundle_file(offered.content_id, "artifact.sig", SIGNATURE_BYTES_LIMIT))
    assert error.code == "not_found"
    error = await refused(cluster.tracker.bundle_file("mac1-" + "0" * 64, "manifest.json", 1 << 20))
    assert error.code == "not_found"
    assert (await cluster.raw("POST", f"/v1/artifacts/{offered.content_id}/bundle/manifest.json")).status == 405


async def test_a_file_that_was_changed_into_a_link_is_not_followed(
    cluster: Cluster, folder_offer: Offer, tmp_path: Path
) -> None:
    path = folder_offer.bundle.folder / "files" / "LICENSE"
    kept = path.read_bytes()
    secret = tmp_path / "secret"
    secret.write_text("free")
    try:
        for make in (lambda: path.symlink_to(secret), lambda: path.write_bytes(kept * 2)):
            path.unlink()
            make()
            error = await refused(cluster.tracker.bundle_file(folder_offer.content_id, "files/LICENSE", 1 << 20))
            assert error.code == "artifact_invalid"
    finally:
        path.unlink()
        path.write_bytes(kept)


async def test_who_does_not_take_what_it_asked_for_keeps_nobody_out(folder_offer: Offer) -> None:
    """However many they are: one address has some places, all together more, and nobody keeps one."""
    files = BundleFiles([folder_offer], Settings(control_s=0.3))
    sent: list[Message] = []

    def scope(address: str) -> Scope:
        params = {"content_id": folder_offer.content_id, "path": "manifest.json"}
        return {"type": "http", "method": "GET", "client": (address, 9), "path_params": params}

    async def stuck(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Message:
        raise AssertionError

    async def taken(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        slow = [tasks.create_task(refused(files(scope("127.0.0.2"), receive, stuck))) for _ in range(TO_ONE)]
        await asyncio.sleep(0.05)
        assert (await refused(files(scope("127.0.0.2"), receive, taken))).code == "queue_full"
        await files(scope("127.0.0.3"), receive, taken)
    body = b"".join(message.get("body", b"") for message in sent)
    assert body == (folder_offer.bundle.folder / "manifest.json").read_bytes()
    assert [one.result().code for one in slow] == ["slow_client"] * TO_ONE
    await files(scope("127.0.0.2"), receive, taken)


async def test_strangers_get_nothing(cluster: Cluster, offered: Offered) -> None:
    for path in ("/v1/artifacts", f"/v1/artifacts/{offered.content_id}/bundle/manifest.json"):
        assert (await cluster.raw("GET", path, authorize=False)).status == 401


async def test_an_advertisement_leads_to_a_source_and_a_challenge(cluster: Cluster, offered: Offered) -> None:
    async with holder(cluster, offered, Pieces.all(offered.count)) as node:
        await cluster.advertise(node, offered)
        async with asyncio.timeout(10):
            while (await told(cluster, offered)).proven is None:
                await asyncio.sleep(0.02)
        shown = await told(cluster, offered)
        assert (shown.node, shown.proven, shown.servable) == (node.id, True, [(0, LAYERS)])
        (source,) = await cluster.tracker.sources(offered.content_id, "n-other")
        assert (source.node, source.url, source.same_host) == (node.id, node.url, True)
        assert await cluster.tracker.sources(offered.content_id, node.id) == []
        text = (await cluster.raw("GET", "/metrics")).body.decode()
        assert 'shardline_tracker_challenges_total{result="passed"} 1.0' in text
        assert 'shardline_tracker_advertisements_total{result="ok"} 1.0' in text
        assert 'shardline_tracker_possession{proven="yes"} 1.0' in text


async def test_one_that_holds_nothing_fails_its_first_challenge(cluster: Cluster, offered: Offered) -> None:
    async with holder(cluster, offered, Pieces(offered.count)) as node:
        await cluster.advertise(node, offered)
        async with asyncio.timeout(10):
            while b'challenges_total{result="failed"} 1.0' not in (await cluster.raw("GET", "/metrics")).body:
                await asyncio.sleep(0.02)
        assert (await told(cluster, offered)).proven is None, "the further try comes later"


async def test_refusals_have_a_status(cluster: Cluster, offered: Offered) -> None:
    async with holder(cluster, offered, Pieces(offered.count)) as node:
        said = advertisement(node, offered, cluster.state.clock.unix())
        stranger = SigningNode(node.url, [])
        for text, code in (
            (statement(stranger, said), "unauthorized"),
            (statement(node, said), None),
            (statement(node, said), "invalid_value"),
            ("a" * (1 << 20), "invalid_value"),
        ):
            work = cluster.tracker.advertise(node.id, Signed(statement=text))
            if code is None:
                await work
            else:
                assert (await refused(work)).code in (code, "body_too_large")
        error = await refused(cluster.tracker.advertise("n-nobody", Signed(statement=statement(node, said))))
        assert error.code == "unknown_node"
        error = await refused(cluster.tracker.sources("mac1-" + "0" * 64, node.id))
        assert error.code == "not_found"


async def told(cluster: Cluster, offered: Offered) -> Seeder:
    infos = (await cluster.tracker.artifacts()).artifacts
    (found,) = [info for info in infos if info.content_id == offered.content_id]
    (seeder,) = found.seeders
    return seeder
