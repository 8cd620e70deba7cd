"""The measurements run, and their arithmetic is right. The figures themselves are not judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import artifacts, torrent
from bench.figures import median, quantile, table
from bench.hops import _between
from bench.random_model import Shape
from shardline.cli.demo_model import demo_model
from shardline.errors import ShardlineError

ROOT = Path(__file__).resolve().parents[2]


def test_quantiles() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert (quantile(values, 0), median(values), quantile(values, 1)) == (1.0, 2.5, 4.0)
    assert quantile([7.0], 0.99) == 7.0


def test_tables_are_aligned() -> None:
    assert table(("system", "tokens/s"), [("1 Node", "12.50"), ("alone", "9.1")]) == (
        "system  tokens/s\n1 Node     12.50\nalone        9.1"
    )


def test_a_hop_is_from_an_end_to_the_next_start_on_the_other_node() -> None:
    """Head and tail in turn, 10 us of work and 300 us between; a pause between two generations is no hop."""
    head, tail, now = [], [], 0
    for step in range(400):
        head.append((now, now + 10_000))
        tail.append((now + 310_000, now + 320_000))
        now += 620_000 + (10**9 if step == 200 else 0)
    hops = _between(head, tail)
    assert set(hops) == {300.0}
    assert len(hops) > 700


@pytest.mark.timeout(120)
def test_the_hop_measurement_runs(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--only", "hops", "--rounds", "1", "--steps", "150", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["hops"]
    assert 0 < figures["hop_p50_us"] <= figures["hop_p99_us"]
    assert figures["hops"] > 150
    assert "hop, from a result to the next engine's start: p50" in done.stdout


def small_demo() -> bool:
    try:
        return demo_model().is_file()
    except ShardlineError:
        return False


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.skipif(not small_demo(), reason="the model of the demo is not installed")
def test_the_artifact_measurement_runs(tmp_path: Path) -> None:
    """A small model: everything is there, and a fetch moved the whole file."""
    shape = Shape(layers=12, hidden=256, feed_forward=512, heads=4, kv_heads=1)
    found = artifacts.measure(tmp_path / "stand", 1, shape)
    size = (tmp_path / "stand/model.gguf").stat().st_size
    expected = set(artifacts.AGAINST) | set(artifacts.AGAINST.values())
    if torrent.why_not() is not None:
        expected = {name for name in expected if "BitTorrent" not in name}
    assert set(found) == expected
    assert {taken.nbytes for name in found if "fetch" in name for taken in found[name]} == {size}
    assert all(taken.seconds > 0 for rounds in found.values() for taken in rounds)
    text = artifacts.report(found, artifacts.header_seconds(1))
    assert all(name in text for name in found)
    assert "Header with 150000 tokens" in text
