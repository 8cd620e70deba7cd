"""Measures of models, from GGUF metadata and from config.json."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader, parse_header
from shardline.formats.shape import shape_of_config, shape_of_gguf
from tests.support.gguf_writer import LLAMA, Typed, gguf_bytes

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 8, "max_position_embeddings": 128,
}  # fmt: skip


def header(keys: dict[str, Any]) -> GGUFHeader:
    data = gguf_bytes({key: value for key, value in {**LLAMA, **keys}.items() if value is not None})
    return parse_header(data, len(data))


def test_both_containers_say_the_same() -> None:
    shape = shape_of_gguf(header({}))
    assert shape == shape_of_config(CONFIG)
    assert (shape.n_layers, shape.hidden_size, shape.vocab_size, shape.context_length) == (2, 32, 8, 128)
    assert [shape.kv_elements(i) for i in range(2)] == [2 * (8 + 8)] * 2


@pytest.mark.parametrize("kind", ["u8", "i16", "u32", "i32", "u64", "i64"])
def test_any_integer_type_passes(kind: str) -> None:
    assert shape_of_gguf(header({"llama.block_count": Typed(kind, 2)})).n_layers == 2


@pytest.mark.parametrize(
    "value", [0, 10**9, Typed("i32", -1), 2.0, "2", [2], True, None, Typed("u64", 2**64 - 1)], ids=str
)
def test_a_layer_count_that_cannot_be_true_is_named(value: object) -> None:
    with pytest.raises(ShardlineError, match=r"llama\.block_count is") as caught:
        shape_of_gguf(header({"llama.block_count": value}))
    assert caught.value.code == "model_file_invalid"


@pytest.mark.parametrize("value", [0, -1, 10**9, 2.0, "2", [2], True, None])
def test_a_layer_count_in_json_that_cannot_be_true_is_named(value: object) -> None:
    with pytest.raises(ShardlineError, match=r"config\.json: num_hidden_layers is"):
        shape_of_config({**CONFIG, "num_hidden_layers": value})


@pytest.mark.parametrize("value", [None, 5, ["llama"], ""])
def test_a_config_without_a_model_type(value: object) -> None:
    with pytest.raises(ShardlineError, match="no model_type"):
        shape_of_config({**CONFIG, "model_type": value})


def test_heads_layer_by_layer() -> None:
    shape = shape_of_gguf(header({"llama.attention.head_count_kv": Typed("i32", [4, 0])}))
    assert shape.kv_heads == (4, 0)
    assert [shape.kv_elements(i) for i in range(2)] == [64, 0]
    with pytest.raises(ShardlineError, match="head_count_kv has 3 entries for 2 layers"):
        shape_of_gguf(header({"llama.attention.head_count_kv": [1, 1, 1]}))


def test_key_and_value_widths_of_their_own() -> None:
    shape = shape_of_gguf(header({"llama.attention.key_length": 16, "llama.attention.value_length": 4}))
    assert shape.kv_elements(0) == 2 * 20


def test_what_is_not_stated_is_not_guessed() -> None:
    absent = {"llama.attention.head_count": None, "llama.attention.head_count_kv": None, "tokenizer.ggml.tokens": None}
    shape = shape_of_gguf(header(absent))
    assert shape.kv_elements(0) is None
    assert shape.vocab_size is None
    assert shape_of_config({"model_type": "x", "num_hidden_layers": 1, "hidden_size": 8}).kv_elements(0) is None


def test_compressed_kv() -> None:
    gguf = shape_of_gguf(header({"llama.attention.kv_lora_rank": 512, "llama.rope.dimension_count": 64}))
    config = shape_of_config({**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert gguf.kv_elements(1) == config.kv_elements(1) == 576


INDEXER = {"attention.indexer.key_length": 16, "leading_dense_block_count": 1, "attention.head_count_kv": 2}


@pytest.mark.parametrize(
    ("architecture", "keys", "beside"),
    [
        # As llama.cpp allocates them: keys and values behind the dense layers; keys alone; none where one is shared.
        ("minimax-m3", {}, [0, 32]),
        ("deepseek32", {}, [16, 16]),
        ("glm-dsa", {"attention.indexer.types": [1, 0]}, [16, 0]),
        ("glm-dsa", {"attention.indexer.key_length": 0}, [0, 0]),
    ],
)
def test_what_indexers_keep_counts(architecture: str, keys: dict[str, Any], beside: list[int]) -> None:
    own = {key.removeprefix("llama."): value for key, value in LLAMA.items() if key.startswith("llama.")}
    stated = {f"{architecture}.{key}": value for key, value in {**own, **INDEXER, **keys}.items()}
    shape = shape_of_gguf(header({"general.architecture": architecture, **stated}))
    assert [shape.cache_elements(layer) for layer in range(2)] == [32 + beside[0], 32 + beside[1]]
    assert [shape.kv_elements(layer) for layer in range(2)] == [32, 32]


def test_prediction_layers_are_no_layers_of_a_route() -> None:
    shape = shape_of_gguf(header({"llama.block_count": 3, "llama.nextn_predict_layers": 1}))
    assert (shape.n_layers, shape.kv_heads) == (2, (2, 2))
    with pytest.raises(ShardlineError, match="nextn_predict_layers is 2, of 2 layers"):
        shape_of_gguf(header({"llama.nextn_predict_layers": 2}))


def test_the_text_model_of_several_modalities() -> None:
    shape = shape_of_config({"model_type": "gemma3", "text_config": {**CONFIG, "model_type": "gemma3_text"}})
    assert (shape.architecture, shape.n_layers) == ("gemma3_text", 2)


def test_windows() -> None:
    assert shape_of_config({**CONFIG, "sliding_window": 512}).sliding_window == 512
    assert shape_of_config({**CONFIG, "sliding_window": 512, "use_sliding_window": False}).sliding_window is None
    assert shape_of_gguf(header({"llama.attention.sliding_window": 64})).sliding_window == 64
    assert shape_of_gguf(header({"llama.attention.sliding_window": 0})).sliding_window is None
