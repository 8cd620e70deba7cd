"""Several processes on one store, and some that are killed: nothing wrong is ever held, little is fetched again."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardline.artifact.bundle import Bundle
from shardline.artifact.fetch import Fetch
from shardline.artifact.locks import Claims, is_stopped
from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError
from tests.support.stores import ANYBODY, FileSource, described, filled, layered_model

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 40.0
KILLS = 20
HOLD = """
import sys
from pathlib import Path
from shardline.artifact.locks import Claims
from shardline.artifact.store import Store, StoredArtifact
from tests.support.stores import ANYBODY
store = Store(Path(sys.argv[1]), reserve_bytes=0)
artifact = store.open(sys.argv[2], ANYBODY)
artifact.claims.take(3, 6)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("model"), layers=16)


@pytest.fixture(scope="module")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return described(model, tmp_path_factory.mktemp("bundle") / "a")


def fetching(store: Store, bundle: Bundle, model: Path, delay_s: float, asked: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.fetching", str(store.folder), bundle.manifest.content_id]
    child = subprocess.Popen(
        [*command, str(model), str(delay_s), str(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    return child


def pieces_in(asked: Path) -> list[int]:
    """Which pieces a process asked for, as often as it did."""
    lines = [line.split() for line in asked.read_text().splitlines()] if asked.exists() else []
    return [int(line[0]) >> 18 for line in lines if len(line) == 2]


@pytest.mark.timeout(150)
def test_twenty_kills_and_no_piece_is_ever_wrong(tmp_path: Path, bundle: Bundle, model: Path) -> None:
    """What a killed process had committed stays, is right, and is not asked for again."""
    store = Store(tmp_path / "store", reserve_bytes=0)
    made = random.Random(11)
    gained = 0
    with store.add(bundle) as artifact:
        file = artifact.files[0]
        for kill in range(KILLS):
            if len(file.held()) > file.count // 2:
                # Begin anew: all kills shall meet a fetch that runs.
                file.data_path.unlink()
            before, asked = file.held(), tmp_path / f"asked-{kill}"
            child = fetching(store, bundle, model, 0.02, asked)
            pieces = made.randrange(12)
            deadline = time.monotonic() + WAIT_S
            while len(pieces_in(asked)) < pieces and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(made.uniform(0.0, 0.03))
            child.kill()
            child.communicate(timeout=WAIT_S)
            held = file.held()
            assert not before - held
            assert all(file.is_whole(piece) for piece in held)
            assert not set(pieces_in(asked)) & set(before)
            gained += len(held - before)
        assert gained > KILLS, "they were killed before they had done anything"
        before, asked = file.held(), tmp_path / "asked"
        child = fetching(store, bundle, model, 0.0, asked)
        _, err = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, err
        assert sorted(pieces_in(asked)) == sorted(set(range(file.count)) - set(before))
        assert file.data_path.read_bytes() == model.read_bytes()


def test_two_processes_fetch_one_file_once(tmp_path: Path, bundle: Bundle, model: Path) -> None:
    store = Store(tmp_path / "store", reserve_bytes=0)
    store.add(bundle).close()
    asked = [tmp_path / "first", tmp_path / "second"]
    children = [fetching(store, bundle, model, 0.02, path) for path in asked]
    outputs = [child.communicate(timeout=WAIT_S) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    with store.open(bundle.manifest.content_id, ANYBODY) as artifact:
        assert artifact.files[0].data_path.read_bytes() == model.read_bytes()
        assert sorted(pieces_in(asked[0]) + pieces_in(asked[1])) == list(range(artifact.files[0].count))


def test_use_and_claims_of_another_process_count_until_it_dies(tmp_path: Path, bundle: Bundle, model: Path) -> None:
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(bundle) as artifact:
        filled(artifact, model, {0: [0]})
    content_id = bundle.manifest.content_id
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store.folder), content_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        with pytest.raises(ShardlineError) as caught:
            store.remove(content_id)
        assert caught.value.code == "artifact_in_use"
        claims = Claims(store.folder / "locks" / f"{content_id}.claims")
        assert claims.take(0, 9) == 3
        assert claims.take(6, 9) == 9
        assert [claims.holder(piece) for piece in (2, 3, 5, 6, 20)] == [None, child.pid, child.pid, None, None]
        assert not is_stopped(child.pid)
        child.kill()
        child.wait(timeout=WAIT_S)
        assert claims.take(3, 6) == 6
        claims.close()
        store.remove(content_id)
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)
        store.close()


def test_a_process_that_is_stopped_is_named_and_not_waited_for(tmp_path: Path, bundle: Bundle, model: Path) -> None:
    """It would keep its claims until somebody lets it go on."""
    store = Store(tmp_path / "store", reserve_bytes=0)
    content_id = bundle.manifest.content_id
    store.add(bundle).close()
    command = [sys.executable, "-c", HOLD, str(store.folder), content_id]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    async def fetched(artifact: StoredArtifact) -> None:
        fetch = Fetch(artifact, {0: range(9)}, connections=1, stall_s=1.0)
        fetch.add(FileSource(model))
        async with asyncio.timeout(5):
            await fetch.run()

    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        child.send_signal(signal.SIGSTOP)
        with store.open(content_id, ANYBODY) as artifact:
            with pytest.raises(ShardlineError) as caught:
                asyncio.run(fetched(artifact))
            assert caught.value.code == "artifact_unavailable"
            assert f"process {child.pid} of this machine has claimed some, and is stopped" in caught.value.message
            assert list(artifact.held()[0]) == [0, 1, 2, 6, 7, 8]
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)
        store.close()


def test_a_record_is_json_that_people_can_read(tmp_path: Path, bundle: Bundle, model: Path) -> None:
    """As docs/artifacts.md describes it."""
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(bundle) as artifact:
        filled(artifact, model, {0: [0]})
        file = artifact.files[0]
        folder = store.folder / bundle.manifest.content_id
        record = json.loads((folder / "held" / file.name).read_bytes())
        assert set(record) == {"version", "size", "piece_length", "inode", "pieces", "sha256", "elsewhere"}
        assert record["inode"] == (folder / "data" / file.name).stat().st_ino
