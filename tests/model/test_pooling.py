"""Rows into vectors: pooled chunk by chunk, by the model's own way or another, and refused where there are none."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardline.errors import ShardlineError
from shardline.formats.gguf import read_header
from shardline.model.backend import BackendEntry, Reuse, ShardSpec, SlotSpec
from shardline.model.generation import Generator, StepResult
from shardline.model.pooling import Embeddings, Pool, embeddings_of_config, embeddings_of_gguf, pooling_of
from shardline.model.scripted import load_inline
from tests.support.embedded import vector
from tests.support.gguf_writer import gguf_bytes

SpecMaker = Callable[..., ShardSpec]
MakeEntry = Callable[..., BackendEntry]
ROWS = np.random.default_rng(3).standard_normal((10, 5)).astype(np.float32)


def pooled(how: Any, chunks: Sequence[int], rows: np.ndarray = ROWS) -> np.ndarray:
    pool, at = Pool(how, rows.shape[1], len(rows)), 0
    for count in chunks:
        wanted = pool.rows_wanted(count)
        pool.passed(count)
        at += count
        if wanted:
            pool.add(rows[at - wanted : at])
    return np.frombuffer(pool.vector(), np.float32)


@pytest.mark.parametrize("chunks", [[10], [4, 6], [1] * 10, [9, 1]], ids=str)
def test_chunks_make_no_difference(chunks: list[int]) -> None:
    assert np.array_equal(pooled("last", chunks), ROWS[-1])
    assert np.array_equal(pooled("mean", chunks), ROWS.astype(np.float64).mean(axis=0).astype(np.float32))


def test_a_mean_of_many_rows_is_as_exact_as_float32_can_say() -> None:
    """Summed in float32, 0.1 would be off in the fourth digit."""
    many = np.full((200_000, 2), 0.1, np.float32)
    assert np.array_equal(pooled("mean", [512] * 390 + [320], many), many[0])


def test_what_is_no_row_is_refused() -> None:
    pool = Pool("mean", 5, 10)
    for wrong in (ROWS[:, :4], ROWS[0], ROWS.astype(np.float64)):
        with pytest.raises(ShardlineError) as refused:
            pool.add(wrong)
        assert refused.value.code == "engine_error"
    with pytest.raises(ShardlineError) as refused:
        pool.passed(11)
    assert refused.value.code == "seam_invalid"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_makes_no_vector(value: float) -> None:
    rows = ROWS.copy()
    rows[-1, 2] = value
    for how in ("mean", "last"):
        with pytest.raises(ShardlineError) as refused:
            pooled(how, [10], rows)
        assert refused.value.code == "numerical_error"


def test_how_it_is_pooled() -> None:
    assert Embeddings(8).pooling(None) == "last"
    assert Embeddings(8, "mean").pooling(None) == "mean"
    assert Embeddings(8, "mean").pooling("last") == "last"
    assert Embeddings(8, "cls").pooling("mean") == "mean"
    with pytest.raises(ShardlineError) as refused:
        Embeddings(8, "cls").pooling(None)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "pooling")
    for none in (None, Embeddings(8, refusal="for a reason")):
        with pytest.raises(ShardlineError) as refused:
            pooling_of(none, "mean")
        assert refused.value.code == "architecture_unsupported"
    assert "for a reason" in refused.value.message


@pytest.mark.parametrize(
    ("keys", "own", "refused"),
    [
        ({}, None, False),
        ({"llama.pooling_type": 0}, None, False),
        ({"llama.pooling_type": 1}, "mean", False),
        ({"llama.pooling_type": 3}, "last", False),
        ({"llama.pooling_type": 2}, "cls", False),
        ({"llama.pooling_type": 77}, "type 77", False),
        ({"llama.attention.causal": False, "llama.pooling_type": 1}, "mean", True),
    ],
    ids=str,
)
def test_what_a_gguf_file_says(tmp_path: Path, keys: dict[str, Any], own: str | None, refused: bool) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "llama", **keys}, []))
    found = embeddings_of_gguf(read_header(path), 64, 64)
    assert (found.width, found.own, found.refusal is not None) == (64, own, refused)
    assert embeddings_of_gguf(read_header(path), 64, 32).refusal is not None


def test_what_a_config_says() -> None:
    assert embeddings_of_config(SimpleNamespace(), 64) == Embeddings(64)
    assert embeddings_of_config(SimpleNamespace(is_causal=False), 64).refusal is not None
    assert embeddings_of_config(SimpleNamespace(use_bidirectional_attention=True), 64).refusal is not None
    assert embeddings_of_config(SimpleNamespace(), 1 << 20).refusal is not None


# ---- in the generator -------------------------------------------------------------------------------------------


def run(generator: Generator, *entries: BackendEntry) -> StepResult:
    (result,) = generator.run(entries)
    assert isinstance(result, StepResult), result
    return result


@pytest.mark.parametrize("how", ["mean", "last"])
def test_vectors_of_one_two_and_three_parts_are_the_same(spec: SpecMaker, how: Any) -> None:
    chunks = [[1, 2, 3], [4], [5, 6]]
    cuts = ([(0, 6)], [(0, 2), (2, 6)], [(0, 2), (2, 3), (3, 6)])
    found = [vector([load_inline(spec(*layers)) for layers in chain], chunks, how) for chain in cuts]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    assert not np.array_equal(found[0], vector([load_inline(spec())], [[1, 2, 3, 4, 5, 7]], how))


def test_a_prompt_that_becomes_a_vector_keeps_to_its_rules(spec: SpecMaker, entry: MakeEntry) -> None:
    generator = Generator(load_inline(spec()))
    generator.open(0, SlotSpec(4, 0, pooling="mean"))
    run(generator, entry(0, [1, 2], want_output=False))
    for wrong in (entry(2, [3], want_output=True), entry(2, [3, 4], want_output=False)):
        (result,) = generator.run([wrong])
        assert isinstance(result, ShardlineError)
        assert result.code == "seam_invalid"
    with pytest.raises(ShardlineError) as refused:
        generator.rollback(0, 1)
    assert refused.value.code == "rollback_unsupported"
    generator.open(1, SlotSpec(2, 5))
    assert run(generator, entry(0, [1, 2], slot=1)).token is not None
    generator.keep(1, 2)
    with pytest.raises(ShardlineError) as refused:
        generator.open(2, SlotSpec(4, 0, pooling="mean", reuse=Reuse(1, 2, struct.pack("<2i", 1, 2))))
    assert refused.value.code == "engine_error"
    assert generator.slots == 2


def test_rows_that_are_not_those_of_the_prompt_make_no_vector(spec: SpecMaker, entry: MakeEntry) -> None:
    head, tail = Generator(load_inline(spec(0, 3))), Generator(load_inline(spec(3, 6)))
    head.open(0, SlotSpec(2, 0))
    tail.open(0, SlotSpec(2, 0, pooling="last"))
    hidden = run(head, entry(0, [1, 2])).hidden
    (result,) = tail.run([entry(0, [2, 1], tuple(bytes(h) for h in hidden))])
    assert isinstance(result, ShardlineError)
    assert result.code == "engine_error"
