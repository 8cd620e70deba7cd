"""A Shard file that was compared once is then read alone; whatever is otherwise, the model decides."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.artifact import shard_digest
from shardline.artifact.shard_digest import Chunks
from shardline.artifact.shard_files import ShardFiles
from shardline.errors import ShardlineError
from shardline.formats.gguf_files import GGUFModel
from tests.support.gguf_models import CONTENT_ID, small_model


@pytest.fixture
def model(tmp_path: Path) -> GGUFModel:
    (tmp_path / "model").mkdir()
    return small_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the file has many."""
    monkeypatch.setattr(shard_digest, "CHUNK", 1000)


def made(folder: Path, model: GGUFModel) -> Path:
    return ShardFiles(folder).shard(model, CONTENT_ID, 2, 6)


def compared(folder: Path, model: GGUFModel) -> tuple[Path, Path]:
    """The Shard file, made and then compared once, and its digest."""
    path = made(folder, model)
    digest = path.with_name(path.name + ".digest")
    assert not digest.exists()
    assert made(folder, model) == path
    return path, digest


def changed(path: Path, at: int) -> None:
    """One bit, with the times that it had."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_it_says_what_lies_there(tmp_path: Path, model: GGUFModel) -> None:
    path, digest = compared(tmp_path, model)
    found = json.loads(digest.read_bytes())
    raw = path.read_bytes()
    assert found["chunks"] == [hashlib.sha256(raw[i : i + 1000]).hexdigest() for i in range(0, len(raw), 1000)]
    assert found["shard"] == {"size": len(raw), "mtime_ns": path.stat().st_mtime_ns, "inode": path.stat().st_ino}
    assert [source["inode"] for source in found["sources"]] == [path.stat().st_ino for path in model.paths]


def test_the_model_is_not_read_again(tmp_path: Path, model: GGUFModel) -> None:
    """Shown by a change of the model that the system does not tell of."""
    path, _ = compared(tmp_path, model)
    before = path.stat()
    for at in range(model.headers[0].data_offset, model.headers[0].file_size, 8):
        changed(model.paths[0], at)
    steps: list[tuple[int, int]] = []
    again = ShardFiles(tmp_path).shard(model, CONTENT_ID, 2, 6, progress=lambda *step: steps.append(step))
    assert (again.stat().st_ino, again.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert steps == sorted(steps)
    assert steps[-1] == (before.st_size, before.st_size)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_disk_that_forgot_is_found_out(tmp_path: Path, model: GGUFModel, where: str) -> None:
    path, _ = compared(tmp_path, model)
    whole = path.read_bytes()
    changed(path, {"first": len(whole) // 4, "middle": len(whole) // 2, "last": len(whole) - 1}[where])
    assert path.read_bytes() != whole
    assert made(tmp_path, model).read_bytes() == whole


def test_a_model_that_changed_is_read_again(tmp_path: Path, model: GGUFModel) -> None:
    path, _ = compared(tmp_path, model)
    whole = path.read_bytes()
    for at in range(model.headers[0].data_offset, model.headers[0].file_size, 8):
        changed(model.paths[0], at)
    os.utime(model.paths[0])
    assert made(tmp_path, model).read_bytes() != whole


@pytest.mark.parametrize(
    "fault", ["noise", "empty", "version", "recipe", "less", "other chunk", "more fields", "folder"]
)
def test_a_digest_that_says_nothing_does_no_harm(tmp_path: Path, model: GGUFModel, fault: str) -> None:
    """The comparison decides, and the digest is written anew."""
    path, digest = compared(tmp_path, model)
    before, right = path.stat(), digest.read_bytes()
    record = json.loads(right)
    if fault in ("noise", "empty"):
        digest.write_bytes(b"" if fault == "empty" else b"\xff{")
    elif fault == "folder":
        digest.unlink()
        digest.mkdir()
    else:
        record |= {
            "version": {"version": 2},
            "recipe": {"recipe": -1},
            "less": {"chunks": record["chunks"][:-1]},
            "other chunk": {"chunks": ["0" * 64, *record["chunks"][1:]]},
            "more fields": {"x": 1},
        }[fault]
        digest.write_text(json.dumps(record))
    assert made(tmp_path, model).stat().st_ino == before.st_ino
    assert digest.is_dir() or digest.read_bytes() == right


def test_it_can_be_cancelled(tmp_path: Path, model: GGUFModel) -> None:
    compared(tmp_path, model)
    with pytest.raises(ShardlineError) as caught:
        ShardFiles(tmp_path).shard(model, CONTENT_ID, 2, 6, cancelled=lambda: True)
    assert caught.value.code == "cancelled"


@given(st.lists(st.binary(max_size=3000), max_size=8))
def test_chunks_do_not_depend_on_how_bytes_come(parts: list[bytes]) -> None:
    chunks, whole = Chunks(), b"".join(parts)
    for part in parts:
        chunks.add(part)
    size = shard_digest.CHUNK
    assert chunks.ended() == tuple(hashlib.sha256(whole[i : i + size]).hexdigest() for i in range(0, len(whole), size))
