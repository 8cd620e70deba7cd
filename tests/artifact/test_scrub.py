"""Scrubbing: what rots is found, is no longer held, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.artifact.scrub import scrub
from shardline.artifact.store import Store, StoredArtifact
from tests.support.stores import content_of, described, filled, layered_model

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture
def artifact(tmp_path: Path, model: Path) -> Iterator[StoredArtifact]:
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(described(model, tmp_path / "bundle")) as made:
        filled(made, model)
        yield made
    store.close()


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def test_one_flipped_bit_costs_one_piece(artifact: StoredArtifact) -> None:
    file = artifact.files[0]
    flip(file.data_path, (5 << 18) + 77)
    seen: list[tuple[int, int]] = []
    report = await scrub(artifact, bytes_per_s=0, progress=lambda done, total: seen.append((done, total)))
    assert report.bad == {0: (5,)}
    assert report.checked_bytes == file.tree.size
    assert seen[-1] == (file.tree.size, file.tree.size)
    assert len(file.held()) == file.count - 1
    assert 5 not in file.held()
    assert (await scrub(artifact, bytes_per_s=0)).bad == {}


async def test_a_lost_record_is_made_again(artifact: StoredArtifact) -> None:
    file = artifact.files[0]
    flip(file.data_path, 9)
    (file.data_path.parent.parent / "held" / file.name).write_bytes(b"")
    report = await scrub(artifact, bytes_per_s=0)
    assert report.found == file.count - 1
    assert list(file.held()) == list(range(1, file.count))


async def test_a_store_that_was_copied_is_known_again(artifact: StoredArtifact, model: Path) -> None:
    """Another inode under the old name: nothing is believed before it was read."""
    file = artifact.files[0]
    copy = file.data_path.with_name("copy")
    copy.write_bytes(content_of(model)[: 4 << 18] + bytes(file.tree.size - (4 << 18)))
    copy.replace(file.data_path)
    assert not file.held()
    assert (await scrub(artifact, bytes_per_s=0)).found == 4
    assert list(file.held()) == [0, 1, 2, 3]


async def test_it_keeps_its_pace(artifact: StoredArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr("shardline.artifact.scrub.asyncio.sleep", nap)
    await scrub(artifact, bytes_per_s=1 << 18)
    # Nothing slept, so the waits add up: the n-th is near n seconds.
    assert naps == sorted(naps)
    assert naps[-1] == pytest.approx(artifact.files[0].tree.size / (1 << 18), abs=3.0)
