"""What a Shard file was when it was last found equal to its model's bytes: so the next look reads it alone.

Owns the small file beside it: SHA-256 of its chunks, the recipe, and size, time and inode of the Shard file and of the
model's files. Where anything of that is otherwise, it says nothing, and the comparison with the model decides
(shard_files.py). It guards against disks that forget, not against people. Blocking. Shown by
tests/artifact/test_shard_digest.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from shardline.artifact.stored_file import write_synced
from shardline.formats.shard_gguf import RECIPE

CHUNK = 16 << 20
_READ = 1 << 20
_THREADS = 4
_RECORD_BYTES_LIMIT = 16 << 20


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as the system tells of it, unread."""

    size: int
    mtime_ns: int
    inode: int


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands on disk beside a Shard file."""

    version: int
    recipe: int
    shard: Seen
    sources: tuple[Seen, ...]
    """The model's files, in their order."""
    chunks: tuple[str, ...]
    """SHA-256 in hex of each 16 MiB of the Shard file; the last chunk may be short."""


class Chunks:
    """SHA-256 of each chunk of what is added, in order."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash = hashlib.sha256()
        self._size = 0

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            part = view[: CHUNK - self._size]
            self._hash.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size == CHUNK:
                self._end()

    def ended(self) -> tuple[str, ...]:
        """All of them; nothing is added after that."""
        if self._size:
            self._end()
        return tuple(self._done)

    def _end(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash = hashlib.sha256()
        self._size = 0


class ShardDigest:
    """The record of the Shard file at `path`, made from the model's files `sources`, all as they are now."""

    def __init__(self, path: Path, sources: Iterable[Path]) -> None:
        self._path = path
        self._sources = tuple(sources)
        self._files = self._look()

    def confirms(self, reached: Callable[[int], None]) -> bool:
        """Whether the Shard file is byte for byte what was found right before; it is read once, whole.

        `reached` hears the bytes that were checked so far, and what it raises ends it. False means nothing.
        """
        record = self._read()
        if record is None or self._files is None:
            return False
        shard, *sources = self._files
        known = (record.version, record.recipe, record.shard, record.sources)
        if known != (1, RECIPE, shard, tuple(sources)) or len(record.chunks) != -(-shard.size // CHUNK):
            return False
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "shard-digest") as threads:
            try:
                found = threads.map(partial(_chunk_digest, self._path), range(len(record.chunks)))
                for number, (expected, digest) in enumerate(zip(record.chunks, found, strict=True), 1):
                    if expected != digest:
                        return False
                    reached(min(shard.size, number * CHUNK))
            except OSError:
                return False
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        return self._look() == self._files

    def keep(self, chunks: Chunks) -> None:
        """The Shard file has just been found right, and has these chunks. Not kept where files changed meanwhile, or
        where it cannot be written: then the next look compares again."""
        if self._files is None or self._look() != self._files:
            return
        shard, *sources = self._files
        record = Record(1, RECIPE, shard, tuple(sources), chunks.ended())
        with contextlib.suppress(OSError):
            write_synced(self._beside, msgspec.json.encode(record))

    @property
    def _beside(self) -> Path:
        return self._path.with_name(self._path.name + ".digest")

    def _look(self) -> tuple[Seen, ...] | None:
        found = []
        try:
            for path in (self._path, *self._sources):
                stat = os.stat(path)
                found.append(Seen(stat.st_size, stat.st_mtime_ns, stat.st_ino))
        except OSError:
            return None
        return tuple(found)

    def _read(self) -> Record | None:
        try:
            with self._beside.open("rb") as file:
                # No more memory than it has bytes: a read of so many at most takes room for all of them.
                size = min(_RECORD_BYTES_LIMIT, os.fstat(file.fileno()).st_size)
                return msgspec.json.decode(file.read(size), type=Record)
        except (OSError, msgspec.MsgspecError):
            return None


def _chunk_digest(path: Path, number: int) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ))
    with path.open("rb", buffering=0) as file:
        file.seek(number * CHUNK)
        left = CHUNK
        while left and (size := file.readinto(buffer[: min(left, _READ)])):
            digest.update(buffer[:size])
            left -= size
    return digest.hexdigest()
