"""A slot that begins with what a kept one holds: the same tokens, penalties and numbers as if it had computed it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, BackendOutput, Reuse, ShardSpec, SlotSpec
from shardline.model.engine import BatchResult
from shardline.model.generation import Generator, SampledToken, StepResult
from shardline.model.scripted import ScriptedBackend, load_inline
from shardline.model.worker_engine import WorkerEngine
from shardline.settings import Settings
from shardline.wire.messages import Sampling

SpecMaker = Callable[..., ShardSpec]
MakeEntry = Callable[..., BackendEntry]
PROMPT = [*range(10, 50)]
PENALTIES = Sampling(
    temperature=0.9,
    seed=5,
    logprobs=4,
    repeat_penalty=1.7,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    logit_bias={20: 1.5},
)


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


class NoisyTail:
    """The scripted backend, but its logits are those of a model in doubt: what penalties do to them shows."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, entries: Any) -> list[BackendOutput | Exception]:
        outputs = self._backend.run(entries)
        size = self._backend.describe().vocab_size
        for i, (entry, output) in enumerate(zip(entries, outputs, strict=True)):
            if isinstance(output, BackendOutput) and output.logits is not None:
                noise = np.random.default_rng(entry.position + entry.rows)
                outputs[i] = BackendOutput(logits=noise.normal(0, 0.5, size).astype(np.float32))
        return outputs


def token(result: object) -> SampledToken:
    assert isinstance(result, StepResult), result
    assert result.token is not None
    return result.token


def go_on(generator: Generator, entry: MakeEntry, slot: int, begin: int, count: int = 8) -> list[SampledToken]:
    out: list[SampledToken] = []
    position, ids = begin, PROMPT[begin:]
    while len(out) < count:
        (result,) = generator.run([entry(position, ids, slot=slot)])
        out.append(token(result))
        position, ids = position + len(ids), [out[-1].id]
    return out


@pytest.fixture
def generator(spec: SpecMaker) -> Generator:
    return Generator(NoisyTail(load_inline(spec(eos=False))))


SLOT = SlotSpec(len(PROMPT), 50, PENALTIES)


def reusing(source: int, tokens: int) -> SlotSpec:
    return SlotSpec(len(PROMPT), 50, PENALTIES, Reuse(source, tokens, packed(PROMPT[:tokens])))


@pytest.mark.parametrize("begin", [32, 16])
@pytest.mark.parametrize("target", [1, 0], ids=["forked", "taken over"])
def test_penalties_logprobs_and_draws_are_those_of_a_whole_prefill(
    generator: Generator, entry: MakeEntry, target: int, begin: int
) -> None:
    """`begin` below what is reused: the slot goes back first."""
    generator.open(0, SLOT)
    wanted = go_on(generator, entry, 0, 0)
    generator.keep(0, 32)
    assert generator.kv_tokens == 32
    generator.open(target, reusing(0, 32))
    if begin < 32:
        generator.rollback(target, begin)
    found = go_on(generator, entry, target, begin)
    assert found == wanted
    assert len({t.id for t in wanted}) > 2
    generator.close(target)
    generator.close(0)
    assert (generator.kv_tokens, generator.slots) == (0, 0)


def test_without_the_ids_penalties_would_differ(generator: Generator, entry: MakeEntry) -> None:
    """The test above can fail."""
    generator.open(0, SLOT)
    wanted = go_on(generator, entry, 0, 0)
    generator.keep(0, 32)
    wrong = Reuse(0, 32, packed([7] * 32))
    generator.open(1, SlotSpec(len(PROMPT), 50, PENALTIES, wrong))
    assert go_on(generator, entry, 1, 32) != wanted


def test_what_is_kept_computes_nothing_and_what_is_not_kept_is_not_forked(
    generator: Generator, entry: MakeEntry
) -> None:
    generator.open(0, SLOT)
    go_on(generator, entry, 0, 0, 1)
    for bad in (reusing(0, 32), reusing(3, 32)):  # in use; not there
        with pytest.raises(ShardlineError) as caught:
            generator.open(1, bad)
        assert caught.value.code == "session_gone"
    with pytest.raises(ShardlineError):
        generator.keep(0, 41)  # more than it holds
    generator.close(0)
    generator.open(0, SLOT)
    go_on(generator, entry, 0, 0, 1)
    generator.keep(0, 32)
    (refused,) = generator.run([entry(32, [1], slot=0)])
    assert isinstance(refused, ShardlineError) and refused.code == "session_gone"
    for bad in (reusing(0, 33), SlotSpec(40, 50, PENALTIES, Reuse(0, 32, b""))):
        with pytest.raises(ShardlineError):
            generator.open(1, bad)
    assert (generator.slots, generator.kv_tokens) == (1, 32)
    generator.open(1, reusing(0, 32))  # nothing of the failures is left


def test_a_take_over_that_fails_leaves_the_slot_free(generator: Generator, entry: MakeEntry) -> None:
    generator.open(0, SLOT)
    go_on(generator, entry, 0, 0, 1)
    generator.keep(0, 32)
    with pytest.raises(ShardlineError):
        generator.open(0, reusing(0, 33))
    assert (generator.slots, generator.kv_tokens) == (0, 0)
    generator.open(0, SLOT)


async def test_across_the_worker_process(spec: SpecMaker, entry: MakeEntry, submit: Any) -> None:
    engine = WorkerEngine("scripted", spec(eos=False), Settings(), inherited={})
    try:
        await engine.start()
        await engine.open(0, SLOT)

        async def step(slot: int, position: int, ids: list[int]) -> BatchResult:
            result: BatchResult = await submit(engine, entry(position, ids, slot=slot))
            return result

        first = await step(0, 0, PROMPT)
        await engine.keep(0, 32)
        assert engine.kv() == 32
        await engine.open(1, reusing(0, 32))
        assert engine.kv() == 64
        again = await step(1, 32, PROMPT[32:])
        assert again.results == first.results
        await engine.close(1)
        await engine.open(0, reusing(0, 32))
        assert (await step(0, 32, PROMPT[32:])).results == first.results
        with pytest.raises(ShardlineError) as caught:
            await engine.open(2, reusing(0, 32))
        assert caught.value.code == "session_gone"
        assert engine.kv() == 40
    finally:
        await engine.stop()
