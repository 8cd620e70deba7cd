"""The engine worker as a real process: it computes, and whatever happens to it, the Node lives and knows why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, ShardSpec, SlotSpec
from shardline.model.channel import Done
from shardline.model.engine import BatchResult
from shardline.model.generation import StepResult
from shardline.model.worker_engine import WorkerEngine
from shardline.model.worker_process import last_words, worker_environment
from shardline.settings import Settings
from shardline.wire.messages import Sampling

SpecMaker = Callable[..., ShardSpec]
MakeEntry = Callable[..., BackendEntry]
Submit = Callable[..., Any]
SLOT = SlotSpec(2, 10, Sampling(temperature=0.0))
QUICK = Settings(worker_backoff_s=0.01, step_s=0.4, prefill_chunk_s=0.6, worker_start_s=10.0, worker_silent_s=0.6)


def own_workers() -> list[int]:
    """Engine workers below this process; other children belong to fixtures of other tests."""
    return [child.pid for child in psutil.Process().children() if "shardline.model.worker" in child.cmdline()]


class Events:
    """What an engine called back."""

    def __init__(self, engine: WorkerEngine) -> None:
        self.lost: list[ShardlineError] = []
        self.lost_now = asyncio.Event()
        self.ready = asyncio.Event()
        self.progress: list[tuple[int, int]] = []
        engine.on_lost = self._lost
        engine.on_ready = self.ready.set
        engine.on_progress = lambda done, total: self.progress.append((done, total))

    def _lost(self, error: ShardlineError) -> None:
        self.lost.append(error)
        self.lost_now.set()


@asynccontextmanager
async def running(spec: ShardSpec, settings: Settings = QUICK) -> AsyncIterator[tuple[WorkerEngine, Events]]:
    engine = WorkerEngine("scripted", spec, settings, inherited={})
    events = Events(engine)
    try:
        await engine.start()
        yield engine, events
    finally:
        await engine.stop()


def pid_of(engine: WorkerEngine) -> int:
    pid = engine.health().pid
    assert pid is not None
    return pid


def flag_of(spec: ShardSpec, name: str) -> Path:
    return Path(spec.model).parent / name


def rewrite(spec: ShardSpec, fields: dict[str, Any]) -> None:
    Path(spec.model).write_text(json.dumps(fields))


async def refusal(call: Awaitable[object]) -> str:
    with pytest.raises(ShardlineError) as caught:
        await call
    return caught.value.code


async def within(seconds: float, event: asyncio.Event) -> None:
    async with asyncio.timeout(seconds):
        await event.wait()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


# ---- it works ----------------------------------------------------------------------------------------------------


async def test_two_workers_answer_as_one_route(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    layout = [["streams", "F32", [4, 8]], ["aux", "F16", [8]]]
    async with running(spec(0, 3, layout=layout)) as (head, events), running(spec(3, 6, layout=layout)) as (tail, _):
        assert events.progress == [(0, 3), (3, 3)]
        assert (await head.self_test(), await tail.self_test()) is not None
        for slot in (0, 1):
            await head.open(slot, SLOT)
            await tail.open(slot, SLOT)
        ids: list[list[int]] = [await head.tokenize("ab", add_special=False, parse_special=True), [9, 8]]
        out: list[list[int]] = [[], []]
        position = 0
        while len(out[0]) < 4:
            rows = await submit(head, *(entry(position, ids[s], slot=s) for s in (0, 1)))
            batch = [entry(position, ids[s], rows.results[s].hidden, slot=s) for s in (0, 1)]
            tokens = await submit(tail, *batch)
            position += len(ids[0])
            for s in (0, 1):
                out[s].append(tokens.results[s].token.id)
            ids = [[out[s][-1]] for s in (0, 1)]
            assert head.kv() == tail.kv() == 2 * position
        assert out[0] == out[1]
        assert tokens.results[0].token.end == "stop"
        assert tokens.compute_us > 0
        bundle = tail.text_bundle()
        assert bundle is not None
        assert bundle == head.text_bundle()
        for slot in (0, 1):
            await head.close(slot)
        assert (head.kv(), tail.kv()) == (0, 2 * position)
        assert head.health().alive
        assert head.health().running_step_age_ms is None


async def test_results_stay_when_the_next_batch_overwrites_the_rows(
    spec: SpecMaker, entry: MakeEntry, submit: Submit
) -> None:
    async with running(spec(0, 3)) as (head, _):
        await head.open(0, SLOT)
        first = (await submit(head, entry(0, [1]))).results[0].hidden
        kept = [bytes(b) for b in first]
        for position in range(1, 5):
            await submit(head, entry(position, [position]))
        assert [bytes(b) for b in first] == kept


async def test_large_batches_grow_the_shared_rows(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    layout = [["hidden", "F32", [2048]]]
    async with running(spec(0, 3, layout=layout)) as (head, _), running(spec(3, 6, layout=layout)) as (tail, _):
        await head.open(0, SLOT)
        await tail.open(0, SLOT)
        position = 0
        for count in (1, 300, 7, 600):  # 600 rows: 4.9 MB
            ids = [(position + i) % 250 for i in range(count)]
            rows = await submit(head, entry(position, ids, want_output=False))
            assert len(rows.results[0].hidden[0]) == count * 8192
            done = await submit(tail, entry(position, ids, rows.results[0].hidden, want_output=count == 600))
            position += count
        bundle_text = done.results[0].token.id
        whole = (await submit(head, entry(position, [bundle_text]))).results[0]
        assert isinstance(whole, StepResult)
        assert head.kv() == position + 1
        assert bundle_text == (await tail.tokenize("alpha", add_special=False, parse_special=True))[0]


async def test_refusals_and_faults_of_one_entry_leave_the_worker_alive(
    spec: SpecMaker, entry: MakeEntry, submit: Submit
) -> None:
    faults = [
        {"kind": "oom", "phase": "prefill", "contains": "\x07"},
        {"kind": "oom", "phase": "open", "step": 2},
        {"kind": "nan", "phase": "prefill", "contains": "\x08"},
    ]
    async with running(spec(faults=faults)) as (engine, events):
        pid = pid_of(engine)
        await engine.open(0, SLOT)
        await engine.open(1, SLOT)
        with pytest.raises(ShardlineError) as caught:
            await engine.open(2, SLOT)
        assert caught.value.code == "engine_out_of_memory"
        await engine.open(2, SLOT)
        with pytest.raises(ShardlineError) as caught:
            await engine.open(3, SlotSpec(2, 10, Sampling(top_p=7.0)))
        assert (caught.value.code, caught.value.param) == ("invalid_value", "top_p")
        result = await submit(engine, entry(0, [1, 7]), entry(0, [1, 2], slot=1), entry(0, [1, 8], slot=2))
        assert [getattr(r, "code", "ok") for r in result.results] == ["engine_out_of_memory", "ok", "numerical_error"]
        with pytest.raises(ShardlineError) as caught:
            await engine.rollback(1, 7)
        assert caught.value.code == "seam_gap"
        await engine.close(9)
        assert not events.lost
        assert pid_of(engine) == pid


async def test_calls_keep_their_order_behind_a_running_batch(spec: SpecMaker, entry: MakeEntry) -> None:
    async with running(spec(prefill_ms_per_row=50)) as (engine, _):
        await engine.open(0, SLOT)
        results: list[BatchResult] = []
        engine.submit([entry(0, [1, 2])], results.append)
        age_seen = asyncio.Event()

        async def watch() -> None:
            await until(lambda: (engine.health().running_step_age_ms or 0) > 10)
            age_seen.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            await engine.close(0)  # waits for the batch
        assert len(results) == 1
        assert age_seen.is_set()
        assert engine.kv() == 0


async def test_a_batch_behind_the_running_one_is_begun_without_the_node(spec: SpecMaker, entry: MakeEntry) -> None:
    """The second is submitted while the first runs; its token is the first one's, its rows lie elsewhere."""
    async with running(spec(prefill_ms_per_row=40)) as (engine, _):
        assert engine.takes_ahead
        await engine.open(0, SLOT)
        await engine.open(1, SlotSpec(2, 1, Sampling(temperature=0.0)))
        results: list[BatchResult] = []
        engine.submit([entry(0, [1, 2]), entry(0, [1, 2], slot=1)], results.append)
        engine.submit([BackendEntry(s, 2, 1, b"", (), True) for s in (0, 1)], results.append)
        with pytest.raises(RuntimeError):
            engine.submit([entry(3, [1])], results.append)
        assert not results
        await engine.close(1)  # behind both
        assert [[r.token.end if r.token else "skipped" for r in b.results] for b in results] == [  # type: ignore[union-attr]
            [None, "length"],
            [None, "skipped"],
        ]
        second = results[1].results
        assert isinstance(second[1], StepResult) and second[1].skipped
        assert engine.kv() == 3


