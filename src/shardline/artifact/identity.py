"""`content_id`: the name of a Model Artifact, made of everything that changes what the model does, and of nothing else.

mac1-<SHA-256 of the canonical JSON {"files": [[size, pieces root], …], "small": [[path, SHA-256], …]}>: the files that
hold tensors in split order with their BEP 52 roots, and of a safetensors folder the small files of `SMALL_FILES` that
are there. File names of the large files, piece lengths, publishers and signatures do not enter. Roots are cached by
path, size, mtime and inode. It reads files, and never the network. Shown by tests/artifact/test_identity.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
import structlog

from shardline.errors import ShardlineError
from shardline.formats.gguf_files import part_paths
from shardline.formats.merkle import hash_file
from shardline.formats.safetensors import weight_files

SMALL_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Of a safetensors folder: what the model computes, and how text becomes tokens and back. A fixed list: README, LICENSE
and the index (which says only where tensors lie, and is checked against the files) can change without a new name."""

SMALL_FILE_LIMIT = 256 << 20
CACHE_NAME = "identity-v1.json"
CACHE_ENTRIES = 2000
CACHE_BYTES_LIMIT = 4 << 20
_READ = 1 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes hashed so far and the bytes to hash."""

_log = structlog.get_logger()


class HashedFile(NamedTuple):
    """A file with tensors, and the state that it was hashed in."""

    path: Path
    """The file itself, whatever links lead to it."""
    size: int
    mtime_ns: int
    inode: int
    root: str
    """In hex."""


class _Known(msgspec.Struct, frozen=True):
    """A root that was computed, and the state of the file at that time."""

    size: int
    mtime_ns: int
    inode: int
    root: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, _Known]


def content_id(path: Path | str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> str:
    """The `content_id` of a GGUF file (any part of a split one) or of a safetensors folder.

    Blocks for about a second a GB at the first time; with `cache_dir` not at all the next time. Errors:
    `model_file_invalid`, naming the part that is missing, empty, or changed while it was read.
    """
    path = Path(path)
    small = _hash_small(path) if path.is_dir() else []
    found = hashed_files(path, cache_dir=cache_dir, progress=progress)
    return identity_of([(file.size, file.root) for file in found], small)


def hashed_files(path: Path, *, cache_dir: Path | None = None, progress: Progress | None = None) -> list[HashedFile]:
    """The files with tensors, in split order. Costs and errors as of `content_id`."""
    large = [path / name for name in weight_files(path)] if path.is_dir() else part_paths(path)
    known = _read_cache(cache_dir)
    found: list[HashedFile] = []
    total = sum(_stat(part).st_size for part in large)
    done = 0
    for part in large:
        key, now = os.path.realpath(part), _stat(part)
        entry = known.get(key)
        if entry is None or (entry.size, entry.mtime_ns, entry.inode) != _state(now):
            entry = _hash_large(part, _step(progress, done, total))
            if cache_dir is not None:
                _write_cache(cache_dir, {key: entry})
        found.append(HashedFile(Path(key), entry.size, entry.mtime_ns, entry.inode, entry.root))
        done += entry.size
    return found


def identity_of(files: list[tuple[int, str]], small: list[tuple[str, str]]) -> str:
    """The name, from (size, pieces root in hex) in split order and (path, SHA-256 in hex) of the small files."""
    document = {"files": [list(f) for f in files], "small": [list(s) for s in sorted(small)]}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "mac1-" + hashlib.sha256(canonical.encode()).hexdigest()


def _step(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total) if progress is not None else None


def _stat(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except OSError as error:
        raise _bad(f"{path.name!r:.200} cannot be read: {error.strerror}") from None
    if not path.is_file():
        raise _bad(f"{path.name!r:.200} is not a file")
    return found


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _hash_large(path: Path, step: Callable[[int], None]) -> _Known:
    try:
        with path.open("rb", buffering=0) as file:
            before = _state(os.fstat(file.fileno()))
            tree = hash_file(_counted(file, before[0], step))
            after = _state(os.fstat(file.fileno()))
    except OSError as error:
        raise _bad(f"{path.name!r:.200} cannot be read: {error.strerror}") from None
    if before != after or tree.size != after[0]:
        raise _bad(f"{path.name!r:.200} changed while it was read: is a download still running?")
    if tree.root is None:
        raise _bad(f"{path.name!r:.200} is empty")
    return _Known(*after, tree.root.hex())


def _counted(file: BinaryIO, size: int, step: Callable[[int], None]) -> Iterator[bytes]:
    """The content, up to a little more than the size it began with: a file that grows must not be read for ever."""
    done = 0
    while done <= size and (chunk := file.read(_READ)):
        yield chunk
        done += len(chunk)
        step(done)


def _hash_small(folder: Path) -> list[tuple[str, str]]:
    result = []
    for name in SMALL_FILES:
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > SMALL_FILE_LIMIT:
            raise _bad(f"{name} has more than {SMALL_FILE_LIMIT} bytes")
        with path.open("rb") as file:
            result.append((name, hashlib.file_digest(file, "sha256").hexdigest()))
    return result


def _read_cache(cache_dir: Path | None) -> dict[str, _Known]:
    """What is known; a cache that is absent or damaged is an empty one, and is written anew."""
    if cache_dir is None:
        return {}
    try:
        with (cache_dir / CACHE_NAME).open("rb") as file:
            raw = file.read(CACHE_BYTES_LIMIT + 1)
        return msgspec.json.decode(raw, type=_Cache).files if len(raw) <= CACHE_BYTES_LIMIT else {}
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _log.warning("identity_cache_ignored", reason=type(error).__name__)
        return {}


def _write_cache(cache_dir: Path, entries: dict[str, _Known]) -> None:
    """Add entries: read, join, write aside, rename. Two processes at once may lose one's entry, never the file.

    A cache that cannot be written costs time at the next start and nothing else, so it is a warning.
    """
    files = {**_read_cache(cache_dir), **entries}
    for oldest in list(files)[: max(0, len(files) - CACHE_ENTRIES)]:
        del files[oldest]
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=cache_dir, prefix=CACHE_NAME)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(_Cache(files)))
            os.replace(name, cache_dir / CACHE_NAME)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        _log.warning("identity_cache_not_written", reason=type(error).__name__)


def _bad(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", message, reason="damaged")
