"""Reading again what is held, slowly: a disk forgets, and other programs write where they should not.

Owns the pace and the verdict: a piece that is not itself any more is no longer held, and so no longer advertised or
served. Where a record was lost, it finds what is there. Shown by tests/artifact/test_scrub.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shardline.artifact.store import StoredArtifact
from shardline.artifact.stored_file import StoredFile
from shardline.wire.bitmap import Pieces

log = structlog.get_logger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What came of one round."""

    checked_bytes: int
    bad: dict[int, tuple[int, ...]]
    """Pieces that were held and are no longer, by file number."""
    found: int
    """Pieces that were on disk and are held now, of files whose record was lost."""


async def scrub(
    artifact: StoredArtifact, *, bytes_per_s: int, rebuild: bool = True, progress: Progress | None = None
) -> ScrubReport:
    """Check every held piece once, at most `bytes_per_s` (0: as fast as it goes). Cancel it at any time.

    `rebuild`: hash also what lies in a data file of which nothing is held.
    Errors: `disk_full`, `state_unwritable`, where the verdict cannot be written down.
    """
    held = artifact.held()
    total, done, found = artifact.bytes_of(held), 0, 0
    bad: dict[int, tuple[int, ...]] = {}
    for number, file in enumerate(artifact.files):
        began = time.monotonic()
        before = done
        for piece in held[number]:
            start, end = file.tree.piece_range(piece)
            if not await asyncio.to_thread(file.is_whole, piece) and piece in file.held():
                bad[number] = (*bad.get(number, ()), piece)
                log.warning("piece_damaged", content_id=artifact.content_id, file=file.name[:16], piece=piece)
                await asyncio.to_thread(file.commit, Pieces(file.count), Pieces.of(file.count, [piece]))
            done += end - start
            if progress is not None:
                progress(done, total)
            if bytes_per_s:
                await asyncio.sleep(began + (done - before) / bytes_per_s - time.monotonic())
        if rebuild and not held[number]:
            found += await asyncio.to_thread(recover, file)
    return ScrubReport(done, bad, found)


def recover(file: StoredFile) -> int:
    """Hash what our data file has, where its record claims nothing; how many pieces are held after that. Blocking."""
    if file.held() or not file.data_path.exists():
        return 0
    found = Pieces.of(file.count, file.found_on_disk())
    if found:
        try:
            file.prepare()
            file.commit(found)
        finally:
            file.rest()
        log.info("pieces_recovered", file=file.name[:16], pieces=len(found))
    return len(found)
