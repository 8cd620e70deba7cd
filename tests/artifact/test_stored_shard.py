"""Shard files from a store with holes: equal to those of the whole file, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.artifact.shard_files import ShardFiles
from shardline.artifact.store import Store, StoredArtifact
from shardline.artifact.stored_shard import check_headers, stored_model, stored_shard
from shardline.errors import ShardlineError
from shardline.formats.gguf_files import read_model
from tests.support.artifacts import split_gguf
from tests.support.stores import described, filled


@pytest.mark.parametrize(("first", "last"), [(0, 2), (3, 5), (6, 8)])
def test_it_is_the_file_that_the_whole_model_gives(
    tmp_path: Path, artifact: StoredArtifact, model: Path, first: int, last: int
) -> None:
    filled(artifact, model, artifact.wanted(first, last))
    made = stored_shard(artifact, ShardFiles(tmp_path / "made"), first, last)
    plain = ShardFiles(tmp_path / "plain").shard(read_model(model), artifact.content_id, first, last)
    assert made.read_bytes() == plain.read_bytes()
    # From the cache, also when the pieces are gone.
    artifact.files[0].commit(artifact.files[0].held() - artifact.files[0].held(), artifact.files[0].held())
    filled(artifact, model, {0: [0]})
    assert stored_shard(artifact, ShardFiles(tmp_path / "made"), first, last) == made


def test_with_a_hole_there_is_none(tmp_path: Path, artifact: StoredArtifact, model: Path) -> None:
    wanted = artifact.wanted(3, 5)[0]
    for missing in (wanted[0], wanted[-1]):
        filled(artifact, model, {0: [piece for piece in wanted if piece != missing]})
        with pytest.raises(ShardlineError, match="layers 3:5 lack") as caught:
            stored_shard(artifact, ShardFiles(tmp_path / "made"), 3, 5)
        assert caught.value.code == "artifact_incomplete"
        file = artifact.files[0]
        file.commit(file.held() - file.held(), file.held())
    assert not (tmp_path / "made").exists()


def test_what_rotted_since_is_found_before_it_is_loaded(tmp_path: Path, artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model, artifact.wanted(3, 5))
    bad = artifact.wanted(3, 5)[0][-1]
    with artifact.files[0].data_path.open("r+b") as file:
        file.seek(bad << 18)
        byte = file.read(1)[0]
        file.seek(bad << 18)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(ShardlineError, match="lack 1 pieces"):
        stored_shard(artifact, ShardFiles(tmp_path / "made"), 3, 5)
    assert bad not in artifact.files[0].held()
    assert list((tmp_path / "made").glob("*.gguf")) == []
    filled(artifact, model, {0: [bad]})
    assert stored_shard(artifact, ShardFiles(tmp_path / "made"), 3, 5).exists()


def test_of_a_split_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    paths = split_gguf(tmp_path / "model")
    with Store(tmp_path / "store", reserve_bytes=0).add(described(paths[0], tmp_path / "bundle")) as artifact:
        from shardline.artifact.adoption import adopt

        for number, path in enumerate(paths):
            assert adopt(artifact, number, path, refer=False) is not None
        check_headers(artifact)
        assert stored_model(artifact).tensors.keys() == read_model(paths[0]).tensors.keys()
        made = stored_shard(artifact, ShardFiles(tmp_path / "made"), 2, 6)
        plain = ShardFiles(tmp_path / "plain").shard(read_model(paths[0]), artifact.content_id, 2, 6)
        assert made.read_bytes() == plain.read_bytes()


def test_a_damaged_cache_is_not_made_anew_from_damaged_pieces(
    tmp_path: Path, artifact: StoredArtifact, model: Path
) -> None:
    """The file differs from the store: whichever of the two is damaged, what comes out is right or nothing."""
    filled(artifact, model, artifact.wanted(3, 5))
    files = ShardFiles(tmp_path / "made")
    made = stored_shard(artifact, files, 3, 5)
    right = made.read_bytes()
    made.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    assert stored_shard(artifact, files, 3, 5).read_bytes() == right
    bad = artifact.wanted(3, 5)[0][-1]
    with artifact.files[0].data_path.open("r+b") as file:
        file.seek(bad << 18)
        file.write(b"rotten")
    with pytest.raises(ShardlineError, match="lack 1 pieces"):
        stored_shard(artifact, files, 3, 5)
    assert made.read_bytes() == right
