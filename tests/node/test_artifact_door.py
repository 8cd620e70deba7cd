"""The port of a Node that holds pieces: what it gives, and to whom it shows blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.artifact.possession import is_true
from shardline.artifact.store import Store, StoredArtifact
from shardline.node.artifact_door import ArtifactDoor
from shardline.settings import Settings
from shardline.transport.authority import uri_of
from shardline.transport.boundary import ErrorBoundary
from shardline.transport.guard import PARTIES
from shardline.transport.http_client import HttpClient, Response
from shardline.transport.http_server import serve
from shardline.wire.artifacts import Challenge
from shardline.wire.bitmap import HeldPieces
from tests.support.stores import described, filled, layered_model

SETTINGS = Settings()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("held")
    model = layered_model(folder, layers=4)
    store = Store(folder / "store", reserve_bytes=0)
    with store.add(described(model, folder / "bundle")) as artifact:
        filled(artifact, model, artifact.wanted(0, 2))
        yield artifact
    store.close()


@asynccontextmanager
async def opened(artifact: StoredArtifact, party: str | None = None) -> AsyncIterator[tuple[HttpClient, str]]:
    """A door, as a caller meets it whose certificate names `party`; None: in a cluster without keys."""
    door = ArtifactDoor(SETTINGS)
    door.put(artifact)

    def named(app: ASGIApp) -> ASGIApp:
        async def inner(scope: Scope, receive: Receive, send: Send) -> None:
            if party is not None:
                scope.setdefault("state", {})[PARTIES] = frozenset({uri_of(party)})
            await app(scope, receive, send)

        return inner

    server = await serve(ErrorBoundary(named(door)), settings=SETTINGS, host="127.0.0.1", port=0, lifespan="off")
    client = HttpClient(SETTINGS)
    try:
        yield client, server.url
    finally:
        await client.aclose()
        await server.stop()


async def shown(client: HttpClient, url: str, content_id: str, blocks: list[tuple[int, int]]) -> Response:
    body = msgspec.json.encode(Challenge(content_id=content_id, blocks=blocks))
    headers = {"content-type": "application/json"}
    return await client.request(
        "POST", f"{url}/v1/possession", body=body, headers=headers, timeout_s=10, limit="x", max_body=4 << 20
    )


def code_of(response: Response) -> str:
    return str(msgspec.json.decode(response.body)["error"]["code"])


async def test_pieces_are_given(held: StoredArtifact) -> None:
    async with opened(held) as (client, url):
        offer = await client.json("GET", f"{url}/v1/pieces/{held.content_id}", HeldPieces)
        assert offer.files[0].pieces == held.held()[0].to_bytes()


async def test_blocks_are_shown_to_the_tracker(held: StoredArtifact) -> None:
    blocks = [(0, piece * held.files[0].tree.piece_length // 16384) for piece in held.held()[0]][:5]
    for party in (None, "tracker"):
        async with opened(held, party) as (client, url):
            answer = await shown(client, url, held.content_id, blocks)
            assert answer.status == 200 and is_true(held.bundle.trees, blocks, answer.body)
    for party in ("n-0123456789abcdef", "operator", "gateway-x"):
        async with opened(held, party) as (client, url):
            assert code_of(await shown(client, url, held.content_id, blocks)) == "forbidden"


async def test_what_is_not_held_or_not_there_is_refused(held: StoredArtifact) -> None:
    missing = next(piece for piece in range(held.files[0].count) if piece not in held.held()[0])
    block = missing * held.files[0].tree.piece_length // 16384
    async with opened(held) as (client, url):
        assert code_of(await shown(client, url, held.content_id, [(0, block)])) == "artifact_incomplete"
        assert code_of(await shown(client, url, held.content_id, [(0, 1 << 30)])) == "invalid_value"
        assert code_of(await shown(client, url, held.content_id, [(0, 0)] * 65)) == "invalid_value"
        assert code_of(await shown(client, url, "mac1-" + "0" * 64, [(0, 0)])) == "not_found"
        answer = await client.request("GET", f"{url}/v1/possession", timeout_s=5, limit="x")
        assert code_of(answer) == "method_not_allowed"
