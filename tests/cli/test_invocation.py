"""What one call hands on to other commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardline.cli.cluster import command_words
from shardline.cli.invocation import Invocation


def test_flags_for_other_commands_hold_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"state_dir": "s", "credential_file": None, "log_level": "debug"}
    call = Invocation("c.toml", ("push_s=1",), flags)
    found = ["--config", str(tmp_path / "c.toml"), "--state-dir", str(tmp_path / "s")]
    assert call.finding_arguments() == found
    assert call.child_arguments() == [*found[:2], "--set", "push_s=1", *found[2:], "--log-level", "debug"]


def test_the_command_is_named_so_that_it_works_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "bin" / "shardline"
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", str(own.parent))
    assert command_words() == (sys.executable, "-m", "shardline")
    own.parent.mkdir()
    own.touch(0o755)
    assert command_words() == ("shardline",)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert command_words() == (str(own),)
