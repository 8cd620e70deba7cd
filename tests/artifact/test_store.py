"""The store: what is held is right, synced and readable, and nothing else is; whatever happens to its disk."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.artifact.bundle import Bundle, TrustPolicy
from shardline.artifact.locks import Claims
from shardline.artifact.piece_writer import PieceWriter
from shardline.artifact.store import Store, StoredArtifact
from shardline.artifact.stored_file import RECORD_BYTES_LIMIT
from shardline.errors import ShardlineError
from shardline.wire.bitmap import Pieces
from tests.support.artifacts import change_manifest
from tests.support.small_disk import mounted
from tests.support.stores import ANYBODY, described, filled, layered_model, store_at


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return described(model, tmp_path_factory.mktemp("bundle") / "a")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = store_at(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def artifact(store: Store, bundle: Bundle) -> Iterator[StoredArtifact]:
    with store.add(bundle) as made:
        yield made


def piece_of(artifact: StoredArtifact, model: Path, piece: int) -> bytes:
    start, end = artifact.files[0].tree.piece_range(piece)
    return model.read_bytes()[start:end]


def reopened(artifact: StoredArtifact) -> StoredArtifact:
    """As another process would see it."""
    return Store(artifact.store.folder, reserve_bytes=0).open(artifact.content_id, ANYBODY)


def test_a_piece_is_held_from_its_commit_on(artifact: StoredArtifact, model: Path) -> None:
    writer, file = PieceWriter(artifact), artifact.files[0]
    assert writer.put(0, 3, piece_of(artifact, model, 3)) == []
    start, end = file.tree.piece_range(3)
    assert not file.held()
    with pytest.raises(ShardlineError, match="not all held") as caught:
        file.read(start, end)
    assert caught.value.code == "artifact_incomplete"
    writer.commit()
    assert list(file.held()) == [3]
    assert file.read(start + 5, end - 5) == model.read_bytes()[start + 5 : end - 5]
    with reopened(artifact) as other:
        assert list(other.files[0].held()) == [3]
    writer.close()


def test_no_byte_beside_held_pieces_is_readable(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model, {0: [1, 2, 4]})
    file, length = artifact.files[0], artifact.files[0].tree.piece_length
    assert len(file.read(length, 3 * length)) == 2 * length
    for start, end in ((length - 1, length + 1), (2 * length, 3 * length + 1), (0, 1), (3 * length, 4 * length)):
        with pytest.raises(ShardlineError, match="not all held"):
            file.read(start, end)
    for start, end in ((-1, 5), (5, 5), (0, file.tree.size + 1)):
        with pytest.raises(ShardlineError, match="bytes"):
            file.read(start, end)


def test_a_wrong_piece_is_never_written(artifact: StoredArtifact, model: Path) -> None:
    """Nor does it do harm to a right one that is there, or that comes in the same run."""
    file, length = artifact.files[0], artifact.files[0].tree.piece_length
    filled(artifact, model, {0: [2]})
    run = bytearray(model.read_bytes()[length : 4 * length])
    run[length] ^= 1
    writer = PieceWriter(artifact)
    assert writer.put(0, 1, run) == [2]
    writer.finish()
    assert list(file.held()) == [1, 2, 3]
    assert file.read(length, 4 * length) == model.read_bytes()[length : 4 * length]


def test_the_last_piece_may_be_short_but_not_longer(artifact: StoredArtifact, model: Path) -> None:
    file = artifact.files[0]
    last = file.count - 1
    writer = PieceWriter(artifact)
    assert writer.put(0, last, piece_of(artifact, model, last)[:-1]) == [last]
    assert writer.put(0, last, piece_of(artifact, model, last) + b"\0") == []
    writer.finish()
    assert last in file.held()
    assert file.data_path.stat().st_size == file.tree.size


def test_the_file_is_sparse(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model, {0: [5]})
    found = artifact.files[0].data_path.stat()
    assert found.st_size == model.stat().st_size
    assert found.st_blocks * 512 < 4 * artifact.files[0].tree.piece_length


def test_pieces_behind_the_end_of_a_file_that_was_cut_are_not_held(artifact: StoredArtifact, model: Path) -> None:
    """Nor are they again when it has its old length, all holes, and another piece was written."""
    filled(artifact, model)
    file, length = artifact.files[0], artifact.files[0].tree.piece_length
    os.truncate(file.data_path, 3 * length + 7)
    assert list(file.held()) == [0, 1, 2]
    filled(artifact, model, {0: [5]})
    assert list(file.held()) == [0, 1, 2, 5]
    with reopened(artifact) as other:
        assert list(other.files[0].held()) == [0, 1, 2, 5]


def test_another_file_in_its_place_holds_nothing(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model)
    file = artifact.files[0]
    kept = file.data_path.with_name("kept")
    os.rename(file.data_path, kept)
    assert not file.held()
    file.data_path.write_bytes(bytes(file.tree.size))
    assert not file.held()
    os.rename(kept, file.data_path)
    assert len(file.held()) == file.count


@pytest.mark.parametrize("change", [b"", b"{", b'{"version":2}', b"\xff"], ids=["empty", "cut", "newer", "noise"])
def test_a_damaged_record_claims_nothing(artifact: StoredArtifact, model: Path, change: bytes) -> None:
    filled(artifact, model)
    file = artifact.files[0]
    record = file.data_path.parent.parent / "held" / file.name
    record.write_bytes(change)
    assert not file.held()
    filled(artifact, model, {0: [1]})
    assert list(file.held()) == [1]


def test_a_record_of_any_size_costs_no_more_memory_than_it_may(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model)
    file = artifact.files[0]
    record = file.data_path.parent.parent / "held" / file.name
    tracemalloc.start()
    try:
        os.utime(record)
        assert len(file.held()) == file.count
        with record.open("r+b") as huge:
            huge.truncate(RECORD_BYTES_LIMIT + 1)
        assert not file.held()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_bit_that_the_disk_invented_is_not_believed(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model, {0: [0]})
    file = artifact.files[0]
    record = file.data_path.parent.parent / "held" / file.name
    raw = record.read_bytes()
    assert b'"pieces":"gA' in raw
    record.write_bytes(raw.replace(b'"pieces":"gA', b'"pieces":"wA'))
    assert not file.held()


def test_a_file_taken_away_between_write_and_commit_is_named(artifact: StoredArtifact, model: Path) -> None:
    writer, file = PieceWriter(artifact), artifact.files[0]
    writer.put(0, 0, piece_of(artifact, model, 0))
    file.data_path.unlink()
    file.data_path.write_bytes(bytes(file.tree.size))
    with pytest.raises(ShardlineError, match="taken away") as caught:
        writer.commit()
    assert caught.value.code == "state_unwritable"
    assert not file.held()
    writer.close()


def test_a_vanished_folder_is_named_and_what_was_held_comes_back(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model, {0: [0, 1]})
    folder = artifact.store.folder
    os.rename(folder, folder.with_name("unplugged"))
    writer = PieceWriter(artifact)
    assert not artifact.files[0].held()
    with pytest.raises(ShardlineError, match="cannot be written") as caught:
        writer.put(0, 2, piece_of(artifact, model, 2))
    assert caught.value.code == "state_unwritable"
    os.rename(folder.with_name("unplugged"), folder)
    assert list(artifact.files[0].held()) == [0, 1]
    writer.close()


def test_a_piece_that_another_program_wrote_is_read_before_it_counts(artifact: StoredArtifact, model: Path) -> None:
    """The way in for BitTorrent: the data file is written by others, the record only here."""
    file, length = artifact.files[0], artifact.files[0].tree.piece_length
    file.prepare()
    with file.data_path.open("r+b") as data:
        data.write(model.read_bytes()[: 2 * length])
    writer = PieceWriter(artifact)
    assert writer.confirm(0, Pieces.of(file.count, [0, 1, 2])) == [2]
    writer.finish()
    assert list(file.held()) == [0, 1]


def test_which_shards_are_held(artifact: StoredArtifact, model: Path) -> None:
    assert artifact.holding().servable == ()
    filled(artifact, model, artifact.wanted(2, 5))
    assert artifact.missing(artifact.wanted(2, 5)) == {}
    artifact.check_held(2, 5)
    holding = artifact.holding()
    assert any(first <= 2 and last >= 5 for first, last in holding.servable)
    assert 0 < holding.held_bytes < holding.total_bytes == model.stat().st_size
    with pytest.raises(ShardlineError, match=r"layers 0:8 lack \d+ pieces"):
        artifact.check_held(0, 8)
    filled(artifact, model)
    assert artifact.holding().held_bytes == model.stat().st_size


def test_space_is_checked_with_the_reserve(tmp_path: Path, bundle: Bundle) -> None:
    found = os.statvfs(tmp_path)
    free = found.f_bavail * found.f_frsize
    store = Store(tmp_path / "store", reserve_bytes=free // 2)
    store.add(bundle).close()
    store.check_space(1)
    with pytest.raises(ShardlineError) as caught:
        store.check_space(free)
    assert caught.value.code == "disk_full"
    assert caught.value.details["needed_bytes"] == free
    assert caught.value.details["free_bytes"] < free


def test_open_checks_the_description_again(store: Store, bundle: Bundle) -> None:
    with pytest.raises(ShardlineError, match="not in the store"):
        store.open(bundle.manifest.content_id, ANYBODY)
    store.add(bundle).close()
    assert store.content_ids() == [bundle.manifest.content_id]
    with pytest.raises(ShardlineError) as caught:
        store.open(bundle.manifest.content_id, TrustPolicy())
    assert caught.value.code == "artifact_untrusted"
    manifest = store.folder / bundle.manifest.content_id / "bundle" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(ShardlineError) as caught:
        store.open(bundle.manifest.content_id, ANYBODY)
    assert caught.value.code == "artifact_invalid"


def test_killed_while_a_description_is_replaced(store: Store, bundle: Bundle, model: Path) -> None:
    """Between the two renames there is none under its name: the old one is taken back, and nothing held is lost."""
    content_id = bundle.manifest.content_id
    with store.add(bundle) as artifact:
        filled(artifact, model, {0: [0, 1]})
        (artifact.folder / "bundle").rename(artifact.folder / "bundle.old")
    with store.open(content_id, ANYBODY) as artifact:
        assert list(artifact.files[0].held()) == [0, 1]
        assert not (artifact.folder / "bundle.old").exists()
        (artifact.folder / "bundle").rename(artifact.folder / "bundle.old")
    with store.add(bundle) as artifact:
        assert list(artifact.files[0].held()) == [0, 1]


@pytest.mark.parametrize("name", ["../x", "mac1-", "mac1-" + "g" * 64, "/etc", "mac1-" + "0" * 64 + "/.."])
def test_only_content_ids_name_folders(store: Store, name: str) -> None:
    for call in (store.remove, lambda name: store.open(name, ANYBODY)):
        with pytest.raises(ShardlineError, match="not a content_id"):
            call(name)


def test_what_is_in_use_is_not_removed(store: Store, bundle: Bundle, model: Path) -> None:
    content_id = bundle.manifest.content_id
    with store.add(bundle) as artifact:
        filled(artifact, model)
        for other in (store, Store(store.folder, reserve_bytes=0)):
            with pytest.raises(ShardlineError) as caught:
                other.remove(content_id)
            assert caught.value.code == "artifact_in_use"
            assert other.collect(keep=[]) == []
        assert len(artifact.files[0].held()) == artifact.files[0].count
    assert store.collect(keep=[content_id]) == []
    assert store.remove(content_id) >= model.stat().st_size
    assert store.content_ids() == []
    with store.add(bundle) as artifact:
        assert not artifact.files[0].held()
    assert store.collect(keep=[]) == [content_id]


def test_a_new_description_of_the_same_content_keeps_what_is_held(
    store: Store, model: Path, tmp_path: Path, bundle: Bundle
) -> None:
    with store.add(bundle) as artifact:
        filled(artifact, model, {0: [0, 4]})
    renamed = described(model, tmp_path / "b")

    def rename(manifest: dict[str, object]) -> None:
        manifest["license"] = "MIT"

    change_manifest(renamed.folder, rename, signed=False)
    from shardline.artifact.bundle import load_bundle

    with store.add(load_bundle(renamed.folder, ANYBODY)) as artifact:
        assert list(artifact.files[0].held()) == [0, 4]
    with store.open(bundle.manifest.content_id, ANYBODY) as artifact:
        assert artifact.bundle.manifest.license == "MIT"


def test_claims_are_given_once(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    assert claims.take(0, 4) == 4
    assert claims.take(2, 6) == 2
    assert claims.take(4, 6) == 6
    claims.give(0, 2)
    assert claims.take(0, 9) == 2
    claims.close()
    assert claims.take(0, 9) == 9
    claims.close()


def test_a_claim_that_the_system_fails_leaves_nothing_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody of this process, nor of another, would fetch these pieces any more."""
    claims, lockf = Claims(tmp_path / "claims"), fcntl.lockf

    def failing(handle: int, kind: int, length: int, start: int) -> None:
        if kind != fcntl.LOCK_UN and start == 3:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        lockf(handle, kind, length, start)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", failing)
        with pytest.raises(OSError, match="locks"):
            claims.take(0, 6)
    assert claims.take(0, 6) == 6
    claims.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB; the model has more than 8."""
    with mounted(tmp_path / "disk", "4m") as mount:
        yield mount


def test_a_full_disk_is_named_and_loses_nothing(small_disk: Path, bundle: Bundle, model: Path) -> None:
    with Store(small_disk / "store", reserve_bytes=0).add(bundle) as artifact:
        file, writer = artifact.files[0], PieceWriter(artifact)
        blocker = small_disk / "blocker"
        blocker.write_bytes(bytes(64 << 10))
        done = []
        with pytest.raises(ShardlineError) as caught:
            for piece in range(file.count):
                writer.put(0, piece, piece_of(artifact, model, piece))
                done.append(piece)
                if len(done) == 4:
                    writer.commit()
        assert caught.value.code == "disk_full"
        assert list(file.held()) == done[:4]
        writer.commit()
        assert list(file.held()) == done
        with (small_disk / "more").open("wb") as filler:
            filler.write(bytes(os.statvfs(small_disk).f_bavail * 4096))
        # Not even a record can be written now.
        with pytest.raises(ShardlineError) as caught:
            writer.drop({0: Pieces.of(file.count, [0])})
        assert caught.value.code == "disk_full"
        assert list(file.held()) == done
        blocker.unlink()
        writer.drop({0: Pieces.of(file.count, [0])})
        assert list(file.held()) == done[1:]
        assert all(file.is_whole(piece) for piece in done)
        writer.close()


def test_a_disk_that_turned_read_only_is_named_and_still_read(small_disk: Path, bundle: Bundle, model: Path) -> None:
    with Store(small_disk / "store", reserve_bytes=0).add(bundle) as artifact:
        filled(artifact, model, {0: [0, 1]})
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, capture_output=True)
    with Store(small_disk / "store", reserve_bytes=0).open(bundle.manifest.content_id, ANYBODY) as artifact:
        file, writer = artifact.files[0], PieceWriter(artifact)
        assert list(file.held()) == [0, 1]
        assert file.read(0, 10) == model.read_bytes()[:10]
        with pytest.raises(ShardlineError) as caught:
            writer.put(0, 2, piece_of(artifact, model, 2))
        assert caught.value.code == "state_unwritable"
        assert list(file.held()) == [0, 1]
        writer.close()
