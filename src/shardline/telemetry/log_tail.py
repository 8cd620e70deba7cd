"""The last lines of this process's own log, kept for whoever looks at the cluster from another machine.

Owns the ring and how a line is written there: one line of printable characters, bounded, without what `hide` hides.
More cautious than the log itself, because it leaves the machine: only Shardline's own loggers, and of an exception
that is not ours its type and place, never its words. Nothing is sent from here: a Gateway asks. Shown by
tests/telemetry/test_log_tail.py and tests/cluster/test_log_tails.py.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import traceback
from collections import deque
from collections.abc import MutableMapping
from pathlib import PurePath
from typing import Any

import structlog

from shardline.errors import ShardlineError
from shardline.wire.messages import LOG_CHARS, LOG_LINES, LogLine, LogLines

_ELSEWHERE = frozenset({"timestamp", "level", "role", "exc_info", "stack_info"})
"""Keys that are no part of a line's words: it has a time and a level of its own, and its Node has a role."""
_EXCEPTION = re.compile(r"\b([A-Za-z_][\w.]*(?:Error|Exception)): .*", re.DOTALL)
"""An exception with its words, as an engine worker prints it, or an error of ours quotes it."""
_UNTOLD = "[not told]"


class LogTail(logging.Handler):
    """A ring of the last `LOG_LINES` lines. `configure_logs` gives it its formatter and its place."""

    def __init__(self) -> None:
        super().__init__()
        self._boot = secrets.token_hex(8)
        self._lines: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            words = self.format(record)
        except Exception:
            # A line that cannot be written must not end what it tells of; logging itself reports it.
            self.handleError(record)
            return
        self._count += 1
        level = record.levelname.lower()
        self._lines.append(LogLine(n=self._count, time=round(record.created, 3), level=level, text=printable(words)))

    def since(self, boot: str, after: int) -> LogLines:
        """The lines behind number `after` of the process `boot`; all that are kept where that is another process."""
        self.acquire()
        try:
            lines = [line for line in self._lines if boot != self._boot or line.n > after]
        finally:
            self.release()
        return LogLines(boot=self._boot, lines=lines)


def printable(text: str, limit: int = LOG_CHARS) -> str:
    """One line, of at most `limit` characters that move no cursor and hide nothing."""
    return "".join(c if c.isprintable() else " " for c in text[:limit])


def in_one_line(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """Structlog renderer: `event key=value key="two words"`; nothing of keys that are None."""
    words = [str(event.get("event", ""))]
    said = {key: value for key, value in event.items() if value is not None and key not in _ELSEWHERE}
    words += [f"{key}={_value(value)}" for key, value in said.items() if key != "event"]
    raised = _raised(event.get("exc_info"))
    return " ".join([*words, f"raised={raised}"] if raised else words)


def tail_formatter(foreign: list[Any]) -> logging.Formatter:
    """`foreign`: the processors of lines that came by the standard library."""
    meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=foreign, processors=[meta, in_one_line])


def _value(value: Any) -> str:
    text = _without_words(str(value))
    return text if text and not any(c.isspace() for c in text) else f'"{text}"'


def _raised(given: Any) -> str | None:
    """Which exception, and where: its own words only where they are ours, for others may quote what was computed."""
    found = sys.exc_info() if given is True else given
    error = found[1] if isinstance(found, tuple) else found
    if not isinstance(error, BaseException):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {'/'.join(PurePath(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else ""
    ours = f": {_without_words(error.message)}" if isinstance(error, ShardlineError) else ""
    return f'"{type(error).__name__}{place}{ours}"'


def _without_words(text: str) -> str:
    return _EXCEPTION.sub(rf"\1: {_UNTOLD}", text[:LOG_CHARS])
