"""The start of a cluster, line by line."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.cli.startup import StartView
from shardline.cli.supervisor import Child, Part


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def announced(child: Child, view: StartView, phase: str, **facts: object) -> None:
    child.phase, child.facts = phase, dict(facts)
    child.url = str(facts.get("url")) if "url" in facts else child.url
    view(child)


def test_a_part_that_has_ended_is_not_called_ready(sleeper: subprocess.Popen[bytes]) -> None:
    out = io.StringIO()
    view = StartView(out, {})
    child = Child(Part("node-1", ()), Path("log"), sleeper)
    announced(child, view, "ready", url="http://127.0.0.1:5")
    sleeper.kill()
    sleeper.wait()
    view(child)
    assert out.getvalue().splitlines()[-1].split(None, 1)[1] == "was killed by SIGKILL"
    assert out.getvalue().count("ready") == 1


def test_a_line_for_each_new_thing_and_every_fifth_of_the_layers(sleeper: subprocess.Popen[bytes]) -> None:
    out = io.StringIO()
    view = StartView(out, {"node-1": "0:15"})
    child = Child(Part("node-1", ()), Path("log"), sleeper)
    view(child)
    view(child)
    announced(child, view, "listening", url="http://127.0.0.1:5")
    for done in range(31):
        announced(child, view, "loading", done=done, total=30)
    announced(child, view, "testing")
    announced(child, view, "ready")
    view.close()
    lines = [line.split(None, 2)[2] for line in out.getvalue().splitlines()]
    assert lines[:2] == ["starting", "listening on http://127.0.0.1:5"]
    assert lines[2:8] == [f"loading {n}/30 layers" for n in (0, 6, 12, 18, 24, 30)]
    assert lines[8] == "testing its layers"
    assert lines[9].startswith("ready after ") and lines[9].endswith(" s, http://127.0.0.1:5")
    assert out.getvalue().startswith("  node-1   0:15     starting\n")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_same_lines_are_redrawn(
    monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Screen()
    view = StartView(out, {})
    child = Child(Part("tracker", ()), Path("log"), sleeper)
    announced(child, view, "ready", url="http://127.0.0.1:5")
    view.close()
    assert "tracker" in out.getvalue() and "http://127.0.0.1:5" in out.getvalue()
