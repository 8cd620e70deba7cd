"""DeepSeek-V4 on llama.cpp: the whole model runs, the beginning of it gives the streams, and no other part is made.

Contexts go beyond the window of 8 and beyond the 16 tokens whose compressed rows are all chosen.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.formats.cuts import cuts_of
from shardline.formats.gguf_files import read_model
from shardline.formats.shard_gguf import plan_shard
from shardline.model.llama_library import library
from tests.support.llama_tiny import TinyRoute
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import VOCABULARY, WIDTH
from tests.support.tiny_split import CONTENT_ID
from tests.support.unsplit import Outcome, Rows, Unsplit
from tests.support.window import STREAMS, deepseek4

pytestmark = [pytest.mark.llama, pytest.mark.timeout(120)]

TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(3, VOCABULARY, 180))
CALLS = ((0, 64), (64, 64), (128, 50), (178, 1), (179, 1))


def call(at: int, count: int) -> tuple[Rows, ...]:
    return (Rows(0, at, TOKENS[at : at + count]),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(deepseek4(), tmp_path_factory.mktemp("whole") / "whole.gguf")


def bare(path: Path, taps: tuple[str, ...] = ()) -> list[Outcome]:
    with Unsplit(path, 2, taps) as model:
        return [model.run(call(*rows)) for rows in CALLS]


def test_the_whole_model_runs_as_in_the_bare_library(tmp_path: Path, whole: Path) -> None:
    route = TinyRoute(deepseek4(), tmp_path)
    try:
        route.open(0)
        for (at, count), expected in zip(CALLS, bare(whole), strict=True):
            logits = route.run([(0, at, TOKENS[at : at + count])])
            np.testing.assert_allclose(logits[0], expected.logits[-1], atol=2e-5)
        assert not route.shards[0].describe().rollback
    finally:
        route.close()


def test_contexts_go_beyond_what_is_chosen(tmp_path: Path, whole: Path) -> None:
    everything = write_tiny_gguf(deepseek4(chosen=64), tmp_path / "everything.gguf")
    few, all_of_it = bare(whole), bare(everything)
    assert not np.allclose(few[0].logits[-1], all_of_it[0].logits[-1], atol=1e-4)
    assert np.array_equal(few[0].logits[:8], all_of_it[0].logits[:8])


@pytest.mark.parametrize("layers", [4, 5, 6, 7])
def test_the_beginning_of_the_model_gives_the_streams(tmp_path: Path, whole: Path, layers: int) -> None:
    """Its first layers as a model of their own, whose weights are the same, to the bit: four streams that differ."""
    head = write_tiny_gguf(deepseek4(layers), tmp_path / "head.gguf")
    taps = (f"l_last-{layers - 1}",)
    for one, other in zip(bare(head, taps), bare(whole, taps), strict=True):
        assert np.array_equal(one.inside[taps[0]], other.inside[taps[0]])
        streams = one.inside[taps[0]].reshape(-1, STREAMS, WIDTH)
        assert np.abs(streams - streams.mean(axis=1, keepdims=True)).max() > 1e-2


@pytest.mark.parametrize(("layers", "sound"), [(4, True), (5, False), (6, True), (7, False)])
def test_what_is_kept_for_prediction_is_no_way_out(tmp_path: Path, whole: Path, layers: int, sound: bool) -> None:
    """The library's own buffer for the streams is right for single rows, and of a prompt only where the last layer is
    not a sparse one: whoever wants to use it has to look at this again."""
    head = write_tiny_gguf(deepseek4(layers), tmp_path / "head.gguf")
    inside = f"l_last-{layers - 1}"
    functions = library().c
    with Unsplit(head, 2) as model:
        functions.llama_set_embeddings_nextn(model._context, c_bool(True), c_bool(False))
        for (at, count), outcome in zip(CALLS, bare(whole, (inside,)), strict=True):
            model.run(call(at, count))
            address = functions.llama_get_embeddings_nextn(model._context)
            held = np.frombuffer((ctypes.c_float * (count * STREAMS * WIDTH)).from_address(address), np.float32)
            expected = outcome.inside[inside].reshape(-1)
            assert np.array_equal(held, expected) is (sound or count == 1)


@pytest.mark.parametrize("part", [(0, 4), (2, 6), (4, 8), (7, 8)])
def test_no_part_is_made(whole: Path, part: tuple[int, int]) -> None:
    """Nor a head: whoever took its streams on would have to be this engine."""
    model = read_model(whole)
    with pytest.raises(ShardlineError, match="runs deepseek4 only whole: its layers exchange more than one") as caught:
        plan_shard(model, *part, content_id=CONTENT_ID)
    assert caught.value.code == "architecture_unsupported"
    assert "docs/audits/deepseek-v4-flash.md" in caught.value.advice
    assert cuts_of(model.header).positions() == ()
