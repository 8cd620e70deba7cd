"""What the generator adds to a backend: checks, tokens, ends. Backends here are the scripted one, whole or cut."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, BackendOutput, ShardSpec, SlotSpec
from shardline.model.generation import Generator, SampledToken, StepResult, fault_of
from shardline.model.scripted import load_inline
from shardline.wire.messages import Sampling

SpecMaker = Callable[..., ShardSpec]
MakeEntry = Callable[..., BackendEntry]
GREEDY = Sampling(temperature=0.0)


def token(result: object) -> SampledToken:
    assert isinstance(result, StepResult), result
    assert result.token is not None
    return result.token


def code(result: object) -> str:
    assert isinstance(result, ShardlineError), result
    return result.code


def follow(position: int, slot: int = 0) -> BackendEntry:
    """The step behind the one before, whose token only the generator knows."""
    return BackendEntry(slot, position, 1, b"", (), True)


@pytest.fixture
def whole(spec: SpecMaker) -> Callable[..., Generator]:
    def make(**fields: Any) -> Generator:
        return Generator(load_inline(spec(**fields)))

    return make


def generate(
    generator: Generator, entry: MakeEntry, spec: SlotSpec, prompt: Sequence[int] = (1, 2, 3)
) -> list[SampledToken]:
    generator.open(0, spec)
    out: list[SampledToken] = []
    ids, position = list(prompt), 0
    while not out or out[-1].end is None:
        (result,) = generator.run([entry(position, ids)])
        out.append(token(result))
        position += len(ids)
        ids = [out[-1].id]
        assert len(out) < 50
    generator.close(0)
    return out


def test_it_ends_at_the_models_end_at_stop_ids_and_at_max_tokens(
    whole: Callable[..., Generator], entry: MakeEntry
) -> None:
    generator = whole()
    text = generator.backend.vocabulary.text  # type: ignore[attr-defined]
    out = generate(generator, entry, SlotSpec(3, 10, GREEDY))
    assert (text(t.id for t in out[:-1]), out[-1].end) == (b"alpha beta gamma", "stop")
    out = generate(generator, entry, SlotSpec(3, 2, GREEDY))
    assert (text(t.id for t in out), [t.end for t in out]) == (b"alpha beta", [None, "length"])
    beta = out[1].id
    out = generate(generator, entry, SlotSpec(3, 10, Sampling(temperature=0.0, stop_ids=[beta])))
    assert [(t.id == beta, t.end) for t in out] == [(False, None), (True, "stop")]


def test_the_end_on_the_last_permitted_token_is_a_stop(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    assert [t.end for t in generate(whole(), entry, SlotSpec(3, 4, GREEDY))] == [None, None, None, "stop"]


def test_min_tokens_and_ignore_eos_hold_the_end_back(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    out = generate(whole(), entry, SlotSpec(3, 9, Sampling(temperature=0.0, min_tokens=6)))
    assert (len(out), out[-1].end) == (7, "stop")
    out = generate(whole(), entry, SlotSpec(3, 9, Sampling(temperature=0.0, ignore_eos=True)))
    assert (len(out), out[-1].end) == (9, "length")
    assert all(t.id != whole().backend.vocabulary.end for t in out)  # type: ignore[attr-defined]


def test_a_prompt_in_chunks_gives_one_token_at_its_end(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    generator = whole()
    generator.open(0, SlotSpec(5, 10, GREEDY))
    (first,) = generator.run([entry(0, [1, 2, 3], want_output=False)])
    assert first == StepResult()
    (second,) = generator.run([entry(3, [4, 5])])
    assert token(second).end is None
    assert generator.kv_tokens == 5


def test_penalties_see_prompt_and_output_once(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    """frequency_penalty 13 on an answer that repeats one piece with logit 40 over noise below 1: three times."""
    sampling = Sampling(temperature=0.0, frequency_penalty=13.0)
    out = generate(whole(answer=["same"], eos=False), entry, SlotSpec(3, 6, sampling))
    same = out[0].id
    assert [t.id == same for t in out[:5]] == [True, True, True, True, False]


def test_logprobs_come_with_the_token(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    out = generate(whole(), entry, SlotSpec(3, 2, Sampling(temperature=0.0, logprobs=2)))
    top = out[0].top
    assert top is not None
    assert (len(top), top[0][0], top[0][1]) == (2, out[0].id, out[0].logprob)


def test_sampler_state_belongs_to_the_slot(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    def run(slots: Sequence[int]) -> dict[int, list[int]]:
        generator = whole(sharpness=1.0, eos=False)
        for slot in slots:
            generator.open(slot, SlotSpec(2, 20, Sampling(seed=40 + slot)))
        out: dict[int, list[int]] = {slot: [] for slot in slots}
        for step in range(8):
            batch = [entry(step + (step > 0), out[s][-1:] or [1, 2], slot=s) for s in slots]
            for slot, result in zip(slots, generator.run(batch), strict=True):
                out[slot].append(token(result).id)
        return out

    together = run([0, 1, 2])
    assert run([1])[1] == together[1]
    assert together[0] != together[1]


def test_a_middle_shard_hands_rows_through(spec: SpecMaker, entry: MakeEntry) -> None:
    head, tail = (Generator(load_inline(spec(*span))) for span in ((0, 3), (3, 6)))
    for generator in (head, tail):
        generator.open(0, SlotSpec(3, 10, GREEDY))
    (rows,) = head.run([entry(0, [1, 2, 3])])
    assert isinstance(rows, StepResult)
    assert (rows.token, [len(bytes(b)) for b in rows.hidden]) == (None, [96])
    (last,) = tail.run([entry(0, [1, 2, 3], rows.hidden)])
    assert tail.backend.vocabulary.text([token(last).id]) == b"alpha"  # type: ignore[attr-defined]


# ---- what must not reach an engine -------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_the_cache_is_refused_entry_by_entry(
    whole: Callable[..., Generator], entry: MakeEntry
) -> None:
    generator = whole()
    for slot in range(7):
        generator.open(slot, SlotSpec(2, 10, GREEDY))
    raw = struct.pack("<2i", 1, 2)
    results = generator.run(
        [
            entry(1, [1, 2], slot=0),  # a gap
            BackendEntry(1, 0, 3, raw, (), True),  # fewer ids than rows
            entry(0, [1, -1], slot=2),
            entry(0, [1, 2**31 - 1], slot=3),
            entry(0, [1], slot=4),  # an output inside the prompt
            entry(0, [1, 2], slot=5),
            entry(0, [1, 2], slot=99),
            BackendEntry(6, 0, 0, b"", (), True),
        ]
    )
    codes = [r.code if isinstance(r, ShardlineError) else "ok" for r in results]
    invalid = "seam_invalid"
    assert codes == ["seam_gap", invalid, invalid, invalid, invalid, "ok", "session_gone", invalid]
    assert generator.kv_tokens == 2


def test_the_sampled_token_must_come_round(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    generator = whole()
    generator.open(0, SlotSpec(2, 10, GREEDY))
    (result,) = generator.run([entry(0, [1, 2])])
    (wrong,) = generator.run([entry(2, [token(result).id + 1])])
    assert code(wrong) == "seam_invalid"
    generator.rollback(0, 1)  # after a rollback any token may follow
    (right,) = generator.run([entry(1, [2])])
    assert token(right).id == token(result).id


def test_an_entry_without_a_token_goes_on_with_the_one_that_was_sampled(
    whole: Callable[..., Generator], entry: MakeEntry
) -> None:
    alone, ahead = whole(), whole()
    spec = SlotSpec(3, 10, GREEDY)
    said = [t.id for t in generate(alone, entry, spec)]
    ahead.open(0, spec)
    found = [token(ahead.run([entry(0, [1, 2, 3])])[0])]
    while found[-1].end is None:
        found.append(token(ahead.run([follow(3 + len(found) - 1)])[0]))
    assert [t.id for t in found] == said
    held = ahead.kv_tokens
    assert ahead.run([follow(held)]) == [StepResult(skipped=True)]  # it has ended
    assert ahead.kv_tokens == held


def test_without_a_token_to_go_on_with_an_entry_is_skipped_and_disturbs_no_other(
    whole: Callable[..., Generator], entry: MakeEntry
) -> None:
    generator = whole(faults=[{"kind": "oom", "phase": "decode", "step": 0, "contains": "\x07"}])
    for slot in range(4):
        generator.open(slot, SlotSpec(2, 1 if slot == 1 else 10, GREEDY))
    first = generator.run([entry(0, [1, 2]), entry(0, [1, 2], slot=1), entry(0, [1], slot=2, want_output=False)])
    assert [token(r).end for r in first[:2]] == [None, "length"]
    results = generator.run([follow(2), follow(2, 1), follow(1, 2), follow(0, 3)])
    assert token(results[0]).id != token(first[0]).id
    assert results[1:] == [StepResult(skipped=True)] * 3
    generator.rollback(0, 2)
    assert generator.run([follow(2)]) == [StepResult(skipped=True)]  # what was sampled is void
    assert code(generator.run([entry(5, [1])])[0]) == "seam_gap"
    assert code(generator.run([follow(0, 99)])[0]) == "session_gone"


def test_where_nothing_is_sampled_an_entry_without_tokens_is_refused(spec: SpecMaker) -> None:
    head = Generator(load_inline(spec(0, 3)))
    head.open(0, SlotSpec(2, 10))
    assert code(head.run([follow(0)])[0]) == "seam_invalid"


def test_the_context_has_an_end(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    generator = whole(context_length=4)
    generator.open(0, SlotSpec(2, 10, GREEDY))
    generator.open(1, SlotSpec(2, 10, GREEDY))
    results = generator.run([entry(0, [1, 2, 3, 4]), entry(0, [1, 2, 3, 4, 5], slot=1)])
    assert token(results[0]).end is None
    assert code(results[1]) == "context_length_exceeded"


def test_open_close_and_rollback_keep_their_books(whole: Callable[..., Generator], entry: MakeEntry) -> None:
    generator = whole()
    generator.open(0, SlotSpec(2, 10))
    with pytest.raises(ShardlineError):
        generator.open(0, SlotSpec(2, 10))
    generator.run([entry(0, [1, 2, 3])])
    with pytest.raises(ShardlineError) as caught:
        generator.rollback(0, 4)
    assert caught.value.code == "seam_gap"
    generator.rollback(0, 1)
    assert generator.kv_tokens == 1
    generator.close(0)
    generator.close(0)
    assert (generator.kv_tokens, generator.slots) == (0, 0)
    with pytest.raises(ShardlineError) as caught:
        generator.rollback(0, 0)
    assert caught.value.code == "session_gone"
    with pytest.raises(ShardlineError) as caught:
        generator.open(1, SlotSpec(2, 10, Sampling(top_p=2.0)))
    assert caught.value.code == "invalid_value"
    assert generator.slots == 0


def test_a_failed_open_leaves_nothing(whole: Callable[..., Generator]) -> None:
    generator = whole(faults=[{"kind": "oom", "phase": "open", "step": 0}])
    with pytest.raises(ShardlineError) as caught:
        generator.open(0, SlotSpec(2, 10))
    assert caught.value.code == "engine_out_of_memory"
    generator.open(0, SlotSpec(2, 10))


# ---- what an engine may do wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("nan", "numerical_error"),
        ("inf", "numerical_error"),
        ("wrong_width", "engine_error"),
        ("bad_token", "engine_error"),
        ("error", "engine_error"),
        ("oom", "engine_out_of_memory"),
    ],
)
def test_a_fault_of_one_entry_is_its_own(
    whole: Callable[..., Generator], entry: MakeEntry, kind: str, expected: str
) -> None:
    generator = whole(faults=[{"kind": kind, "phase": "prefill", "contains": "\x07"}])
    for slot in (0, 1, 2):
        generator.open(slot, SlotSpec(2, 10, GREEDY))
    results = generator.run([entry(0, [1, 2]), entry(0, [1, 7], slot=1), entry(0, [1, 2], slot=2)])
    assert code(results[1]) == expected
    assert token(results[0]).id == token(results[2]).id


def test_rows_of_a_wrong_width_do_not_leave(spec: SpecMaker, entry: MakeEntry) -> None:
    faults = [{"kind": "wrong_width", "phase": "prefill"}]
    generator = Generator(load_inline(spec(0, 3, faults=faults)))
    generator.open(0, SlotSpec(2, 10))
    (result,) = generator.run([entry(0, [1, 2])])
    assert code(result) == "engine_error"
    assert "[63]" in str(result)


class Broken:
    """A backend whose `run` is replaced; the rest is a scripted one."""

    def __init__(self, inner: Any, run: Callable[[Sequence[BackendEntry]], Any]) -> None:
        self.inner = inner
        self.run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (RuntimeError("CUDA error: an illegal access\nand 40 lines"), "engine_error"),
        (MemoryError(), "engine_out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 3 TB"), "engine_out_of_memory"),
        ([], "engine_error"),
        ([BackendOutput()], "engine_error"),
        ([BackendOutput(logits="text")], "engine_error"),
        ([BackendOutput(logits=np.zeros((2, 3), dtype=np.float32))], "engine_error"),
        ([ValueError("this one")], "engine_error"),
    ],
)
def test_whatever_an_engine_returns_is_a_result(
    spec: SpecMaker, entry: MakeEntry, outcome: Any, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(entries: Sequence[BackendEntry]) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    generator = Generator(Broken(load_inline(spec()), run))
    generator.open(0, SlotSpec(1, 10, GREEDY))
    (result,) = generator.run([entry(0, [1])])
    assert code(result) == expected
    assert "40 lines" not in str(result)


def test_engine_lost_leaves_the_generator_as_it_is(spec: SpecMaker, entry: MakeEntry) -> None:
    generator = Generator(load_inline(spec(faults=[{"kind": "exit", "phase": "prefill"}])))
    generator.open(0, SlotSpec(1, 10, GREEDY))
    with pytest.raises(ShardlineError) as caught:
        generator.run([entry(0, [1])])
    assert caught.value.code == "engine_lost"


def test_faults_keep_their_cause_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    assert fault_of(OutOfMemoryError("CUDA out of memory")).code == "engine_out_of_memory"
    assert "KeyError" in fault_of(KeyError("x")).message
    assert "KeyError" in capfd.readouterr().err
