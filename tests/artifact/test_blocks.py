"""Sharing blocks, on file systems that can and on one that cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardline.artifact.blocks import share
from tests.support.small_disk import disk, mounted

SIZE = (4 << 20) + 100


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_whole_file_is_shared_to_its_last_byte(tmp_path: Path, kind: str) -> None:
    with disk(tmp_path / "mounted", kind, 512 << 20) as folder:
        source, target = folder / "source", folder / "target"
        source.write_bytes(os.urandom(SIZE))
        with source.open("rb") as read, target.open("wb") as file:
            share(read.fileno(), file.fileno())
        assert target.read_bytes() == source.read_bytes()


def test_where_it_cannot_be_the_target_is_as_before(tmp_path: Path) -> None:
    with mounted(tmp_path / "mounted", "16m") as folder:
        source, target = folder / "source", folder / "target"
        source.write_bytes(os.urandom(SIZE))
        with source.open("rb") as read, target.open("wb") as file, pytest.raises(OSError):
            share(read.fileno(), file.fileno())
        assert target.read_bytes() == b""
