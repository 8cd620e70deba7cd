"""The state folder as the commands write it: every folder and file of theirs is made here.

Owns what a failed write looks like to a person (`state_unwritable`, with the path and what to do), and the look before
a start whether the folder takes anything at all. What stands in the files is the callers'; secrets are written by
transport/credentials.py, behind that look. Shown by tests/cli/test_state.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shardline.errors import ShardlineError

ROOM = 256 << 10
"""Bytes that a start wants to be able to write: secrets, logs and the entry of a cluster are less."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever makes or fills `path`: the system's refusal becomes `state_unwritable`."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> ShardlineError:
    """The error of the catalogue for a write to `path` that failed."""
    folder = path if path.is_dir() else path.parent
    if error.errno in _FULL:
        advice = f"Free some space on the disk of {folder}, or use another folder: shardline --state-dir FOLDER …"
    else:
        advice = f"Make {folder} a folder that you may write to, or use another: shardline --state-dir FOLDER …"
    return ShardlineError("state_unwritable", f"{path} cannot be written: {error.strerror or error}", advice=advice)


def made_folder(path: Path) -> Path:
    """`path`, made with its parents where it is not there; nobody else may look into it."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def opened_log(path: Path) -> BinaryIO:
    """The log at `path`, open for appending."""
    with writing(path):
        return path.open("ab")


def check_room(folder: Path) -> None:
    """Write `ROOM` bytes into `folder`, and take them back: a full disk is told before anything starts."""
    made_folder(folder)
    with writing(folder), tempfile.TemporaryFile(dir=folder, prefix=".room-") as probe:
        probe.write(bytes(ROOM))
        probe.flush()
        os.fsync(probe.fileno())


def check_room_for(path: Path) -> None:
    """The same for a file that will be made by somebody else; one that is there already needs no room."""
    if not path.exists():
        check_room(path.parent)
