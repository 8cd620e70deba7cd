"""Shard files on disk: carries a plan out, once for each Model Artifact and range, and keeps the result.

Owns the cache folder. A file appears under its name whole and synced, or not at all: written aside, renamed at the end;
one that is there is compared with the model first, or with its own digest (shard_digest.py). Processes that want the
same file at once make it once (flock, which ends with its owner). Blocks are shared with the model's file where the
file system can. It decides nothing about the content (formats/shard_gguf.py does) and never touches the network.
Blocking: call it in a thread. Shown by tests/artifact/test_shard_files.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from shardline.artifact.blocks import share
from shardline.artifact.locks import exclusive
from shardline.artifact.shard_digest import Chunks, ShardDigest
from shardline.errors import ShardlineError
from shardline.formats.gguf_files import GGUFModel
from shardline.formats.shard_gguf import PAGE, RECIPE, Copy, ShardPlan, Zeros, plan_shard, plan_vocabulary

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that were checked or written so far, and all of them."""
Cancelled = Callable[[], bool]
"""Asked between chunks of 16 MiB; True ends the work with `cancelled`."""

CHUNK = 16 << 20
WRITE = 1 << 20
"""Of one write. Smaller ones leave small pages behind, larger ones are slower where memory is in pieces."""
LOCK_WAIT_S = 3600.0
"""How long another process may take to make the file that this one waits for."""

