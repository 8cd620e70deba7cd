"""The line of progress: on a terminal alone, and gone at the end."""

from __future__ import annotations

import sys

import pytest

from shardline.cli.progress import progress


class Terminal:
    def __init__(self) -> None:
        self.written = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass


def test_nothing_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Hashing") as show:
        show(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_line_that_is_redrawn_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(KeyboardInterrupt), progress("Hashing") as show:
        show(0, 300)
        show(1, 300)
        show(150, 300)
        raise KeyboardInterrupt
    assert terminal.written == "\rHashing: 0 %\rHashing: 50 %\r\033[K"


def test_nothing_to_do_is_no_division_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("Hashing") as show:
        show(0, 0)
