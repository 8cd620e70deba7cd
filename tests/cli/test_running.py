"""Traces of running clusters: where each listens, and its logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardline.cli.running import (
    FOLDER,
    KEPT_LOGS,
    RunningCluster,
    ambiguous,
    entered,
    new_log_dir,
    running_clusters,
)
from shardline.errors import ShardlineError


def cluster(number: int) -> RunningCluster:
    return RunningCluster(
        pid=number,
        gateway=f"http://127.0.0.1:{number}",
        tracker=f"http://127.0.0.1:1{number}",
        what=f"up {number}.gguf",
    )


def test_each_cluster_has_an_entry_while_it_runs(tmp_path: Path) -> None:
    one, two = cluster(1), cluster(2)
    with entered(tmp_path, one):
        assert running_clusters(tmp_path) == [one]
        with entered(tmp_path, two):
            assert running_clusters(tmp_path) == [one, two]
        assert running_clusters(tmp_path) == [one]
    assert list((tmp_path / FOLDER).iterdir()) == []


OWNER = """
import os, signal, sys
from pathlib import Path
from shardline.cli.running import RunningCluster, entered
with entered(Path(sys.argv[1]), RunningCluster(pid=1, gateway="http://g", tracker="http://t", what="up")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_entry_of_a_killed_process_counts_for_nothing_and_is_dropped(tmp_path: Path) -> None:
    """Its pid, 1, is that of a living process: the pid is not what counts."""
    assert subprocess.run([sys.executable, "-c", OWNER, str(tmp_path)], timeout=20).returncode == -9
    assert len(list((tmp_path / FOLDER).iterdir())) == 1
    assert running_clusters(tmp_path) == []
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_what_is_no_entry_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    assert running_clusters(tmp_path) == []
    with entered(tmp_path, cluster(1)):
        for name, content in (("1.json", "{}"), ("2.json", ""), ("3.txt", "x"), (".entry-x", "{")):
            (folder / name).write_text(content)
        (folder / "4.json").mkdir()
        assert running_clusters(tmp_path) == [cluster(1)]


@pytest.mark.parametrize("place", ["gateway", "tracker"])
def test_several_are_named_with_the_flag_that_chooses_one(place: str) -> None:
    error = ambiguous(place, [cluster(1), cluster(2)])  # type: ignore[arg-type]
    assert error.code == "cluster_ambiguous"
    for words in ("2 clusters run", "http://127.0.0.1:1,", "up 1.gguf, process 1", "http://127.0.0.1:12"):
        assert words in error.message
    assert error.advice == f"Name the one you mean: --{place} {getattr(cluster(2), place)}"


def test_a_folder_that_takes_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(ShardlineError) as refused, entered(tmp_path, cluster(1)):
        pass
    assert refused.value.code == "state_unwritable" and str(tmp_path / FOLDER) in refused.value.message


def test_old_logs_are_dropped(tmp_path: Path) -> None:
    for i in range(KEPT_LOGS + 5):
        (tmp_path / "logs" / f"20200101-0000{i:02}-1").mkdir(parents=True)
    fresh = new_log_dir(tmp_path)
    kept = sorted(p.name for p in (tmp_path / "logs").iterdir())
    assert len(kept) == KEPT_LOGS and fresh.name == kept[-1] and kept[0] == "20200101-000006-1"
