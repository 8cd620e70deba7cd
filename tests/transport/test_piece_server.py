"""Pieces over HTTP: only to those who may ask, only what is held, at the pace that was set."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from shardline.artifact.shelf import Shelf
from shardline.artifact.store import Store, StoredArtifact
from shardline.settings import Settings
from shardline.transport.answers import Response
from shardline.transport.http_client import HttpClient
from shardline.transport.pace import Pace
from shardline.transport.piece_server import PieceServer, piece_app
from shardline.wire.bitmap import HeldPieces
from tests.support.stores import content_of, described, filled, layered_model, size_of
from tests.transport.loopback import client_of, serving, until

KEY = "cluster-credential"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def artifact(tmp_path: Path, model: Path) -> Iterator[StoredArtifact]:
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(described(model, tmp_path / "bundle")) as made:
        filled(made, model, {0: [0, 1, 2, 6]})
        yield made
    store.close()


def server_of(artifact: StoredArtifact, settings: Settings | None = None) -> PieceServer:
    shelf = Shelf()
    shelf.put(artifact)
    return PieceServer(shelf, settings or Settings())


async def get(client: HttpClient, url: str, field: str | None) -> Response:
    headers = {} if field is None else {"range": field}
    return await client.request("GET", url, headers=headers, timeout_s=10, limit="test", max_body=16 << 20)


def path_of(artifact: StoredArtifact) -> str:
    return f"/v1/pieces/{artifact.content_id}/{artifact.files[0].name}"


async def test_only_held_ranges_are_given(artifact: StoredArtifact, model: Path) -> None:
    raw, size = content_of(model), size_of(model)
    async with serving(piece_app(server_of(artifact), KEY)) as server, client_of(credential=KEY) as client:
        url = server.url + path_of(artifact)
        for start, end in ((0, 1), (5, 3 << 18), (6 << 18, 7 << 18), ((1 << 18) - 1, (1 << 18) + 1)):
            answer = await get(client, url, f"bytes={start}-{end - 1}")
            assert answer.status == 206
            assert answer.body == raw[start:end]
            assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        for field in (f"bytes={2 << 18}-{3 << 18}", "bytes=0-", f"bytes={7 << 18}-", f"bytes={size}-", "bytes=5-4"):
            answer = await get(client, url, field)
            assert answer.status == 416, field
            assert answer.headers["content-range"] == f"bytes */{size}"
            assert b"artifact_incomplete" in answer.body
        for field in (None, "bytes=-5", "bytes=0-1,3-4", "items=0-1", "bytes=a-b", "bytes=0-" + "9" * 40):
            assert (await get(client, url, field)).status == 400, field


async def test_a_whole_file_is_given_to_the_end(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model)
    server_app = server_of(artifact)
    async with serving(piece_app(server_app, KEY)) as server, client_of(credential=KEY) as client:
        answer = await get(client, server.url + path_of(artifact), "bytes=0-")
    assert answer.body == content_of(model)
    assert server_app.sent_bytes == size_of(model)


async def test_the_offer_says_what_is_held(artifact: StoredArtifact) -> None:
    async with serving(piece_app(server_of(artifact), KEY)) as server, client_of(credential=KEY) as client:
        offer = await client.json("GET", f"{server.url}/v1/pieces/{artifact.content_id}", HeldPieces)
    tree = artifact.files[0].tree
    assert list(offer.files[0].in_pieces_of(tree.size, tree.piece_length)) == [0, 1, 2, 6]


async def test_strangers_get_nothing(artifact: StoredArtifact) -> None:
    async with serving(piece_app(server_of(artifact), KEY)) as server:
        for credential in (None, "wrong"):
            async with client_of(credential=credential) as client:
                assert (await get(client, server.url + path_of(artifact), "bytes=0-1")).status == 401


@pytest.mark.parametrize(
    "path",
    [
        "/v1/pieces/",
        "/v1/pieces/mac1-" + "0" * 64,
        "/v1/pieces/mac1-" + "0" * 64 + "/" + "0" * 64,
        "/v1/pieces/../../etc/passwd",
        "/v1/pieces/mac1-%2e%2e/x",
        "/v1/else",
    ],
)
async def test_other_paths_are_not_found(artifact: StoredArtifact, path: str) -> None:
    async with serving(piece_app(server_of(artifact), KEY)) as server, client_of(credential=KEY) as client:
        assert (await get(client, server.url + path, "bytes=0-1")).status == 404


async def test_nothing_can_be_sent_to_it(artifact: StoredArtifact) -> None:
    async with serving(piece_app(server_of(artifact), KEY)) as server, client_of(credential=KEY) as client:
        answer = await client.request(
            "PUT", server.url + path_of(artifact), body=b"x", timeout_s=5, limit="test", max_body=1 << 20
        )
    assert (answer.status, answer.headers["allow"]) == (405, "GET")


async def test_a_piece_found_damaged_is_no_longer_given(artifact: StoredArtifact) -> None:
    from shardline.wire.bitmap import Pieces

    file = artifact.files[0]
    async with serving(piece_app(server_of(artifact), KEY)) as server, client_of(credential=KEY) as client:
        url = server.url + path_of(artifact)
        assert (await get(client, url, "bytes=0-9")).status == 206
        file.commit(Pieces(file.count), Pieces.of(file.count, [0]))
        assert (await get(client, url, "bytes=0-9")).status == 416


class HeldBack(Shelf):
    """Opens nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_open = threading.Event()
        self.asked = 0

    def open(self, content_id: str, root: str, start: int, end: int) -> FileIO:
        self.asked += 1
        assert self.may_open.wait(20)
        return super().open(content_id, root, start, end)


async def test_too_many_at_once_are_told_to_come_again(artifact: StoredArtifact) -> None:
    """Those that are being answered are, to their end."""
    shelf = HeldBack()
    shelf.put(artifact)
    app = piece_app(PieceServer(shelf, Settings(upload_requests=2)), KEY)
    async with serving(app) as server, client_of(credential=KEY) as client:
        url, field = server.url + path_of(artifact), "bytes=0-99"
        async with asyncio.TaskGroup() as group:
            first = [group.create_task(get(client, url, field)) for _ in range(2)]
            await until(lambda: shelf.asked == 2)
            refused = await get(client, url, field)
            shelf.may_open.set()
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        assert [task.result().status for task in first] == [206, 206]
        assert (await get(client, url, field)).status == 206


def test_the_pace_is_shared_by_all() -> None:
    """In order, and without a debt from idle times."""
    pace = Pace(1000)
    assert [pace.place(5.0, 100) for _ in range(3)] == pytest.approx([0.0, 0.1, 0.2])
    assert pace.place(60.0, 500) == 0.0
    assert pace.place(60.1, 500) == pytest.approx(0.4)
    assert Pace(0).place(0.0, 1 << 60) == 0.0


async def test_the_pace_is_asked_for_every_byte(artifact: StoredArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    paces: list[int] = []
    place = Pace.place

    def noted(self: Pace, now: float, count: int) -> float:
        paces.append(count)
        return place(self, now, count)

    monkeypatch.setattr(Pace, "place", noted)
    app = piece_app(server_of(artifact, Settings(upload_bytes_per_s=1 << 30)), KEY)
    async with serving(app) as server, client_of(credential=KEY) as client:
        await get(client, server.url + path_of(artifact), f"bytes=0-{(3 << 18) - 1}")
    assert sum(paces) == 3 << 18
