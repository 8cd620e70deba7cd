"""One role as a process: run its coroutine until a signal, and tell whoever started it how far it is.

Owns signals, the exit code of a stopped process, the announcements on stdout, and the lifeline to a supervisor (an
open stdin; its end means that the supervisor is gone). Knows nothing of what a role does.
Shown by tests/cli/test_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any

import uvloop

from shardline.cli.values import counted
from shardline.errors import ShardlineError
from shardline.options import LOAD_STEPS, StartPhase

COUNTED = ("loading", "fetching", "verifying", "cutting")
"""Phases that come often, each time a little further."""
_TOLD = {
    "chosen": "model {name} ({content_id}): {reason}",
    "placed": "layers {first}:{last} of {n_layers} of {model}: {reason}",
    "waiting": "waiting: {reason}",
    "adopting": "looking for the files of {name}",
    "offering": "offers {name} ({content_id}), {held} of {total} bytes",
}
FILES = 65_536
FORCED_S = 6.0
"""A process that was told to stop has the drain time plus this long; then it ends the hard way."""


class Announcer:
    """Writes the announcements of a role: for people, or one JSON object a line for a supervisor."""

    def __init__(self, name: str, *, supervised: bool, like_logs: bool = False) -> None:
        """`like_logs`: stdout is where JSON log lines go, too, so that announcements have their form."""
        self.name = name
        self.supervised = supervised
        self._like_logs = like_logs
        self._last_news: tuple[str, int] = ("", -1)

    def __call__(self, phase: StartPhase, /, **facts: str | int) -> None:
        if self.supervised:
            _write(json.dumps({"phase": phase, **facts}))
        elif self._is_news(phase, facts):
            self._say(phase, facts)

    def ended(self) -> None:
        """The last word to a person; a supervisor sees the end itself."""
        if not self.supervised:
            self._say("ended", {})

    def _say(self, phase: str, facts: Mapping[str, str | int]) -> None:
        words = in_words(phase, dict(facts))
        if not self._like_logs:
            _write(f"{self.name}: {words}")
            return
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = {"says": " ".join(words.split()), "phase": phase, **facts}
        logged = {"event": "part_announced", "level": "info", "timestamp": now, "role": self.name}
        _write(json.dumps(line | logged, ensure_ascii=False))

    def failed(self, error: ShardlineError) -> None:
        """The last word to a supervisor; a person gets it on stderr."""
        if self.supervised:
            facts = {"code": error.code, "message": error.message, "advice": error.advice}
            _write(json.dumps({"phase": "failed", **facts}))

    def _is_news(self, phase: str, facts: dict[str, str | int]) -> bool:
        """A line for every fifth of the way, not for every layer."""
        last, self._last_news = self._last_news, (phase, fifths(facts))
        return phase not in COUNTED or last != self._last_news


def is_one_place() -> bool:
    """Whether stdout and stderr are one file, pipe or journal: what is written to either stands between the other's."""
    try:
        out, err = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False  # one of them is no file
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino) and not sys.stderr.isatty()


def _write(line: str) -> None:
    """A reader that has gone (a closed terminal, a killed supervisor) must not end the role through its progress."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # What is in the buffer goes nowhere from now on; Python would fail on it once more at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def in_words(phase: str, facts: dict[str, Any]) -> str:
    """`loading 12/30 layers`, `listening on http://…`: an announcement as a person reads it."""
    if phase == "listening":
        return f"listening on {facts.get('url', '?')}"
    if phase == "inviting":
        return f"to join from another machine:\n  {join_command(str(facts.get('line', '?')))}"
    if phase == "testing":
        return f"testing {facts.get('what', 'its layers')}"
    if phase in COUNTED and "total" in facts:
        return _counted(phase, facts)
    if phase == "draining":
        sessions = int(facts.get("sessions", 0))
        return f"ending; waits for what runs: {counted(sessions, 'session')}" if sessions else "ending"
    told = _TOLD.get(phase)
    return phase if told is None else told.format_map(_Facts(facts))


def fifths(facts: Mapping[str, Any]) -> int:
    """How far something counted is, as coarsely as lines that stay should tell it."""
    return 5 * int(facts.get("done", 0)) // max(1, int(facts.get("total", 1)))


def _counted(phase: str, facts: dict[str, Any]) -> str:
    """How far something is; of a fetch also how fast, from where and how long it will take."""
    words = f"{phase} {_share(phase, int(facts.get('done', 0)), int(facts['total']))}"
    if facts.get("bytes_per_s"):
        words += f", {int(facts['bytes_per_s']) / 1e6:.1f} MB/s"
    if "source" in facts:
        words += f", from {facts['source']}"
    if "seconds_left" in facts:
        words += f", {facts['seconds_left']} s left"
    return words


class _Facts(dict[str, Any]):
    """What an announcement lacks is shown as such."""

    def __missing__(self, key: str) -> str:
        return "?"


def join_command(line: str, part: str = "node") -> str:
    """What a person pastes on the next machine; which model a Node serves is said there, behind it."""
    return f"shardline {part} --join '{line}'"


def _share(phase: str, done: int, total: int) -> str:
    """`12/30 layers`; `113/326 MB` where what is counted can only be bytes; `40 %` of steps that are nothing else."""
    if phase == "verifying":
        return f"{done}/{total} pieces"
    if total >= 10**6:
        return f"{done // 10**6}/{total // 10**6} MB"
    if phase in ("fetching", "cutting"):
        return f"{done // 1000}/{total // 1000} kB"
    return f"{100 * done // total} %" if total == LOAD_STEPS else f"{done}/{total} layers"


def run_until_signal(work: Coroutine[Any, Any, None], *, drain_s: float, lifeline: bool = False) -> None:
    """Run `work` on a fresh loop; SIGINT, SIGTERM or the end of the lifeline cancel it, and then it returns normally.

    A second signal, or a drain that takes longer than `drain_s` and a little, ends the process at once with code 1.
    """
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signal(work, drain_s=drain_s, lifeline=lifeline))


def _raise_file_limit() -> None:
    """As many open files as the system lets this user have: each session of a Node is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems name a limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _until_signal(work: Coroutine[Any, Any, None], *, drain_s: float, lifeline: bool) -> None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if stopping:
            os._exit(1)
        stopping = True
        task.cancel()
        # From a thread: the loop itself may be what does not come to an end.
        timer = threading.Timer(drain_s + FORCED_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if lifeline:
        _watch_stdin(loop, lambda: None if stopping else stop())
    try:
        await task
    except asyncio.CancelledError:
        if not stopping:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _watch_stdin(loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            on_end()

    loop.add_reader(descriptor, readable)
