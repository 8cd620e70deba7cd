"""One reading of a large file for all digests that a manifest has of it.

Owns the reading: bounded by the size at the start, refused where the file changes meanwhile, SHA-256 of the whole in a
thread beside the tree (hashlib lets both run at once). Blocking. Shown by tests/artifact/test_hashing.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from shardline.errors import ShardlineError
from shardline.formats.merkle import FileTree, hash_file

_READ = 1 << 20

Step = Callable[[int], None]
"""Called with the bytes of this file read so far; what it raises ends the reading."""


class FileHashes(NamedTuple):
    """Digests of one file."""

    sha256: str
    tree: FileTree


def hash_once(path: Path, piece_length: int, step: Step) -> FileHashes:
    """Read the whole file at `path`; `model_file_invalid` where it cannot be read, or changes while it is."""
    whole = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "sha256") as beside:
            before = _state(file)
            tree = hash_file(_chunks(file, before[0], whole.update, beside, step), piece_length)
            after = _state(file)
    except OSError as error:
        raise _bad(f"{path.name!r:.200} cannot be read: {error.strerror or type(error).__name__}") from None
    if before != after or tree.size != after[0]:
        raise _bad(f"{path.name!r:.200} changed while it was read: is a download still running?")
    return FileHashes(whole.hexdigest(), tree)


def _chunks(
    file: FileIO, size: int, update: Callable[[bytes], None], beside: ThreadPoolExecutor, step: Step
) -> Iterator[bytes]:
    """The content, up to a little more than `size`: a file that grows must not be read for ever."""
    done = 0
    pending: Future[None] | None = None
    while done <= size and (chunk := file.read(_READ)):
        if pending is not None:
            pending.result()
        pending = beside.submit(update, chunk)
        yield chunk
        done += len(chunk)
        step(done)
    if pending is not None:
        pending.result()


def _state(file: FileIO) -> tuple[int, int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino


def _bad(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", message, reason="damaged")
