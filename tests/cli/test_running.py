"""Traces of a running cluster: where it listens, and its logs."""

from __future__ import annotations

import json
from pathlib import Path

from shardline.cli.config import RUNNING_FILE
from shardline.cli.running import KEPT_LOGS, Running, new_log_dir


def test_the_file_is_there_while_the_cluster_runs(tmp_path: Path) -> None:
    with Running(tmp_path, gateway="http://g", tracker="http://t"):
        assert json.loads((tmp_path / RUNNING_FILE).read_text())["gateway"] == "http://g"
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_later_cluster_is_left_alone(tmp_path: Path) -> None:
    with Running(tmp_path, gateway="http://g", tracker="http://t"):
        later = json.dumps({"pid": 1, "gateway": "http://later", "tracker": "http://t"})
        (tmp_path / RUNNING_FILE).write_text(later)
    assert (tmp_path / RUNNING_FILE).read_text() == later


def test_old_logs_are_dropped(tmp_path: Path) -> None:
    for i in range(KEPT_LOGS + 5):
        (tmp_path / "logs" / f"20200101-0000{i:02}-1").mkdir(parents=True)
    fresh = new_log_dir(tmp_path)
    kept = sorted(p.name for p in (tmp_path / "logs").iterdir())
    assert len(kept) == KEPT_LOGS and fresh.name == kept[-1] and kept[0] == "20200101-000006-1"
