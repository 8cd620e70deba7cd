"""What a running cluster leaves in the state folder: where it listens, and its logs.

Owns `running.json` (config.py reads it, so that commands need no URL) and the folders under `logs/`.
Shown by tests/cli/test_running.py.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType

from shardline.cli.config import RUNNING_FILE

KEPT_LOGS = 10


class Running:
    """While entered, commands of this machine find this cluster; the last one started wins."""

    def __init__(self, state_dir: Path, *, gateway: str, tracker: str) -> None:
        self._path = state_dir / RUNNING_FILE
        self._content = json.dumps({"pid": os.getpid(), "gateway": gateway, "tracker": tracker})

    def __enter__(self) -> Running:
        # Renamed into place: a reader sees the old file or the new one, never half of one.
        fresh = self._path.with_name(f"{RUNNING_FILE}.{os.getpid()}")
        fresh.write_text(self._content, encoding="utf-8")
        fresh.replace(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._path.read_text(encoding="utf-8") == self._content:
                self._path.unlink()
        except OSError:
            pass


def new_log_dir(state_dir: Path) -> Path:
    """A fresh folder for the logs of one cluster; of the old ones the newest `KEPT_LOGS` stay."""
    logs = state_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    old = sorted(path for path in logs.iterdir() if path.is_dir())
    for path in old[: -(KEPT_LOGS - 1)]:
        shutil.rmtree(path, ignore_errors=True)
    folder = logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    return folder
