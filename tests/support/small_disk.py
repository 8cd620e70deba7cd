"""A file system of its own: one that is soon full, one that shares blocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size` (as mount takes it) at `folder`, which is made; skips the test where one may mount nothing."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


@contextmanager
def disk(folder: Path, kind: str, size: int) -> Iterator[Path]:
    """A file of `size` bytes with a file system of `kind`, at `folder`, which is made; skips the test where it cannot
    be made or mounted."""
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"there is no mkfs.{kind}")
    folder.mkdir()
    file = folder.with_name(f"{folder.name}.{kind}")
    with file.open("wb") as made:
        made.truncate(size)
    subprocess.run([f"mkfs.{kind}", "-q", str(file)], check=True, capture_output=True, timeout=60)
    _mount("-o", "loop", str(file), str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def _mount(*arguments: str) -> None:
    if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount that")