async def test_rows_of_two_batches_under_way_do_not_mix(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    """On a head, in each of two shared files, while the batches grow and shrink."""
    async with running(made := spec(0, 3, prefill_ms_per_row=0.2)) as (head, _), running(made) as (other, _):
        for slot in (0, 1):
            await head.open(slot, SLOT)
            await other.open(slot, SLOT)
        ends = [0, 0]
        for count in (1, 40, 3, 900, 2):
            ids = [[(s + i) % 250 for i in range(count)] for s in (0, 1)]
            under_way: list[asyncio.Future[BatchResult]] = []
            for slot in (0, 1):
                under_way.append(asyncio.get_running_loop().create_future())
                head.submit([entry(ends[slot], ids[slot], slot=slot)], under_way[-1].set_result)
            for slot in (0, 1):
                alone = await submit(other, entry(ends[slot], ids[slot], slot=slot))
                assert isinstance(alone.results[0], StepResult)
                assert (await under_way[slot]).results == alone.results
                ends[slot] += count


async def test_a_worker_that_dies_with_two_batches_fails_both_in_order(spec: SpecMaker, entry: MakeEntry) -> None:
    made = spec(faults=[{"kind": "hang", "phase": "prefill", "flag": "now"}])
    flag_of(made, "now").touch()
    async with running(made) as (engine, events):
        await engine.open(0, SLOT)
        order: list[str] = []
        engine.on_lost = lambda error: order.append("lost")
        both = asyncio.Event()

        def done(name: str, result: BatchResult) -> None:
            order.append(f"{name} {result.failure and result.failure.code}")
            if name == "second":
                both.set()

        engine.submit([entry(0, [1, 2])], partial(done, "first"))
        engine.submit([BackendEntry(0, 2, 1, b"", (), True)], partial(done, "second"))
        await until(lambda: not flag_of(made, "now").exists())
        os.kill(pid_of(engine), signal.SIGKILL)
        await within(2, both)
        assert order == ["lost", "first engine_lost", "second engine_lost"]
        await within(5, events.ready)
        await engine.open(0, SLOT)
        results: list[BatchResult] = []
        engine.submit([entry(0, [1, 2])], results.append)
        engine.submit([BackendEntry(0, 2, 1, b"", (), True)], results.append)
        await engine.close(0)
        assert [r.failure for r in results] == [None, None]


async def test_a_wrong_answer_to_the_first_of_two_batches_fails_both_and_none_after(
    spec: SpecMaker, entry: MakeEntry, submit: Submit
) -> None:
    made = spec(faults=[{"kind": "hang", "phase": "prefill", "flag": "now"}])
    flag_of(made, "now").touch()
    async with running(made) as (engine, events):
        await engine.open(0, SLOT)
        told: list[tuple[str, str | None]] = []
        for name in ("first", "second"):
            engine.submit([entry(0, [1, 2])], lambda r, name=name: told.append((name, r.failure and r.failure.code)))
        await until(lambda: not flag_of(made, "now").exists())
        worker = engine._serving
        assert worker is not None
        worker._take(Done())
        await within(5, events.ready)
        assert told == [("first", "engine_lost"), ("second", "engine_lost")]
        await engine.open(0, SLOT)
        assert isinstance((await submit(engine, entry(0, [1, 2]))).results[0], StepResult)


async def test_stopping_an_engine_tells_both_batches(spec: SpecMaker, entry: MakeEntry) -> None:
    told: list[tuple[str, str | None]] = []
    async with running(spec(prefill_ms_per_row=100)) as (engine, _):
        await engine.open(0, SLOT)
        for name in ("first", "second"):
            engine.submit([entry(0, [1, 2])], lambda r, name=name: told.append((name, r.failure and r.failure.code)))
    await asyncio.sleep(0)
    assert told == [("first", "draining"), ("second", "draining")]


def test_a_worker_imports_nothing_of_the_nodes_side() -> None:
    code = "import shardline.model.worker, sys; print([m for m in ('structlog', 'rich', 'uvloop') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[]"


async def test_a_caller_that_gives_up_does_not_disturb_the_next(
    spec: SpecMaker, entry: MakeEntry, submit: Submit
) -> None:
    made = spec(faults=[{"kind": "slow", "phase": "open", "step": 0, "ms": 150}])
    async with running(made) as (engine, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await engine.open(0, SLOT)
        await engine.close(0)
        await engine.open(0, SLOT)
        assert isinstance((await submit(engine, entry(0, [1, 2]))).results[0], StepResult)


# ---- it is lost, and comes back ----------------------------------------------------------------------------------


async def test_kill_in_a_step_is_known_at_once_with_the_signal(
    spec: SpecMaker, entry: MakeEntry, submit: Submit
) -> None:
    made = spec(faults=[{"kind": "hang", "phase": "prefill", "flag": "now"}])
    async with running(made) as (engine, events):
        await engine.open(0, SLOT)
        flag_of(made, "now").touch()
        order: list[str] = []
        engine.on_lost = lambda error: order.append("lost")
        batch: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()

        def done(result: BatchResult) -> None:
            order.append("done")
            batch.set_result(result)

        engine.submit([entry(0, [1, 2])], done)
        await until(lambda: not flag_of(made, "now").exists())
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(refusal(engine.open(1, SLOT)))
            await asyncio.sleep(0)
            os.kill(pid_of(engine), signal.SIGKILL)
            result = await asyncio.wait_for(batch, 1)
        assert order == ["lost", "done"]
        assert result.failure is not None
        assert result.failure.code == "engine_lost"
        assert result.failure.details["signal"] == "SIGKILL"
        assert waiting.result() == "engine_lost"
        assert engine.kv() == 0
        refused = await submit(engine, entry(0, [1, 2]))
        assert refused.failure.code == "engine_lost"
        await within(5, events.ready)
        assert engine.health().restarts == 1
        await engine.open(0, SLOT)
        assert isinstance((await submit(engine, entry(0, [1, 2]))).results[0], StepResult)


async def test_an_idle_worker_that_is_killed_is_missed_too(spec: SpecMaker) -> None:
    async with running(spec()) as (engine, events):
        first = pid_of(engine)
        os.kill(first, signal.SIGTERM)
        await within(2, events.lost_now)
        assert events.lost[0].details["signal"] == "SIGTERM"
        await within(5, events.ready)
        assert pid_of(engine) != first
        assert not psutil.pid_exists(first)


async def test_a_crash_brings_its_last_words(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    made = spec(faults=[{"kind": "exit", "phase": "prefill", "signal": int(signal.SIGSEGV)}])
    async with running(made) as (engine, _):
        await engine.open(0, SLOT)
        result = await submit(engine, entry(0, [1, 2]))
        assert result.failure.details["signal"] == "SIGSEGV"
        assert result.failure.message.endswith("it said: Fatal Python error: Segmentation fault")


def test_last_words_name_the_cause_and_no_directory() -> None:
    lines = [
        "loading",
        "Traceback (most recent call last):",
        'File "/home/me/x.py", line 3 in f',
        "OSError: /home/me/a.bin",
    ]
    assert last_words(lines) == "loading | OSError: a.bin"
    assert last_words([]) == ""
    assert len(last_words(["x" * 5000])) < 1000


async def test_a_stopped_worker_is_lost_within_the_silence_limit(spec: SpecMaker, entry: MakeEntry) -> None:
    async with running(spec()) as (engine, events):
        await engine.open(0, SLOT)
        pid = pid_of(engine)
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.perf_counter()
        engine.submit([entry(0, [1, 2])], lambda _: None)
        await within(QUICK.worker_silent_s + 1.5, events.lost_now)
        assert time.perf_counter() - stopped_at >= QUICK.worker_silent_s * 0.8
        assert events.lost[0].code == "engine_lost"
        assert "no life" in events.lost[0].message
        assert not psutil.pid_exists(pid)
        await within(5, events.ready)


async def test_a_step_over_its_limit_ends_the_worker_although_it_ticks(
    spec: SpecMaker, entry: MakeEntry, submit: Submit
) -> None:
    made = spec(faults=[{"kind": "hang", "phase": "decode", "flag": "now"}])
    async with running(made, Settings(worker_backoff_s=0.01, step_s=0.4, worker_silent_s=0.3)) as (engine, events):
        await engine.open(0, SLOT)
        first = await submit(engine, entry(0, [1, 2]))
        flag_of(made, "now").touch()
        result = await submit(engine, entry(2, [first.results[0].token.id]))
        assert (result.failure.code, result.failure.details["limit"]) == ("deadline", "step")
        assert events.lost == [result.failure]
        await within(5, events.ready)


async def test_a_slow_step_within_its_limit_is_no_fault(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    """Longer than the silence limit, shorter than the step limit: the ticker ticks, so it lives."""
    made = spec(prefill_ms_per_row=250)
    settings = Settings(worker_silent_s=0.3, prefill_chunk_s=5.0)
    async with running(made, settings) as (engine, events):
        await engine.open(0, SLOT)
        assert isinstance((await submit(engine, entry(0, [1, 2]))).results[0], StepResult)
        assert not events.lost


async def test_a_hanging_open_is_a_hanging_engine(spec: SpecMaker) -> None:
    made = spec(faults=[{"kind": "hang", "phase": "open", "step": 0}])
    async with running(made) as (engine, events):
        with pytest.raises(ShardlineError) as caught:
            await engine.open(0, SLOT)
        assert (caught.value.code, caught.value.details["limit"]) == ("deadline", "step")
        assert len(events.lost) == 1


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ({"kind": "exit"}, "engine_lost", "exit code 1"),
        ({"kind": "exit", "signal": 9}, "engine_lost", "SIGKILL (the kernel does this when memory ends)"),
        ({"kind": "error"}, "engine_error", "the script says so"),
        ({"kind": "oom"}, "engine_out_of_memory", "ran out of memory"),
        ({"kind": "hang"}, "deadline", "within 1 s"),
    ],
)
async def test_a_first_load_that_fails_raises_and_leaves_nothing(
    spec: SpecMaker, fault: dict[str, Any], code: str, says: str
) -> None:
    engine = WorkerEngine(
        "scripted", spec(faults=[{"phase": "load", **fault}]), Settings(worker_start_s=1.0), inherited={}
    )
    with pytest.raises(ShardlineError) as caught:
        await engine.start()
    assert caught.value.code == code
    assert says in caught.value.message
    assert engine.health().pid is None
    assert not engine.health().alive
    await engine.stop()
    assert not own_workers()


async def test_a_file_that_is_no_model_is_the_first_starts_error(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("<!DOCTYPE html>")
    engine = WorkerEngine("scripted", ShardSpec(str(path), 0, 3), QUICK, inherited={})
    with pytest.raises(ShardlineError) as caught:
        await engine.start()
    assert caught.value.code == "model_file_invalid"
    await engine.stop()


async def test_restarts_are_bounded_and_the_last_error_shows(spec: SpecMaker) -> None:
    made = spec()
    settings = Settings(worker_backoff_s=0.01, worker_restarts=2, worker_silent_s=1.0)
    async with running(made, settings) as (engine, events):
        rewrite(made, {})
        os.kill(pid_of(engine), signal.SIGKILL)
        await until(lambda: len(events.lost) == 2, 10)
        assert "given up after 2 restarts" in events.lost[1].message
        health = engine.health()
        assert (health.alive, health.restarts, health.pid) == (False, 2, None)
        assert "model" in (health.last_error or "")
        assert not events.ready.is_set()
        assert not own_workers()
        with pytest.raises(ShardlineError, match="given up"):
            await engine.open(0, SLOT)


async def test_another_model_at_the_path_is_not_taken(spec: SpecMaker) -> None:
    made = spec()
    async with running(made, Settings(worker_backoff_s=0.01, worker_restarts=1)) as (engine, events):
        rewrite(made, {"model": "demo", "answer": ["another"]})
        os.kill(pid_of(engine), signal.SIGKILL)
        await until(lambda: len(events.lost) == 2, 10)
        assert "not what it was before" in events.lost[1].message


async def test_garbage_on_the_socket_is_a_lost_engine(
    spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program in the worker's place, which speaks HTTP."""
    impostor = tmp_path / "impostor.py"
    impostor.write_text(
        "import os, sys, time\n"
        "os.write(int(sys.argv[sys.argv.index('--channel') + 1]), b'HTTP/1.1 200 OK\\r\\n\\r\\n')\n"
        "time.sleep(60)\n"
    )
    real = subprocess.Popen

    def popen(command: list[str], **rest: Any) -> Any:
        at = command.index("-m")
        return real([*command[:at], str(impostor), *command[at + 2 :]], **rest)

    monkeypatch.setattr(subprocess, "Popen", popen)
    engine = WorkerEngine("scripted", spec(), QUICK, inherited={})
    with pytest.raises(ShardlineError, match="cannot be read") as caught:
        await engine.start()
    assert caught.value.code == "engine_lost"
    await engine.stop()
    assert not own_workers()


@pytest.mark.parametrize("call", ["socket.socketpair", "os.pipe", "subprocess.Popen", "os.memfd_create"])
async def test_a_system_that_refuses_a_worker_is_an_error_and_leaves_nothing(
    spec: SpecMaker, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(24, "Too many open files")

    before = psutil.Process().num_fds()
    engine = WorkerEngine("scripted", spec(), QUICK, inherited={})
    with monkeypatch.context() as patched:
        patched.setattr(call, refuse)
        if call == "os.memfd_create":
            patched.setattr("tempfile.TemporaryFile", refuse)
        with pytest.raises(ShardlineError, match="Too many open files") as caught:
            await engine.start()
    assert caught.value.code == "engine_lost"
    await engine.stop()
    assert psutil.Process().num_fds() == before


# ---- who lives longer --------------------------------------------------------------------------------------------

_PARENT = """
import asyncio, sys
from shardline.model.backend import ShardSpec
from shardline.model.worker_engine import WorkerEngine
from shardline.settings import Settings

async def main():
    settings = Settings(worker_silent_s=0.8, late_timer_s=0.2)
    engine = WorkerEngine("scripted", ShardSpec(sys.argv[1], 0, 6), settings, inherited={})
    await engine.start()
    print("pid", engine.health().pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def parent(spec: SpecMaker) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A Node in miniature, and its worker."""
    started = subprocess.Popen([sys.executable, "-c", _PARENT, spec().model], stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        pid = next(line for line in started.stdout if line.startswith("pid")).split()[1]
        yield started, psutil.Process(int(pid))
    finally:
        started.kill()
        started.wait()
        if started.stdout is not None:
            started.stdout.close()


def gone(process: psutil.Process, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("worker_stopped", [False, True])
def test_the_worker_dies_with_its_node(
    parent: tuple[subprocess.Popen[str], psutil.Process], worker_stopped: bool
) -> None:
    node, worker = parent
    if worker_stopped:
        worker.suspend()
    node.kill()
    assert gone(worker, 1.0)


def test_ctrl_c_reaches_the_node_only(parent: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    node, worker = parent
    assert os.getpgid(worker.pid) != os.getpgid(node.pid)
    worker.send_signal(signal.SIGINT)
    assert not gone(worker, 0.2)


def test_the_node_that_was_stopped_does_not_blame_its_worker(
    parent: tuple[subprocess.Popen[str], psutil.Process],
) -> None:
    """Both stopped for longer than the silence limit, as a laptop that sleeps; the Node, which has seen the last tick,
    wakes first."""
    node, worker = parent
    worker.suspend()
    time.sleep(0.3)
    os.kill(node.pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(node.pid, signal.SIGCONT)
    time.sleep(0.2)
    worker.resume()
    assert not gone(worker, 1.0)


# ---- nothing is left ---------------------------------------------------------------------------------------------


def counts() -> tuple[int, int, int]:
    me = psutil.Process()
    return me.num_fds(), threading.active_count(), len(me.children(recursive=True))


async def test_nothing_is_left_after_stop(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    made = spec()
    async with running(made) as (engine, _):
        await engine.open(0, SLOT)
    before, tasks = counts(), asyncio.all_tasks()
    for how in ("idle", "killed", "running", "loading", "lost"):
        engine = WorkerEngine("scripted", made, QUICK, inherited={})
        if how == "loading":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.start()
        else:
            await engine.start()
            await engine.open(0, SLOT)
            await submit(engine, entry(0, [1, 2]))
        results: list[BatchResult] = []
        if how == "killed":
            os.kill(pid_of(engine), signal.SIGKILL)
        elif how == "running":
            engine.submit([entry(2, [1])], results.append)
        elif how == "lost":
            os.kill(pid_of(engine), signal.SIGKILL)
            await asyncio.sleep(0.02)
        await engine.stop()
        await engine.stop()
        await asyncio.sleep(0)
        assert [r.failure.code for r in results if r.failure] == (["draining"] if how == "running" else []), how
        assert counts() == before, how
    assert asyncio.all_tasks() == tasks


async def test_restarts_leave_nothing_either(spec: SpecMaker) -> None:
    async with running(spec(), Settings(worker_backoff_s=0.001, worker_restarts=9)) as (engine, events):
        before = counts()
        for _ in range(3):
            events.ready.clear()
            os.kill(pid_of(engine), signal.SIGKILL)
            await within(5, events.ready)
        assert counts() == before


async def test_stop_in_good_order_takes_no_kill(spec: SpecMaker) -> None:
    async with running(spec(), Settings(worker_stop_s=5.0)) as (engine, _):
        worker = engine._worker
        assert worker is not None
        await engine.stop()
        assert worker._process.returncode == 0


def test_the_environment_of_a_worker_is_made_not_inherited() -> None:
    inherited = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "SHARDLINE_CREDENTIAL": "s",
        "HTTP_PROXY": "p",
        "GLIBC_TUNABLES": "t",
    }
    made = worker_environment(inherited, 3)
    assert made["OMP_NUM_THREADS"] == "3"
    assert (made["PATH"], made["CUDA_VISIBLE_DEVICES"], made["GLIBC_TUNABLES"]) == ("/bin", "1", "t")
    assert not {"SHARDLINE_CREDENTIAL", "HTTP_PROXY"} & set(made)
    assert int(worker_environment({}, 0)["OMP_NUM_THREADS"]) >= 1


async def test_a_worker_sees_no_secret(spec: SpecMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_CREDENTIAL", "secret")
    async with running(spec()) as (engine, _):
        assert "SHARDLINE_CREDENTIAL" not in psutil.Process(pid_of(engine)).environ()
