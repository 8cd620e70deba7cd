"""A transformers model without weights, and how it is cut down to the layers of one Shard.

Owns the skeleton (every parameter on `meta`), the names of the parts that a Shard needs, the cut itself and the
buffers that no file holds. Names no architecture: what it cannot recognise it refuses as `architecture_unsupported`.
Reads no weights (torch_safetensors.py, torch_gguf.py) and runs nothing (torch_probe.py, torch_backend.py).
Shown by tests/model/test_torch_split.py and test_torch_refusals.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization
from transformers.cache_utils import DynamicCache

from shardline.errors import ShardlineError
from shardline.formats.architectures import check_torch, of_model_type
from shardline.model.torch_layers import ROW_LAYERS, STATE_LAYERS

_BEHIND = frozenset({"hc_head"})
"""Parts with weights that a decoder uses behind its last layer, beside the norm: of the tail, and of no other Shard."""


def unsupported(config: PreTrainedConfig, why: str) -> ShardlineError:
    """`architecture_unsupported` with the model type and the reason in words."""
    kind = str(config.model_type)
    return ShardlineError(
        "architecture_unsupported", f"the PyTorch engine does not run {kind}: {why}", architecture=kind
    )


def check_range(first: int, last: int, n_layers: int) -> None:
    """`layers_invalid` unless [first, last) is a non-empty range of `n_layers` layers."""
    if not 0 <= first < last <= n_layers:
        raise ShardlineError(
            "layers_invalid", f"layers {first}:{last} are no range of a model with {n_layers} layers", layers=n_layers
        )


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A whole model on `meta`, with its parts found. `_name` fields are attribute names inside the decoder."""

    model: PreTrainedModel
    decoder: PreTrainedModel
    config: PreTrainedConfig
    """Of the whole decoder; after the cut the decoder has a shorter one."""
    n_layers: int
    dtype: torch.dtype
    decoder_name: str
    """Of the decoder inside the model: the prefix of its parameters, such as `model`."""
    layers_name: str
    embedding_name: str
    norm_name: str | None
    """None: what stands behind the layers was not recognised, so only the whole model can be loaded."""
    behind: tuple[str, ...]
    """Other parts that are used behind the last layer only."""
    strangers: tuple[str, ...]
    """Parts of the decoder with weights that are none of the above."""

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = getattr(self.decoder, self.layers_name)
        return layers

    @property
    def tied(self) -> dict[str, str]:
        """Parameter name -> name of the parameter that it shares its values with."""
        return dict(self.model.all_tied_weights_keys)

    def layer_of(self, name: str) -> int | None:
        """The layer that a parameter of this model belongs to, by its full name."""
        match = re.match(re.escape(f"{self.decoder_name}.{self.layers_name}.") + r"(\d+)\.", name)
        return int(match[1]) if match else None

    def wanted(self, first: int, last: int) -> dict[str, torch.dtype]:
        """Full name -> dtype of every parameter and stored buffer of the Shard [first, last), in the model's order."""
        check_range(first, last, self.n_layers)
        whole = (first, last) == (0, self.n_layers)
        if not whole:
            self._check_divisible()
        plan = self.model._get_dtype_plan(self.dtype)
        pattern = re.compile("|".join(f"(?:{p.replace('*', '.*')})" for p in plan)) if plan else None
        names = {}
        for name, tensor in self.model.state_dict().items():
            if self._belongs(name, first, last, whole):
                kept = pattern is not None and pattern.search(name)
                names[name] = torch.float32 if kept else tensor.dtype
        return names

    def _belongs(self, name: str, first: int, last: int, whole: bool) -> bool:
        layer = self.layer_of(name)
        if layer is not None:
            return first <= layer < last
        inside = name.removeprefix(f"{self.decoder_name}.")
        if inside == name:
            return last == self.n_layers and self._makes_logits(name)
        if inside.startswith(f"{self.embedding_name}."):
            return first == 0
        tail = tuple(f"{name}." for name in (self.norm_name, *self.behind) if name is not None)
        return whole or (last == self.n_layers and inside.startswith(tail))

    def _makes_logits(self, name: str) -> bool:
        """Outside of the decoder: all of a plain language model, only the output matrix of a composite one."""
        if "." not in self.decoder_name:
            return True
        output = self.model.get_output_embeddings()
        return any(parameter is self.model.get_parameter_or_buffer(name) for parameter in output.parameters())

    def _check_divisible(self) -> None:
        if self.strangers:
            raise unsupported(self.config, f"it cannot be cut, its layers share {', '.join(self.strangers)}")
        if self.norm_name is None:
            raise unsupported(self.config, "it cannot be cut, the norm behind its layers is not recognised")
        if self.config.is_heterogeneous:
            raise unsupported(self.config, "it cannot be cut, its configuration differs from layer to layer")


