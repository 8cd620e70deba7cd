"""How far a step is, in one line on stderr that is redrawn; nothing where stderr is no terminal.

Owns that line. Shown by tests/cli/test_progress.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how far a step is, on stderr, if that is a terminal. Called with bytes done and bytes in all."""
    live, shown = sys.stderr.isatty(), -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(1, total)
        if live and percent != shown:
            shown = percent
            click.echo(f"\r{label}: {percent} %", nl=False, err=True)

    try:
        yield show
    finally:
        if shown >= 0:
            click.echo("\r\033[K", nl=False, err=True)
