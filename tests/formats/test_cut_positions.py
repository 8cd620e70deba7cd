"""Legal cuts of models of every kind, the reason for each other position, and the even cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.formats.architectures import ROWS, LlamaRules
from shardline.formats.cuts import LAYER_BYTES, Cuts, cuts_of, even_cut
from shardline.formats.layer_kinds import LayerKinds
from shardline.formats.memory import WeightBytes
from shardline.formats.shape import ModelShape
from tests.support.gguf_models import small_model
from tests.support.gguf_writer import Tensor, Typed

WINDOWS = "attention.sliding_window_pattern"
SECTIONS = {"rope.dimension_sections": Typed("i32", [2, 2, 0, 0])}


def cuts(folder: Path, architecture: str, layers: int, keys: dict[str, Any] | None = None) -> Cuts:
    return cuts_of(small_model(folder, architecture, layers, keys).header)


@pytest.mark.parametrize(
    ("architecture", "layers", "keys", "positions"),
    [
        ("llama", 4, {}, [1, 2, 3]),
        ("llama", 1, {}, []),
        ("mamba", 4, {}, [1, 2, 3]),
        ("llama4", 12, {"interleave_moe_layer_step": 1}, [4, 8]),
        ("llama4", 16, {"interleave_moe_layer_step": 8}, [8]),
        ("smollm3", 12, {}, [4, 8]),
        ("smollm3", 10, {}, [4, 8]),
        ("ernie4_5-moe", 8, {"interleave_moe_layer_step": 2}, [2, 4, 6]),
        ("glm-dsa", 8, {"attention.indexer.types": [1, 0, 0, 1, 0, 1, 1, 0]}, [3, 5, 6]),
        ("gpt-oss", 4, {}, [1, 2]),
        ("gemma3", 8, {"attention.sliding_window": 4}, [1, 2, 3, 4, 5, 6, 7]),
        ("gemma4", 6, {WINDOWS: Typed("bool", [True, True, False, True, True, False])}, [2, 3, 4]),
        ("qwen3next", 8, {}, [4, 5, 6]),
        ("qwen3next", 12, {}, [4, 5, 6, 7, 8, 9, 10]),
        ("jamba", 8, {"attention.head_count_kv": [0, 2, 0, 0, 0, 2, 0, 0]}, [2, 3, 4, 5]),
        (
            "nemotron_h",
            6,
            {"attention.head_count_kv": [0, 2, 0, 0, 2, 0], "feed_forward_length": [0, 0, 64, 0, 0, 64]},
            [2, 3],
        ),
        ("minimax-m3", 6, {"leading_dense_block_count": 2}, [3, 4, 5]),
        ("step35", 4, {WINDOWS: [True] * 4, "attention.head_count": [4, 8, 8, 4]}, [1, 2, 3]),
        ("llama", 4, {"attention.head_count": [4, 0, 4, 4]}, [2, 3]),
        ("glm4", 4, SECTIONS, [1, 2, 3]),
        ("exaone4", 30, {}, list(range(1, 30))),
        ("deepseek2", 27, {}, list(range(1, 27))),
        ("qwen2", 5, {"nextn_predict_layers": 1}, [1, 2, 3]),
    ],
)
def test_legal_positions(
    tmp_path: Path, architecture: str, layers: int, keys: dict[str, Any], positions: list[int]
) -> None:
    found = cuts(tmp_path, architecture, layers, keys)
    assert list(found.positions()) == positions
    illegal = [p for (first, last), _ in found.illegal() for p in range(first, last)]
    assert sorted([*illegal, *positions]) == list(range(1, found.n_layers))
    for position in positions:
        assert found.part_reason(0, position) is None
        assert found.part_reason(position, found.n_layers) is None
        found.check_part(0, position)


@pytest.mark.parametrize(
    ("architecture", "layers", "keys", "part", "reason"),
    [
        ("smollm3", 8, {}, (0, 3), "groups of 4"),
        ("glm-dsa", 4, {"attention.indexer.types": [1, 0, 1, 0]}, (0, 1), "uses the indexer of a layer before it"),
        ("gpt-oss", 4, {}, (1, 2), "a part needs a layer with a sliding window, and layers 1:2 have none"),
        ("qwen35", 8, {}, (4, 7), "needs a layer with attention"),
        ("qwen35", 8, {}, (3, 4), "needs a recurrent layer"),
        ("minimax-m3", 6, {"leading_dense_block_count": 2}, (0, 2), "needs a layer with experts"),
        ("gemma4", 4, {WINDOWS: Typed("bool", [True] * 4)}, (1, 2), "at least 2 layers"),
        ("deepseek2", 40, {}, (3, 30), "27 layers of this architecture for another model"),
        ("deepseek2", 40, {}, (14, 40), "26 layers of this architecture for another model"),
        ("llama", 4, {"attention.head_count": [4, 0, 4, 4]}, (1, 3), "the width of a head"),
    ],
)
def test_reasons_of_parts(
    tmp_path: Path, architecture: str, layers: int, keys: dict[str, Any], part: tuple[int, int], reason: str
) -> None:
    found = cuts(tmp_path, architecture, layers, keys)
    assert reason in (found.part_reason(*part) or "")
    with pytest.raises(ShardlineError, match=reason) as caught:
        found.check_part(*part)
    assert caught.value.code == "layers_invalid"
    assert found.part_reason(0, found.n_layers) is None


@pytest.mark.parametrize(
    ("architecture", "layers", "keys", "reason"),
    [
        ("rwkv7", 4, {}, "normalises whatever it is given"),
        ("deepseek4", 4, {}, "more than one row"),
        ("gemma3n", 4, {}, "share keys and values"),
        ("never-heard-of", 4, {}, "nobody has compared"),
        ("gemma4", 4, {WINDOWS: [True] * 4, "embedding_length_per_layer_input": 8}, "by token id"),
        ("gemma4", 4, {WINDOWS: [True] * 4, "attention.shared_kv_layers": 2}, "share keys and values"),
        ("gemma2", 46, {}, "by its 46 layers"),
        ("exaone4", 64, {}, "by its 64 layers"),
        ("llama", 513, {}, "512 is the limit"),
        ("llama4", 8, {"attention.sliding_window": 0}, "without sliding windows"),
        ("glm4", 4, {}, "convert it again"),
        ("glm4", 4, {"rope.dimension_sections": Typed("i32", [0, 0, 0, 0])}, "convert it again"),
    ],
)
def test_what_is_not_cut_runs_whole(
    tmp_path: Path, architecture: str, layers: int, keys: dict[str, Any], reason: str
) -> None:
    found = cuts(tmp_path, architecture, layers, keys)
    assert found.refusal is not None
    assert found.refusal.code == "architecture_unsupported"
    assert found.positions() == ()
    assert [span for span, _ in found.illegal()] == [(1, layers)]
    assert reason in found.illegal()[0][1]
    assert even_cut(found, weights(layers), 1) == [(0, layers)]
    for attempt in (lambda: even_cut(found, weights(layers), 2), lambda: found.check_part(0, 2)):
        with pytest.raises(ShardlineError, match=reason) as caught:
            attempt()
        assert caught.value.code == "architecture_unsupported"


def test_parts_between_legal_positions_that_cannot_be(tmp_path: Path) -> None:
    """One of four layers has attention: legal positions may be too close to each other."""
    assert cuts(tmp_path, "qwen3next", 8).illegal_parts() == [(4, 5), (4, 6), (5, 6)]
    assert cuts(tmp_path, "llama", 5).illegal_parts() == []
    assert (3, 30) in cuts(tmp_path, "deepseek2", 60).illegal_parts()
    assert cuts(tmp_path, "rwkv7", 4).illegal_parts() == []


def test_a_vocabulary_can_make_the_difference(tmp_path: Path) -> None:
    """48 layers are a particular model only with its vocabulary, which only a tail shows."""
    found = cuts(tmp_path, "deepseek2", 60, {"vocab_size": 128_256})
    assert found.part_reason(0, 48) is None
    assert "48 layers" in (found.part_reason(12, 60) or "")
    assert cuts(tmp_path, "deepseek2", 60, {"vocab_size": 129_280}).part_reason(12, 60) is None
    known = cuts(tmp_path, "deepseek2", 48, {"vocab_size": 128_256})
    assert known.is_special()
    assert known.part_reason(0, 27) is None


def test_warnings(tmp_path: Path) -> None:
    assert cuts(tmp_path, "llama", 4).warnings() == []
    unproven = replace(cuts(tmp_path, "llama", 4), rules=LlamaRules("unproven"))
    assert "nobody has compared" in unproven.warnings()[0]
    assert "last bits" in cuts(tmp_path, "gemma", 4).warnings()[0]
    assert "last bits" in cuts(tmp_path, "gemma3", 62).warnings()[0]
    assert cuts(tmp_path, "gemma3", 34).warnings() == []
    assert cuts(tmp_path, "rwkv7", 4).warnings() == []


def test_a_rotation_that_changes_with_the_context_is_said(tmp_path: Path) -> None:
    factors = [Tensor("rope_factors_long.weight", (4,)), Tensor("rope_factors_short.weight", (4,))]
    keys = {"rope.scaling.original_context_length": 64}
    found = cuts_of(small_model(tmp_path, "phi3", keys=keys, extra=factors).header)
    assert found.context_switch == 64
    assert "more than 64 tokens" in found.warnings()[0]
    assert cuts_of(small_model(tmp_path, "phi3", extra=factors).header).context_switch == 128
    assert cuts(tmp_path, "phi3", 4).context_switch is None


@pytest.mark.parametrize("row", [row for row in ROWS if row.llama is not None], ids=lambda row: row.name)
def test_every_row_can_be_applied(tmp_path: Path, row: Any) -> None:
    """With the keys that its rules ask for, each architecture gives cuts or a refusal, never another failure."""
    keys: dict[str, Any] = {WINDOWS: [True, False] * 8, "attention.sliding_window": 4, **SECTIONS}
    if row.llama.recurrent in ("no_kv_heads", "no_kv_heads_no_ffn"):
        keys |= {"attention.head_count_kv": [0, 2] * 8, "feed_forward_length": [0, 0] * 8}
    for name in row.gguf:
        found = cuts(tmp_path, name, 16, keys)
        assert (found.refusal is None) == (row.llama.proof != "refused")
        assert bool(found.positions()) == (found.refusal is None)


def weights(layers: int, *, embedding: int = 0, output: int = 0) -> WeightBytes:
    """In units of one layer's 10; large, so that what a layer costs beside its bytes does not show."""
    gigabyte = 1 << 30
    return WeightBytes((10 * gigabyte,) * layers, embedding * gigabyte, output * gigabyte, 0, 0)


