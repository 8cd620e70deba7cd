"""A file system of its own that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size` (as mount takes it) at `folder`, which is made; skips the test where one may mount nothing."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("this user may mount nothing")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
