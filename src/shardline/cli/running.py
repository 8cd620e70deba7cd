"""What running clusters leave in the state folder: where each listens, and its logs.

Owns the folder `running/`, an entry for each cluster of this machine, and the folders under `logs/`. An entry is held
by a lock of its process, so that one whose process was killed counts for nothing, whoever has its pid now.
Shown by tests/cli/test_running.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from shardline.cli.state import made_folder, writing
from shardline.errors import ShardlineError

FOLDER = "running"
KEPT_LOGS = 10


class RunningCluster(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster that `up`, `demo` or `serve` runs on this machine."""

    pid: int
    gateway: str
    """URL."""
    tracker: str
    """URL."""
    what: str
    """The command and its model, for people: `up model.gguf`."""

    def __str__(self) -> str:
        return f"{self.what}, process {self.pid} (Gateway {self.gateway}, Tracker {self.tracker})"


@contextlib.contextmanager
def entered(state_dir: Path, cluster: RunningCluster) -> Iterator[None]:
    """While inside, the commands of this machine find `cluster`. Raises `state_unwritable`."""
    folder = made_folder(state_dir / FOLDER)
    running_clusters(state_dir)
    path = folder / f"{time.time_ns()}-{cluster.pid}.json"
    with writing(path):
        file = _held_entry(path, msgspec.json.encode(cluster))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        file.close()


def _held_entry(path: Path, content: bytes) -> BinaryIO:
    """A locked file that is renamed into place when it is whole: no reader sees one that is half, or not held yet."""
    descriptor, fresh = tempfile.mkstemp(dir=path.parent, prefix=".entry-")
    file = os.fdopen(descriptor, "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(content)
        file.flush()
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        with contextlib.suppress(OSError):  # closing writes once more what the disk did not take
            file.close()
        raise
    return file


def running_clusters(state_dir: Path) -> list[RunningCluster]:
    """Those that run on this machine with this state folder, oldest first. Entries of killed ones are dropped."""
    found = []
    for path in sorted((state_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError), path.open("rb") as file:
            if _is_held(file):
                found.append(msgspec.json.decode(file.read(), type=RunningCluster))
            else:
                path.unlink()  # names are used once, so this takes nobody else's
    return found


def _is_held(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def ambiguous(place: Literal["gateway", "tracker"], clusters: Sequence[RunningCluster]) -> ShardlineError:
    """Which one is meant? The candidates, and the flag that names one."""
    listed = "".join(f"\n    {cluster}" for cluster in clusters)
    return ShardlineError(
        "cluster_ambiguous",
        f"{len(clusters)} clusters run on this machine:{listed}",
        advice=f"Name the one you mean: --{place} {getattr(clusters[-1], place)}",
    )


def new_log_dir(state_dir: Path) -> Path:
    """A fresh folder for the logs of one cluster; of the old ones the newest `KEPT_LOGS` stay."""
    logs = made_folder(state_dir / "logs")
    with writing(logs):
        old = sorted(path for path in logs.iterdir() if path.is_dir())
    for path in old[: -(KEPT_LOGS - 1)]:
        shutil.rmtree(path, ignore_errors=True)
    return made_folder(logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
