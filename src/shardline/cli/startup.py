"""The start of a cluster as a person sees it: a line a part, redrawn on a terminal, appended elsewhere.

Owns the picture alone; the supervisor calls it at every change. Shown by tests/cli/test_startup.py.
"""

from __future__ import annotations

import time
from typing import Any, TextIO

from shardline.cli.process import COUNTED, fifths, in_words
from shardline.cli.supervisor import Child


class StartView:
    """Call it with a child at every change; `close()` before anything else is printed."""

    def __init__(self, out: TextIO, notes: dict[str, str]) -> None:
        self._out = out
        self._notes = notes
        """Part -> what stands beside its name (its layers)."""
        self._lines: dict[str, str] = {}
        self._fifths: dict[str, int] = {}
        self._live: Any = None
        if out.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=out, highlight=False)
            self._live = Live(console=console, refresh_per_second=8, get_renderable=self._picture)
            self._live.start()

    def __call__(self, child: Child) -> None:
        name = child.part.name
        words = in_words(child.phase, child.facts)
        if child.ended:
            words = child.how_it_ended()
        elif child.phase == "ready":
            words = f"ready after {time.monotonic() - child.started:.1f} s"
            words += f", {child.url}" if child.url else ""
        elif child.phase == "failed":
            words = "failed"
        line = f"  {name:8} {self._notes.get(name, ''):8} {words}"
        news = line != self._lines.get(name) and self._is_worth_a_line(child)
        self._lines[name] = line
        if self._live is None and news:
            self._out.write(line.rstrip() + "\n")
            self._out.flush()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_worth_a_line(self, child: Child) -> bool:
        """Where lines stay: a line for every fifth of the layers, not for each."""
        if child.phase not in COUNTED:
            return True
        name = child.part.name
        last, self._fifths[name] = self._fifths.get(name), fifths(child.facts)
        return last != self._fifths[name]

    def _picture(self) -> Any:
        from rich.text import Text

        return Text("\n".join(self._lines.values()))
