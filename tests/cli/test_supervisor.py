"""Real processes: ready, dead, stopped, hung, orphaned; nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardline.cli.supervisor import Child, Part, Supervisor
from shardline.errors import ShardlineError

FAKE = """
import json, os, signal, subprocess, sys, time

def say(phase, **facts):
    print(json.dumps({"phase": phase, **facts}), flush=True)

kind = sys.argv[1]
if kind in ("deaf", "apart"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if kind == "failing":
    say("failed", code="address_in_use", message="port 8080 on 127.0.0.1 is taken", advice="x")
    sys.exit(1)
if kind == "crashing":
    print("first line", file=sys.stderr)
    print("Segmentation fault, most likely", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
if kind in ("parent", "apart"):
    worker = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=kind == "apart"
    )
    say("listening", url="http://127.0.0.1:1", worker=worker.pid)
else:
    print("not json")
    say("listening", url="http://127.0.0.1:1")
say("loading", done=1, total=2)
if kind != "slow":
    say("ready")
sys.stdin.buffer.read()  # the lifeline
if kind in ("deaf", "apart"):
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "fake_part.py"
    script.write_text(FAKE, encoding="utf-8")
    return (sys.executable, str(script))


def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "condition was not met in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_parts_become_ready_and_are_gone_afterwards(tmp_path: Path, program: tuple[str, ...]) -> None:
    seen: list[tuple[str, str]] = []
    with Supervisor(tmp_path / "logs", lambda c: seen.append((c.part.name, c.phase)), program=program) as supervisor:
        children = [supervisor.start(Part(f"node-{i}", ("ok",))) for i in range(2)]
        supervisor.until_ready(children, within_s=20)
        assert [c.url for c in children] == ["http://127.0.0.1:1"] * 2
        pids = [c.process.pid for c in children]
        assert all(os.getpgid(pid) == pid for pid in pids)
    assert all(is_gone(pid) for pid in pids)
    assert seen[0] == ("node-0", "starting") and ("node-1", "ready") in seen


def test_a_part_that_says_why_it_failed_is_quoted(tmp_path: Path, program: tuple[str, ...]) -> None:
    with Supervisor(tmp_path, lambda c: None, program=program) as supervisor:
        children = [supervisor.start(Part("node-1", ("slow",))), supervisor.start(Part("gateway", ("failing",)))]
        with pytest.raises(ShardlineError) as died:
            supervisor.until_ready(children, within_s=20)
    assert died.value.code == "address_in_use"
    assert died.value.message == "gateway: port 8080 on 127.0.0.1 is taken"


def test_a_part_that_dies_without_a_word_is_told_with_its_log(tmp_path: Path, program: tuple[str, ...]) -> None:
    with Supervisor(tmp_path, lambda c: None, program=program) as supervisor:
        child = supervisor.start(Part("node-1", ("crashing",)))
        with pytest.raises(ShardlineError) as died:
            supervisor.until_ready([child], within_s=20)
    assert died.value.code == "part_lost"
    for words in ("node-1 was killed by SIGKILL", "Segmentation fault, most likely", str(tmp_path / "node-1.log")):
        assert words in died.value.message


def test_a_part_that_never_gets_ready_has_a_limit_with_a_name(tmp_path: Path, program: tuple[str, ...]) -> None:
    with Supervisor(tmp_path, lambda c: None, program=program) as supervisor:
        child = supervisor.start(Part("node-1", ("slow",)))
        with pytest.raises(ShardlineError) as late:
            supervisor.until_ready([child], within_s=0.3)
    assert late.value.code == "deadline"
    assert late.value.details["limit"] == "start"
    assert "node-1" in late.value.message


def test_the_next_death_is_reported_once(tmp_path: Path, program: tuple[str, ...]) -> None:
    with Supervisor(tmp_path, lambda c: None, program=program) as supervisor:
        children = [supervisor.start(Part(f"node-{i}", ("ok",))) for i in range(2)]
        supervisor.until_ready(children, within_s=20)
        os.kill(children[1].process.pid, signal.SIGKILL)
        first = supervisor.next_death([])
        assert first is children[1]
        os.kill(children[0].process.pid, signal.SIGTERM)
        assert supervisor.next_death([first]) is children[0]


@pytest.mark.parametrize("kind", ["deaf", "stopped", "parent", "apart"])
def test_what_does_not_end_is_killed_with_its_workers(tmp_path: Path, program: tuple[str, ...], kind: str) -> None:
    with Supervisor(tmp_path, lambda c: None, program=program, stop_s=0.3) as supervisor:
        child = supervisor.start(Part("node-1", ("ok" if kind == "stopped" else kind,)))
        supervisor.until_ready([child], within_s=20)
        pids = [child.process.pid, *(p.pid for p in psutil.Process(child.process.pid).children())]
        assert len(pids) == (2 if kind in ("parent", "apart") else 1)
        if kind == "stopped":
            os.kill(child.process.pid, signal.SIGSTOP)
    until(lambda: all(is_gone(pid) for pid in pids))


def test_waves_end_in_order(tmp_path: Path, program: tuple[str, ...]) -> None:
    """The second wave is asked to end only when the first has gone, or has had its time."""
    with Supervisor(tmp_path, lambda c: None, program=program, stop_s=0.3) as supervisor:
        tracker = supervisor.start(Part("tracker", ("ok",), stop_wave=2))
        gateway = supervisor.start(Part("gateway", ("deaf",), stop_wave=0))
        supervisor.until_ready([tracker, gateway], within_s=20)
        asked = time.monotonic()
    assert time.monotonic() - asked >= 0.3
    assert tracker.process.returncode == -signal.SIGTERM
    assert gateway.process.returncode == -signal.SIGKILL


OWNER = """
import sys, time
from pathlib import Path
from shardline.cli.supervisor import Part, Supervisor

with Supervisor(Path(sys.argv[1]), lambda c: None, program=(sys.executable, sys.argv[2]), stop_s=1.0) as supervisor:
    child = supervisor.start(Part("node-1", (sys.argv[3],)))
    supervisor.until_ready([child], within_s=20)
    print(child.process.pid, flush=True)
    supervisor.next_death([])
print("left", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(signal.SIGTERM, "ok", 0), (signal.SIGINT, "ok", 0), (signal.SIGHUP, "ok", 0), (signal.SIGKILL, "ok", -9)],
)
def test_children_end_with_their_supervisor_however_it_ends(
    tmp_path: Path, program: tuple[str, ...], number: signal.Signals, kind: str, code: int
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), program[1], kind], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.send_signal(number)
        assert owner.wait(10) == code
        assert owner.stdout.read() == ("" if number == signal.SIGKILL else "left\n")
        until(lambda: is_gone(pid))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close() if owner.stdout else None


def test_a_second_signal_does_not_wait(tmp_path: Path, program: tuple[str, ...]) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.replace("stop_s=1.0", "stop_s=30.0"), str(tmp_path), program[1], "deaf"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.send_signal(signal.SIGINT)
        until(lambda: psutil.Process(owner.pid).is_running())
        time.sleep(0.05)
        owner.send_signal(signal.SIGINT)
        assert owner.wait(10) == 0
        until(lambda: is_gone(pid))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close() if owner.stdout else None


def test_a_child_is_only_what_it_announces(tmp_path: Path, program: tuple[str, ...]) -> None:
    """Lines that are no announcement change nothing; half a line is kept for the next poll."""
    with Supervisor(tmp_path, lambda c: None, program=program) as supervisor:
        child = supervisor.start(Part("node-1", ("ok",)))
        for line in (b"[]", b"1", b"{}", b'{"phase"', b"\xff", b'{"url": "x"}'):
            assert not child._take(line)
        assert isinstance(child, Child) and child.phase == "starting"
