"""What one call hands on to other commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.cluster import command_words
from shardline.cli.invocation import Invocation, credential_of
from shardline.errors import ShardlineError


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


def test_a_credential_of_another_state_folder_is_asked_for_where_the_tracker_runs(stage: Any, tmp_path: Path) -> None:
    configuration = Invocation(flags={"state_dir": str(tmp_path)}).configuration()
    stage.json("GET /healthz", {"status": "ok"})
    for tracker, words in ((stage.url, "another state folder"), ("http://127.0.0.1:9", "start its Tracker first")):
        with pytest.raises(ShardlineError, match="there is no cluster credential") as caught:
            credential_of(configuration, tracker=tracker)
        assert words in caught.value.advice and "--credential-file" in caught.value.advice
