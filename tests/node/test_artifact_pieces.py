"""Pieces from the Nodes that a Tracker names: found while the fetch runs, accused when they lie, waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardline.artifact.bundle import Bundle
from shardline.artifact.shelf import Shelf
from shardline.artifact.store import Store, StoredArtifact
from shardline.node import artifact_pieces
from shardline.node import bans as banning
from shardline.node.artifact_pieces import ArtifactPieces
from shardline.settings import Settings
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import serve
from shardline.transport.piece_server import PieceServer, piece_app
from shardline.wire.artifacts import Source
from tests.support.stores import described, filled, layered_model
from tests.transport.loopback import until

SETTINGS = Settings(store_reserve_bytes=0)
CREDENTIAL = "c" * 32


class Plane:
    """Whom the Tracker names, and what was announced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = layered_model(folder / "model", layers=4)
        self.bundle: Bundle = described(self.model, folder / "bundle")
        self.named: list[Source] = []
        self.given: dict[str, PieceServer] = {}
        self.stores: dict[str, StoredArtifact] = {}
        self.announced: list[tuple[str, dict[str, Any]]] = []
        self.stack = AsyncExitStack()

    def store(self, name: str) -> StoredArtifact:
        store = Store(self.folder / name, reserve_bytes=0)
        self.stack.callback(store.close)
        return self.stack.enter_context(store.add(self.bundle))

    async def seed(self, name: str, *, rotten: Sequence[int] = (), has: Sequence[int] | None = None) -> Source:
        """A Node with everything, if not said what; of the `rotten` pieces it does not know that they are."""
        artifact = self.stores[name] = self.store(name)
        filled(artifact, self.model, None if has is None else {0: has})
        length = artifact.files[0].tree.piece_length
        with artifact.files[0].data_path.open("r+b") as file:
            for piece in rotten:
                file.seek(piece * length)
                file.write(b"rotten")
        shelf = Shelf()
        shelf.put(artifact)
        given = self.given[name] = PieceServer(shelf, SETTINGS)
        app = piece_app(given, CREDENTIAL)
        server = await serve(app, settings=SETTINGS, host="127.0.0.1", port=0, lifespan="off")
        self.stack.push_async_callback(server.stop)
        return Source(node=f"n-{name}", url=server.url)

    def announce(self, phase: str, /, **facts: str | int) -> None:
        self.announced.append((phase, facts))

    def fetching(self) -> ArtifactPieces:
        client = HttpClient(SETTINGS, credential=CREDENTIAL)
        self.stack.push_async_callback(client.aclose)

        async def sources() -> Sequence[Source]:
            return list(self.named)

        pieces = ArtifactPieces(
            self.store("own"), sources=sources, client=client, settings=SETTINGS, announce=self.announce
        )
        self.stack.push_async_callback(pieces.aclose)
        return pieces


@asynccontextmanager
async def plane(folder: Path) -> AsyncIterator[Plane]:
    made = Plane(folder)
    async with made.stack:
        yield made


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_pieces, "SOURCES_S", 0.05)


async def test_it_waits_for_somebody_who_has_them(tmp_path: Path) -> None:
    async with plane(tmp_path) as made:
        pieces = made.fetching()
        async with asyncio.TaskGroup() as tasks:
            bringing = tasks.create_task(pieces.bring(0, 2))
            await until(lambda: [phase for phase, _ in made.announced if phase == "waiting"] == ["waiting"])
            assert "no source is known" in (pieces.doing or "")
            made.named.append(await made.seed("late"))
            await bringing
        assert pieces.artifact.missing(pieces.artifact.wanted(0, 2)) == {}
        assert pieces.doing is None and pieces.fetching is None
        assert [phase for phase, _ in made.announced].count("waiting") == 1, "said once"
        assert made.announced[-1][1]["done"] == made.announced[-1][1]["total"]