_ADVICE = (
    "Make room on that disk, or choose another folder: --state-dir for the cache of a Node, -o for a file of your own."
)
_CONTENT_ID = re.compile(r"mac1-[0-9a-f]{64}")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ShardFiles:
    """The Shard files under `folder`, which is made at need."""

    def __init__(self, folder: Path, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self.folder = folder
        self.lock_wait_s = lock_wait_s

    def shard(
        self,
        model: GGUFModel,
        content_id: str,
        first: int,
        last: int,
        *,
        growing: bool = False,
        before: Callable[[], None] | None = None,
        progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> Path:
        """The file of Shard [first, last), from the cache or made now.

        `growing`: other pieces may be written into the model's files meanwhile, as in a store. `before` is called
        where the file must be made; what it raises ends it.

        Errors: those of `plan_shard`; `disk_full`, `state_unwritable`, `cancelled`, each with nothing left behind;
        `deadline` where another process does not come to an end with the same file; `model_file_invalid` where the
        model's files changed.
        """
        plan = plan_shard(model, first, last, content_id=content_id)
        path = self.shard_path(content_id, first, last)
        return self._file(path, model, plan, progress, cancelled, growing, before)

    def vocabulary(
        self,
        model: GGUFModel,
        content_id: str,
        *,
        progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> Path:
        """A file with the tokenizer and no tensors. Errors: as of `shard`."""
        return self._file(self.vocabulary_path(content_id), model, plan_vocabulary(model), progress, cancelled)

    def shard_path(self, content_id: str, first: int, last: int) -> Path:
        """Where `shard` puts its file."""
        return self.folder / f"{_checked(content_id)}-r{RECIPE}-{first}-{last}.gguf"

    def vocabulary_path(self, content_id: str) -> Path:
        """Where `vocabulary` puts its file."""
        return self.folder / f"{_checked(content_id)}-r{RECIPE}-vocabulary.gguf"

    def _file(
        self,
        path: Path,
        model: GGUFModel,
        plan: ShardPlan,
        progress: Progress | None,
        cancelled: Cancelled | None,
        growing: bool = False,
        before: Callable[[], None] | None = None,
    ) -> Path:
        steps = _Steps(plan.nbytes, progress, cancelled)
        if _is_whole(path, plan, model, steps):
            return path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(path, self.lock_wait_s, cancelled):
                if not _is_whole(path, plan, model, steps):
                    self._sweep()
                    if before is not None:
                        before()
                    write_plan(plan, model, path, growing=growing, progress=progress, cancelled=cancelled)
        except OSError as error:
            raise _unwritable(error, self.folder) from None
        return path

    def _sweep(self) -> None:
        """Remove what processes that were killed left unfinished: parts of files whose lock nobody holds."""
        for part in self.folder.glob("*.*.part"):
            path = part.with_name(part.name.rsplit(".", 2)[0])
            with contextlib.suppress(OSError, ShardlineError), _locked(path, 0.0, None):
                part.unlink()


def write_plan(
    plan: ShardPlan,
    model: GGUFModel,
    path: Path,
    *,
    growing: bool = False,
    progress: Progress | None = None,
    cancelled: Cancelled | None = None,
) -> None:
    """Write the file at `path`, in place of one that may be there. Errors: as of `ShardFiles.shard`."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        _check_space(path.parent, plan.nbytes)
        try:
            _write(plan, model, part, _Steps(plan.nbytes, progress, cancelled), growing)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(error, path.parent) from None


class _Steps:
    """Says how far the work is, and asks whether it shall go on."""

    def __init__(self, total: int, progress: Progress | None, cancelled: Cancelled | None) -> None:
        self.total = total
        self.progress = progress
        self.cancelled = cancelled

    def reached(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, self.total)
        _check_cancelled(self.cancelled)


def _write(plan: ShardPlan, model: GGUFModel, part: Path, steps: _Steps, growing: bool) -> None:
    with contextlib.ExitStack() as stack:
        sources = _Sources(model, stack)
        target = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        stack.callback(os.close, target)
        _put(target, plan.header, 0)
        position = len(plan.header)
        steps.reached(position)
        for piece in plan.pieces:
            if isinstance(piece, Copy) and piece.factor is None:
                for done in _copied(sources.of(piece.file), target, piece, position):
                    steps.reached(position + done)
            elif isinstance(piece, Copy):
                _put(target, _multiplied(sources.of(piece.file), piece), position)
            # Zeros are holes: they read as zeros and take no space.
            position += piece.nbytes
            if isinstance(piece, Zeros):
                steps.reached(position)
        os.ftruncate(target, position)
        if not growing:
            sources.check_unchanged()
        os.fsync(target)


class _Sources:
    """The model's files, opened when first needed; they must be those whose headers were read."""

    def __init__(self, model: GGUFModel, stack: contextlib.ExitStack) -> None:
        self.model = model
        self.stack = stack
        self.opened: dict[int, tuple[int, tuple[int, int]]] = {}

    def of(self, number: int) -> int:
        if number not in self.opened:
            path = self.model.paths[number]
            try:
                handle = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise _bad(f"{path.name!r:.200} cannot be read: {error.strerror}") from None
            self.stack.callback(os.close, handle)
            stat = os.fstat(handle)
            if stat.st_size != self.model.headers[number].file_size:
                raise _changed(path)
            self.opened[number] = handle, (stat.st_size, stat.st_mtime_ns)
        return self.opened[number][0]

    def check_unchanged(self) -> None:
        for number, (handle, state) in self.opened.items():
            stat = os.fstat(handle)
            if (stat.st_size, stat.st_mtime_ns) != state:
                raise _changed(self.model.paths[number])


def _copied(source: int, target: int, piece: Copy, position: int) -> Iterator[int]:
    """Copy the piece to `position`; yields the bytes done after each chunk.

    Not by copy_file_range: where it shares no blocks, Linux copies page by page, and what lies in the page cache in
    single pages all over the memory is computed with 10 to 20 % more slowly than the same in long runs, which large
    writes leave. It copies no faster either.
    """
    done, cloning = 0, True
    buffer = memoryview(bytearray(min(WRITE, piece.nbytes)))
    while done < piece.nbytes:
        # Up to the next page of the source first: blocks can be shared only as a whole.
        inside = (piece.offset + done) % PAGE
        size = min(PAGE - inside if inside else CHUNK, piece.nbytes - done)
        whole = 0 if inside else size // PAGE * PAGE
        cloning = cloning and (whole == 0 or _cloned(source, target, whole, piece.offset + done, position + done))
        shared = whole if cloning else 0
        for start in range(done + shared, done + size, WRITE):
            part = buffer[: min(WRITE, done + size - start)]
            _fill(part, source, piece.offset + start)
            _put(target, part, position + start)
        done += size
        yield done


def _cloned(source: int, target: int, size: int, offset: int, position: int) -> bool:
    """Share the blocks of a range; False where it cannot be, for whatever reason: then the bytes are written, and what
    is wrong with the disk shows there."""
    try:
        share(source, target, size=size, offset=offset, position=position)
    except OSError:
        return False
    return True


def _multiplied(source: int, piece: Copy) -> bytes:
    """A small float32 tensor times the factor, each product rounded to float32."""
    form = struct.Struct(f"<{piece.nbytes // 4}f")
    factor = piece.factor if piece.factor is not None else 1.0
    return form.pack(*(value * factor for value in form.unpack(_read(source, piece.nbytes, piece.offset))))


def _read(handle: int, size: int, offset: int) -> bytearray:
    data = bytearray(size)
    _fill(memoryview(data), handle, offset)
    return data


def _fill(buffer: memoryview, handle: int, offset: int) -> None:
    done = 0
    while done < len(buffer):
        more = os.preadv(handle, [buffer[done:]], offset + done)
        if not more:
            raise _bad("the model's file became shorter while it was cut: is a download still running?")
        done += more


def _put(handle: int, data: bytes | memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, memoryview(data)[done:], offset + done)


def _is_whole(path: Path, plan: ShardPlan, model: GGUFModel, steps: _Steps) -> bool:
    """Whether the cached file is the planned one, byte for byte: disks lose some, and weights that are a little wrong
    answer without an error. Compared with the model, unless its digest shows that it is what was compared before."""
    digest, chunks = ShardDigest(path, model.paths), Chunks()
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            if os.fstat(file.fileno()).st_size != plan.nbytes or file.read(len(plan.header)) != plan.header:
                return False
        except OSError:
            return False
        if digest.confirms(steps.reached):
            return True
        chunks.add(plan.header)
        sources, position = _Sources(model, stack), len(plan.header)
        for piece in plan.pieces:
            for done in range(0, piece.nbytes, CHUNK):
                size = min(CHUNK, piece.nbytes - done)
                found = os.pread(file.fileno(), size, position + done)
                if _expected(sources, piece, done, size) != found:
                    return False
                chunks.add(found)
                steps.reached(position + done + size)
            position += piece.nbytes
    digest.keep(chunks)
    return True


def _expected(sources: _Sources, piece: Copy | Zeros, done: int, size: int) -> bytes | bytearray:
    """`size` bytes of a piece from byte `done` on."""
    if isinstance(piece, Zeros):
        return bytes(size)
    if piece.factor is None:
        return _read(sources.of(piece.file), size, piece.offset + done)
    return _multiplied(sources.of(piece.file), piece)[done : done + size]


def _locked(path: Path, wait_s: float, cancelled: Cancelled | None) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of the file at `path`, so that no other process makes it; `deadline` after `wait_s`."""
    lock = path.with_name(path.name + ".lock")
    return exclusive(lock, wait_s, limit="shard_file", waiting=partial(_check_cancelled, cancelled))


def _check_space(folder: Path, needed: int) -> None:
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < needed:
        message = f"no Shard file in {str(folder)!r:.300}: it needs {needed} bytes, {free} are free"
        raise ShardlineError("disk_full", message, advice=_ADVICE, needed_bytes=needed, free_bytes=free)


def _check_cancelled(cancelled: Cancelled | None) -> None:
    if cancelled is not None and cancelled():
        raise ShardlineError("cancelled", "the making of a Shard file was cancelled")


def _checked(content_id: str) -> str:
    if not _CONTENT_ID.fullmatch(content_id):
        raise ShardlineError("invalid_value", f"{content_id!r:.100} is not a content_id", param="content_id")
    return content_id


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(error: OSError, folder: Path) -> ShardlineError:
    code = "disk_full" if error.errno in _FULL else "state_unwritable"
    message = f"no Shard file can be written to {str(folder)!r:.300}: {error.strerror or type(error).__name__}"
    return ShardlineError(code, message, advice=_ADVICE)


def _changed(path: Path) -> ShardlineError:
    return _bad(f"{path.name!r:.200} changed since its header was read: is a download still running?")


def _bad(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", message, reason="damaged")
