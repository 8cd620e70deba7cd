"""Numbers of a model from its config.json: equal to those of transformers' own models, and to published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.architectures import LlamaRules, of_model_type
from shardline.formats.layer_kinds import layer_kinds_of_config
from shardline.formats.parameters import Bits, Parameters, bits_of_config, dtype_of, parameters_of_config, weights_of
from shardline.formats.shape import shape_of_config

MODELS = Path(__file__).parents[2] / "docs" / "audits" / "models"


def parameters(config: dict[str, Any]) -> Parameters:
    shape = shape_of_config(config)
    kinds = layer_kinds_of_config(config, shape, of_model_type(shape.architecture).llama or LlamaRules())
    return parameters_of_config(config, shape, indexed=kinds.indexed, recurrent=kinds.recurrent)


def audited(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return found


def configurations() -> dict[str, Any]:
    import transformers

    from tests.support.torch_models import CONFIGS, SIZES

    more = {
        "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
        "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8),
        "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
        "granite": lambda: transformers.GraniteConfig(**SIZES),
        "granitemoe": lambda: transformers.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**SIZES, head_dim=16),
        "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**SIZES, head_dim=16),
        "qwen3_next": lambda: transformers.Qwen3NextConfig(**SIZES, head_dim=16),
        "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(
            num_hidden_layers=7, index_topk_freq=4, index_skip_topk_offset=3
        ),
        "deepseek_v4": lambda: transformers.DeepseekV4Config(
            num_hidden_layers=5, compress_ratios=[0, 0, 4, 128, 4, 0], num_hash_layers=3
        ),
    }
    return {**CONFIGS, **more}


KINDS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "mistral", "phi3", "gpt_oss", "deepseek_v3", "gemma",
    "gemma2", "mixtral", "granite", "granitemoe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm_moe_dsa", "deepseek_v4",
)  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_as_the_model_of_transformers_has(kind: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = configurations()[kind]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stored = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
    assert parameters(config.to_dict()).total == sum(stored.values())


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek-v4-flash", 284.3e9, 13.27e9),
        ("glm-5.2", 743.4e9, 40.3e9),
        ("ornith-9b", 8.95e9, 7.94e9),
        ("ornith-35b-a3b", 34.7e9, 2.95e9),
        ("ornith-397b-a17b", 396.3e9, 16.3e9),
    ],
)
def test_audited_models_are_as_large_as_their_publishers_say(name: str, total: float, active: float) -> None:
    found = parameters(audited(name))
    assert found.total == pytest.approx(total, rel=0.005)
    assert found.active == pytest.approx(active, rel=0.01)


def test_what_a_number_takes() -> None:
    config = audited("deepseek-v4-flash")
    assert bits_of_config(config) == Bits(8, 4.25, 16)
    assert bits_of_config({"model_type": "llama", "dtype": "float32"}) == Bits.equal(32)
    assert bits_of_config({"text_config": {"model_type": "llama", "torch_dtype": "float16"}}) == Bits.equal(16)
    with pytest.raises(ShardlineError, match="quantisation 'awq' is not known"):
        bits_of_config({"model_type": "llama", "quantization_config": {"quant_method": "awq"}})


@pytest.mark.parametrize("said", [["float32"], {"float32": 1}, 4, "float8", "", None])
def test_a_dtype_that_is_none(said: object) -> None:
    config = {"model_type": "llama", "dtype": said}
    assert dtype_of(config) == "bfloat16"
    inner = {"model_type": "llama", "torch_dtype": "float16"}
    assert dtype_of(config | {"text_config": inner}) == "float16"


def test_a_build_has_the_size_that_it_was_given() -> None:
    found = parameters(audited("deepseek-v4-flash"))
    bits = Bits.of_build(found, 86_800_000_000, 8.5)
    weights, experts = weights_of(found, bits)
    assert weights.of_shard(0, 43) == pytest.approx(86.8e9, rel=1e-6)
    assert (bits.always, bits.ends) == (8.5, 8.5)
    assert 2.2 < bits.experts < 2.3
    assert all(layer > routed > 0 for layer, routed in zip(weights.layers, experts, strict=True))
    with pytest.raises(ShardlineError, match="no room") as caught:
        Bits.of_build(found, 1_000_000_000, 8.5)
    assert caught.value.code == "setting_invalid"


def test_nothing_is_guessed_of_other_types() -> None:
    config = audited("ornith-9b") | {"model_type": "mamba"}
    with pytest.raises(ShardlineError, match="cannot be told from its config") as caught:
        parameters(config)
    assert caught.value.code == "architecture_unsupported"
    with pytest.raises(ShardlineError, match="intermediate_size is missing"):
        parameters({k: v for k, v in audited("ornith-9b").items() if k != "intermediate_size"})
