"""Split by any number of Nodes, the logits are those of unsplit llama.cpp to the bit, on the same batch shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from tests.support.llama_plain import Given, Plain
from tests.support.llama_route import LAYERS, SMOLLM2, WIDTH, Route, entry, hidden_of, result

pytestmark = [pytest.mark.llama, pytest.mark.smollm2, pytest.mark.timeout(180)]

VOCABULARY = 49152
RNG = np.random.default_rng(11)


def ids(count: int) -> list[int]:
    return [int(t) for t in RNG.integers(3, VOCABULARY, count)]


def one_sequence() -> list[list[Given]]:
    """Two prefill chunks of which the first wants nothing, then decoding."""
    steps: list[list[Given]] = [[(0, 0, ids(64), False)], [(0, 64, ids(23), True)]]
    steps += [[(0, 87 + i, ids(1), True)] for i in range(12)]
    return steps


def eight_sequences() -> list[list[Given]]:
    """Prompts one after another, decoding of all and of some, in orders that differ; a prompt between."""
    lengths = [5 + 7 * i for i in range(8)]
    steps: list[list[Given]] = [[(s, 0, ids(n), True)] for s, n in enumerate(lengths)]
    ends = dict(enumerate(lengths))
    for group in ([0, 1, 2, 3, 4, 5, 6, 7], [1, 3, 5], [0, 1, 2, 3, 4, 5, 6, 7], [6, 7], [0, 2, 4, 5, 6, 7]):
        steps.append([(s, ends[s], ids(1), True) for s in group])
        for s in group:
            ends[s] += 1
    steps.append([(8, 0, ids(40), True)])
    steps.append([(s, ends[s], ids(1), s % 2 == 0) for s in range(8)])
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def workloads():
    """Steps with the unsplit model's logits."""
    plain = Plain(SMOLLM2)
    try:
        found = []
        for steps in (one_sequence(), eight_sequences()):
            plain.clear()
            found.append([(step, plain.run(step)) for step in steps])
        return found
    finally:
        plain.close()


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param((), marks=pytest.mark.long, id="1 part"),
        pytest.param((15,), marks=pytest.mark.long, id="2 parts"),
        pytest.param((10, 20), id="3 parts"),
        pytest.param(tuple(range(1, LAYERS)), id="30 parts"),
    ],
)
def test_logits_are_those_of_the_unsplit_model(folder, workloads, cuts):
    route = Route(folder, cuts)
    try:
        for workload in workloads:
            route.open(*range(9))
            for step, expected in workload:
                given = [entry(tokens, position, slot=s, want_output=wanted) for s, position, tokens, wanted in step]
                for logits, wanted in zip(route.run(given), expected, strict=True):
                    assert (logits is None) == (wanted is None)
                    if logits is not None:
                        assert np.abs(logits - wanted).max() == 0.0
    finally:
        route.close()


def test_entries_in_any_order_give_the_same(folder, workloads):
    """The engine groups rows by sequence, whatever order the batch has."""
    route = Route(folder, (15,))
    try:
        route.open(*range(9))
        for step, expected in workloads[1]:
            given = [entry(tokens, position, slot=s, want_output=wanted) for s, position, tokens, wanted in step]
            order = RNG.permutation(len(given))
            outputs = route.run([given[i] for i in order])
            for i, logits in zip(order, outputs, strict=True):
                assert (logits is None) == (expected[i] is None)
                assert logits is None or np.array_equal(logits, expected[i])
    finally:
        route.close()


def test_a_part_left_out_and_one_changed_value_are_seen(folder, workloads):
    """Negative controls: the comparison would find what it is there to find."""
    route = Route(folder, (10, 20))
    head, middle, tail = route.shards
    try:
        route.open(0)
        tokens = ids(8)
        (first,) = hidden_of(head, [entry(tokens, 0)])
        (rows,) = hidden_of(middle, [entry(tokens, 0, [first])])
        right = result(tail.run([entry(tokens, 0, [rows])])).logits.copy()
        changed = np.frombuffer(rows, np.float32).copy()
        changed[-WIDTH] *= 1.01
        for wrong in (changed.tobytes(), first):
            tail.close(0)
            tail.open(0)
            assert not np.array_equal(result(tail.run([entry(tokens, 0, [wrong])])).logits, right)
    finally:
        route.close()


def test_greedy_text_is_the_same_alone_and_cut(folder):
    """64 tokens, each fed back."""
    texts = []
    for cuts in ((), (7, 15, 22)):
        route = Route(folder, cuts)
        route.open(0)
        prompt = route.shards[0].tokenize("The capital of France is", add_special=True, parse_special=False)
        (logits,) = route.run([entry(prompt, 0)])
        text = [int(logits.argmax())]
        for i in range(63):
            (logits,) = route.run([entry(text[-1:], len(prompt) + i)])
            text.append(int(logits.argmax()))
        texts.append(text)
        route.close()
    assert texts[0] == texts[1]
