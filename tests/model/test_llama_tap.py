"""Every way to take the residual gives the same rows, and none gives rows that are not there."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.model.llama_context import TAP_SEQUENCE, ContextPlan, LlamaContext, LlamaModel
from shardline.model.llama_library import library
from shardline.model.llama_rows import RowArrays
from shardline.model.llama_shard import load
from shardline.model.llama_tap import CallbackTap, SamplerTap, layer_input_tap
from tests.support.llama_route import WIDTH, spec

pytestmark = [pytest.mark.llama, pytest.mark.smollm2]

ROW = 4 * WIDTH
PLAN = ContextPlan(kv_tokens=256, sessions=4, rows=32, outputs=32, threads=1, kv_type="f16", swa_full=False)
RNG = np.random.default_rng(3)


class Part:
    """Layers [10, 14) with one tap, driven without the backend."""

    def __init__(self, model, tap):
        self.tap = tap
        self.context = LlamaContext(library(), model, PLAN, tap)
        self.arrays = RowArrays(rows=32, width=WIDTH, sequences=4, multi=False, outputs=tap.outputs)

    def run(self, calls):
        rows = []
        for sequence, position, given in calls:
            self.arrays.place(0, len(given), sequence, position)
            self.arrays.hidden[: len(given)] = given
            assert library().c.llama_decode(self.context.pointer, self.arrays.with_hidden(len(given))) == 0
            rows.append(np.frombuffer(bytes(self.tap.rows(len(given))), np.float32).reshape(-1, WIDTH))
        self.context.close()
        return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    file = spec(tmp_path_factory.mktemp("shards"), 10, 14).options["shard_file"]
    model = LlamaModel(library(), file)
    yield model
    model.close()


def calls():
    """Shapes that alternate: graphs are built, used again, and built anew."""
    lengths = [7, 1, 1, 5, 1, 12, 1, 1]
    position, found = 0, []
    for count in lengths:
        found.append((1, position, RNG.standard_normal((count, WIDTH)).astype(np.float32)))
        position += count
    return found


def test_all_taps_give_the_same_rows(model):
    given = calls()
    expected = Part(model, CallbackTap(library(), "l_out-3", ROW)).run(given)
    for on_host in (True, False):
        rows = Part(model, SamplerTap(library(), "l_out-3", ROW, TAP_SEQUENCE, on_host=on_host)).run(given)
        assert all(np.array_equal(a, b) for a, b in zip(rows, expected, strict=True))
    assert not np.array_equal(expected[0], given[0][2])


def test_the_input_of_a_layer_is_the_output_of_the_one_before(model):
    given = calls()
    expected = Part(model, CallbackTap(library(), "l_out-1", ROW)).run(given)
    rows = Part(model, layer_input_tap(library(), ROW, 2)).run(given)
    assert all(np.array_equal(a, b) for a, b in zip(rows, expected, strict=True))


def test_a_tensor_that_the_graph_does_not_have_is_told_when_the_context_is_made(model):
    with pytest.raises(ShardlineError, match="no tensor l_out-4") as caught:
        LlamaContext(library(), model, PLAN, SamplerTap(library(), "l_out-4", ROW, TAP_SEQUENCE, on_host=True))
    assert caught.value.code == "architecture_unsupported"


@pytest.mark.parametrize("kind", ["sampler", "callback"])
def test_another_number_of_rows_is_refused(model, kind):
    tap = (
        SamplerTap(library(), "l_out-3", ROW, TAP_SEQUENCE, on_host=True)
        if kind == "sampler"
        else CallbackTap(library(), "l_out-3", ROW)
    )
    part = Part(model, tap)
    part.arrays.place(0, 3, 0, 0)
    assert library().c.llama_decode(part.context.pointer, part.arrays.with_hidden(3)) == 0
    with pytest.raises(ShardlineError, match="for 2 rows"):
        tap.rows(2)
    part.context.close()


def test_taps_that_the_architecture_does_not_have_are_refused(tmp_path):
    """The library would end the process: llama's graph has no input behind its last layer."""
    for tap in ("layer_end", "nextn"):
        with pytest.raises(ShardlineError, match=f"no tap {tap}"):
            load(spec(tmp_path, 10, 14, tap=tap))


def test_the_fallback_serves_a_whole_backend(tmp_path):
    from tests.support.llama_route import entry, hidden_of

    rows = RNG.standard_normal((5, WIDTH)).astype(np.float32).tobytes()
    answers = []
    for tap in ("sampler", "callback"):
        shard = load(spec(tmp_path, 10, 14, tap=tap))
        shard.open(0)
        answers.append(hidden_of(shard, [entry([1, 2, 3, 4, 5], 0, [rows])]))
        answers[-1] += hidden_of(shard, [entry([6], 5, [rows[:ROW]])])
        shard.unload()
    assert answers[0] == answers[1]
