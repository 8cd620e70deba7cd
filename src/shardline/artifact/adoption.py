"""Files that other programs hold: used by content, read only, never moved or written.

Owns where to look (any folder: caches of Hugging Face, Ollama, LM Studio), what could be a file of an artifact (its
size says so), and the proof (its hashes). A whole file is referred to, or cloned where the file system shares blocks;
of a part the pieces are copied. Blocking. Shown by tests/artifact/test_adoption.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from shardline.artifact.blocks import share
from shardline.artifact.identity import HashedFile
from shardline.artifact.piece_writer import PieceWriter
from shardline.artifact.store import StoredArtifact
from shardline.artifact.stored_file import StoredFile
from shardline.errors import ShardlineError
from shardline.wire.bitmap import Pieces

ENTRIES_LIMIT = 200_000
"""Files and folders that are looked at below one folder."""
DEPTH_LIMIT = 8
_COMMIT_BYTES = 256 << 20

log = structlog.get_logger(__name__)

Way = Literal["reference", "clone", "pieces"]


@dataclass(frozen=True, slots=True)
class Adopted:
    """What one file of another program gave."""

    path: Path
    number: int
    """Of the file in the manifest."""
    way: Way
    pieces: int


def usual_folders(home: Path) -> list[Path]:
    """Where other programs keep models below a home folder; only those that are there."""
    names = (".cache/huggingface/hub", ".ollama/models/blobs", ".lmstudio/models", ".cache/lm-studio/models")
    return [folder for name in names if (folder := home / name).is_dir()]


def candidates(artifact: StoredArtifact, folders: Iterable[Path]) -> Iterator[tuple[int, Path]]:
    """Files that have the size of a file of the artifact with missing pieces: (its number, where). Reads none."""
    by_size: dict[int, list[int]] = {}
    for number, file in enumerate(artifact.files):
        if len(file.held()) < file.count:
            by_size.setdefault(file.tree.size, []).append(number)
    seen: set[tuple[int, int]] = set()
    for folder in folders:
        for path, found in _files(folder):
            if found.st_size in by_size and (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                yield from ((number, path) for number in by_size[found.st_size])


def adopt(artifact: StoredArtifact, number: int, path: Path, *, refer: bool = True) -> Adopted | None:
    """Take what the file at `path` has of file `number` of the artifact; None where that is nothing.

    It is read once, whole. `refer`: where all is right, use it in place; else clone or copy it.
    Errors: `disk_full`, `state_unwritable`.
    """
    file = artifact.files[number]
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        log.info("file_not_adopted", path=str(path), reason=error.strerror)
        return None
    try:
        before = os.fstat(handle)
        if before.st_size != file.tree.size:
            return None
        good = Pieces.of(file.count, _good_pieces(file, handle))
        after = os.fstat(handle)
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size) or not good:
            return None
        if len(good) == file.count and refer:
            # The file itself: the link may go, or lead elsewhere tomorrow.
            path = path.resolve()
            file.refer(path, after.st_mtime_ns, after.st_ino)
            return Adopted(path, number, "reference", len(good))
        return _copied(artifact, number, path, handle, good)
    except OSError as error:
        log.info("file_not_adopted", path=str(path), reason=error.strerror)
        return None
    finally:
        os.close(handle)


def _copied(artifact: StoredArtifact, number: int, path: Path, handle: int, good: Pieces) -> Adopted | None:
    file = artifact.files[number]
    if len(good) == file.count and not file.held() and _cloned(file, handle):
        return Adopted(path, number, "clone", len(good))
    needed = good - file.held()
    artifact.store.check_space(artifact.bytes_of({number: needed}))
    writer = PieceWriter(artifact)
    bad = 0
    try:
        for piece in needed:
            start, end = file.tree.piece_range(piece)
            bad += len(writer.put(number, piece, os.pread(handle, end - start, start)))
            if writer.uncommitted_bytes >= _COMMIT_BYTES:
                writer.commit()
        writer.commit()
    finally:
        writer.close()
    return Adopted(path, number, "pieces", len(needed) - bad)


def _cloned(file: StoredFile, handle: int) -> bool:
    """Share the blocks of a whole file, where the file system can. What we then have is ours, and read again."""
    file.prepare()
    try:
        target = os.open(file.data_path, os.O_RDWR)
    except OSError:
        return False
    try:
        share(handle, target)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.EBADF):
            raise
        return False
    finally:
        os.close(target)
    try:
        file.commit(Pieces.of(file.count, _good_on_disk(file)))
    finally:
        file.rest()
    return len(file.held()) == file.count


def _good_on_disk(file: StoredFile) -> Iterator[int]:
    return (piece for piece in range(file.count) if file.is_whole(piece, own=True))


def _good_pieces(file: StoredFile, handle: int) -> Iterator[int]:
    for piece in range(file.count):
        start, end = file.tree.piece_range(piece)
        if file.tree.verify_piece(piece, os.pread(handle, end - start, start)):
            yield piece


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Plain files below, bounded in number and depth, also behind links: caches name their files by links. Links to
    folders are not followed, what cannot be read is passed over."""
    waiting, count = [(folder, 0)], 0
    while waiting:
        at, depth = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(at) as entries:
            for entry in entries:
                count += 1
                if count > ENTRIES_LIMIT:
                    log.warning("folder_too_large", folder=str(folder), looked_at=ENTRIES_LIMIT)
                    return
                if entry.is_dir(follow_symlinks=False):
                    if depth < DEPTH_LIMIT:
                        waiting.append((Path(entry.path), depth + 1))
                elif (found := _plain(entry)) is not None:
                    yield Path(entry.path), found


def _plain(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What an entry leads to, where that is a plain file; a link into a circle must not hide its neighbours."""
    try:
        return entry.stat() if entry.is_file() else None
    except OSError:
        return None


def adopt_hashed(artifact: StoredArtifact, files: Iterable[HashedFile]) -> int:
    """Refer to files whose hashes are known, without reading them: those that the store lacks a piece of, and that are
    files of the artifact. How many. Errors: `disk_full`, `state_unwritable`."""
    numbers = {file.name: number for number, file in enumerate(artifact.files)}
    taken = 0
    for found in files:
        file = artifact.files[numbers[found.root]] if found.root in numbers else None
        if file is not None and len(file.held()) < file.count:
            file.refer(found.path, found.mtime_ns, found.inode)
            taken += 1
    return taken


def adopt_all(artifact: StoredArtifact, folders: Iterable[Path], *, refer: bool = True) -> list[Adopted]:
    """Look in all `folders`, and take what there is. Files that are held whole by then are not looked for."""
    taken = []
    for number, path in candidates(artifact, folders):
        file = artifact.files[number]
        if len(file.held()) == file.count:
            continue
        try:
            found = adopt(artifact, number, path, refer=refer)
        except ShardlineError as error:
            log.warning("file_not_adopted", path=str(path), reason=error.message)
            continue
        if found is not None:
            taken.append(found)
    return taken
