"""The engine protocol: restarts as arithmetic, and the inline engine with its losses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, ShardSpec, SlotSpec
from shardline.model.engine import BatchResult, Engine, InlineEngine, Restarts
from shardline.model.generation import StepResult
from shardline.model.limits import step_limit
from shardline.model.scripted import load_inline
from shardline.settings import Settings
from shardline.wire.messages import Sampling

SpecMaker = Callable[..., ShardSpec]
MakeEntry = Callable[..., BackendEntry]
Submit = Callable[..., Any]
SLOT = SlotSpec(2, 10, Sampling(temperature=0.0))
QUICK = Settings(worker_backoff_s=0.01, step_s=0.2, prefill_chunk_s=0.3, worker_start_s=0.5)


def test_restarts_double_their_pause_and_end() -> None:
    restarts = Restarts(Settings(worker_restarts=4, worker_backoff_s=1.0, worker_good_run_s=100.0))
    assert [restarts.next_delay_s(5.0) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, None]
    assert restarts.count == 4
    assert restarts.next_delay_s(100.0) == 1.0  # a good run pays the debt
    assert restarts.next_delay_s(0.0) == 2.0
    assert restarts.count == 6


def test_the_limit_of_a_batch_is_by_its_rows(entry: MakeEntry) -> None:
    settings = Settings(step_s=1.0, prefill_chunk_s=9.0)
    assert step_limit([entry(0, [1]), entry(4, [1])], settings) == ("step", 1.0)
    assert step_limit([entry(0, [1]), entry(4, [1, 2])], settings) == ("prefill_chunk", 9.0)


class Events:
    """What an engine called back."""

    def __init__(self, engine: Engine) -> None:
        self.lost: list[ShardlineError] = []
        self.ready = asyncio.Event()
        engine.on_lost = self.lost.append
        engine.on_ready = self.ready.set


@asynccontextmanager
async def running(spec: ShardSpec, settings: Settings = QUICK) -> AsyncIterator[tuple[InlineEngine, Events]]:
    engine = InlineEngine(lambda: load_inline(spec), settings)
    events = Events(engine)
    await engine.start()
    try:
        yield engine, events
    finally:
        await engine.stop()


async def test_a_generation_with_tokens_text_and_kv(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    async with running(spec()) as (engine, _):
        await engine.open(0, SLOT)
        first = await submit(engine, entry(0, [1, 2]))
        assert isinstance(first.results[0], StepResult)
        assert first.failure is None
        assert engine.kv() == 2
        await engine.rollback(0, 1)
        assert engine.kv() == 1
        assert await engine.tokenize("ab", add_special=False, parse_special=True) == [97, 98]
        assert engine.text_bundle() is not None
        assert (await engine.self_test()).decode_ms == 0
        assert engine.health().alive
        await engine.close(0)
        assert engine.kv() == 0
    assert not engine.health().alive


async def test_done_never_runs_inside_submit_and_batches_do_not_overlap(spec: SpecMaker, entry: MakeEntry) -> None:
    async with running(spec()) as (engine, _):
        await engine.open(0, SLOT)
        order = []
        finished = asyncio.Event()

        def done(result: BatchResult) -> None:
            order.append("done")
            finished.set()

        engine.submit([entry(0, [1, 2])], done)
        order.append("submitted")
        with pytest.raises(RuntimeError):
            engine.submit([entry(0, [1, 2])], done)
        await asyncio.wait_for(finished.wait(), 5)
        assert order == ["submitted", "done"]


async def test_the_loop_runs_on_while_a_batch_takes_its_time(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    async with running(spec(decode_ms=60, prefill_ms_per_row=30)) as (engine, _):
        await engine.open(0, SLOT)
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.002)
                turns += 1

        async with asyncio.TaskGroup() as tasks:
            turning = tasks.create_task(turn())
            started = time.perf_counter()
            result = await submit(engine, entry(0, [1, 2]))
            took = time.perf_counter() - started
            turning.cancel()
        assert turns > 5
        assert took >= 0.055
        assert result.compute_us >= 55_000


@pytest.mark.parametrize(
    ("fault", "code", "limit"),
    [
        ({"kind": "hang", "phase": "prefill"}, "deadline", "prefill_chunk"),
        ({"kind": "slow", "phase": "prefill", "ms": 5000}, "deadline", "prefill_chunk"),
        ({"kind": "exit", "phase": "prefill"}, "engine_lost", None),
    ],
)
async def test_a_lost_engine_says_so_once_and_comes_back(
    spec: SpecMaker, entry: MakeEntry, submit: Submit, fault: dict[str, Any], code: str, limit: str | None
) -> None:
    made = spec(faults=[{**fault, "flag": "now"}])
    async with running(made) as (engine, events):
        await engine.open(0, SLOT)
        (Path(made.model).parent / "now").touch()
        result = await submit(engine, entry(0, [1, 2]))
        assert result.failure is not None
        assert (result.failure.code, result.failure.details.get("limit")) == (code, limit)
        assert events.lost == [result.failure]
        assert engine.kv() == 0
        assert not engine.health().alive
        refused = await submit(engine, entry(0, [1, 2]))
        assert refused.failure is result.failure
        with pytest.raises(ShardlineError):
            await engine.open(1, SLOT)
        await engine.close(0)  # nothing is left to close
        await asyncio.wait_for(events.ready.wait(), 5)
        assert engine.health().restarts == 1
        await engine.open(0, SLOT)
        assert isinstance((await submit(engine, entry(0, [1, 2]))).results[0], StepResult)


async def test_running_step_age_shows_in_health(spec: SpecMaker, entry: MakeEntry) -> None:
    async with running(spec(faults=[{"kind": "hang", "phase": "prefill"}])) as (engine, events):
        await engine.open(0, SLOT)
        assert engine.health().running_step_age_ms is None
        engine.submit([entry(0, [1, 2])], lambda _: None)
        await asyncio.sleep(0.03)
        age_ms = engine.health().running_step_age_ms
        assert age_ms is not None
        assert age_ms >= 25
        await asyncio.wait_for(events.ready.wait(), 5)


async def test_it_gives_up_after_its_restarts(spec: SpecMaker, entry: MakeEntry, submit: Submit) -> None:
    made = spec(faults=[{"kind": "exit", "phase": "prefill"}])
    settings = Settings(worker_backoff_s=0.005, worker_restarts=2)
    async with running(made, settings) as (engine, events):
        for _ in range(2):
            events.ready.clear()
            await engine.open(0, SLOT)
            await submit(engine, entry(0, [1, 2]))
            await asyncio.wait_for(events.ready.wait(), 5)
        await engine.open(0, SLOT)
        await submit(engine, entry(0, [1, 2]))
        events.ready.clear()
        await asyncio.sleep(0.05)
        assert not events.ready.is_set()
        assert len(events.lost) == 4
        assert "given up after 2 restarts" in (engine.health().last_error or "")


async def test_stop_in_a_running_batch_tells_it(spec: SpecMaker, entry: MakeEntry) -> None:
    async with running(spec(prefill_ms_per_row=60)) as (engine, events):
        await engine.open(0, SLOT)
        results: list[BatchResult] = []
        engine.submit([entry(0, [1, 2])], results.append)
        await engine.stop()
        await engine.stop()
        assert [r.failure.code for r in results if r.failure] == ["draining"]
        await asyncio.sleep(0.05)
        assert len(results) == 1
        assert not events.lost


async def test_a_first_start_that_fails_raises(spec: SpecMaker) -> None:
    engine = InlineEngine(lambda: load_inline(spec(0, 9)), QUICK)
    with pytest.raises(ShardlineError) as caught:
        await engine.start()
    assert caught.value.code == "layers_invalid"
    hanging = spec(faults=[{"kind": "hang", "phase": "load"}])
    engine = InlineEngine(lambda: load_inline(hanging), QUICK)
    with pytest.raises(ShardlineError) as caught:
        await engine.start()
    assert caught.value.details["limit"] == "worker_start"
    assert not engine.health().alive
