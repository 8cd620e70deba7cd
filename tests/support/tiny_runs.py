"""Comparisons of many tiny models at once, by a few processes that each take one name after the other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from tests.support.tiny_split import Record, read_record

ROOT = Path(__file__).resolve().parents[2]


class TinyRuns:
    """Begins with all `names` at once; `record` waits for the one that is asked for."""

    def __init__(self, names: Iterable[str], workers: int = 2) -> None:
        self._own = threading.local()
        self._processes: list[subprocess.Popen[str]] = []
        self._pool = ThreadPoolExecutor(workers)
        self._records: dict[str, Future[Record]] = {name: self._pool.submit(self._ask, name) for name in names}

    def __enter__(self) -> TinyRuns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()

    def record(self, name: str) -> Record:
        return self._records[name].result()

    def _ask(self, name: str) -> Record:
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that compares {name} ended by {process.wait()}")
        return read_record(line)

    def _process(self) -> subprocess.Popen[str]:
        """The process of this thread."""
        if not hasattr(self._own, "process"):
            self._own.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.tiny_split"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(self._own.process)
        process: subprocess.Popen[str] = self._own.process
        return process