def test_the_even_cut_knows_that_a_small_layer_costs_more_than_its_bytes(tmp_path: Path) -> None:
    """Of SmolLM2's shape: by bytes alone the tail would have its output matrix and nothing else."""
    small = WeightBytes((2_100_000,) * 30, 28_000_000, 0, 28_000_000, 0)
    assert even_cut(cuts(tmp_path, "llama", 30), small, 3) == [(0, 12), (12, 24), (24, 30)]


def test_the_even_cut_counts_what_a_step_reads(tmp_path: Path) -> None:
    found = cuts(tmp_path, "llama", 12)
    assert even_cut(found, weights(12), 3) == [(0, 4), (4, 8), (8, 12)]
    assert even_cut(found, weights(12, embedding=1000), 3) == [(0, 4), (4, 8), (8, 12)]
    assert even_cut(found, weights(12, output=30), 3) == [(0, 5), (5, 10), (10, 12)]
    assert even_cut(found, weights(12), 12) == list(pairwise(range(13)))


def test_the_even_cut_keeps_to_legal_parts(tmp_path: Path) -> None:
    assert even_cut(cuts(tmp_path, "smollm3", 16), weights(16), 3) == [(0, 4), (4, 8), (8, 16)]
    assert even_cut(cuts(tmp_path, "smollm3", 16), weights(16), 2) == [(0, 8), (8, 16)]
    found = cuts(tmp_path, "qwen3next", 12)
    assert even_cut(found, weights(12), 3) == [(0, 4), (4, 8), (8, 12)]
    with pytest.raises(ShardlineError, match="cannot be cut into 4 parts: 3 is the most") as caught:
        even_cut(found, weights(12), 4)
    assert caught.value.code == "layers_invalid"
    # No part of 26 or 27 layers, though 27 + 26 would be the most even cut of 53.
    parts = even_cut(cuts(tmp_path, "deepseek2", 53), weights(53), 2)
    assert sorted(last - first for first, last in parts) == [25, 28]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(0, 20), st.integers(1, 4))
def test_no_cut_is_more_even(sizes: list[int], output: int, parts: int) -> None:
    layers = len(sizes)
    shape = ModelShape("llama", layers, 8, 8, 8, None, None, None)
    found = Cuts(shape, LlamaRules(), None, LayerKinds(windowed=(True,) + (False, True) * 4))
    weight = WeightBytes(tuple(size << 20 for size in sizes), 7, output << 20, 0, 0)

    def largest(edges: tuple[int, ...]) -> int:
        return max(weight.of_shard(a, b) - (0 if a else 7) + LAYER_BYTES * (b - a) for a, b in pairwise(edges))

    ways = [
        (0, *inner, layers)
        for inner in combinations(range(1, layers), parts - 1)
        if all(found.part_reason(a, b) is None for a, b in pairwise((0, *inner, layers)))
    ]
    if not ways:
        with pytest.raises(ShardlineError, match="is the most"):
            even_cut(found, weight, parts)
        return
    cut = even_cut(found, weight, parts)
    assert largest((0, *(last for _, last in cut))) == min(largest(way) for way in ways)
