"""What each layer is, from arrays, from patterns of the table, and from headers that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.architectures import llama_rules, of_gguf
from shardline.formats.layer_kinds import LayerKinds, layer_kinds
from shardline.formats.shape import shape_of_gguf
from tests.support.gguf_models import small_model
from tests.support.gguf_writer import Typed


def kinds(folder: Path, architecture: str, layers: int, **keys: Any) -> LayerKinds:
    header = small_model(folder, architecture, layers, {name.replace("__", "."): v for name, v in keys.items()}).header
    return layer_kinds(header, shape_of_gguf(header), llama_rules(of_gguf(architecture)))


def flags(text: str) -> tuple[bool, ...]:
    return tuple(letter == "x" for letter in text)


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("gpt-oss", {}, "x.x.x.x."),
        ("gemma2", {}, "x.x.x.x."),
        ("gemma3", {"attention__sliding_window": 16}, "xxxxx.xx"),
        ("gemma3", {"attention__sliding_window": 0}, None),
        ("gemma3", {}, None),
        ("gemma3", {"attention__sliding_window": 16, "attention__sliding_window_pattern": 3}, "xx.xx.xx"),
        ("cohere2moe", {}, ".xxx.xxx"),
        ("llama4", {}, "xxx.xxx."),
        ("llama4", {"attention__sliding_window": 0}, None),
        ("olmo2", {"attention__sliding_window": 16}, "xxx.xxx."),
        ("cohere2", {"attention__sliding_window_pattern": 0}, "xxxxxxxx"),
        ("mimo2", {"attention__sliding_window_pattern": Typed("bool", list(flags(".x.x..xx")))}, ".x.x..xx"),
        ("mimo2", {"attention__sliding_window_pattern": Typed("i32", [0, 1, 0, 1, 0, 0, 1, 1])}, ".x.x..xx"),
        ("llama", {"attention__sliding_window": 16}, None),
    ],
)
def test_windows(tmp_path: Path, architecture: str, keys: dict[str, Any], expected: str | None) -> None:
    found = kinds(tmp_path, architecture, 8, **keys).windowed
    assert found == (flags(expected) if expected is not None else None)


@pytest.mark.parametrize(
    ("architecture", "keys", "recurrent", "attending"),
    [
        ("qwen3next", {}, "xxx.xxx.", "...x...x"),
        ("qwen35", {"full_attention_interval": 2}, "x.x.x.x.", ".x.x.x.x"),
        ("qwen35", {"attention__recurrent_layers": Typed("bool", list(flags("x..xx..x")))}, "x..xx..x", ".xx..xx."),
        ("jamba", {"attention__head_count_kv": [0, 2, 0, 0, 2, 0, 0, 2]}, "x.xx.xx.", ".x..x..x"),
        ("kimi-linear", {"attention__head_count_kv": [0, 1, 0, 0, 1, 0, 0, 1]}, "x.xx.xx.", ".x..x..x"),
        (
            "nemotron_h",
            {
                "attention__head_count_kv": [0, 2, 0, 0, 2, 0, 0, 0],
                "feed_forward_length": [0, 0, 64, 0, 0, 64, 0, 64],
            },
            "x..x..x.",
            ".x..x...",
        ),
        ("mamba", {}, None, None),
        ("falcon-h1", {}, None, None),
    ],
)
def test_recurrent_layers(
    tmp_path: Path, architecture: str, keys: dict[str, Any], recurrent: str | None, attending: str | None
) -> None:
    found = kinds(tmp_path, architecture, 8, **keys)
    assert found.recurrent == (flags(recurrent) if recurrent is not None else None)
    assert found.attending == (flags(attending) if attending is not None else None)


def test_indexers_follow_the_array_or_the_length_of_the_context(tmp_path: Path) -> None:
    types = {"attention__indexer__types": Typed("i32", [1, 0, 0, 1, 0, 0, 0, 1])}
    assert kinds(tmp_path, "glm-dsa", 8, **types).indexed == flags("x..x...x")
    assert kinds(tmp_path, "glm-dsa", 8).indexed == flags("xxxxxxxx")
    assert kinds(tmp_path, "glm-dsa", 12, context_length=1 << 20).indexed == flags("xxx...x...x.")
    assert kinds(tmp_path, "deepseek32", 8).indexed is None


def test_groups(tmp_path: Path) -> None:
    assert kinds(tmp_path, "smollm3", 8).group == 4
    assert kinds(tmp_path, "llama4", 12, interleave_moe_layer_step=3).group == 12
    assert kinds(tmp_path, "llama4", 8, interleave_moe_layer_step=0).group == 4
    assert kinds(tmp_path, "ernie4_5-moe", 8, interleave_moe_layer_step=2).group == 2
    assert kinds(tmp_path, "smallthinker", 8).group == 1
    assert kinds(tmp_path, "smallthinker", 8, attention__sliding_window=16).group == 4
    assert kinds(tmp_path, "llama", 8).group == 1


def test_leading_dense_layers_and_heads(tmp_path: Path) -> None:
    assert kinds(tmp_path, "minimax-m3", 4, leading_dense_block_count=2).sparse == flags("..xx")
    assert kinds(tmp_path, "llama", 4).sparse is None
    assert kinds(tmp_path, "llama", 4).headed is None
    assert kinds(tmp_path, "llama", 4, attention__head_count=[4, 0, 4, 4]).headed == flags("x.xx")


def test_layers_for_prediction_are_none_of_a_route(tmp_path: Path) -> None:
    pattern = {"attention__sliding_window_pattern": Typed("bool", [True, False, True, False])}
    found = kinds(tmp_path, "mimo2", 4, nextn_predict_layers=1, **pattern)
    assert found.windowed == flags("x.x")


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("mimo2", {}, "mimo2.attention.sliding_window_pattern is missing"),
        ("mimo2", {"attention__sliding_window_pattern": [True] * 7}, "has 7 entries for 8 layers"),
        ("gpt-oss", {"attention__sliding_window": -1}, "gpt-oss.attention.sliding_window is -1"),
        ("gpt-oss", {"attention__sliding_window": "wide"}, "expected an integer"),
        ("qwen3next", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("jamba", {"attention__head_count_kv": ["a"] * 8}, "expected an array of numbers"),
        ("minimax-m3", {"leading_dense_block_count": 1 << 30}, "leading_dense_block_count is 1073741824"),
        ("ernie4_5-moe", {"interleave_moe_layer_step": 1.5}, "expected an integer"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, architecture: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardlineError, match=message) as caught:
        kinds(tmp_path, architecture, 8, **keys)
    assert caught.value.code == "model_file_invalid"
