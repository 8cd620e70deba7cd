"""One file of a Model Artifact in a store: a sparse file, and the record of which of its pieces are held.

Owns the order that makes a piece *held*: it was checked in memory, written, read back equal, synced; then the record
is written aside, synced, renamed, and the folder synced. Every read goes through the record: a hole is never
readable. Where the data are not those the record is about (another file, cut short), its pieces are not held. Knows
one file only; leases and space are store.py's. Blocking. Shown by tests/artifact/test_store.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec
import structlog

from shardline.artifact.locks import exclusive
from shardline.errors import ShardlineError
from shardline.formats.merkle import FileTree
from shardline.wire.bitmap import Pieces

RECORD_BYTES_LIMIT = 64 << 20
SPARE_BYTES = 8 << 10
_WRITE = 256 << 10
"""Written and read back at a time: a processor's own cache holds it, and systems are slow with far more at once."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ADVICE_FULL = "Make room on that disk: what is held stays, and fetching goes on from there."
_ADVICE_LOST = "Bring the folder of the store back, or make it writable: what is held there stays."

log = structlog.get_logger(__name__)


class Elsewhere(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of another program that is read in place of our own, while it stays the very same."""

    path: str
    mtime_ns: int


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What stands on disk about one file."""

    version: int
    size: int
    piece_length: int
    inode: int
    """Of the data file: pieces of another one are not held."""
    pieces: bytes
    """`Pieces.to_bytes`."""
    sha256: str
    """Of `pieces`, in hex: a damaged disk must not invent one."""
    elsewhere: Elsewhere | None = None


class StoredFile:
    """One file. Threads and processes may use it at once."""

    def __init__(self, folder: Path, tree: FileTree) -> None:
        """`folder` is the artifact's in the store. Nothing is opened yet."""
        if tree.root is None:
            raise ValueError("an empty file is not stored")
        self.tree = tree
        self.count = len(tree.layer)
        self.name = tree.root.hex()
        self.data_path = folder / "data" / self.name
        self._record_path = folder / "held" / self.name
        self._spare_path = folder / "held" / (self.name + ".spare")
        self._lock_path = folder / "held" / (self.name + ".lock")
        self._seen: tuple[object, ...] = ()
        self._record: Record | None = None
        self._written = -1
        """Open from the first write to `rest`: the file that was written to, whatever lies at its path by then."""
        self._guard = threading.Lock()

    # What is held.

    def held(self) -> Pieces:
        """What may be read, as the disk says now."""
        found = self._current()
        return Pieces(self.count) if found is None else found[1]

    def path(self) -> Path:
        """Where the bytes are: our own sparse file, or the file of another program."""
        record = self._load()
        return self.data_path if record is None or record.elsewhere is None else Path(record.elsewhere.path)

    def open(self, start: int, end: int) -> FileIO:
        """The file with the bytes [start, end), for reading them. `artifact_incomplete` where one of their pieces is
        not held."""
        self.check_held(start, end)
        try:
            return self.path().open("rb", buffering=0)
        except OSError as error:
            raise _hole(f"{self.name[:16]} cannot be read: {error.strerror}") from None

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end); errors as of `open`."""
        with self.open(start, end) as file:
            try:
                return _pread(file.fileno(), end - start, start)
            except OSError as error:
                raise _hole(f"{self.name[:16]} cannot be read: {error.strerror}") from None

    def check_held(self, start: int, end: int) -> None:
        """`artifact_incomplete` unless all pieces with bytes of [start, end) are held."""
        if not 0 <= start < end <= self.tree.size:
            raise ShardlineError("invalid_value", f"bytes {start} to {end} of a file of {self.tree.size}")
        length = self.tree.piece_length
        if not self.held().covers(start // length, -(-end // length)):
            raise _hole(f"bytes {start} to {end} of {self.name[:16]} are not all held")

    def is_whole(self, piece: int, *, own: bool = False) -> bool:
        """Whether the bytes on disk are this piece, whatever the record says. `own`: those of our own data file."""
        start, end = self.tree.piece_range(piece)
        try:
            handle = os.open(self.data_path if own else self.path(), os.O_RDONLY)
        except OSError:
            return False
        try:
            return self.tree.verify_piece(piece, _pread(handle, end - start, start))
        except OSError:
            return False
        finally:
            os.close(handle)

    def found_on_disk(self) -> Iterator[int]:
        """The pieces that our own data file has, by hashing all that is no hole: where the record was lost."""
        try:
            handle = os.open(self.data_path, os.O_RDONLY)
        except OSError:
            return
        try:
            for piece in range(self.count):
                start, end = self.tree.piece_range(piece)
                if _has_data(handle, start, end) and self.tree.verify_piece(piece, _pread(handle, end - start, start)):
                    yield piece
        except OSError as error:
            log.warning("store_unreadable", file=self.name[:16], reason=error.strerror)
        finally:
            os.close(handle)

    # Changing it.

    def prepare(self) -> None:
        """Make the data file, of full size and all holes, where it is not there; and keep room for its record."""
        with self._changing():
            self._keep_spare()
            record, held = self._current() or (None, Pieces(self.count))
            handle = os.open(self.data_path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                found = os.fstat(handle)
                if found.st_size == self.tree.size:
                    return
                if record is not None and record.elsewhere is None:
                    # Before it is made longer: the new end is a hole, and no piece there is held any more.
                    self._write_record(held, found.st_ino, None)
                os.ftruncate(handle, self.tree.size)
                os.fsync(handle)
            finally:
                os.close(handle)
            _sync(self.data_path.parent)

    def put(self, first: int, data: bytes | memoryview) -> tuple[list[int], list[int]]:
        """Write pieces in a row from `first` on, of which `data` are the bytes. (good ones, bad ones).

        Only what is right is written, and it is read back. The good ones are not held before `commit`.
        """
        # Never behind the end of the file, however much came.
        length = self.tree.piece_length
        view = memoryview(data)[: self.tree.size - first * length]
        good: list[int] = []
        bad: list[int] = []
        with self._naming_errors(), self._writing() as handle:
            # One piece after the other: what was just hashed is still near the processor when it is written.
            for piece, at in enumerate(range(0, len(view), length), first):
                part = view[at : at + length]
                if self.tree.verify_piece(piece, part):
                    _write_checked(handle, part, piece * length)
                    good.append(piece)
                else:
                    bad.append(piece)
        return good, bad

    def commit(self, good: Pieces, bad: Pieces | None = None) -> None:
        """From now on `good` are held, and `bad` are not; both survive a loss of power once this returns."""
        with self._changing():
            record, held = self._current() or (None, Pieces(self.count))
            elsewhere = None if record is None else record.elsewhere
            if good:
                elsewhere = None
                if record is not None and record.elsewhere is not None:
                    held = Pieces(self.count)
            found = os.stat(self.data_path if elsewhere is None else elsewhere.path)
            if good:
                os.fsync(self._written_to(found))
            held = (held | good) - (bad or Pieces(self.count))
            self._write_record(held, found.st_ino, elsewhere)

    def rest(self) -> None:
        """Writing is over, for now: free what it held. Idempotent."""
        with self._guard:
            if self._written >= 0:
                os.close(self._written)
                self._written = -1
        with contextlib.suppress(OSError):
            self._spare_path.unlink(missing_ok=True)

    def refer(self, path: Path, mtime_ns: int, inode: int) -> None:
        """All pieces are held by the file at `path`, which was read whole while it was as these say."""
        with self._changing():
            self._write_record(Pieces.all(self.count), inode, Elsewhere(str(path), mtime_ns))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[int]:
        handle = os.open(self.data_path, os.O_RDWR)
        try:
            self._written_to(os.fstat(handle))
            yield handle
        finally:
            os.close(handle)

    def _written_to(self, found: os.stat_result) -> int:
        """A handle of the file that is written to; OSError unless `found` is that very one, in its full size."""
        with self._guard:
            if self._written < 0:
                self._written = os.open(self.data_path, os.O_RDWR)
            ours = os.fstat(self._written)
            if (ours.st_ino, ours.st_dev) != (found.st_ino, found.st_dev) or found.st_size != self.tree.size:
                raise OSError(errno.ENOENT, "the file of the pieces was taken away or changed by another program")
            return self._written

    # The record.

    def _current(self) -> tuple[Record, Pieces] | None:
        """The record, and what it is worth with the file that it is about; None: nothing is held."""
        record = self._load()
        if record is None:
            return None
        path = self.data_path if record.elsewhere is None else Path(record.elsewhere.path)
        try:
            found = os.stat(path)
        except OSError:
            return record, Pieces(self.count)
        same = found.st_ino == record.inode
        if record.elsewhere is not None:
            same = same and (found.st_size, found.st_mtime_ns) == (self.tree.size, record.elsewhere.mtime_ns)
        if not same:
            return record, Pieces(self.count)
        length = self.tree.piece_length
        held = Pieces.from_bytes(-(-record.size // record.piece_length), record.pieces)
        if record.piece_length != length:
            # The same bytes under another manifest: the root, and so the file, is the same.
            held = held.regrouped(record.size, record.piece_length, length)
        if found.st_size < self.tree.size:
            held &= Pieces.span(self.count, 0, min(self.count, found.st_size // length))
        return record, held

    def _load(self) -> Record | None:
        try:
            found = os.stat(self._record_path)
        except OSError:
            return None
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen != self._seen:
            # In this order: a second thread that comes between reads the same or a newer one again.
            self._record = self._read_record()
            self._seen = seen
        return self._record

    def _read_record(self) -> Record | None:
        try:
            with self._record_path.open("rb") as file:
                # Only as much memory as it has bytes: a read of "at most 64 MiB" takes all of them at once.
                size = os.fstat(file.fileno()).st_size
                if size > RECORD_BYTES_LIMIT:
                    raise ValueError(f"it has {size} bytes")
                record = msgspec.json.decode(file.read(size), type=Record)
            if record.version != 1 or record.size != self.tree.size or record.piece_length < 1:
                raise ValueError("it is about another file")
            Pieces.from_bytes(-(-record.size // record.piece_length), record.pieces)
            if hashlib.sha256(record.pieces).hexdigest() != record.sha256:
                raise ValueError("its digest is wrong")
        except (OSError, ValueError, msgspec.MsgspecError, ShardlineError) as error:
            log.warning("store_record_damaged", file=self.name[:16], reason=str(error)[:200])
            return None
        return record

    def _write_record(self, held: Pieces, inode: int, elsewhere: Elsewhere | None) -> None:
        raw = held.to_bytes()
        record = Record(
            version=1,
            size=self.tree.size,
            piece_length=self.tree.piece_length,
            inode=inode,
            pieces=raw,
            sha256=hashlib.sha256(raw).hexdigest(),
            elsewhere=elsewhere,
        )
        raw = msgspec.json.encode(record)
        try:
            write_synced(self._record_path, raw)
        except OSError as error:
            if error.errno not in _FULL or not self._spare_path.exists():
                raise
            # Data have taken the last block. What they are worth is written down all the same.
            self._spare_path.unlink(missing_ok=True)
            write_synced(self._record_path, raw)

    def _keep_spare(self) -> None:
        """A file that gives its room to the record on a full disk; on one that is full already there is none."""
        size = self.count // 4 + SPARE_BYTES
        with contextlib.suppress(OSError):
            if not self._spare_path.exists():
                self._spare_path.write_bytes(bytes(size))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._naming_errors(), exclusive(self._lock_path):
            yield

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(error, self.data_path.parent.parent) from None


def write_synced(path: Path, raw: bytes) -> None:
    """Replace the file at `path`, whole or not at all, also where power is lost."""
    part = path.with_name(path.name + ".part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _pwrite(handle, memoryview(raw), 0)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def unwritable(error: OSError, folder: Path) -> ShardlineError:
    """A disk that takes no more, or a folder that is gone, in our words."""
    if error.errno in _FULL:
        return ShardlineError("disk_full", f"the disk of the store is full ({folder.name[:24]})", advice=_ADVICE_FULL)
    why = error.strerror or type(error).__name__
    return ShardlineError(
        "state_unwritable", f"the store cannot be written ({folder.name[:24]}): {why}", advice=_ADVICE_LOST
    )


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pwrite(handle: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], offset + done)


def _write_checked(handle: int, data: memoryview, offset: int) -> None:
    """Write, and see that the same can be read; OSError where it cannot."""
    back = bytearray(min(_WRITE, len(data)))
    for at in range(0, len(data), _WRITE):
        part = data[at : at + _WRITE]
        if len(part) < len(back):
            back = bytearray(len(part))
        _pwrite(handle, part, offset + at)
        # A bytearray compares its memory with that of the view; two views would be compared by element.
        if os.preadv(handle, [back], offset + at) != len(part) or back != part:
            raise OSError(errno.EIO, "what was written reads back otherwise")


def _pread(handle: int, size: int, offset: int) -> bytes:
    """`size` bytes, in one buffer where one call gives them all; OSError where the file is shorter."""
    data = os.pread(handle, size, offset)
    while len(data) < size:
        more = os.pread(handle, size - len(data), offset + len(data))
        if not more:
            raise OSError(errno.EIO, "the file is shorter than it was")
        data += more
    return data


def _has_data(handle: int, start: int, end: int) -> bool:
    try:
        return os.lseek(handle, start, os.SEEK_DATA) < end
    except OSError:
        return False


def _hole(message: str) -> ShardlineError:
    return ShardlineError("artifact_incomplete", message)
