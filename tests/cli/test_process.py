"""A role as a process: signals, the lifeline, and what it announces."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from datetime import datetime

import pytest

from shardline.cli.process import Announcer, in_words, run_until_signal
from shardline.errors import ShardlineError

ROLE = """
import asyncio, sys
from shardline.cli.process import Announcer, run_until_signal

announce = Announcer("node", supervised=True)

async def work():
    try:
        announce("ready")
        await asyncio.sleep(600)
    finally:
        announce("draining")
        if sys.argv[1] == "stuck":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass

run_until_signal(work(), drain_s=float(sys.argv[2]), lifeline=True)
announce("listening", url="end")
"""


def started(kind: str, drain_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", ROLE, kind, str(drain_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"phase": "ready"}
    return process


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "lifeline"])
def test_a_role_ends_by_signal_or_with_its_supervisor(how: str) -> None:
    with started("well", 5) as process:
        assert process.stdin is not None and process.stdout is not None
        if how == "lifeline":
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, how))
        assert process.wait(10) == 0
        assert [json.loads(line)["phase"] for line in process.stdout] == ["draining", "listening"]


def test_a_role_that_does_not_drain_is_ended() -> None:
    with started("stuck", 0.1) as process:
        process.terminate()
        assert process.wait(10) == 1


def test_a_second_signal_ends_at_once() -> None:
    with started("stuck", 600) as process:
        assert process.stdout is not None
        process.terminate()
        assert json.loads(process.stdout.readline()) == {"phase": "draining"}
        process.terminate()
        assert process.wait(10) == 1


def test_what_a_role_raises_comes_out() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ShardlineError("layers_invalid", "no such layers")

    with pytest.raises(ShardlineError, match="no such layers"):
        run_until_signal(fails(), drain_s=1)


def test_loading_is_a_line_for_every_fifth(capsys: pytest.CaptureFixture[str]) -> None:
    announce = Announcer("node", supervised=False)
    announce("listening", url="http://127.0.0.1:1")
    for done in range(31):
        announce("loading", done=done, total=30)
    announce("testing")
    announce("ready")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "node: listening on http://127.0.0.1:1"
    assert lines[1:-2] == [f"node: loading {n}/30 layers" for n in (0, 6, 12, 18, 24, 30)]
    assert lines[-2:] == ["node: testing its layers", "node: ready"]


def test_a_supervisor_gets_the_reason_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    Announcer("node", supervised=True).failed(ShardlineError("layers_invalid", "no such layers"))
    said = json.loads(capsys.readouterr().out)
    assert (said["phase"], said["code"], said["message"]) == ("failed", "layers_invalid", "no such layers")
    Announcer("node", supervised=False).failed(ShardlineError("layers_invalid", "no such layers"))
    assert capsys.readouterr().out == ""


def test_the_last_word_is_that_it_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    for supervised in (True, False):
        Announcer("node", supervised=supervised).ended()
    assert capsys.readouterr().out == "node: ended\n"


def test_beside_json_logs_announcements_are_json_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    announce = Announcer("node", supervised=False, like_logs=True)
    announce("loading", done=6, total=30)
    announce("inviting", line="https://192.0.2.10:7070/#t.p")
    announce.ended()
    loading, inviting, ended = map(json.loads, capsys.readouterr().out.splitlines())
    assert loading["says"] == "loading 6/30 layers" and (loading["done"], loading["total"]) == (6, 30)
    assert {"event": "part_announced", "level": "info", "role": "node"}.items() <= loading.items()
    assert datetime.fromisoformat(loading["timestamp"]).tzinfo is not None
    assert inviting["says"].endswith("shardline node --join 'https://192.0.2.10:7070/#t.p'")
    assert (ended["says"], ended["phase"]) == ("ended", "ended")


@pytest.mark.parametrize(("together", "said"), [(True, "True"), (False, "False")])
def test_one_place_is_told_from_two(together: bool, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from shardline.cli.process import is_one_place; print(is_one_place())"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.DEVNULL,
        text=True,
    )
    assert done.stdout.strip() == said


def test_a_closed_stdout_does_not_end_a_role() -> None:
    with started("well", 5) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.terminate()
        assert process.wait(10) == 0


def test_words_for_phases() -> None:
    assert in_words("loading", {"done": 12, "total": 30}) == "loading 12/30 layers"
    assert in_words("loading", {"done": 400, "total": 1000}) == "loading 40 %"
    assert in_words("loading", {"done": 113248512, "total": 325654272}) == "loading 113/325 MB"
    assert in_words("cutting", {"done": 5000, "total": 9000}) == "cutting 5/9 kB"
    assert in_words("loading", {}) == "loading"
    assert in_words("draining", {}) == in_words("draining", {"sessions": 0}) == "ending"
    assert in_words("draining", {"sessions": 1}) == "ending; waits for what runs: 1 session"
    assert in_words("fetching", {"done": 5000, "total": 9000}) == "fetching 5/9 kB"
    assert in_words("verifying", {"done": 5, "total": 1000}) == "verifying 5/1000 pieces"
