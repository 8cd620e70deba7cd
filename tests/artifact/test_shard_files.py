"""Shard files on disk: made once, whole or not at all, whoever is killed, cancelled, or out of space."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardline.artifact import shard_files
from shardline.artifact.shard_files import ShardFiles, write_plan
from shardline.errors import ShardlineError
from shardline.formats.gguf import read_header
from shardline.formats.gguf_files import GGUFModel, read_model
from shardline.formats.shard_gguf import PAGE, Copy, plan_shard
from tests.support.gguf_models import CONTENT_ID, WIDTH, content, metadata, small_model, tensors
from tests.support.gguf_writer import Tensor, gguf_bytes
from tests.support.small_disk import disk, mounted

WAIT_S = 20.0

CHILD = """
import sys, time
from pathlib import Path
from shardline.artifact.shard_files import ShardFiles
from shardline.formats.gguf_files import read_model
model, folder, content_id, go = sys.argv[1:]
def hold(done, total):
    if done > total // 2:
        print("half", flush=True)
        while not Path(go).exists():
            time.sleep(0.01)
print(ShardFiles(Path(folder)).shard(read_model(model), content_id, 2, 6, progress=hold))
"""


@pytest.fixture
def model(tmp_path: Path) -> GGUFModel:
    (tmp_path / "model").mkdir()
    return small_model(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def left_in(folder: Path) -> list[str]:
    """File names without locks and digests."""
    return sorted(path.name for path in folder.iterdir() if path.suffix not in (".lock", ".digest"))


@contextlib.contextmanager
def child_that_stops_half_way(model: GGUFModel, cache: Path, go: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, str(model.paths[0]), str(cache), CONTENT_ID, str(go)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        yield child
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)


def test_the_file_is_that_of_the_plan(model: GGUFModel, cache: Path) -> None:
    steps: list[tuple[int, int]] = []
    path = ShardFiles(cache).shard(model, CONTENT_ID, 2, 6, progress=lambda done, total: steps.append((done, total)))
    plan = plan_shard(model, 2, 6, content_id=CONTENT_ID)
    data = path.read_bytes()
    assert data.startswith(plan.header)
    assert len(data) == plan.nbytes
    header = read_header(path)
    for layer in range(4):
        info = header.tensors[f"blk.{layer}.attn_q.weight"]
        assert data[info.offset : info.offset + info.nbytes] == content(f"blk.{layer + 2}.attn_q.weight", (WIDTH, 8))
    assert steps == sorted(steps)
    assert steps[-1] == (plan.nbytes, plan.nbytes)
    assert left_in(cache) == [path.name]


def test_a_second_call_takes_the_file_that_is_there(model: GGUFModel, cache: Path) -> None:
    files = ShardFiles(cache)
    first = files.shard(model, CONTENT_ID, 2, 6)
    state = first.stat()
    steps: list[tuple[int, int]] = []
    again = files.shard(model, CONTENT_ID, 2, 6, progress=lambda *step: steps.append(step))
    assert again == first
    assert steps[-1] == (state.st_size, state.st_size)
    assert (again.stat().st_ino, again.stat().st_mtime_ns) == (state.st_ino, state.st_mtime_ns)


def test_ranges_models_and_vocabularies_have_files_of_their_own(model: GGUFModel, cache: Path) -> None:
    files = ShardFiles(cache)
    paths = {
        files.shard(model, CONTENT_ID, 2, 6),
        files.shard(model, CONTENT_ID, 2, 5),
        files.shard(model, "mac1-" + "f" * 64, 2, 6),
        files.vocabulary(model, CONTENT_ID),
    }
    assert len(paths) == 4
    assert all(CONTENT_ID in path.name or "mac1-fff" in path.name for path in paths)
    vocabulary = read_header(files.vocabulary(model, CONTENT_ID))
    assert vocabulary.kv == model.header.kv
    assert not vocabulary.tensors


@pytest.mark.parametrize("damage", ["shorter", "longer", "header", "empty", "zeros", "bit", "last"])
def test_a_damaged_file_is_made_again(model: GGUFModel, cache: Path, damage: str) -> None:
    files = ShardFiles(cache)
    path = files.shard(model, CONTENT_ID, 2, 6)
    whole = path.read_bytes()
    middle = len(whole) // 2
    wrong = {
        "shorter": whole[:-1],
        "longer": whole + b"x",
        "header": b"GGUX" + whole[4:],
        "empty": b"",
        "zeros": whole[:middle] + bytes(256) + whole[middle + 256 :],
        "bit": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "last": whole[:-1] + bytes([whole[-1] ^ 128]),
    }
    assert wrong[damage] != whole
    path.write_bytes(wrong[damage])
    assert files.shard(model, CONTENT_ID, 2, 6).read_bytes() == whole


@pytest.mark.parametrize(
    "content_id", ["", "mac1-", "../../etc/passwd", "mac1-" + "F" * 64, "mac1-" + "0" * 64 + "/.."]
)
def test_what_is_no_content_id_is_no_file_name(model: GGUFModel, cache: Path, content_id: str) -> None:
    with pytest.raises(ShardlineError, match="is not a content_id"):
        ShardFiles(cache).shard(model, content_id, 2, 6)
    assert not cache.exists()


def test_what_cannot_be_cut_makes_no_folder(model: GGUFModel, cache: Path) -> None:
    with pytest.raises(ShardlineError, match="not a range"):
        ShardFiles(cache).shard(model, CONTENT_ID, 2, 9)
    assert not cache.exists()


@pytest.mark.parametrize("write", [1, 100, PAGE, 3 * PAGE + 8])
def test_whatever_the_size_of_a_write_the_bytes_are_the_same(
    model: GGUFModel, cache: Path, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    expected = ShardFiles(cache / "a").shard(model, CONTENT_ID, 0, 4).read_bytes()
    monkeypatch.setattr(shard_files, "WRITE", write)
    monkeypatch.setattr(shard_files, "CHUNK", 2 * PAGE)
    assert ShardFiles(cache / "b").shard(model, CONTENT_ID, 0, 4).read_bytes() == expected


def test_large_tensors_are_shared_in_chunks_that_begin_on_pages(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the source, and of the file too: only so can a file system share the blocks."""
    monkeypatch.setattr(shard_files, "CHUNK", 2 * PAGE)
    model = small_model(tmp_path, layers=40)
    expected = ShardFiles(cache / "a").shard(model, CONTENT_ID, 2, 39).read_bytes()
    calls: list[tuple[int, int, int]] = []

    def shared(source: int, target: int, size: int, offset: int, position: int) -> bool:
        calls.append((size, offset, position))
        os.pwrite(target, os.pread(source, size, offset), position)
        return True

    monkeypatch.setattr(shard_files, "_cloned", shared)
    path = ShardFiles(cache / "b").shard(model, CONTENT_ID, 2, 39)
    assert path.read_bytes() == expected
    assert [size for size, _, _ in calls[:2]] == [2 * PAGE, 2 * PAGE]
    assert sum(size for size, _, _ in calls) > len(expected) / 2
    assert all(number % PAGE == 0 for call in calls for number in call)


