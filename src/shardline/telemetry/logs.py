"""Logs: one call sets up structlog and the standard library alike, JSON or console lines on stderr.

Owns the format, the role that stands in every line, and what never gets into one: the values of keys that name a
secret or a text of a user. An event is `noun_verb` with keys. Shown by tests/telemetry/test_logs.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from shardline.telemetry.log_tail import LogTail, tail_formatter

LogStyle = Literal["auto", "console", "json"]

HIDDEN = "[hidden]"
UNLOGGED = frozenset(
    {
        *("api_key", "api_keys", "authorization", "cookie", "credential", "headers", "key", "secret", "statement"),
        *("ticket", "tickets", "token_bytes", "tokens_text"),
        *("body", "completion", "content", "delta", "messages", "piece", "prompt", "text"),
    }
)
"""Keys whose values are secrets, or somebody's words."""


def hide(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Structlog processor: replace what must not be logged, at any depth of dictionaries."""
    for name, value in event.items():
        if isinstance(name, str) and name.lower() in UNLOGGED:
            event[name] = HIDDEN
        elif isinstance(value, dict):
            event[name] = hide(logger, method, dict(value))
    return event


def configure_logs(
    *,
    role: str,
    style: LogStyle = "auto",
    level: str = "info",
    stream: TextIO | None = None,
    tail: LogTail | None = None,
) -> None:
    """Every logger of the process writes to `stream` (stderr) from now on. Call once, in the command.

    `auto` is console lines where the stream is a terminal, JSON elsewhere. Lines of libraries (uvicorn, asyncio) take
    the same way from `warning` upwards. `tail` keeps the last lines of Shardline's own loggers.
    """
    out = sys.stderr if stream is None else stream
    as_json = style == "json" or (style == "auto" and not out.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _role(role),
        hide,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer(sort_keys=False)
        if as_json
        else structlog.dev.ConsoleRenderer(
            colors=out.isatty(),
            pad_event_to=0,
            # The pretty one shows the local variables of each frame, and with them credentials and prompts.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    ending: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        ending.append(structlog.processors.format_exc_info)
    handler = logging.StreamHandler(out)
    # Lines of the standard library bring their keys as `extra`.
    foreign = [structlog.stdlib.ExtraAdder(), *shared]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=foreign, processors=[*ending, renderer]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    ours = logging.getLogger("shardline")
    ours.setLevel(level.upper())
    ours.handlers[:] = [] if tail is None else [tail]
    if tail is not None:
        tail.setFormatter(tail_formatter(foreign))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _role(role: str) -> Any:
    def add(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["role"] = role
        return event

    return add
