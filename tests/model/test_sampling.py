"""The sampler against plain reference arithmetic, and against every value that has broken one before."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.model.sampling import LOGPROB_FLOOR, Sampler
from shardline.wire.messages import Sampling

F32 = npt.NDArray[np.float32]


def row(*values: float) -> F32:
    return np.array(values, dtype=np.float32)


def ids(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def sampler(vocab: int = 5, *, prompt: int = 0, end_ids: tuple[int, ...] = (), **fields: Any) -> Sampler:
    return Sampler(Sampling(**fields), vocab_size=vocab, prompt_tokens=prompt, end_ids=end_ids)


def draws(logits: F32, n: int = 400, **fields: Any) -> Counter[int]:
    """Tokens of `n` generation steps that all see the same logits."""
    s = sampler(len(logits), seed=11, **fields)
    found: Counter[int] = Counter()
    for _ in range(n):
        token = s.sample(logits).id
        found[token] += 1
        s.observe(ids(token))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-8, 1e-4, 1e-3])
def test_zero_and_tiny_temperatures_are_argmax_without_overflow(temperature: float) -> None:
    logits = row(-60000, 59999, 60000, 3, 60000)
    with np.errstate(all="raise"):
        assert sampler(temperature=temperature, seed=1).sample(logits).id == 2  # of equal ones the lower id


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 2.0, 1e30])
def test_temperatures_above_draw_without_overflow(temperature: float) -> None:
    logits = row(-60000, 10, 60000, 3, 60000)
    assert draws(logits, 50, temperature=temperature).total() == 50


def test_the_logits_are_left_as_they_are() -> None:
    logits = row(1, 2, 3, 4, 5)
    s = sampler(temperature=1, top_k=3, top_p=0.9, repeat_penalty=1.3, logit_bias={1: 5.0, 2: -100.0}, logprobs=2)
    s.observe(ids(1, 2))
    s.sample(logits)
    assert logits.tolist() == [1, 2, 3, 4, 5]


def test_draws_follow_the_softmax() -> None:
    logits = row(0.0, 1.0, 2.0, -1.0, 0.5)
    n = 20_000
    found = draws(logits, n, temperature=0.8)
    expected = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    for i, p in enumerate(expected):
        assert abs(found[i] / n - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_draws_over_a_large_vocabulary_follow_the_softmax() -> None:
    """The draw from everything goes by blocks: each third of the ids must get its share."""
    logits = np.random.default_rng(3).normal(size=3000).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    found = draws(logits, 6000)
    for part in range(3):
        share = float(p[1000 * part : 1000 * (part + 1)].sum())
        seen = sum(c for i, c in found.items() if 1000 * part <= i < 1000 * (part + 1)) / 6000
        assert abs(seen - share) < 0.035


def reference_support(logits: F32, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The sorted way, with everything in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if top_k:
        order = order[:top_k]
    weights = [math.exp(float(logits[i]) - float(logits[order[0]])) for i in order]
    kept: list[int] = []
    mass = 0.0
    for i, w in zip(order, weights, strict=True):
        if top_p < 1 and kept and mass >= top_p * sum(weights):
            break
        kept.append(i)
        mass += w
    return {i for i in kept if math.exp(float(logits[i]) - float(logits[order[0]])) >= min_p}


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-40, 40), min_size=2, max_size=40, unique=True),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_truncation_is_the_sorted_definition(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    logits = row(*(v / 5 for v in values))
    found = draws(logits, 150, top_k=top_k, top_p=top_p, min_p=min_p)
    support = reference_support(logits, top_k, top_p, min_p)
    assert set(found) <= support
    likely = {i for i in support if math.exp(float(logits[i]) - float(logits.max())) > 0.4 and len(support) < 6}
    assert likely <= set(found)


@pytest.mark.parametrize("top_k", [5, 6, 2**31, 2**63])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    logits = row(0.0, 0.1, 0.2, 0.1, 0.0)
    assert draws(logits, 100, top_k=top_k) == draws(logits, 100)


def test_top_p_zero_and_top_k_one_are_argmax() -> None:
    logits = row(0.0, 0.1, 0.2, 0.2, 0.0)
    assert set(draws(logits, 50, top_p=0.0)) == {2}
    assert set(draws(logits, 50, top_k=1)) == {2}


def test_truncation_over_a_flat_row_and_far_below_the_peak() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    assert set(draws(flat, 60, top_k=3)) <= {0, 1, 2}
    assert max(draws(flat, 60, top_p=0.01)) < 50
    cliff = np.full(5000, -30.0, dtype=np.float32)
    cliff[4000] = 0.0
    assert set(draws(cliff, 60, top_k=2)) == {4000}
    assert set(draws(cliff, 60, top_k=2, temperature=1000.0)) == {0, 4000}


def test_same_seed_same_draws_whatever_else_runs() -> None:
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)

    def text(seed: int | None, neighbour: bool = False) -> list[int]:
        s, other = sampler(300, seed=seed), sampler(300, seed=5)
        out = []
        for _ in range(30):
            if neighbour:
                other.observe(ids(other.sample(logits).id))
            out.append(s.sample(logits).id)
            s.observe(ids(out[-1]))
        return out

    assert text(42) == text(42, neighbour=True)
    assert len({tuple(text(seed)) for seed in (0, -1, 1, 42, 2**32, 2**64)}) == 6
    assert text(None) != text(None)


def test_the_draws_of_a_seed_are_the_same_on_every_machine_and_version() -> None:
    logits = np.zeros(64, dtype=np.float32)
    s = sampler(64, seed=42)
    out = []
    for _ in range(8):
        out.append(s.sample(logits).id)
        s.observe(ids(out[-1]))
    assert out == [49, 4, 40, 15, 8, 8, 41, 61]


def test_a_rollback_repeats_the_same_draws() -> None:
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    s = sampler(300, prompt=2, seed=9, repeat_penalty=1.5, presence_penalty=1.0)
    s.observe(ids(7, 8))
    first = []
    for _ in range(6):
        first.append(s.sample(logits).id)
        s.observe(ids(first[-1]))
    s.rollback(4)
    assert s.generated == 2
    again = first[:2]
    for _ in range(4):
        again.append(s.sample(logits).id)
        s.observe(ids(again[-1]))
    assert again == first
    s.rollback(1)  # into the prompt
    s.observe(ids(8))
    assert s.generated == 0
    assert s.sample(logits).id == first[0]


# ---- penalties, bias, bans ---------------------------------------------------------------------------------------


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    s = sampler(temperature=0, prompt=1, repeat_penalty=2.0)
    s.observe(ids(0))
    assert s.sample(row(10, 6, -9, -9, -9)).id == 1  # 10 / 2 < 6
    s.observe(ids(3, 3))
    assert s.sample(row(-100, -100, -4, -3, -5)).id == 2  # -3 * 2 < -4: once, however often it occurred
    assert s.sample(row(-100, -100, -6.5, -3, -6.6)).id == 3


def test_presence_and_frequency_count_the_output_only() -> None:
    s = sampler(temperature=0, prompt=2, presence_penalty=1.0, frequency_penalty=0.5)
    s.observe(ids(0, 0))
    assert s.sample(row(5, 4.9, 0, 0, 0)).id == 0
    s.observe(ids(0))
    assert s.sample(row(5, 3.4, 0, 0, 0)).id == 0  # 5 - 1 - 0.5
    assert s.sample(row(5, 3.6, 0, 0, 0)).id == 1
    s.observe(ids(0))
    assert s.sample(row(5, 3.1, 0, 0, 0)).id == 1  # 5 - 1 - 2 * 0.5
    assert s.sample(row(5, 2.9, 0, 0, 0)).id == 0


def test_a_prompt_in_chunks_that_ends_inside_one_is_counted_right() -> None:
    s = sampler(temperature=0, prompt=3, presence_penalty=5.0)
    s.observe(ids(0, 1))
    s.observe(ids(2, 3))  # 3 is the first generated token
    assert s.generated == 1
    assert s.sample(row(5, 5, 5, 6, 0)).id == 0


def test_logit_bias_adds_bans_and_forces_whatever_the_size_of_the_logits() -> None:
    big = row(60000, 59999, 0, 0, -60000)
    assert sampler(temperature=0, logit_bias={1: 2.0}).sample(big).id == 1
    assert sampler(temperature=0, logit_bias={0: -100.0}).sample(big).id == 1
    assert sampler(temperature=1, logit_bias={4: 100.0}).sample(big).id == 4
    assert sampler(temperature=0, logit_bias={4: 100.0, 2: 100.0, 2 + 1: -100.0}).sample(big).id == 2
    assert set(draws(row(0, 0, 0, 0, 0), 60, logit_bias={0: -100.0, 1: -100.0})) == {2, 3, 4}


def test_min_tokens_and_ignore_eos_ban_the_end() -> None:
    logits = row(0, 1, 2, 9, 8)
    s = sampler(temperature=0, end_ids=(3,), stop_ids=[4], min_tokens=2)
    out = []
    for _ in range(3):
        out.append(s.sample(logits).id)
        s.observe(ids(out[-1]))
    assert out == [2, 2, 3]
    s = sampler(temperature=0, end_ids=(3,), stop_ids=[4], ignore_eos=True)
    assert s.sample(logits).id == 4  # a stop id that was asked for is not the model's end


def test_all_tokens_banned_is_an_error_of_the_session() -> None:
    s = sampler(temperature=1, logit_bias=dict.fromkeys(range(5), -100.0))
    with pytest.raises(ShardlineError) as caught:
        s.sample(row(1, 2, 3, 4, 5))
    assert (caught.value.code, caught.value.fault.status) == ("no_token_left", 400)
    s = sampler(end_ids=(3,), min_tokens=1, logit_bias={3: 100.0})
    with pytest.raises(ShardlineError, match="every token is banned"):
        s.sample(row(1, 2, 3, 4, 5))


# ---- numbers that are none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5, "logprobs": 3}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 2, 4])
def test_one_value_that_is_not_finite_ends_the_session(fields: dict[str, Any], bad: float, where: int) -> None:
    logits = row(1, 2, 3, 4, 5)
    logits[where] = bad
    with pytest.raises(ShardlineError) as caught:
        sampler(**fields).sample(logits)
    assert caught.value.code == "numerical_error"


def test_no_finite_logit_at_all_is_an_error_and_a_masked_token_is_none() -> None:
    with pytest.raises(ShardlineError) as caught:
        sampler().sample(np.full(5, -np.inf, dtype=np.float32))
    assert caught.value.code == "numerical_error"
    masked = row(1, -math.inf, 1, -math.inf, 1)
    assert set(draws(masked, 60)) == {0, 2, 4}
    assert set(draws(masked, 60, top_k=4, temperature=50.0)) == {0, 2, 4}
    choice = sampler(logit_bias={1: 100.0}, logprobs=5)
    with pytest.raises(ShardlineError):
        choice.sample(masked)


def test_penalties_past_the_range_are_an_error() -> None:
    s = sampler(temperature=0, presence_penalty=-1e38)
    s.observe(ids(0))
    with pytest.raises(ShardlineError) as caught:
        s.sample(row(3e38, 0, 0, 0, 0))
    assert caught.value.code == "numerical_error"


@pytest.mark.parametrize("width", [4, 6, 0])
def test_logits_of_another_width_are_an_error(width: int) -> None:
    with pytest.raises(ShardlineError, match="the vocabulary has 5") as caught:
        sampler().sample(np.zeros(width, dtype=np.float32))
    assert caught.value.code == "engine_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 2.0),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("repeat_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logprobs", -1),
        ("logprobs", 6),
        ("min_tokens", -1),
        ("logit_bias", {5: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("stop_ids", [5]),
    ],
)
def test_values_without_a_formula_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ShardlineError) as caught:
        sampler(**{field: value})
    assert (caught.value.code, caught.value.param) == ("invalid_value", field)


# ---- logprobs ----------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_before_any_option() -> None:
    logits = row(1, 2, 3, 4, 5)
    expected = logits - math.log(float(np.exp(logits.astype(np.float64)).sum()))
    s = sampler(temperature=0.2, logit_bias={0: 100.0}, repeat_penalty=3.0, logprobs=3)
    s.observe(ids(4))
    choice = s.sample(logits)
    assert choice.id == 0
    assert choice.logprob == pytest.approx(float(expected[0]), abs=1e-5)
    assert choice.top is not None
    assert [i for i, _ in choice.top] == [4, 3, 2]
    assert [p for _, p in choice.top] == pytest.approx([float(expected[i]) for i in (4, 3, 2)], abs=1e-5)


def test_logprobs_none_zero_all_and_ties() -> None:
    logits = row(2, 7, 2, 7, 2)
    assert sampler(temperature=0).sample(logits).logprob is None
    zero = sampler(temperature=0, logprobs=0).sample(logits)
    assert zero.logprob is not None
    assert zero.top == ()
    every = sampler(temperature=0, logprobs=5).sample(logits)
    assert every.top is not None
    assert [i for i, _ in every.top] == [1, 3, 0, 2, 4]


def test_logprobs_of_a_masked_token_are_finite() -> None:
    choice = sampler(temperature=0, logprobs=5).sample(row(1, 1, -60000, 1, -math.inf))
    assert choice.top is not None
    assert [i for i, _ in choice.top] == [0, 1, 3, 2]
    assert choice.top[-1][1] == LOGPROB_FLOOR


def test_logprobs_of_a_flat_row_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(1).normal(size=20_000, scale=0.2).astype(np.float32)
    choice = sampler(20_000, temperature=0, logprobs=20).sample(logits)
    assert choice.top is not None
    order = np.argsort(-logits, kind="stable")[:20]
    assert [i for i, _ in choice.top] == order.tolist()