def test_what_is_not_shared_is_written_in_large_pieces(tmp_path: Path) -> None:
    """They leave long runs in the page cache: what is computed from single pages is slower."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(8 << 20))
    written = tmp_path / "written"
    sizes: list[int] = []
    real = os.pwrite
    with source.open("rb") as read, written.open("wb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files, "_cloned", lambda *_: False)
        patch.setattr(os, "pwrite", lambda handle, data, offset: sizes.append(len(data)) or real(handle, data, offset))
        piece = Copy(0, 4, (8 << 20) - 4)
        assert list(shard_files._copied(read.fileno(), file.fileno(), piece, 4))[-1] == piece.nbytes
    assert written.read_bytes()[4:] == source.read_bytes()[4:]
    assert sizes == [PAGE - 4, *[1 << 20] * 7, (1 << 20) - PAGE]


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_file_system_that_can_shares_the_blocks(tmp_path: Path, kind: str) -> None:
    with disk(tmp_path / "mounted", kind, 512 << 20) as folder:
        source, target = folder / "source", folder / "target"
        source.write_bytes(bytes_of_it := os.urandom(16 << 20))
        with source.open("rb") as read, target.open("wb") as file:
            os.fsync(read.fileno())
            before = os.statvfs(folder)
            assert list(shard_files._copied(read.fileno(), file.fileno(), Copy(0, 100, (16 << 20) - 100), 100))
            os.fsync(file.fileno())
            used = (before.f_bfree - os.statvfs(folder).f_bfree) * before.f_frsize
        assert target.read_bytes()[100:] == bytes_of_it[100:]
        assert used < 4 << 20


def test_a_factor_is_applied(tmp_path: Path, cache: Path) -> None:
    model = small_model(tmp_path, "gemma3", 62, {"attention.key_length": 2, "attention.value_length": 2})
    plan = plan_shard(model, 0, 4, content_id=CONTENT_ID)
    assert {piece.factor for piece in plan.pieces if isinstance(piece, Copy)} == {None, 0.5}
    path = ShardFiles(cache).shard(model, CONTENT_ID, 0, 4)
    info = read_header(path).tensors["blk.0.attn_q_norm.weight"]
    found = memoryview(path.read_bytes()[info.offset : info.offset + info.nbytes]).cast("f").tolist()
    source = memoryview(content("blk.0.attn_q_norm.weight", (8,))).cast("f").tolist()
    assert found == [value / 2 for value in source]


def test_cancelled_work_leaves_nothing(model: GGUFModel, cache: Path) -> None:
    reached: list[int] = []
    with pytest.raises(ShardlineError) as caught:
        ShardFiles(cache).shard(
            model,
            CONTENT_ID,
            2,
            6,
            progress=lambda done, _: reached.append(done),
            cancelled=lambda: bool(reached) and reached[-1] > 4000,
        )
    assert caught.value.code == "cancelled"
    assert left_in(cache) == []
    assert ShardFiles(cache).shard(model, CONTENT_ID, 2, 6).exists()


def test_two_processes_make_it_once(model: GGUFModel, cache: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    got: list[Path] = []
    written: list[int] = []

    def second() -> None:
        files = ShardFiles(cache)
        path = files.shard_path(CONTENT_ID, 2, 6)

        def heard(done: int, _: int) -> None:
            if not path.exists():
                written.append(done)  # else it looks at what the other one made

        got.append(files.shard(model, CONTENT_ID, 2, 6, progress=heard))

    with child_that_stops_half_way(model, cache, go) as child:
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        assert not got
        go.touch()
        waiting.join(WAIT_S)
        output, _ = child.communicate(timeout=WAIT_S)
    assert output.splitlines()[-1] == str(got[0])
    assert written == []
    assert left_in(cache) == [got[0].name]


def test_a_process_killed_half_way_blocks_nobody(model: GGUFModel, cache: Path, tmp_path: Path) -> None:
    with child_that_stops_half_way(model, cache, tmp_path / "never") as child:
        (part,) = left_in(cache)
        assert part.endswith(".part")
        child.kill()
        child.wait(WAIT_S)
    other = ShardFiles(cache).shard(model, CONTENT_ID, 0, 4)
    assert left_in(cache) == [other.name], "what the killed process left is gone"
    assert ShardFiles(cache).shard(model, CONTENT_ID, 2, 6).exists()


def test_what_another_process_writes_is_not_swept_away(model: GGUFModel, cache: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with child_that_stops_half_way(model, cache, go) as child:
        ShardFiles(cache).shard(model, CONTENT_ID, 0, 4)
        assert any(name.endswith(".part") for name in left_in(cache))
        go.touch()
        output, _ = child.communicate(timeout=WAIT_S)
    path = Path(output.splitlines()[-1])
    assert path.stat().st_size == plan_shard(model, 2, 6, content_id=CONTENT_ID).nbytes


def test_waiting_for_another_process_has_a_limit_and_can_be_cancelled(model: GGUFModel, cache: Path) -> None:
    files = ShardFiles(cache)
    path = files.shard(model, CONTENT_ID, 2, 6)
    path.unlink()
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ShardlineError) as caught:
            ShardFiles(cache, lock_wait_s=0.05).shard(model, CONTENT_ID, 2, 6)
        assert (caught.value.code, caught.value.details["limit"]) == ("deadline", "shard_file")
        with pytest.raises(ShardlineError) as caught:
            files.shard(model, CONTENT_ID, 2, 6, cancelled=lambda: True)
        assert caught.value.code == "cancelled"
    assert files.shard(model, CONTENT_ID, 2, 6) == path


def test_too_little_space_is_said_before_anything_is_written(
    model: GGUFModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real(path)[:3], 1, 1, *real(path)[5:]]))
    with pytest.raises(ShardlineError) as caught:
        ShardFiles(cache).shard(model, CONTENT_ID, 2, 6)
    assert caught.value.code == "disk_full"
    assert caught.value.details["needed_bytes"] == plan_shard(model, 2, 6, content_id=CONTENT_ID).nbytes
    assert caught.value.details["free_bytes"] < caught.value.details["needed_bytes"]
    assert left_in(cache) == []


@contextlib.contextmanager
def files_up_to(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_nothing(model: GGUFModel, cache: Path) -> None:
    with files_up_to(6000), pytest.raises(ShardlineError) as caught:
        ShardFiles(cache).shard(model, CONTENT_ID, 2, 6)
    assert caught.value.code == "disk_full"
    assert left_in(cache) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, for as long as one may mount it."""
    with mounted(tmp_path / "disk", "64k") as mount:
        yield mount