def build(config: PreTrainedConfig, dtype: torch.dtype) -> Skeleton:
    """The model of `config` with every tensor on `meta`. Costs about a millisecond a layer, and no memory.

    Raises `architecture_unsupported` for what is no causal language model, for what the table of architectures
    refuses, and for caches that hold more than rows by position (recurrent, hybrid, convolution, shared between layers)
    in architectures that were not proven with them.
    """
    check_torch(of_model_type(str(config.model_type)))
    if getattr(config, "quantization_config", None) is not None:
        raise unsupported(config, "its checkpoint is quantised; take the unquantised one, or a GGUF file")
    try:
        kind = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise unsupported(config, "transformers has no causal language model of this type") from None
    attention = "sdpa" if kind._supports_sdpa else "eager"
    try:
        with torch.device("meta"), initialization.no_tie_weights(), initialization.meta_device_safe_creation_ops():
            model = kind._from_config(config, dtype=dtype, attn_implementation=attention)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, IndexError, AssertionError) as error:
        raise unsupported(config, f"its configuration is refused ({type(error).__name__}: {error})"[:500]) from None
    model.eval()
    skeleton = _find_parts(model, dtype)
    _check_caches(skeleton)
    return skeleton


def _find_parts(model: PreTrainedModel, dtype: torch.dtype) -> Skeleton:
    # The first model inside that has the layers itself: some classes call themselves their decoder.
    inside = [m for m in model.get_decoder().modules() if isinstance(m, PreTrainedModel) and m is not model]
    decoder = next((m for m in inside if len(_layer_lists(m)) == 1), None)
    if decoder is None or model.get_output_embeddings() is None:
        raise unsupported(model.config, "its layers or its output matrix were not found")
    decoder_name = next(name for name, module in model.named_modules() if module is decoder)
    lists = _layer_lists(decoder)
    embedding = decoder.get_input_embeddings()
    embeddings = [name for name, module in decoder.named_modules() if module is embedding]
    if len(embeddings) != 1:
        raise unsupported(model.config, "its embedding was not found")
    rest = [
        (name, child)
        for name, child in decoder.named_children()
        if name not in (lists[0], embeddings[0]) and (_is_norm(child) or child.state_dict())
    ]
    loose = [name for name, _ in decoder.named_parameters(recurse=False)]
    norms = [name for name, child in rest if _is_norm(child)]
    norm = norms[0] if len(norms) == 1 else None
    behind = tuple(name for name, _ in rest if name in _BEHIND)
    strangers = (*(name for name, _ in rest if name != norm and name not in behind), *loose)
    return Skeleton(
        model=model,
        decoder=decoder,
        config=decoder.config,
        n_layers=len(getattr(decoder, lists[0])),
        dtype=dtype,
        decoder_name=decoder_name,
        layers_name=lists[0],
        embedding_name=embeddings[0],
        norm_name=norm,
        behind=behind,
        strangers=strangers,
    )


