"""One reading for all digests: equal to the standard ways, and refused where the file changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from shardline.artifact.hashing import hash_once
from shardline.errors import ShardlineError
from shardline.formats.merkle import hash_file

PIECE = 256 << 10


@pytest.mark.parametrize("size", [0, 1, 16 << 10, PIECE, PIECE + 1, (1 << 20) + 5, 3 << 20])
def test_both_digests(tmp_path: Path, size: int) -> None:
    raw = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(raw)
    steps: list[int] = []
    found = hash_once(path, PIECE, steps.append)
    assert found.sha256 == hashlib.sha256(raw).hexdigest()
    assert found.tree == hash_file([raw], PIECE)
    assert steps == [*range(1 << 20, size, 1 << 20), size] if size else steps == []


def test_a_file_that_grows_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))

    def grow(_done: int) -> None:
        with path.open("ab") as file:
            file.write(bytes(1 << 20))

    with pytest.raises(ShardlineError, match="changed while it was read") as caught:
        hash_once(path, PIECE, grow)
    assert caught.value.code == "model_file_invalid"


def test_a_file_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))

    def touch(_done: int) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(ShardlineError, match="changed while it was read"):
        hash_once(path, PIECE, touch)


def test_what_the_step_raises_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    seen: list[int] = []

    def stop(done: int) -> None:
        seen.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hash_once(path, PIECE, stop)
    assert seen == [1 << 20]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ShardlineError, match="cannot be read") as caught:
            hash_once(path, PIECE, lambda _: None)
        assert caught.value.code == "model_file_invalid"