def test_a_disk_that_fills_while_it_is_written(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space that was there at the start is taken by somebody else in the middle."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("llama", 30), tensors(30)))
    model = read_model(path)
    plan = plan_shard(model, 5, 25, content_id=CONTENT_ID)
    assert plan.nbytes > 16 << 10
    monkeypatch.setattr(shard_files, "CHUNK", 4096)

    def take(done: int, _: int) -> None:
        if done > plan.nbytes // 2 and not (small_disk / "other").exists():
            with contextlib.suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
                while file.write(bytes(1024)):
                    pass

    files = ShardFiles(small_disk / "cache")
    with pytest.raises(ShardlineError) as caught:
        files.shard(model, CONTENT_ID, 5, 25, progress=take)
    assert caught.value.code == "disk_full"
    assert left_in(files.folder) == []
    (small_disk / "other").unlink()
    assert files.shard(model, CONTENT_ID, 5, 25).stat().st_size == plan.nbytes


def test_a_folder_that_takes_no_files(model: GGUFModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardlineError, match="no Shard file can be written") as caught:
        ShardFiles(tmp_path / "file").shard(model, CONTENT_ID, 2, 6)
    assert caught.value.code == "state_unwritable"
    assert "choose another folder" in caught.value.advice


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_model_that_changes_is_refused(model: GGUFModel, cache: Path, when: str) -> None:
    source = model.paths[0]

    def change(done: int, total: int) -> None:
        if done > total // 2:
            os.utime(source, ns=(1, 1))

    if when == "before":
        with source.open("ab") as file:
            file.write(b"more")
    with pytest.raises(ShardlineError, match="changed since its header was read") as caught:
        ShardFiles(cache).shard(model, CONTENT_ID, 2, 6, progress=change if when == "during" else None)
    assert caught.value.code == "model_file_invalid"
    assert left_in(cache) == []


def test_a_model_that_is_gone_is_refused(model: GGUFModel, cache: Path) -> None:
    model.paths[0].unlink()
    with pytest.raises(ShardlineError, match="cannot be read") as caught:
        ShardFiles(cache).shard(model, CONTENT_ID, 2, 6)
    assert caught.value.code == "model_file_invalid"


def test_zeros_take_no_space(tmp_path: Path, cache: Path) -> None:
    """The embedding that a tail must have, and nobody reads, is a hole in the file."""
    width, words = 128, 40_000
    keys = metadata("qwen2moe", 2, {"embedding_length": width})
    path = tmp_path / "model.gguf"
    rest = [tensor for tensor in tensors(2) if str(tensor.name).startswith("blk.")]
    large = Tensor("token_embd.weight", (width, words), type_id=1, data=bytes(2 * width * words))
    output = Tensor("output.weight", (width, words), type_id=2, data=b"\1" * (width * words // 32 * 18))
    path.write_bytes(gguf_bytes(keys, [large, output, Tensor("output_norm.weight", (width,)), *rest]))
    tail = ShardFiles(cache).shard(read_model(path), CONTENT_ID, 1, 2)
    info = read_header(tail).tensors["token_embd.weight"]
    assert info.nbytes == width * words // 128 * 18
    assert tail.stat().st_blocks * 512 < tail.stat().st_size - info.nbytes // 2
    assert not any(tail.read_bytes()[info.offset : info.offset + info.nbytes])


def test_a_given_name_is_written_as_safely(model: GGUFModel, tmp_path: Path) -> None:
    plan = plan_shard(model, 0, 4, content_id=CONTENT_ID)
    path = tmp_path / "part.gguf"
    path.write_text("old")
    with pytest.raises(ShardlineError):
        write_plan(plan, model, path, cancelled=lambda: True)
    assert path.read_text() == "old"
    write_plan(plan, model, path)
    assert path.stat().st_size == plan.nbytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "part.gguf"]


def test_a_link_under_the_temporary_name_is_not_followed(model: GGUFModel, tmp_path: Path) -> None:
    """Folders that many may write to: the name can be guessed."""
    other = tmp_path / "other"
    other.write_text("precious")
    path = tmp_path / "part.gguf"
    (tmp_path / f"part.gguf.{os.getpid()}.part").symlink_to(other)
    with pytest.raises(ShardlineError) as caught:
        write_plan(plan_shard(model, 0, 4, content_id=CONTENT_ID), model, path)
    assert caught.value.code == "state_unwritable"
    assert other.read_text() == "precious" and not path.exists()
