"""A generation as it runs, in a terminal: the answer, the route, prefill, tokens/s, and the time of each hop.

Owns the pictures, made from telemetry events (wire/telemetry.py) and text; two ways out: one block that is redrawn on
a terminal, and plain lines elsewhere. It asks nobody for anything. Shown by tests/cli/test_live.py.
"""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

from shardline.cli.values import counted
from shardline.errors import ShardlineError

_BAR = 24
_LINE_INTERVAL_S = 0.5
_LABEL = 8
_GAP = "  "
_BREAKS = re.compile(rf"({_GAP}|(?<=→) )")
"""Between the parts of a line: where it is broken first, if it must be."""
ENDED = ("completed", "failed", "cancelled")


def wrapped(line: str, width: int) -> list[str]:
    """`line` in rows of `width` characters, broken between its parts, else between words; a longer word stays whole."""
    first, *rest = _BREAKS.split(line)
    rows = [first]
    for gap, part in zip(rest[::2], rest[1::2], strict=True):
        if len(rows[-1]) + len(gap) + len(part) <= width:
            rows[-1] += gap + part
        else:
            rows.append(part)
    words = [textwrap.wrap(row, max(1, width), break_long_words=False, break_on_hyphens=False) for row in rows]
    return [row for broken in words for row in broken] or [""]


def labelled(label: str, line: str, width: int | None) -> str:
    """`label` and `line`, its further rows below the first; without a width in one row."""
    rows = line.split("\n")
    if width is not None:
        rows = [part for row in rows for part in wrapped(row.strip(), width - _LABEL - 1)]
    return f"\n{'':{_LABEL}} ".join((f"{label:{_LABEL}} {rows[0]}", *rows[1:]))


def number(value: float | None, unit: str = "", digits: int = 1) -> str:
    """`12.3 ms`; a dash where there is no measurement."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def bar(done: int, total: int, width: int = _BAR) -> str:
    filled = width if total <= 0 else width * min(done, total) // total
    return "█" * filled + "░" * (width - filled)


def route_line(event: dict[str, Any]) -> str:
    """`n-12ab 0:15 → n-34cd 15:30`, or how the route is being found."""
    route = event.get("route")
    if route is None:
        position = (event.get("queue") or {}).get("position")
        return f"place {position} in the queue" if position else "none yet"
    return " → ".join(f"{hop['node']} {layers_words(hop['layers'])}" for hop in route["hops"])


def layers_words(layers: Sequence[int] | None) -> str:
    """`0:15`; `all` of a composite Node, of whose layers nobody knows how many there are."""
    return "all" if layers is None else f"{layers[0]}:{layers[1]}"


def hop_line(hop: dict[str, Any]) -> str:
    """One hop's last step in words."""
    health = "" if hop.get("health", "ok") == "ok" else f"  {hop['health']}"
    return (
        f"{hop['node']}  {layers_words(hop['layers'])}  "
        f"compute {number(hop.get('compute_ms'), ' ms')}  queue {number(hop.get('queue_ms'), ' ms')}  "
        f"send {number(hop.get('send_ms'), ' ms')}{health}"
    )


def prefill_line(event: dict[str, Any]) -> str:
    done, total = event["prefill"]["done"], event["prefill"]["total"]
    return f"{bar(done, total)}{_GAP}{done}/{counted(total, 'token')}"


def decode_line(event: dict[str, Any]) -> str:
    decode = event["decode"]
    if event.get("output") == "vector":
        return "none: the prompt becomes a vector"
    tokens = "–" if decode["tokens"] is None else counted(decode["tokens"], "token")
    return (
        f"{tokens}  {number(decode.get('tokens_per_s'), ' tokens/s')}  "
        f"first after {number(decode.get('ttft_ms'), ' ms', 0)}"
    )


def failure_words(failure: dict[str, Any] | ShardlineError) -> str:
    """What happened and what to do, in two sentences; from an error object or an error."""
    if isinstance(failure, ShardlineError):
        return f"{failure.message} ({failure.code})\n  What to do: {failure.advice}"
    advice = f"\n  What to do: {failure['advice']}" if failure.get("advice") else ""
    return f"{failure.get('message', 'failed')} ({failure.get('code', 'unknown')}){advice}"


def block(event: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, line) of the whole account, top to bottom."""
    rows = [("phase", event["phase"]), ("route", route_line(event))]
    if event["prefill"]["total"]:
        rows.append(("prefill", prefill_line(event)))
    rows.append(("decode", decode_line(event)))
    rows += [("hop", hop_line(hop)) for hop in (event.get("route") or {}).get("hops", [])]
    if event.get("failure"):
        rows.append(("failure", failure_words(event["failure"])))
    return rows


class View(Protocol):
    """Where a running generation is shown."""

    def text(self, delta: str) -> None: ...

    def event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def width_of(stream: TextIO) -> int | None:
    """Columns of the terminal that `stream` is; None where it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):
        return None


class LineView:
    """The answer to one stream as it comes, the account to another, a line for each thing that is new."""

    def __init__(self, answer: TextIO, account: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._answer = answer
        self._account = account
        self._clock = clock
        self._phase = ""
        self._route = ""
        self._last_progress = -_LINE_INTERVAL_S
        self._last: dict[str, Any] | None = None
        self._open_line = False

    def text(self, delta: str) -> None:
        self._answer.write(delta)
        self._answer.flush()
        self._open_line = bool(delta) and not delta.endswith("\n")

    def event(self, event: dict[str, Any]) -> None:
        self._last = event
        phase, route = event["phase"], route_line(event)
        if phase != self._phase and phase not in ENDED:
            self._say(phase, route)
        elif route != self._route:
            self._say("route", route)
        self._phase, self._route = phase, route
        now = self._clock()
        if phase == "prefill" and event["prefill"]["total"] and now - self._last_progress >= _LINE_INTERVAL_S:
            self._last_progress = now
            self._say("prefill", prefill_line(event))

    def close(self) -> None:
        if self._open_line:
            self._answer.write("\n")
            self._answer.flush()
            self._open_line = False
        if self._last is not None:
            for label, line in block(self._last):
                self._say(label, line)

    def _say(self, label: str, line: str) -> None:
        # Both may go to one place (a log of CI): the account must not cut the answer into pieces.
        if not self._open_line:
            self._account.write(labelled(label, line, width_of(self._account)) + "\n")
            self._account.flush()


class TerminalView:
    """One block that is redrawn: the end of the answer, and the account below it; at the end the whole answer."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._text = ""
        self._event: dict[str, Any] | None = None
        self._live = Live(console=self._console, refresh_per_second=12, transient=True, get_renderable=self._picture)
        self._live.start()

    def text(self, delta: str) -> None:
        self._text += delta

    def event(self, event: dict[str, Any]) -> None:
        self._event = event

    def close(self) -> None:
        self._live.stop()
        if self._text:
            self._console.print(self._text, markup=False)
        if self._event is not None:
            self._console.print(self._account())

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        room = max(3, self._console.size.height - 12)
        answer = Text(self._text).wrap(self._console, self._console.size.width)
        return Group(*answer[-room:], self._account())

    def _account(self) -> Any:
        from rich.text import Text

        width = self._console.size.width
        account = Text(overflow="fold", end="")
        rows: Sequence[tuple[str, str]] = [("phase", "sent")] if self._event is None else block(self._event)
        for label, line in rows:
            style = {"failure": "red", "phase": "bold"}.get(label, "")
            shown = labelled(label, line, width)
            account.append("\n" if account else "")
            account.append(shown[:_LABEL], style="dim")
            account.append(shown[_LABEL:], style=style)
        return account
