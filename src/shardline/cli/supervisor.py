"""Starts the parts of a cluster as processes, watches them, and leaves none behind.

Owns child processes: each leads a process group of its own, writes its log to a file, announces on stdout, and holds
a pipe from us as stdin, so that it ends by itself when we are killed. Refuses to know what the parts do, and never
restarts one: whoever called decides. Plain polling, no threads. Shown by tests/cli/test_supervisor.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from shardline.cli.state import made_folder, opened_log
from shardline.errors import CATALOGUE, ShardlineError

POLL_S = 0.05
STOP_S = 4.0
"""How long one wave of parts may take to end after SIGTERM; then their process groups are killed."""
_LOG_LINES = 8
_LOG_TAIL_BYTES = 16 << 10
PROGRAM = (sys.executable, "-m", "shardline", "--supervised")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked us to end. Not an Exception: nothing but the way out may catch it."""


class Part(NamedTuple):
    """One process to start: `arguments` stand behind `python -m shardline --supervised`."""

    name: str
    arguments: tuple[str, ...]
    stop_wave: int = 0
    """Parts of wave 0 are ended first; the next wave follows when they have gone."""
    by_hand: tuple[str, ...] = ()
    """What a person types behind `shardline` to start it again."""


class Child:
    """A started part, as of the last poll."""

    def __init__(self, part: Part, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.part = part
        self.log = log
        self.process = process
        self.phase = "starting"
        self.facts: dict[str, Any] = {}
        """Of the last announcement."""
        self.url: str | None = None
        self.started = time.monotonic()
        self._unread = b""
        self.line = ""
        """For joining, as the part announced it last; a Tracker with cluster keys does."""
        self.offers: list[str] = []
        """What it gives to Nodes, in words; a seeder does."""
        self._on_line: Callable[[str], None] | None = None

    def on_line(self, say: Callable[[str], None]) -> None:
        """`say` the last line for joining that the part announced, and each that follows."""
        self._on_line = say
        if self.line:
            say(self.line)

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def poll(self) -> bool:
        """Read what it announced, look whether it lives; True if anything is new."""
        news = False
        for line in self._lines():
            news |= self._take(line)
        if not self.ended and self.process.poll() is not None:
            news = True
            for line in self._lines():
                self._take(line)
        return news

    def _lines(self) -> Iterator[bytes]:
        assert self.process.stdout is not None
        # A worker of an ended part may still hold the other end: the end of the stream is no sign of the part's end.
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.process.stdout.fileno(), 65536):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        yield from lines

    def _take(self, line: bytes) -> bool:
        try:
            said = json.loads(line)
            phase = said.pop("phase")
        except (ValueError, KeyError, AttributeError, TypeError):
            return False
        if phase == "offering":
            name, content_id, total = (said.get(key, "?") for key in ("name", "content_id", "total"))
            self.offers.append(f"{name} ({content_id}), {total} bytes")
            return False
        if phase == "inviting":
            # News for people, and no phase of the part's life.
            self.line = str(said.get("line", ""))
            if self._on_line is not None:
                self._on_line(self.line)
            return False
        self.phase = str(phase)
        self.facts = said
        if "url" in said:
            self.url = str(said["url"])
        return True

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def last_log_lines(self) -> list[str]:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
        except OSError:
            return []

    def signal_leader(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """The part and whatever it started; also after its own end, when a worker may be left."""
        import psutil

        # Engine workers lead groups of their own; they end with their Node, but one that hangs does not.
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            below = [] if self.ended else psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()


def death(child: Child) -> ShardlineError:
    """Why a part that should run has ended: its own words where it had any, else its last log lines."""
    code = child.facts.get("code") if child.phase == "failed" else None
    if code in CATALOGUE:
        message, advice = f"{child.part.name}: {child.facts.get('message', '')}", child.facts.get("advice")
        return ShardlineError(code, message, advice=advice, part=child.part.name)
    words = f"{child.part.name} {child.how_it_ended()}"
    tail = "".join(f"\n    {line}" for line in child.last_log_lines())
    return ShardlineError(
        "part_lost",
        f"{words}; its log, {child.log}, ends with:{tail or ' nothing'}",
        advice="Read that log for the cause, then run this command again: nothing of it is left running.",
    )


class Supervisor:
    """Children in start order; `with Supervisor(…) as cluster:` ends them all on the way out, whatever the way is."""

    def __init__(
        self, log_dir: Path, watch: Callable[[Child], None], *, program: Sequence[str] = PROGRAM, stop_s: float = STOP_S
    ) -> None:
        self.log_dir = log_dir
        self._program = program
        self._stop_s = stop_s
        self.children: list[Child] = []
        self._watch = watch
        self._stopping = False
        self._hurry = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Supervisor:
        made_folder(self.log_dir)
        for number in _SIGNALS:
            self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._stopping = True
        try:
            self._stop_in_waves()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        return kind is Stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            self._hurry = True
            return
        self._stopping = True
        raise Stopped

    def start(self, part: Part) -> Child:
        log = self.log_dir / f"{part.name}.log"
        with opened_log(log) as stderr:
            process = subprocess.Popen(
                [*self._program, *part.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        child = Child(part, log, process)
        self.children.append(child)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._watch(child)
        return child

    def poll(self) -> None:
        for child in self.children:
            if child.poll():
                self._watch(child)

    def until_ready(self, children: Sequence[Child], *, within_s: float) -> None:
        """Return when all are ready; raise with the reason when any part ends before, or when the time is over."""
        deadline = time.monotonic() + within_s
        while True:
            self.poll()
            dead = next((c for c in self.children if c.ended), None)
            if dead is not None:
                raise death(dead)
            waiting = [c.part.name for c in children if c.phase != "ready"]
            if not waiting:
                return
            if time.monotonic() > deadline:
                why = f"{', '.join(waiting)}: not ready within the start limit of {within_s:.0f} s"
                advice = "The logs say what they wait for. If it is a large model: shardline --set worker_start_s=900 …"
                raise ShardlineError("deadline", f"{why}; logs are in {self.log_dir}", advice=advice, limit="start")
            time.sleep(POLL_S)

    def next_death(self, known: Iterable[Child]) -> Child:
        """Wait for the end of a child that is not in `known`."""
        seen = set(known)
        while True:
            self.poll()
            dead = next((c for c in self.children if c.ended and c not in seen), None)
            if dead is not None:
                return dead
            time.sleep(POLL_S)

    def _stop_in_waves(self) -> None:
        for wave in sorted({c.part.stop_wave for c in self.children}):
            members = [c for c in self.children if c.part.stop_wave == wave]
            for child in members:
                child.signal_leader(signal.SIGTERM)
            deadline = time.monotonic() + self._stop_s
            while not self._hurry and time.monotonic() < deadline and any(c.process.poll() is None for c in members):
                time.sleep(POLL_S / 5)
        for child in self.children:
            child.kill_group()
        for child in self.children:
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    pipe.close()
