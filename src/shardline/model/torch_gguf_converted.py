"""GGUF models whose configuration and weights transformers converts as it converts checkpoints (Qwen3.5, Ornith).

Owns the way from such a header to a configuration, in which no key of the architecture is passed over in silence, and
hands the weights to the machinery of torch_safetensors.py. Files of other architectures are torch_gguf.py's. Shown by
tests/model/test_torch_gguf_converted.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.core_model_loading import WeightRenaming
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

from shardline.errors import ShardlineError
from shardline.formats.gguf import Array, GGUFHeader, TensorInfo, Value
from shardline.formats.gguf_files import GGUFModel
from shardline.model.pooling import POOLING_KEY
from shardline.model.torch_safetensors import load_converted
from shardline.model.torch_weights import ShardWeights, StoredTensor

CONVERTED = frozenset({"qwen35", "qwen35moe"})
"""Architectures for which it is done so, and was compared with llama.cpp from the same file."""
_FUSED_EXPERTS = WeightRenaming(r"\.ffn_gate_up_exps\.weight", ".mlp.experts.gate_up_proj")
"""Some converters store both matrices of experts as one, as the model has them."""


def unsupported(architecture: str, why: str) -> ShardlineError:
    return ShardlineError(
        "architecture_unsupported",
        f"the PyTorch engine does not read this GGUF file of {architecture}: {why}. Take its safetensors version",
        architecture=architecture,
    )


def converted_config(model: GGUFModel) -> PreTrainedConfig:
    """The transformers configuration. Raises `architecture_unsupported` for a key that is missing, or that nobody
    asked for: what it says about the computation would be lost."""
    header = model.header
    architecture = header.text("general.architecture")
    metadata = _Asked({key: _plain(header, key, value) for key, value in header.kv.items()})
    try:
        fields = GGUF_CONFIG_ARCHS[architecture](metadata, tuple(model.tensors))
        config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    except KeyError as error:
        raise unsupported(architecture, f"its key {error} is missing") from None
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise unsupported(architecture, f"its metadata are refused ({error!s:.300})") from None
    prefix = f"{architecture}."
    left = [key for key in metadata if key.startswith(prefix) and key not in metadata.asked]
    for key in left:
        if not _says_nothing_new(key.removeprefix(prefix), metadata, prefix, config):
            raise unsupported(architecture, f"it does not know the key {key.removeprefix(prefix)}")
    return config


class _Asked(dict[str, Any]):
    """Metadata that remember which keys were looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def _plain(header: GGUFHeader, key: str, value: Value) -> Any:
    """A value as transformers' reader gives it: the vocabulary as its length, texts as str."""
    if isinstance(value, Array):
        if value.kind == "string":
            return value.count
        return list(header.numbers(key)) if value.kind != "bool" else [bool(n) for n in header.numbers(key)]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _says_nothing_new(key: str, metadata: Mapping[str, Any], prefix: str, config: PreTrainedConfig) -> bool:
    """Whether a key that the conversion does not read says what it assumes."""
    value = metadata[f"{prefix}{key}"]
    if key == "attention.recurrent_layers":
        return [bool(flag) for flag in value] == [kind == "linear_attention" for kind in config.layer_types]
    # A layer norm is no part of these models; experts are weighed by a softmax over the chosen ones, unscaled.
    assumed = {
        "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon": value,
        "expert_shared_count": 1,
        "expert_gating_func": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        POOLING_KEY: value,
        "rope.scaling.type": "none",
    }
    return key in assumed and assumed[key] == value


def load_converted_gguf(model: GGUFModel, stored: Callable[[TensorInfo], StoredTensor], weights: ShardWeights) -> None:
    """Fill the Shard's parameters. Raises `model_file_invalid` with the name of what is missing, unexpected or odd."""
    architecture = model.header.text("general.architecture")
    transforms = [*GGUF_ARCHS[architecture](weights.skeleton.config), _FUSED_EXPERTS]
    load_converted(model.tensors, transforms, stored, weights)