def _layer_lists(module: PreTrainedModel) -> list[str]:
    """Names of the lists that are as long as the configuration has layers."""
    count = getattr(module.config, "num_hidden_layers", None)
    return [n for n, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) == count]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _check_caches(skeleton: Skeleton) -> None:
    """Refuse, from the configuration of all layers, what a cut of this model could never hold."""
    config = skeleton.config
    proven = of_model_type(str(config.model_type)).torch == "supported"
    if skeleton.model._is_stateful and not proven:
        raise unsupported(config, "it keeps a recurrent state, which is not supported yet")
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (*ROW_LAYERS, *(STATE_LAYERS if proven else ())):
            raise unsupported(config, f"its cache ({type(layer).__name__}) is not supported yet")
    if getattr(config, "num_kv_shared_layers", 0):
        raise unsupported(config, "its layers share keys and values, which is not supported yet")


def cut(skeleton: Skeleton, first: int, last: int) -> None:
    """Take everything out of the model that the Shard [first, last) does not use; in place, weights or not.

    Layers keep the configuration of the whole model that they were built with, and count from 0 in the cache. The
    decoder's own configuration is cut, because it steers masks and caches per layer. What is gone is an `nn.Identity`.
    """
    decoder = skeleton.decoder
    layers = nn.ModuleList(list(skeleton.layers)[first:last])
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if getattr(module, "layer_idx", None) == first + index:
                vars(module)["layer_idx"] = index
    setattr(decoder, skeleton.layers_name, layers)
    decoder.config = cut_config(skeleton.config, first, last)
    if first > 0:
        decoder.set_submodule(skeleton.embedding_name, nn.Identity())
    if last < skeleton.n_layers:
        for name in (skeleton.norm_name, *skeleton.behind):
            if name is not None:
                setattr(decoder, name, nn.Identity())


def cut_config(config: PreTrainedConfig, first: int, last: int) -> PreTrainedConfig:
    """A copy of a decoder's configuration for layers [first, last): lists with one value a layer are sliced."""
    count = config.num_hidden_layers
    result = copy.deepcopy(config)
    for key, value in vars(result).items():
        if isinstance(value, list | tuple) and len(value) == count and not key.endswith("_token_id"):
            vars(result)[key] = value[first:last]
    result.num_hidden_layers = last - first
    return result


def fill_buffers(skeleton: Skeleton, first: int, last: int) -> None:
    """Make the buffers that no file holds (rotary frequencies, embedding scales), as transformers makes them.

    To be called while the parameters are still on `meta`, so that their initialisation, which comes along, costs
    nothing. Done twice over different contents: a buffer that keeps any of them was not made, and is refused by name.
    """
    for name, owner, module, buffer_names in _buffer_owners(skeleton, first, last):
        results: list[dict[str, torch.Tensor]] = []
        for content in (0, 1):
            for key in buffer_names:
                empty = module._buffers[key]
                module._buffers[key] = torch.full_like(empty, content, device="cpu")
            with torch.no_grad():
                owner._init_weights(module)
            results.append({key: module._buffers[key].clone() for key in buffer_names})
        for key in buffer_names:
            if not torch.equal(results[0][key], results[1][key]):
                raise unsupported(skeleton.config, f"transformers does not say how to make its buffer {name}.{key}")


def _buffer_owners(skeleton: Skeleton, first: int, last: int) -> Iterator[tuple[str, PreTrainedModel, Any, list[str]]]:
    """Modules of the Shard with buffers that no file holds, each with the model whose rules initialise it."""
    for name, module in skeleton.model.named_modules():
        inside = name == skeleton.decoder_name or name.startswith(f"{skeleton.decoder_name}.")
        layer = skeleton.layer_of(f"{name}.")
        if (layer is not None and not first <= layer < last) or (not inside and "." in skeleton.decoder_name):
            continue
        names = [key for key in module._buffers if key in module._non_persistent_buffers_set]
        names = [key for key in names if module._buffers[key] is not None]
        if names:
            yield name, skeleton.decoder if inside else skeleton.model, module, names
