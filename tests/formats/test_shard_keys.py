"""The metadata of a part: what stays, what is sliced, what is said that llama.cpp would else guess."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.cuts import cuts_of
from shardline.formats.gguf import Array
from shardline.formats.gguf_writer import Stored, f32, text, u32
from shardline.formats.shard_keys import InputScale, input_scale, part_keys
from tests.support.gguf_models import small_model
from tests.support.gguf_writer import Typed

WINDOWS = "attention.sliding_window_pattern"


def keys_of(
    folder: Path, architecture: str, first: int, last: int, keys: dict[str, Any] | None = None, *, layers: int = 8
) -> dict[str, Stored]:
    """Keys of the part, without the prefix of the architecture."""
    header = small_model(folder, architecture, layers, keys).header
    cuts = cuts_of(header)
    found = part_keys(header, cuts, cuts.check_part(first, last), first, last)
    return {key.removeprefix(f"{architecture}."): stored for key, stored in found.items()}


def numbers(stored: Stored) -> list[int | float]:
    assert isinstance(stored.value, Array)
    form = {"bool": "?", "i32": "i", "u32": "I", "f32": "f"}[stored.value.kind]
    return list(struct.unpack(f"<{stored.value.count}{form}", stored.value.raw))


def scale_of(folder: Path, architecture: str, first: int, keys: dict[str, Any] | None = None) -> InputScale:
    header = small_model(folder, architecture, 8, keys).header
    cuts = cuts_of(header)
    return input_scale(header, cuts, cuts.check_part(first, 8 if first else 4), first)


def test_what_is_kept_is_little(tmp_path: Path) -> None:
    kept = keys_of(
        tmp_path,
        "llama",
        2,
        5,
        {"rope.freq_base": 5e5, "attention.causal": True, "tensor_data_layout": "x", "some.number": Typed("u64", 7)},
    )
    assert kept == {
        "general.architecture": text("llama"),
        "general.name": text("Small"),
        "block_count": u32(3),
        "context_length": u32(128),
        "embedding_length": u32(32),
        "feed_forward_length": u32(64),
        "attention.head_count": u32(4),
        "attention.head_count_kv": u32(2),
        "attention.layer_norm_rms_epsilon": f32(struct.unpack("<f", struct.pack("<f", 1e-5))[0]),
        "rope.freq_base": f32(5e5),
        "attention.causal": Stored("bool", True),
        "tensor_data_layout": text("x"),
        "some.number": Stored("u64", 7),
        "tokenizer.ggml.model": text("none"),
        "vocab_size": u32(32),
    }


def test_arrays_are_sliced_and_keep_their_kind(tmp_path: Path) -> None:
    found = keys_of(
        tmp_path,
        "nemotron_h",
        2,
        6,
        {
            "attention.head_count_kv": Typed("i32", [0, 2, 0, 0, 2, 0, 2, 0]),
            "feed_forward_length": [0, 0, 64, 0, 0, 65, 0, 0],
            "swiglu_clamp_exp": [float(i) for i in range(8)],
            "rope.dimension_sections": Typed("i32", [1, 2, 3, 4, 5, 6, 7, 8]),
        },
    )
    assert numbers(found["attention.head_count_kv"]) == [0, 0, 2, 0]
    assert isinstance(found["attention.head_count_kv"].value, Array)
    assert found["attention.head_count_kv"].value.kind == "i32"
    assert numbers(found["feed_forward_length"]) == [64, 0, 0, 65]
    assert numbers(found["swiglu_clamp_exp"]) == [2.0, 3.0, 4.0, 5.0]
    # As long as the model has layers, but not one entry a layer.
    assert numbers(found["rope.dimension_sections"]) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_layers_for_prediction_are_left_out(tmp_path: Path) -> None:
    heads = {"nextn_predict_layers": 2, "attention.head_count_kv": [1, 2, 1, 2, 1, 2, 4, 4]}
    found = keys_of(tmp_path, "mimo2", 3, 6, {**heads, WINDOWS: [True, False] * 4})
    assert "nextn_predict_layers" not in found
    assert found["block_count"] == u32(3)
    assert numbers(found["attention.head_count_kv"]) == [2, 1, 2]
    assert numbers(found[WINDOWS]) == [False, True, False]


def test_an_array_without_an_entry_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardlineError, match=r"llama.swiglu_clamp_exp has 3 entries for 8 layers") as caught:
        keys_of(tmp_path, "llama", 0, 4, {"swiglu_clamp_exp": [1.0, 2.0, 3.0]})
    assert caught.value.code == "model_file_invalid"


@pytest.mark.parametrize(
    ("architecture", "first", "last", "key", "expected"),
    [
        ("gpt-oss", 3, 6, WINDOWS, [False, True, False]),
        ("gemma2", 1, 4, WINDOWS, [False, True, False]),
        ("cohere2moe", 3, 7, WINDOWS, [True, False, True, True]),
        ("qwen35", 2, 6, "attention.recurrent_layers", [True, False, True, True]),
        ("glm-dsa", 2, 4, "attention.indexer.types", [True, True]),
    ],
)
def test_patterns_are_written_out(
    tmp_path: Path, architecture: str, first: int, last: int, key: str, expected: list[bool]
) -> None:
    assert numbers(keys_of(tmp_path, architecture, first, last)[key]) == expected


def test_a_period_is_replaced_by_its_layers(tmp_path: Path) -> None:
    keys = {"attention.sliding_window": 4, WINDOWS: 3}
    assert numbers(keys_of(tmp_path, "gemma3", 1, 5, keys)[WINDOWS]) == [True, False, True, True]


def test_no_pattern_without_windows(tmp_path: Path) -> None:
    assert WINDOWS not in keys_of(tmp_path, "olmo2", 1, 5)


@pytest.mark.parametrize(("first", "last", "left"), [(0, 2, 2), (0, 5, 3), (2, 5, 1), (4, 8, 0)])
def test_leading_dense_layers_are_those_of_the_part(tmp_path: Path, first: int, last: int, left: int) -> None:
    found = keys_of(tmp_path, "deepseek2", first, last, {"leading_dense_block_count": 3})
    assert found["leading_dense_block_count"] == u32(left)


def test_images_are_left_out(tmp_path: Path) -> None:
    assert keys_of(tmp_path, "qwen3vl", 2, 4, {"n_deepstack_layers": 3})["n_deepstack_layers"] == u32(0)
    assert "deepstack_mapping" not in keys_of(tmp_path, "granite", 2, 4, {"deepstack_mapping": [-1] * 8})


def test_widths_of_heads_are_those_of_the_first_layer_of_the_model(tmp_path: Path) -> None:
    found = keys_of(tmp_path, "llama", 4, 8, {"attention.head_count": [4, 4, 4, 4, 8, 8, 8, 8]})
    assert (found["attention.key_length"], found["attention.value_length"]) == (u32(8), u32(8))
    assert found["rope.dimension_count"] == u32(8)
    stated = {"attention.head_count": [4] * 4 + [8] * 4, "attention.key_length": 6, "rope.dimension_count": 4}
    found = keys_of(tmp_path, "llama", 4, 8, stated)
    assert (found["attention.key_length"], found["rope.dimension_count"]) == (u32(6), u32(4))
    assert "attention.key_length" not in keys_of(tmp_path, "llama", 4, 8)


def test_scales_that_the_graph_takes_from_a_key(tmp_path: Path) -> None:
    for first in (0, 4):
        assert keys_of(tmp_path, "granite", first, first + 4, {"embedding_scale": 12.0})["embedding_scale"] == f32(1.0)
    assert scale_of(tmp_path, "granite", 0, {"embedding_scale": 12.5}) == InputScale(embedding=12.5)
    assert scale_of(tmp_path, "granite", 0) == InputScale()
    assert scale_of(tmp_path, "minicpm", 0) == InputScale(embedding=12.0)
    assert scale_of(tmp_path, "minicpm", 0, {"embedding_scale": 3.0}) == InputScale(embedding=3.0)
    grok = scale_of(tmp_path, "grok", 0).embedding
    assert grok == struct.unpack("<f", struct.pack("<f", 78.38367176906169))[0]


def test_scales_that_the_graph_takes_from_the_width(tmp_path: Path) -> None:
    root = struct.unpack("<f", struct.pack("<f", math.sqrt(32)))[0]
    assert scale_of(tmp_path, "gemma3", 0) == InputScale(embedding=root)
    assert scale_of(tmp_path, "gemma", 0) == InputScale()
    assert scale_of(tmp_path, "gemma", 4) == InputScale(graph=root)
    assert scale_of(tmp_path, "llama", 0) == InputScale()


def test_a_scale_by_the_number_of_layers_is_that_of_the_model(tmp_path: Path) -> None:
    found = keys_of(tmp_path, "minicpm", 2, 4)["residual_scale"]
    assert isinstance(found.value, float)
    assert math.isclose(found.value, 1.4 / math.sqrt(8), rel_tol=1e-7)
    assert keys_of(tmp_path, "minicpm", 2, 4, {"residual_scale": 0.5})["residual_scale"] == f32(0.5)


def test_sections_are_added_where_the_graph_wants_them(tmp_path: Path) -> None:
    added = keys_of(tmp_path, "glm4moe", 0, 4, {"rope.dimension_count": 6})["rope.dimension_sections"]
    assert numbers(added) == [2, 1, 0, 0]
    assert numbers(keys_of(tmp_path, "glm4moe", 4, 8)["rope.dimension_sections"]) == [2, 2, 0, 0]
    stated = {"rope.dimension_sections": Typed("i32", [1, 1, 2, 0])}
    assert numbers(keys_of(tmp_path, "glm4moe", 4, 8, stated)["rope.dimension_sections"]) == [1, 1, 2, 0]
    with pytest.raises(ShardlineError, match="leaves nothing to rotate"):
        keys_of(tmp_path, "glm4moe", 4, 8, {"rope.dimension_count": 2})


def test_what_a_number_of_layers_decides_is_said(tmp_path: Path) -> None:
    lite = keys_of(tmp_path, "deepseek2", 0, 10, {"attention.q_lora_rank": 7}, layers=27)
    assert lite["attention.q_lora_rank"] == u32(0)
    assert lite["expert_gating_func"] == u32(1)
    full = keys_of(tmp_path, "deepseek2", 0, 10, {"attention.q_lora_rank": 7, "expert_gating_func": 2}, layers=61)
    assert full["attention.q_lora_rank"] == u32(7)
    assert full["expert_gating_func"] == u32(2)
    glm = {"vocab_size": 154_880}
    assert keys_of(tmp_path, "deepseek2", 0, 10, glm, layers=47)["expert_gating_func"] == u32(2)
    assert keys_of(tmp_path, "deepseek2", 0, 10, glm, layers=46)["expert_gating_func"] == u32(1)
