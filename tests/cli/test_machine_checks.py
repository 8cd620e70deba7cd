"""Each check of this machine, from facts to finding; the fix stands beside each failure."""

from __future__ import annotations

import email.utils
import os
import resource
import shlex
import socket
import sys
import time
from pathlib import Path

import pytest

from shardline.cli import machine_checks
from shardline.cli.machine_checks import (
    Finding,
    Loaded,
    address_finding,
    bittorrent_finding,
    clock_finding,
    clock_findings,
    container_limit,
    disk_finding,
    engine_findings,
    files_finding,
    loaded,
    memory_finding,
    own_address,
    port_finding,
    python_finding,
    tracker_date,
    writing_finding,
)
from shardline.cli.running import RunningCluster

WORKS, ABSENT, BROKEN = Loaded("v1", True), Loaded("No module named 'x'", False, True), Loaded("cut short", False)
GIB = 1 << 30


def test_python() -> None:
    assert python_finding((3, 11, 7), 64).state == "ok"
    assert python_finding((3, 10, 1), 64).state == python_finding((3, 12, 0), 32).state == "failed"


@pytest.mark.parametrize(
    ("llama", "torch", "states"),
    [
        (WORKS, WORKS, ["ok", "ok"]),
        (WORKS, ABSENT, ["ok", "note"]),
        (ABSENT, ABSENT, ["failed", "failed"]),
        (BROKEN, WORKS, ["failed", "ok"]),
    ],
)
def test_one_engine_is_enough_and_a_broken_one_is_a_fault(llama: Loaded, torch: Loaded, states: list[str]) -> None:
    found = engine_findings(llama, torch)
    assert [finding.state for finding in found] == states
    assert all(("pip install" in finding.fix) == (finding.state != "ok") for finding in found)


def test_bittorrent_is_no_must() -> None:
    assert bittorrent_finding(WORKS, (3, 11)).state == "ok"
    assert bittorrent_finding(ABSENT, (3, 11)).state == "note"
    assert "3.13" in bittorrent_finding(ABSENT, (3, 14)).fix
    assert bittorrent_finding(BROKEN, (3, 11)).state == "failed"


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("print('noise'); print('engine 1')", Loaded("engine 1", True)),
        ("import nothing_of_this_name", Loaded("No module named 'nothing_of_this_name'", False, True)),
        ("raise OSError('cut short')", Loaded("cut short", False)),
        ("import os; os.abort()", Loaded("the process ended with -6", False)),
        ("import time; time.sleep(30)", Loaded("not loaded within 1 s", False)),
    ],
)
def test_an_engine_that_crashes_or_hangs_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, program: str, wanted: Loaded
) -> None:
    monkeypatch.setitem(machine_checks._ENGINES, "llama", program)
    monkeypatch.setattr(machine_checks, "LOAD_S", 1.0 if "sleep" in program else 30.0)
    assert loaded("llama", dict(os.environ)) == wanted


def test_memory_and_what_a_container_may_use(tmp_path: Path) -> None:
    assert memory_finding(8 * GIB, 16 * GIB, None).state == "ok"
    assert memory_finding(8 * GIB, 16 * GIB, 32 * GIB).state == "ok"
    small = memory_finding(8 * GIB, 16 * GIB, 2 * GIB)
    assert small.state == "note" and "--memory below 2.0 GiB" in small.fix
    assert memory_finding(GIB - 1, 16 * GIB, None).state == memory_finding(8 * GIB, 16 * GIB, GIB - 1).state == "failed"
    assert container_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert container_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    assert container_limit(tmp_path) == GIB


def test_disk() -> None:
    assert disk_finding(Path("/x"), 2 * GIB, GIB).state == "ok"
    full = disk_finding(Path("/x"), GIB, GIB)
    assert full.state == "failed" and "--state-dir" in full.fix


def test_write_rights_without_making_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    assert writing_finding(folder).state == "ok" and list(tmp_path.iterdir()) == []

    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine_checks.tempfile, "TemporaryFile", refused)
    found = writing_finding(folder)
    assert found.state == "failed" and "Permission denied" in found.what and str(tmp_path) in found.fix


def test_ports_that_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = port_finding(port, "--port", [])
        assert found.state == "failed" and "--port" in found.fix
        own = RunningCluster(
            pid=1, gateway=f"http://127.0.0.1:{port}", tracker="http://127.0.0.1:9", what="up model.gguf"
        )
        held = port_finding(port, "--port", [own])
        assert held.state == "ok" and "up model.gguf" in held.what
        elsewhere = port_finding(port, "--port", [], joined=True)
        assert elsewhere.state == "note" and elsewhere.fix.startswith("Nothing, for the Nodes")
    assert port_finding(port, "--port", []).state == "ok"


def test_the_address_that_others_see() -> None:
    assert address_finding("127.0.0.1").state == "note"
    assert address_finding("192.0.2.10") == Finding(name="address", state="ok", what="others would see 192.0.2.10")
    assert own_address()


def test_clocks() -> None:
    now = 1764460000.0
    at = email.utils.formatdate(now, usegmt=True)
    assert clock_finding("u", None, now).state == clock_finding("u", at, now + 59).state == "ok"
    ahead, behind = clock_finding("u", at, now + 3600), clock_finding("u", at, now - 61)
    assert ahead.state == behind.state == "failed"
    assert "3600 s ahead of" in ahead.what and "61 s behind" in behind.what and "timedatectl" in behind.fix
    assert clock_finding("u", "", now).state == "note"


def test_who_answers_no_more_names_no_date(stage) -> None:
    stage.json("GET /healthz", {"status": "ok"})
    assert email.utils.parsedate_to_datetime(tracker_date(stage.url) or "")
    assert tracker_date("http://127.0.0.1:9") is None


def test_the_clock_goes_by_the_tracker_that_was_joined(stage) -> None:
    """Where none runs here; one that does not answer is told, and none is made up."""
    nobody = "http://127.0.0.1:9"
    stage.json("GET /healthz", {"status": "ok"})
    (here,) = clock_findings(stage.url, [nobody], time.time)
    assert here.state == "ok" and stage.url in here.what
    joined, silent = clock_findings(nobody, [stage.url, nobody], time.time)
    assert joined.state == "ok" and stage.url in joined.what
    assert silent.state == "note" and nobody in silent.what and silent.fix
    assert [found.what for found in clock_findings(nobody, [], time.time)] == ["no Tracker runs to compare it with"]


def test_an_extra_is_installed_from_the_clone_that_runs() -> None:
    (absent, _) = engine_findings(ABSENT, WORKS)
    clone = Path(machine_checks.__file__).resolve().parents[3]
    assert absent.fix.startswith(f"{shlex.quote(sys.executable)} -m pip install") and f"{clone}[llama]" in absent.fix


def test_open_files() -> None:
    assert files_finding(1024, 65536).state == files_finding(1024, resource.RLIM_INFINITY).state == "ok"
    assert files_finding(1024, 2048).state == "note"
    assert files_finding(256, 512).state == "failed" and "LimitNOFILE" in files_finding(256, 512).fix
