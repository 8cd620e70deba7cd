"""What a session keeps, layer by layer, counted by hand from the shapes of the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.architectures import LlamaRules, of_gguf, of_model_type
from shardline.formats.gguf import parse_header
from shardline.formats.layer_kinds import layer_kinds, layer_kinds_of_config
from shardline.formats.session_state import LayerState, Rows, state_bytes, states_of_config, states_of_gguf
from shardline.formats.shape import shape_of_config, shape_of_gguf
from tests.support.gguf_models import metadata
from tests.support.gguf_writer import Typed, gguf_bytes

MODELS = Path(__file__).parents[2] / "docs" / "audits" / "models"
F16 = 2


def of_config(config: dict[str, Any]) -> tuple[LayerState, ...]:
    shape = shape_of_config(config)
    rules = of_model_type(shape.architecture).llama or LlamaRules()
    states = states_of_config(config, shape, layer_kinds_of_config(config, shape, rules))
    assert states is not None
    return states


def audited(name: str) -> tuple[LayerState, ...]:
    return of_config(json.loads((MODELS / f"{name}.json").read_text()))


def of_gguf_keys(architecture: str, layers: int, keys: dict[str, Any]) -> tuple[LayerState, ...] | None:
    data = gguf_bytes(metadata(architecture, layers, keys))
    header = parse_header(data, len(data))
    shape = shape_of_gguf(header)
    return states_of_gguf(header, shape, layer_kinds(header, shape, of_gguf(architecture).llama or LlamaRules()))


def growth(states: tuple[LayerState, ...], tokens: int = 1 << 17) -> float:
    """Bytes for one more token, far behind all windows."""
    more = state_bytes(states, 0, len(states), tokens=2 * tokens, element_bytes=F16)
    return (more - state_bytes(states, 0, len(states), tokens=tokens, element_bytes=F16)) / tokens


def test_deepseek_v4_keeps_rows_of_blocks_windows_and_open_blocks() -> None:
    states = audited("deepseek-v4-flash")
    assert states[0] == LayerState((Rows(512, window=128),))
    assert growth(states) == 21 * (512 + 128) / 4 * F16 + 20 * 512 / 128 * F16 == 6880
    fixed = sum(state.fixed_elements for state in states) * 4
    assert fixed == 21 * 4 * (8 * 1024 * 2 + 8 * 256 * 2) + 20 * 4 * 128 * 512 * 2
    windows = 43 * 128 * 512 * F16
    assert state_bytes(states, 0, 43, tokens=1024, element_bytes=F16) == 6880 * 1024 + fixed + windows
    assert not any(state.rewinds for state in states)


def test_layer_types_say_the_same_as_ratios() -> None:
    config = json.loads((MODELS / "deepseek-v4-flash.json").read_text())
    ratios = config.pop("compress_ratios")
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    assert of_config({**config, "layer_types": [names[r] for r in ratios]}) == audited("deepseek-v4-flash")
    assert of_config({**config, "compress_ratios": [*ratios, 0, 0, 0]}) == audited("deepseek-v4-flash")


def test_glm_keeps_latent_rows_and_the_keys_of_indexers_that_layers_own() -> None:
    states = audited("glm-5.2")
    assert growth(states) == 78 * 576 * F16 + 21 * 128 * F16 == 95_232
    assert [len(state.rows) for state in states[:8]] == [2, 2, 2, 1, 1, 1, 2, 1]
    assert all(state.rewinds for state in states)


@pytest.mark.parametrize(
    ("name", "per_token", "fixed"),
    [("ornith-9b", 32_768, 52.7e6), ("ornith-35b-a3b", 20_480, 65.9e6), ("ornith-397b-a17b", 30_720, 194.6e6)],
)
def test_delta_nets_keep_a_state_of_one_size(name: str, per_token: int, fixed: float) -> None:
    states = audited(name)
    assert growth(states) == per_token
    assert state_bytes(states, 0, len(states), tokens=0, element_bytes=F16) == pytest.approx(fixed, rel=0.01)
    assert [bool(state.rows) for state in states[:4]] == [False, False, False, True]


def test_headers_say_the_same_as_configurations() -> None:
    delta = {"ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.group_count": 16}
    heads = {"attention.head_count": 16, "attention.head_count_kv": 4, "attention.key_length": 256,
             "attention.value_length": 256, "embedding_length": 4096}  # fmt: skip
    assert of_gguf_keys("qwen35", 32, delta | heads) == audited("ornith-9b")
    types = [1, 1, 1, *([0, 0, 0, 1] * 19)][:78]
    latent = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64, "attention.indexer.key_length": 128,
              "attention.indexer.types": Typed("i32", types)}  # fmt: skip
    assert of_gguf_keys("glm-dsa", 78, latent) == audited("glm-5.2")
    ratios = Typed("i32", [0, 0, *[4, 128] * 20, 4, 0])
    flash = {"attention.compress_ratios": ratios, "attention.indexer.key_length": 128, "attention.sliding_window": 128,
             "attention.key_length": 512, "attention.value_length": 512, "attention.head_count_kv": 1}  # fmt: skip
    assert of_gguf_keys("deepseek4", 43, flash) == audited("deepseek-v4-flash")
    assert of_gguf_keys("deepseek4", 43, flash | {"attention.compress_ratios": None}) is None


INDEXER = {"attention.indexer.key_length": 16, "leading_dense_block_count": 3, "attention.head_count_kv": 2}


@pytest.mark.parametrize("architecture", ["minimax-m3", "deepseek32", "glm-dsa"])
def test_plans_count_what_indexers_keep_as_engines_do(architecture: str) -> None:
    """Of MiniMax-M3 keys and values, behind the dense layers alone: the planner and the engine have one number."""
    data = gguf_bytes(metadata(architecture, 8, INDEXER))
    header = parse_header(data, len(data))
    shape = shape_of_gguf(header)
    states = of_gguf_keys(architecture, 8, INDEXER)
    assert states is not None
    assert [state.bytes_at(1, 1) for state in states] == [shape.cache_elements(layer) for layer in range(8)]
    beside = [len(state.rows) for state in states]
    assert beside == ([1] * 3 + [2] * 5 if architecture == "minimax-m3" else [2] * 8)


def test_ordinary_models() -> None:
    states = of_gguf_keys("llama", 8, {})
    assert states == (LayerState((Rows(2 * (8 + 8)),)),) * 8
    with pytest.raises(ShardlineError):
        state_bytes(states, 0, 9, tokens=1, element_bytes=2)
