"""Files of other programs: found by size, proved by content, read in place, never touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.artifact.adoption import adopt, adopt_all, candidates, usual_folders
from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError
from tests.support.stores import described, filled, layered_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture
def artifact(tmp_path: Path, model: Path) -> Iterator[StoredArtifact]:
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(described(model, tmp_path / "bundle")) as made:
        yield made
    store.close()


@pytest.fixture
def cache(tmp_path: Path, model: Path) -> Path:
    """As another program leaves it: a blob under a digest, and a link with the name."""
    blobs = tmp_path / "home/.cache/huggingface/hub/models--x/blobs"
    blobs.mkdir(parents=True)
    (blobs / "0badc0de").write_bytes(model.read_bytes())
    (blobs / "other").write_bytes(b"config")
    snapshot = blobs.parent / "snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.gguf").symlink_to("../../blobs/0badc0de")
    return blobs / "0badc0de"


def test_a_whole_file_is_used_where_it_lies(artifact: StoredArtifact, cache: Path, tmp_path: Path) -> None:
    before = (cache.stat().st_mtime_ns, cache.read_bytes())
    taken = adopt_all(artifact, usual_folders(tmp_path / "home"))
    assert [(found.path, found.way) for found in taken] == [(cache, "reference")]
    file = artifact.files[0]
    assert len(file.held()) == file.count
    assert file.path() == cache
    assert not file.data_path.exists()
    assert file.read(100, 5000) == before[1][100:5000]
    assert (cache.stat().st_mtime_ns, cache.read_bytes()) == before
    assert list(candidates(artifact, [cache.parent])) == []


@pytest.mark.parametrize("change", ["touched", "replaced", "removed", "cut"])
def test_a_file_that_is_not_the_same_any_more_holds_nothing(
    artifact: StoredArtifact, cache: Path, model: Path, change: str
) -> None:
    adopt(artifact, 0, cache)
    file = artifact.files[0]
    assert file.held()
    if change == "touched":
        os.utime(cache, ns=(1, 1))
    elif change == "replaced":
        other = cache.with_name("new")
        other.write_bytes(cache.read_bytes())
        other.replace(cache)
    elif change == "removed":
        cache.unlink()
    else:
        os.truncate(cache, 1 << 18)
    assert not file.held()
    with pytest.raises(ShardlineError, match="not all held"):
        file.read(0, 10)
    # Pieces that are fetched now lie in our own file.
    filled(artifact, model, {0: [2]})
    assert list(file.held()) == [2]
    assert file.path() == file.data_path


def test_of_a_damaged_file_the_good_pieces_are_copied(artifact: StoredArtifact, cache: Path, model: Path) -> None:
    raw = bytearray(model.read_bytes())
    raw[3 << 18] ^= 1
    cache.write_bytes(raw)
    taken = adopt(artifact, 0, cache)
    file = artifact.files[0]
    assert taken is not None
    assert (taken.way, taken.pieces) == ("pieces", file.count - 1)
    assert 3 not in file.held()
    assert len(file.held()) == file.count - 1
    cache.unlink()
    assert file.read(0, 3 << 18) == model.read_bytes()[: 3 << 18]


def test_a_copy_of_our_own_can_be_asked_for(artifact: StoredArtifact, cache: Path, model: Path) -> None:
    taken = adopt(artifact, 0, cache, refer=False)
    assert taken is not None
    assert taken.way in ("clone", "pieces")
    cache.unlink()
    file = artifact.files[0]
    assert len(file.held()) == file.count
    assert file.data_path.read_bytes() == model.read_bytes()


def test_other_files_of_the_same_size_give_nothing(artifact: StoredArtifact, cache: Path, model: Path) -> None:
    cache.write_bytes(bytes(model.stat().st_size))
    assert [path for _, path in candidates(artifact, [cache.parent])] == [cache]
    assert adopt(artifact, 0, cache) is None
    assert not artifact.files[0].held()


def test_pipes_links_and_folders_without_access_are_passed_over(artifact: StoredArtifact, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    (odd / "loop").mkdir(parents=True)
    (odd / "loop" / "back").symlink_to(odd)
    os.mkfifo(odd / "pipe")
    assert list(candidates(artifact, [odd, tmp_path / "absent"])) == []
    assert adopt(artifact, 0, odd / "pipe") is None


def test_a_file_behind_a_link_is_used_where_it_lies(artifact: StoredArtifact, cache: Path, tmp_path: Path) -> None:
    """As caches name theirs: a folder for people, with links to files called by their digests."""
    named = tmp_path / "snapshots" / "main"
    named.mkdir(parents=True)
    (named / "circle.gguf").symlink_to(named / "circle.gguf")
    (named / "gone.gguf").symlink_to(tmp_path / "absent")
    (named / "model.gguf").symlink_to(os.path.relpath(cache, named))
    (taken,) = adopt_all(artifact, [named])
    assert (taken.way, taken.path) == ("reference", cache.resolve())
    assert artifact.files[0].path() == cache.resolve(), "the link may go: the file is what is read"
    (named / "model.gguf").unlink()
    assert len(artifact.files[0].held()) == artifact.files[0].count


def test_removing_the_artifact_leaves_the_file(artifact: StoredArtifact, cache: Path) -> None:
    adopt(artifact, 0, cache)
    artifact.close()
    artifact.store.remove(artifact.content_id)
    assert cache.exists()