async def test_headers_that_have_rotted_are_brought_again(tmp_path: Path) -> None:
    """They are read first of all: a Node that only compared them with the table would never start again."""
    async with plane(tmp_path) as made:
        made.named.append(await made.seed("good"))
        pieces = made.fetching()
        await pieces.bring_headers()
        file = pieces.artifact.files[0]
        with file.data_path.open("r+b") as data:
            data.seek(100)
            data.write(b"rotten")
        assert list(file.held()) == [0], "nothing has looked yet"
        await pieces.bring_headers()
        assert list(file.held()) == [0] and file.is_whole(0)


async def test_only_the_headers(tmp_path: Path) -> None:
    async with plane(tmp_path) as made:
        made.named.append(await made.seed("good"))
        pieces = made.fetching()
        await pieces.bring_headers()
        assert list(pieces.artifact.held()[0]) == [0]


async def test_who_gives_wrong_bytes_is_accused_once_and_asked_nothing_more(tmp_path: Path) -> None:
    async with plane(tmp_path) as made:
        pieces = made.fetching()
        wanted = pieces.artifact.wanted(0, 4)[0]
        made.named.append(await made.seed("liar", rotten=wanted))
        async with asyncio.TaskGroup() as tasks:
            bringing = tasks.create_task(pieces.bring(0, 4))
            await until(lambda: bool(pieces.accused() == ["n-liar"]))
            made.named.append(await made.seed("good"))
            await bringing
        assert pieces.accused() == []
        assert all(pieces.artifact.files[0].is_whole(piece) for piece in wanted)


async def test_who_lies_is_not_asked_again_in_the_same_fetch_until_its_ban_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_pieces, "AGAIN_S", 0.05)
    monkeypatch.setattr(banning, "FIRST_S", 2.0)
    async with plane(tmp_path) as made:
        pieces = made.fetching()
        wanted = pieces.artifact.wanted(0, 4)[0]
        liar = await made.seed("liar", rotten=wanted)
        # Somebody who has nearly nothing keeps the fetch going.
        made.named += [liar, await made.seed("poor", has=[0])]
        async with asyncio.TaskGroup() as tasks:
            bringing = tasks.create_task(pieces.bring(0, 4))
            await until(lambda: bool(pieces.accused() == ["n-liar"]))
            sent = -1
            while sent != (sent := made.given["liar"].sent_bytes):  # what was asked before the ban still comes
                await asyncio.sleep(0.05 * 2)
            await asyncio.sleep(0.05 * 5)
            assert made.given["liar"].sent_bytes == sent and not bringing.done()
            data = made.stores["liar"].files[0].data_path
            data.write_bytes(made.model.read_bytes())
            await bringing
        assert made.given["liar"].sent_bytes > sent


async def test_of_a_tracker_that_names_everybody_some_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_pieces, "SOURCES_AT_A_TIME", 4)
    monkeypatch.setattr("shardline.artifact.sources._BACKOFF_S", (0.01, 0.01))
    async with plane(tmp_path) as made:
        pieces = made.fetching()
        made.named += [await made.seed("poor", has=[0])] * 3
        made.named += [Source(node=f"n-{port}", url=f"http://127.0.0.1:{port}") for port in range(1, 500)]
        async with asyncio.TaskGroup() as tasks:
            bringing = tasks.create_task(pieces.bring(0, 4))
            await until(lambda: len(made.announced) > 2)
            made.named = [await made.seed("good")]
            await bringing


async def test_what_another_way_found_out_counts_here_too(tmp_path: Path) -> None:
    async with plane(tmp_path) as made:
        pieces = made.fetching()
        made.named += [await made.seed("liar"), await made.seed("good")]
        pieces.bans.ban("n-liar", asyncio.get_running_loop().time())
        pieces.accuse("n-liar")
        assert pieces.accused() == ["n-liar"]
        await pieces.bring(0, 4)
        sources = {str(facts["source"]) for _, facts in made.announced if "source" in facts}
        assert sources <= {made.named[1].url.removeprefix("http://")}
