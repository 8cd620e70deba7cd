"""`shardline doctor` on the machine of the tests: what it shows, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardline.cli import machine_checks
from shardline.cli.doctor import findings_text
from shardline.cli.machine_checks import Finding
from shardline.cli.main import cli, main

NAMES = ["python", "llama.cpp", "PyTorch", "BitTorrent", "memory", "disk", "state folder", "port 8080", "port 7070"]
NAMES += ["address", "clock", "open files"]


@pytest.fixture(autouse=True)
def light_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the real ones takes half a minute here, and is tested where they compute."""
    for extra in ("llama", "torch", "bt"):
        monkeypatch.setitem(machine_checks._ENGINES, extra, f"print('{extra} 1')")


def test_every_check_is_there_and_the_exit_code_follows(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    ran = CliRunner().invoke(cli, ["--state-dir", str(folder), "doctor", "--json", "--tracker", "http://127.0.0.1:9"])
    answer = json.loads(ran.stdout)
    assert [check["name"] for check in answer["checks"]] == NAMES
    failed = [check for check in answer["checks"] if check["state"] == "failed"]
    assert ran.exit_code == (1 if failed else 0) and answer["ok"] is not bool(failed)
    assert all(check["fix"] for check in answer["checks"] if check["state"] != "ok")
    assert not folder.exists()


def test_what_fails_ends_with_1_and_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine_checks._ENGINES, "llama", "raise OSError('cut short')")
    ran = CliRunner().invoke(cli, ["--state-dir", str(tmp_path), "doctor", "--tracker", "http://127.0.0.1:9"])
    assert ran.exit_code == 1
    (line,) = (line for line in ran.stdout.splitlines() if "llama.cpp" in line)
    with pytest.raises(SystemExit) as ended:
        main(["--state-dir", str(tmp_path), "doctor", "--json"])
    assert ended.value.code == 1
    assert line.startswith("FAILED") and "cut short" in line and "-m pip install -e" in ran.stdout


def test_lines_for_people() -> None:
    found = [
        Finding(name="disk", state="ok", what="plenty"),
        Finding(name="memory", state="failed", what="none", fix="Buy some."),
    ]
    lines = findings_text(found).splitlines()
    assert lines[0] == "ok      disk    plenty"
    assert lines[1] == "FAILED  memory  none" and lines[2].strip() == "What to do: Buy some."
    assert lines[-1] == "1 of 2 checks failed." and findings_text(found[:1]).endswith("This machine is fit.")


def test_the_ports_of_a_fresh_machine_are_named() -> None:
    """Those that the commands take where nobody says otherwise."""
    defaults = {parameter.name: parameter.default for name in ("gateway",) for parameter in cli.commands[name].params}
    tracker = {parameter.name: parameter.default for parameter in cli.commands["tracker"].params}
    assert {f"port {defaults['port']}", f"port {tracker['port']}"} <= set(NAMES)
