"""The state folder: what a failed write looks like to a person."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardline
from shardline.cli.state import check_room, check_room_for, made_folder, opened_log, writing
from shardline.errors import ShardlineError


def test_a_full_disk_is_told_with_path_and_advice(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(ShardlineError) as refused, writing(tmp_path / "file"):
            raise OSError(number, os.strerror(number))
        error = refused.value
        assert error.code == "state_unwritable"
        assert f"{tmp_path / 'file'} cannot be written: {os.strerror(number)}" == error.message
        assert f"Free some space on the disk of {tmp_path}" in error.advice and "--state-dir" in error.advice


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    for attempt in (check_room, made_folder, opened_log):
        with pytest.raises(ShardlineError) as refused:
            attempt(blocked / "state")
        assert refused.value.code == "state_unwritable"
        assert str(blocked) in refused.value.message and "you may write to" in refused.value.advice


def test_the_look_for_room_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    check_room(folder)
    assert list(folder.iterdir()) == [] and folder.stat().st_mode & 0o077 == 0


def test_a_file_that_is_there_needs_no_room(tmp_path: Path) -> None:
    there = tmp_path / "absent" / "key"
    check_room_for(there)
    there.write_text("x")
    there.parent.chmod(0o500)
    check_room_for(there)
    there.parent.chmod(0o700)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from shardline.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["up", "serve", "tracker"])
def test_every_start_on_a_disk_that_takes_no_more_says_so(tmp_path: Path, command: str) -> None:
    """A limit on the size of files stands in for the full disk: the writes fail in the same place."""
    script = tmp_path / "script.json"
    script.write_text('{"model": "m", "n_layers": 2, "answer": ["x"]}')
    more = [str(script), "--engine", "scripted"] if command == "up" else []
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "--state-dir", str(tmp_path / "state"), command, *more, "--port", "0"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"shardline: {tmp_path / 'state'}" in done.stderr and "cannot be written" in done.stderr
    assert "What to do: Free some space" in done.stderr and "--state-dir" in done.stderr


def test_the_commands_write_in_one_place() -> None:
    """No module of theirs makes a file by itself; running.py fills its own within `writing`."""
    folder = Path(shardline.__file__).parent / "cli"
    words = (".mkdir(", "write_text(", "write_bytes(", "mkstemp(", '.open("w', '.open("a')
    found = {path.name for path in folder.glob("*.py") if any(word in path.read_text() for word in words)}
    assert found <= {"state.py", "running.py"}
