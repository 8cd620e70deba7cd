"""Numbers that no model has are refused by their key, before anything is started with them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.cuts import cuts_of
from shardline.formats.gguf import GGUFHeader, parse_header
from shardline.formats.shape import shape_of_gguf
from tests.support.gguf_writer import LLAMA, Tensor, Typed, gguf_bytes, llama_tensors
from tests.support.tiny_models import ATTENTION, PERIODIC, RECURRENT, TinyModel, metadata


def header(keys: dict[str, Any], tensors: list[Tensor] | None = None) -> GGUFHeader:
    merged = {key: value for key, value in {**LLAMA, **keys}.items() if value is not None}
    data = gguf_bytes(merged, llama_tensors() if tensors is None else tensors)
    return parse_header(data, len(data))


def refusal(read: Any, keys: dict[str, Any], tensors: list[Tensor] | None = None) -> str:
    with pytest.raises(ShardlineError) as caught:
        read(header(keys, tensors))
    assert (caught.value.code, caught.value.details["reason"]) == ("model_file_invalid", "damaged")
    return caught.value.message


EPSILON = "attention.layer_norm_rms_epsilon"
WRONG: list[tuple[str, Any]] = [
    ("context_length", 0),
    ("context_length", Typed("i32", -1)),
    ("context_length", 1 << 31),
    ("attention.head_count", 0),
    ("attention.head_count_kv", 0),
    ("attention.key_length", 0),
    ("attention.value_length", 0),
    ("attention.head_count_kv", 3),
    ("attention.head_count_kv", Typed("i32", [2, 3])),
    ("rope.dimension_count", 7),
    ("expert_used_count", 2),
    ("rope.freq_base", math.nan),
    ("rope.freq_base", math.inf),
    ("rope.freq_base", 0.0),
    ("rope.freq_base", -10000.0),
    ("rope.freq_base", 1e30),
    ("rope.freq_base_swa", 0.0),
    ("rope.scaling.factor", math.nan),
    ("rope.scaling.factor", -2.0),
    ("rope.scaling.attn_factor", 1e38),
    (EPSILON, math.nan),
    (EPSILON, -1.0),
    (EPSILON, 1.0),
    ("attention.layer_norm_epsilon", math.inf),
    ("logit_scale", math.nan),
    ("some_key_of_another_day", -math.inf),
    ("swiglu_clamp_exp", Typed("f32", [1.0, math.nan])),
    ("rope.freq_base", Typed("f64", math.nan)),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_numbers_that_no_model_has(key: str, value: Any) -> None:
    assert f"llama.{key} is" in refusal(shape_of_gguf, {f"llama.{key}": value})


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"expert_count": 8, "expert_used_count": 2},
        {"expert_count": 0, "expert_used_count": 0},
        {"rope.scaling.factor": 0.0, EPSILON: 0.0, "rope.freq_base": 5e8, "logit_scale": 0.0},
        {"attention.head_count_kv": Typed("i32", [4, 0])},
        {"some_key_of_another_day": Typed("i32", -5)},
        {"rope.dimension_count": 8, "context_length": 10_485_760},
    ],
    ids=str,
)
def test_numbers_that_a_model_may_have(keys: dict[str, Any]) -> None:
    shape_of_gguf(header({f"llama.{key}": value for key, value in keys.items()}))


def test_experts_that_are_not_used() -> None:
    keys = {"llama.expert_count": 8, "llama.expert_used_count": 0}
    assert "llama.expert_used_count is 0, of 8 experts" in refusal(shape_of_gguf, keys)


FOR_LLAMA: list[tuple[str, Any, str]] = [
    ("llama.context_length", None, "key llama.context_length is missing"),
    ("llama.context_length", Typed("u64", 128), "llama.context_length is stored as u64"),
    ("llama.expert_count", Typed("i32", 0), "llama.expert_count is stored as i32"),
    ("llama.rope.freq_base", Typed("f64", 1e4), "llama.rope.freq_base is stored as f64"),
    ("tokenizer.ggml.eos_token_id", Typed("i32", 1), "tokenizer.ggml.eos_token_id is stored as i32"),
    ("tokenizer.ggml.tokens", list("abcdefga"), "entries 0 and 7 of key tokenizer.ggml.tokens"),
    ("llama.attention.head_count", None, "key llama.attention.head_count is missing"),
    ("llama.rope.dimension_count", 0, "llama.rope.dimension_count is 0, of heads with a width of 8"),
    ("llama.rope.dimension_count", 10, "llama.rope.dimension_count is 10, of heads"),
    ("llama.embedding_length", 64, "llama.embedding_length is 64, the embedding has rows of 32"),
    ("llama.block_count", 1, "llama.block_count is 1, but there is a tensor blk.1."),
    ("llama.feed_forward_length", 63, "llama.feed_forward_length is 63, blk.0.ffn_down.weight has rows of 64"),
    ("llama.attention.head_count_kv", 4, "4 heads of key llama.attention.head_count_kv"),
    ("llama.attention.key_length", 16, "with a width of 16 do not make the 16 rows of blk.0.attn_k.weight"),
    ("llama.attention.value_length", 3, "with a width of 3 do not make the 16 rows of blk.0.attn_v.weight"),
]


@pytest.mark.parametrize(("key", "value", "words"), FOR_LLAMA, ids=[words for *_, words in FOR_LLAMA])
def test_what_llama_does_not_load(key: str, value: Any, words: str) -> None:
    assert words in refusal(cuts_of, {key: value})


def test_more_experts_than_llama_has_room_for() -> None:
    keys = {"llama.expert_count": 513, "llama.expert_used_count": 2}
    assert "llama.expert_count is 513, 512 is the limit" in refusal(cuts_of, keys)


@pytest.mark.parametrize("model", (*ATTENTION, *PERIODIC, *RECURRENT), ids=lambda model: model.name)
def test_no_model_that_the_library_runs_is_refused(model: TinyModel) -> None:
    data = gguf_bytes(metadata(model))
    cuts_of(parse_header(data, len(data)))
