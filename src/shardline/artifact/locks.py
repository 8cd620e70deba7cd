"""Locks between processes that share a store: who uses an artifact, who writes its state, who fetches which piece.

Owns the waiting and the words for it. All are locks of the system, so the death of a process frees what it had.
Shown by tests/artifact/test_store_processes.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from shardline.errors import ShardlineError

LOCK_WAIT_S = 30.0
"""Locks around a few small files; nobody has one for longer."""
_POLL_S = 0.02
_TAKEN = frozenset({errno.EACCES, errno.EAGAIN})
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of Linux with 64 bits: type, whence, start, length, process."""


class Lease:
    """Says to all processes that something is in use, until `close`."""

    def __init__(self, path: Path) -> None:
        """Raises `artifact_in_use` while it is being removed."""
        self._handle = _open(path)
        if not _try(self._handle, fcntl.LOCK_SH):
            os.close(self._handle)
            raise ShardlineError("artifact_in_use", f"{path.stem} is being removed at this moment")

    def close(self) -> None:
        """Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@contextlib.contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """While inside nobody has or gets a `Lease` of `path`; `artifact_in_use` where somebody has one."""
    handle = _open(path)
    try:
        if not _try(handle, fcntl.LOCK_EX):
            raise ShardlineError("artifact_in_use", f"{path.stem} is in use by a process of this machine")
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def exclusive(
    path: Path, wait_s: float = LOCK_WAIT_S, *, limit: str = "store", waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Alone among all threads and processes; `deadline`, with the name of its `limit`, after `wait_s`.

    `waiting` is called while another one has it; what it raises ends the wait.
    """
    handle = _open(path)
    try:
        deadline = time.monotonic() + wait_s
        while not _try(handle, fcntl.LOCK_EX):
            waiting()
            if time.monotonic() >= deadline:
                raise ShardlineError("deadline", f"another process has had {path.name} for {wait_s:g} s", limit=limit)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


class Claims:
    """Pieces that this process fetches at the moment, so that no other fetches them too. Numbers are any integers.

    One for each artifact and process: the system's locks of this kind belong to the process, and end with the first
    descriptor of the file that it closes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = -1
        self._held: set[int] = set()
        self._guard = threading.Lock()

    def take(self, first: int, end: int) -> int:
        """Claim [first, end) from the front; the end of what was claimed, `first` where the first one is taken.
        OSError, and nothing is claimed, where the system does not say."""
        with self._guard:
            if self._handle < 0:
                self._handle = _open(self._path)
            for number in range(first, end):
                if number in self._held:
                    return number
                try:
                    fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
                except OSError as error:
                    if error.errno in _TAKEN:
                        return number
                    self._free(first, number)
                    raise
                self._held.add(number)
            return end

    def holder(self, number: int) -> int | None:
        """The process that has claimed it; None where it is free, ours, or the system does not say."""
        if sys.platform != "linux" or struct.calcsize("P") != 8:
            return None
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        with self._guard:
            if self._handle < 0:
                return None
            try:
                kind, *_, process = _FLOCK.unpack(fcntl.fcntl(self._handle, fcntl.F_GETLK, asked))
            except OSError:
                return None
        return None if kind == fcntl.F_UNLCK else int(process)

    def give(self, first: int, end: int) -> None:
        """Free [first, end)."""
        with self._guard:
            self._free(first, end)

    def _free(self, first: int, end: int) -> None:
        self._held.difference_update(range(first, end))
        if self._handle >= 0 and end > first:
            fcntl.lockf(self._handle, fcntl.LOCK_UN, end - first, first)

    def close(self) -> None:
        """Free all. Idempotent."""
        with self._guard:
            self._held.clear()
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1


def is_stopped(process: int) -> bool:
    """Whether a process stands still until somebody lets it go on (SIGSTOP, Ctrl-Z, a debugger)."""
    try:
        return psutil.Process(process).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        # In a store that this process cannot write to, a lock may still be taken on a file that is there.
        return os.open(path, os.O_RDONLY)


def _try(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
