"""The llama.cpp engine in a worker process: the same numbers, and an abort of the library ends the worker alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.model.backend import ShardSpec, SlotSpec
from shardline.model.engine import BatchResult
from shardline.model.llama_shard import load
from shardline.model.worker_engine import WorkerEngine
from shardline.settings import Settings
from shardline.wire.messages import Sampling
from tests.support.llama_route import LAYERS, WIDTH, entry, hidden_of, result, spec
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import BY_NAME

pytestmark = [pytest.mark.llama, pytest.mark.smollm2, pytest.mark.timeout(90)]

QUICK = Settings(worker_backoff_s=0.01, worker_start_s=60.0)
SLOT = SlotSpec(1, 1000, Sampling(temperature=0.0))


@asynccontextmanager
async def running(given: ShardSpec, settings: Settings = QUICK) -> AsyncIterator[WorkerEngine]:
    engine = WorkerEngine("llama", given, settings, inherited=dict(os.environ))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def submitted(engine: WorkerEngine, *entries) -> BatchResult:
    future: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
    engine.submit(entries, future.set_result)
    async with asyncio.timeout(30):
        return await future


async def test_rows_through_the_worker_are_those_of_the_backend(tmp_path):
    given = spec(tmp_path, 10, 14)
    alone = load(given)
    rng = np.random.default_rng(0)
    steps = [(rng.standard_normal((n, WIDTH)).astype(np.float32).tobytes(), n) for n in (40, 1, 1, 7)]
    async with running(given) as engine:
        for slot in range(3):
            await engine.open(slot, SlotSpec(1, 1))
            alone.open(slot)
        position = 0
        for rows, count in steps:
            batch = [entry([1] * count, position, [rows], slot=slot) for slot in (2, 0, 1)]
            found = await submitted(engine, *batch)
            expected = hidden_of(alone, batch)
            assert [bytes(r.hidden[0]) for r in found.results] == expected
            position += count
        times = await engine.self_test()
        assert times.decode_ms > 0 and engine.text_bundle() is None
    alone.unload()


async def test_a_whole_model_generates_what_the_backend_does(tmp_path):
    given = spec(tmp_path, 0, LAYERS)
    alone = load(given)
    prompt = alone.tokenize("The capital of France is", add_special=True, parse_special=False)
    alone.open(0)
    expected, step, position = [], prompt, 0
    for _ in range(12):
        logits = result(alone.run([entry(step, position)])).logits
        expected.append(int(logits.argmax()))
        position += len(step)
        step = expected[-1:]
    async with running(given) as engine:
        assert await engine.tokenize("The capital of France is", add_special=True, parse_special=False) == prompt
        await engine.open(0, replace(SLOT, prompt_tokens=len(prompt)))
        found, step, position = [], prompt, 0
        for _ in range(12):
            (answer,) = (await submitted(engine, entry(step, position))).results
            found.append(answer.token.id)
            position += len(step)
            step = found[-1:]
    assert found == expected
    alone.unload()


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
async def test_a_worker_that_aborts_is_lost_and_comes_back(tmp_path, number):
    given = spec(tmp_path, 10, 12)
    rows = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32).tobytes()
    async with running(given) as engine:
        lost: list[ShardlineError] = []
        ready = asyncio.Event()
        engine.on_lost, engine.on_ready = lost.append, ready.set
        await engine.open(0, SlotSpec(1, 1))
        before = (await submitted(engine, entry([1] * 5, 0, [rows]))).results[0].hidden[0]
        os.kill(engine.health().pid, number)
        failed = await submitted(engine, entry([1] * 5, 5, [rows]))
        assert failed.failure is not None and failed.failure.code == "engine_lost"
        async with asyncio.timeout(30):
            await ready.wait()
        assert [error.details.get("signal") for error in lost] == [number.name]
        await engine.open(0, SlotSpec(1, 1))
        after = (await submitted(engine, entry([1] * 5, 0, [rows]))).results[0].hidden[0]
        assert bytes(after) == bytes(before)


async def test_an_assertion_inside_the_library_is_told_in_its_own_words(tmp_path):
    """A model of an architecture with windows in which no layer has one: the library ends its process for that."""
    model = BY_NAME["gemma3"]
    without = replace(model, keys={**model.keys, "attention.sliding_window_pattern": [0] * model.layers})
    file = write_tiny_gguf(without, tmp_path / "odd.gguf")
    engine = WorkerEngine(
        "llama", ShardSpec(str(file), 0, model.layers), replace_settings(worker_restarts=0), inherited=dict(os.environ)
    )
    try:
        with pytest.raises(ShardlineError) as caught:
            await engine.start()
        assert caught.value.code == "engine_lost"
        assert "GGML_ASSERT" in caught.value.message and "is_swa_any" in caught.value.message
    finally:
        await engine.stop()


def replace_settings(**changed) -> Settings:
    return Settings(**{"worker_backoff_s": 0.01, **changed})


def test_the_worker_prints_no_backtrace_of_its_own():
    """Else an abort would fork a debugger, which takes seconds."""
    from shardline.model.worker_process import worker_environment

    assert worker_environment({}, 1)["GGML_NO_BACKTRACE"] == "1"
