"""Room for pieces and Shard file: one sum where they share a disk, each for itself where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.artifact.bundle import Bundle
from shardline.artifact.fetch import Fetch
from shardline.artifact.shard_files import ShardFiles
from shardline.artifact.shard_room import bytes_beside
from shardline.artifact.store import Store, StoredArtifact
from shardline.artifact.stored_shard import stored_shard
from shardline.errors import ShardlineError
from tests.support.small_disk import mounted
from tests.support.stores import FileSource, filled


@pytest.fixture
def headed(artifact: StoredArtifact, model: Path) -> Iterator[StoredArtifact]:
    """Only the header is held."""
    filled(artifact, model, {0: [0]})
    yield artifact


def test_the_file_is_counted_until_it_is_there(tmp_path: Path, artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model)
    files = ShardFiles(tmp_path / "not" / "yet" / "there")
    beside = bytes_beside(artifact, files, 2, 4, vocabulary=False)
    path = stored_shard(artifact, files, 2, 4)
    assert beside == path.stat().st_size
    assert bytes_beside(artifact, files, 2, 4, vocabulary=False) == 0
    with_text = bytes_beside(artifact, files, 2, 4, vocabulary=True)
    assert 0 < with_text < beside, "the vocabulary has a file of its own"


def test_on_another_disk_it_must_fit_there(tmp_path: Path, headed: StoredArtifact) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        with pytest.raises(ShardlineError) as caught:
            bytes_beside(headed, ShardFiles(disk / "shards"), 2, 4, vocabulary=False)
        assert caught.value.code == "disk_full" and str(disk) in caught.value.message
        assert caught.value.details["needed_bytes"] > caught.value.details["free_bytes"]
    with mounted(tmp_path / "large", "64m") as disk:
        assert bytes_beside(headed, ShardFiles(disk / "shards"), 2, 4, vocabulary=False) == 0


async def test_a_fetch_leaves_room_for_what_is_made_of_it(tmp_path: Path, bundle: Bundle, model: Path) -> None:
    """The pieces alone would fit."""
    with mounted(tmp_path / "disk", "4m") as disk:
        store = Store(disk / "store", reserve_bytes=0)
        with store.add(bundle) as artifact:
            filled(artifact, model, {0: [0]})
            beside = bytes_beside(artifact, ShardFiles(disk / "shards"), 2, 4, vocabulary=False)
            source = FileSource(model)
            fetch = Fetch(artifact, artifact.wanted(2, 4), connections=1, beside_bytes=beside)
            fetch.add(source)
            with pytest.raises(ShardlineError, match="more will be made of them") as caught:
                await fetch.run()
            assert caught.value.code == "disk_full" and source.asked == []
            alone = Fetch(artifact, artifact.wanted(2, 4), connections=1)
            alone.add(source)
            await alone.run()
        store.close()
