"""A whole measurement of the demo model, as small as can be. The figures themselves are not judged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

pytest.importorskip("llama_cpp")

from shardline.cli.demo_model import demo_model

pytestmark = [pytest.mark.llama, pytest.mark.smollm2]


@pytest.mark.timeout(180)
def test_every_row_is_measured() -> None:
    flags = ["--nodes", "1,2", "--streams", "1,2", "--rounds", "1", "--tokens", "8", "--prompt", "8"]
    flags += ["--layers", "0:10,10:30"]
    done = subprocess.run(
        [sys.executable, "-m", "shardline", "bench", str(demo_model()), *flags, "--prefill", "64", "--json"],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = [row for row in found["decode"] if not row["system"].startswith("llama")]
    assert [(row["system"], row["streams"], row["unsplit_threads"]) for row in rows] == [
        ("1 Node", 1, 1),
        ("2 Nodes", 1, 1),
        ("1 Node", 2, 1),
        ("2 Nodes", 2, 2),
    ]
    assert all(len(row["rates"]) == 1 and row["ratio"] > 0 for row in [*rows, *found["prefill"][:2]])
    assert [layers for layers, _, _ in found["seams"]] == ["0:10 → 10:30", "10:30 → 0:10"]
    decode = [bytes_ for _, bytes_, _ in found["seams"]]
    assert 4 * 576 < decode[0] < 4 * 576 + 512 and decode[1] < 512
    assert [node["layers"] for node in found["memory"]] == ["0:30", "0:10", "10:30"]
    assert all(node["resident"] > node["weights"] > 0 and node["kv"] > 0 for node in found["memory"])
    assert "**Decode, one stream**" in found["report"]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("words", ["starting a route of 2 Nodes", pytest.param("round 0", marks=pytest.mark.long)])
def test_ctrl_c_ends_it_without_a_report(words: str) -> None:
    """While the routes start, and while they are measured: a report of no rounds would pass for one."""
    flags = ["--nodes", "1,2", "--streams", "1", "--rounds", "50", "--prefill", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "shardline", "bench", str(demo_model()), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = ""
        while words not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        report, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert report == "" and "fault of Shardline" not in rest
