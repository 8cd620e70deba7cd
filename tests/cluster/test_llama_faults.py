"""The fault table with the llama.cpp engine: real processes, a real model, and the ways in which native code ends.

One cluster meets the faults that it outlives one after another; the whole table, a cluster a cell, is among the long
proofs.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support import fault_table
from tests.support.cluster import Cluster, model_cluster, until
from tests.support.fault_table import KILLED_S, Fault, check_error, check_next, error_of, phase_of, worker_struck
from tests.support.worker_abort import SIGNAL, WORDS, aborting

pytestmark = [pytest.mark.llama, pytest.mark.smollm2]
pytest.importorskip("llama_cpp")

LAYERS = ["0:10", "10:20", "20:30"]
NODE_1 = [10, 20]
LONG_PROMPT = "A shard is a piece of something larger; it may be sharp, or old, or both. " * 120
"""Seconds of prefill on any machine."""
NATIVE = frozenset({"engine_lost"})
FAULTS = {
    **fault_table.FAULTS,
    "worker aborted": Fault(
        worker_struck(signal.SIGABRT), NATIVE, KILLED_S, ("SIGABRT", "Fatal Python error: Aborted"), at_worker=True
    ),
    "worker crashed": Fault(
        worker_struck(signal.SIGSEGV), NATIVE, KILLED_S, ("SIGSEGV", "Segmentation fault"), at_worker=True
    ),
    "ggml aborted": Fault(worker_struck(SIGNAL), NATIVE, KILLED_S, ("SIGABRT", WORDS), at_worker=True),
}
Report = Callable[[str], None]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}", end=" ")

    return say


@asynccontextmanager
async def a_cluster(folder: Path, **settings: float) -> AsyncIterator[Cluster]:
    from shardline.cli.demo_model import demo_model

    async with model_cluster(
        folder,
        demo_model(),
        layers=LAYERS,
        engine="llama",
        settings=settings,
        proxied=(1,),
        node_arguments=["--threads", "1", "--kv-tokens", "4096"],
        environment={"PYTHONPATH": aborting(folder / "aborting")},
    ) as cluster:
        yield cluster


async def check_cell(cluster: Cluster, fault: str, phase: str, report: Report) -> None:
    """Strike in a phase: the client's error in time, KV back on the survivors, and what becomes of the next request."""
    row = FAULTS[fault]
    if phase == "opening" and row.at_link:
        phase = "routing"
    restarts = [(await cluster.node_info(i))["health"]["restarts"] for i in range(3)]
    struck = time.monotonic()
    if phase == "routing":
        await row.strike(cluster)
    if phase == "opening":
        # It opens for as long as the last Node does not answer.
        cluster.nodes[2].signal(signal.SIGSTOP)
    body = cluster.body(
        LONG_PROMPT if phase == "prefill" else "Tell me a story.",
        max_tokens=1000,
        ignore_eos=True,
        stream=phase == "decode",
    )
    request = asyncio.create_task(cluster.http.post(f"{cluster.gateway.url}/v1/chat/completions", json=body))
    if phase != "routing":
        await until(lambda: _is_in(cluster, phase), 20)
        struck = time.monotonic()
        await row.strike(cluster)
    if phase == "opening":
        cluster.nodes[2].signal(signal.SIGCONT)
    error = error_of(await request)
    took = time.monotonic() - struck
    assert error["code"] in row.codes, error
    assert took < row.within_s, f"{took:.2f} s"
    check_error(cluster, error, phase, NODE_1)
    assert all(words in error["message"] for words in row.words), error
    freed = await cluster.until_free([0, 1, 2] if row.at_link else [0, 2])
    assert freed < 2.0
    next_one = time.monotonic()
    await check_next(cluster, fault, NODE_1)
    served = time.monotonic() - next_one
    if row.at_worker:
        after = [(await cluster.node_info(i))["health"]["restarts"] for i in range(3)]
        assert after == [restarts[0], restarts[1] + 1, restarts[2]]
    report(
        f"{fault}, {phase}: {error['code']} after {took:.2f} s, KV back after {freed:.2f} s, "
        f"next one {'refused' if fault == 'killed' else f'served after {served:.1f} s'}"
    )


async def _is_in(cluster: Cluster, phase: str) -> bool:
    if await phase_of(cluster) != phase:
        return False
    return phase != "opening" or (await cluster.kv(1))["sessions"] == 1


class ShardFile:
    """That of the Node in the middle."""

    def __init__(self, folder: Path) -> None:
        (self.path,) = folder.rglob("*-10-20.gguf")
        self.whole = self.path.read_bytes()

    def lose(self) -> None:
        self.path.unlink()

    def damage(self) -> None:
        """Not in place: a worker has the file mapped."""
        half = len(self.whole) // 2
        beside = self.path.with_suffix(".damaged")
        beside.write_bytes(self.whole[:half] + bytes(len(self.whole) - half))
        beside.replace(self.path)

    def is_whole(self) -> bool:
        return self.path.read_bytes() == self.whole


@pytest.mark.timeout(150)
async def test_one_cluster_meets_one_fault_after_another(tmp_path: Path, report: Report) -> None:
    """Its Shard file is lost at the first crash, and damaged at the second: it is made again from the model."""
    async with a_cluster(tmp_path) as cluster:
        shard_file = ShardFile(tmp_path)
        shard_file.lose()
        await check_cell(cluster, "ggml aborted", "decode", report)
        assert shard_file.is_whole()
        shard_file.damage()
        await check_cell(cluster, "worker crashed", "prefill", report)
        assert shard_file.is_whole()
        for fault, phase in [
            ("link cut", "decode"),
            ("killed", "decode"),
        ]:
            await check_cell(cluster, fault, phase, report)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("phase", ["opening", "prefill", "decode"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_cell(tmp_path: Path, fault: str, phase: str, report: Report) -> None:
    async with a_cluster(tmp_path) as cluster:
        await check_cell(cluster, fault, phase, report)


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_a_shard_that_is_lost_again_and_again_is_given_up(tmp_path: Path, report: Report) -> None:
    """Bounded: the Node stays, says why, and the route is refused with the range that is missing."""
    async with a_cluster(tmp_path, worker_restarts=2, worker_backoff_s=0.2) as cluster:
        crash = FAULTS["worker crashed"].strike

        async def loaded() -> bool:
            return bool((await cluster.node_info(1))["health"]["alive"])

        for _ in range(3):
            await until(loaded, 30)
            await crash(cluster)
            await until(_not(loaded), 5)

        async def given_up() -> bool:
            return "given up after 2 restarts" in str((await cluster.node_info(1))["health"]["last_error"])

        await until(given_up, 10)
        answer = await cluster.ask("next", max_tokens=2)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["missing"]) == (503, "model_unavailable", [NODE_1]), error
        report((await cluster.node_info(1))["health"]["last_error"])


def _not(condition: Callable[[], Awaitable[bool]]) -> Callable[[], Awaitable[bool]]:
    async def inverse() -> bool:
        return not await condition()

    return inverse
