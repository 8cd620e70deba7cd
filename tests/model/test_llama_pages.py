"""Pages of a model file that loading has touched are given back, and what is read there is the same."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from shardline.model.llama_context import give_back_pages

PAGES = 4096
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise of Linux")


def resident_kib(path: Path) -> int:
    """What of the mappings of `path` this process has in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            ours = line.endswith(str(path))
        elif ours and fields[0] == "Rss:":
            total += int(fields[1])
    return total


def test_only_the_files_own_pages_go_and_they_come_back(tmp_path: Path) -> None:
    model, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    for path in (model, other):
        path.write_bytes(b"\x07" * 4096 * PAGES)
    with model.open("rb") as first, other.open("rb") as second, model.open("rb") as third:
        read = mmap.mmap(first.fileno(), 0, prot=mmap.PROT_READ)
        kept = mmap.mmap(second.fileno(), 0, prot=mmap.PROT_READ)
        changed = mmap.mmap(third.fileno(), 4096, access=mmap.ACCESS_COPY)
        changed[0] = 9
        assert sum(read[::4096]) == sum(kept[::4096]) == 7 * PAGES
        assert resident_kib(model) > 4 * PAGES - 64
        give_back_pages([model])
        assert resident_kib(model) < 64
        assert resident_kib(other) > 4 * PAGES - 64
        assert sum(read[::4096]) == 7 * PAGES
        assert changed[0] == 9
        for mapped in (read, kept, changed):
            mapped.close()
