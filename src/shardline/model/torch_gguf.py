"""Configuration and weights of a Shard from a GGUF file, through transformers' own tables of names.

Owns the way from GGUF metadata to a configuration, in which no key of the architecture is passed over in silence, and
from GGUF tensors to parameters: tensor by tensor of the Shard, dequantised in small chunks. The header is checked by
formats/gguf.py. Shown by tests/model/test_torch_gguf.py and test_torch_smollm2.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from shardline.formats.gguf import Array, TensorInfo, Value
from shardline.formats.gguf_files import GGUFModel
from shardline.formats.layers import place_of
from shardline.model.pooling import POOLING_KEY
from shardline.model.torch_build import Skeleton
from shardline.model.torch_gguf_converted import CONVERTED, converted_config, load_converted_gguf
from shardline.model.torch_gguf_converted import unsupported as _unsupported
from shardline.model.torch_weights import CHUNK_BYTES, OpenFiles, ShardWeights, StoredTensor, file_invalid, fill_plain

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_ROPE_FACTORS = "rope_freqs.weight"

_MORE_KEYS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys that mean the same for every architecture, where transformers' table of it leaves them out."""

_HEAD_WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Widths that must all be those of a head: the model classes know no other."""


def quantisation_of(model: GGUFModel) -> str:
    """The tensor type that most bytes of the model have."""
    sizes: Counter[str] = Counter()
    for info in model.tensors.values():
        sizes[info.type] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else "none"


def config_of(model: GGUFModel) -> PreTrainedConfig:
    """The transformers configuration of a GGUF model.

    Raises `architecture_unsupported` for an architecture without a table, and for a key of the architecture that no
    table knows: what it says about the computation would be lost.
    """
    header = model.header
    architecture = header.text("general.architecture")
    if architecture in CONVERTED:
        return converted_config(model)
    kind = _model_type(architecture)
    table = GGUF_CONFIG_MAPPING[kind]
    fields: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(kind, {}))
    fields["tie_word_embeddings"] = "output.weight" not in model.tensors
    for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items():
        # Absent ids are None: those of the model type are of another vocabulary.
        fields[name] = header.integer(f"tokenizer.{key}") if f"tokenizer.{key}" in header.kv else None
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): value for key, value in header.kv.items() if key.startswith(prefix)}
    for key, value in stated.items():
        name = table[key] if key in table else _more(key, stated, architecture)
        if name is not None:
            fields[name] = _scalar(key, value, architecture)
    tokens = header.kv.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Array):
        fields.setdefault("vocab_size", tokens.count)
    model_type = f"{kind}_text" if f"{kind}_text" in CONFIG_MAPPING else kind
    config = _make(model_type, fields, architecture)
    _check_fields(config, fields, architecture)
    _check_widths(config, stated, architecture)
    return config


def _model_type(architecture: str) -> str:
    """The key of transformers' table: the same name, spelled with underscores (`qwen3moe` is `qwen3_moe`)."""
    plain = architecture.replace("-", "").replace("_", "")
    for kind in GGUF_CONFIG_MAPPING:
        if kind not in ("general", "tokenizer") and kind.replace("_", "") == plain:
            return str(kind)
    raise _unsupported(architecture, "transformers has no table for the architecture")


def _more(key: str, stated: Mapping[str, Value], architecture: str) -> str | None:
    """The name of a key that is not in the architecture's table; None where there is nothing to keep."""
    if key in _MORE_KEYS:
        return _MORE_KEYS[key]
    unscaled = {"rope.scaling.type": b"none", "rope.scaling.original_context_length": stated.get("context_length")}
    if key in (*_HEAD_WIDTHS, POOLING_KEY) or (key in unscaled and stated[key] == unscaled[key]):
        return None
    raise _unsupported(architecture, f"it does not know the key {key}")


def _scalar(key: str, value: Value, architecture: str) -> Any:
    if isinstance(value, Array):
        raise _unsupported(architecture, f"the key {key} has a value for each layer")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _make(model_type: str, fields: dict[str, Any], architecture: str) -> PreTrainedConfig:
    if model_type not in CONFIG_MAPPING:
        raise _unsupported(architecture, f"transformers has no model type {model_type}")
    try:
        return CONFIG_MAPPING[model_type](**fields)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise _unsupported(architecture, f"its metadata are refused ({error!s:.300})") from None


def _check_fields(config: PreTrainedConfig, fields: Mapping[str, Any], architecture: str) -> None:
    """Every field must be one that this type of configuration has: a foreign one would be kept and never read.

    Free are two that all types take in, and the width of a head: some read it without having it, and where it were
    not read, no tensor would fit.
    """
    known = {*vars(type(config)()), *type(config).attribute_map, "rope_theta", "unk_token_id", "head_dim"}
    foreign = [name for name in fields if name not in known]
    if foreign:
        raise _unsupported(architecture, f"its model type has no {', '.join(foreign)}")


def _check_widths(config: PreTrainedConfig, stated: Mapping[str, Value], architecture: str) -> None:
    widths = {key: stated[key] for key in _HEAD_WIDTHS if key in stated}
    if not widths:
        return
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for key, value in widths.items():
        if value != width:
            raise _unsupported(architecture, f"{key} is {value!r:.40}, but a head has the width {width}")


def load_gguf(model: GGUFModel, weights: ShardWeights) -> None:
    """Fill the Shard's parameters. Raises `model_file_invalid` with the name of what is missing, unexpected or odd."""
    architecture = model.header.text("general.architecture")
    if architecture in CONVERTED:
        with OpenFiles() as files:
            load_converted_gguf(model, partial(_stored, files, model.paths), weights)
        return
    skeleton = weights.skeleton
    transform = Transform(skeleton, architecture)
    jobs: dict[str, list[TensorInfo]] = {}
    for name, info in model.tensors.items():
        target = transform.target(name)
        if target is not None:
            jobs.setdefault(target, []).append(info)
        elif name != _ROPE_FACTORS:
            weights.check_known(_as_parameter(name, skeleton), name)
    weights.plan(jobs, called=transform.parts)
    for target, infos in jobs.items():
        absent = set(transform.parts[target]) - {_stem(info.name) for info in infos}
        if absent and weights.wants(target):
            raise file_invalid(f"{min(absent)} is missing in the model file", tensors=sorted(absent))
    with OpenFiles() as files:
        stored = partial(_stored, files, model.paths)
        for target, infos in jobs.items():
            if weights.wants(target):
                _fill(target, infos, stored, transform, weights)
        if _ROPE_FACTORS in model.tensors:
            _divide_frequencies(skeleton, stored(model.tensors[_ROPE_FACTORS]).load(torch.float32), architecture)


class _Names:
    """What transformers' name map asks of a model: parameter names, and no submodules (it would map each anew)."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)

    def state_dict(self) -> dict[str, None]:
        return dict.fromkeys(self._names)

    def named_children(self) -> tuple[()]:
        return ()


def _names(skeleton: Skeleton, layout: TensorProcessor, architecture: str) -> dict[str, str]:
    """GGUF tensor name -> parameter name, as transformers has it."""
    kind, count = str(skeleton.config.model_type), skeleton.n_layers
    names = list(skeleton.model.state_dict())
    prefix = f"{skeleton.decoder_name}."
    inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    try:
        found: dict[str, str] = get_gguf_hf_weights_map(_Names(inner), layout, kind, count, prefix)
        found.update(get_gguf_hf_weights_map(_Names(names), layout, kind, count))
    except NotImplementedError:
        raise _unsupported(architecture, "the gguf package has no names for it") from None
    return found


def _stem(name: str) -> str:
    """A tensor's name without the suffix that transformers' map leaves out for experts."""
    return name.removesuffix(".weight")


Stored = Callable[[TensorInfo], StoredTensor]


class Transform:
    """transformers' names and changes of layout for one GGUF architecture."""

    def __init__(self, skeleton: Skeleton, architecture: str) -> None:
        kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._layout = kind(config=skeleton.config.to_dict())
        self._names = _names(skeleton, self._layout, architecture)
        self._targets = {_stem(name): target for name, target in self._names.items()}
        self.parts: dict[str, list[str]] = {}
        """Parameter name -> the tensors that make it, as `_stem` calls them."""
        for stem, target in self._targets.items():
            self.parts.setdefault(target, []).append(stem)

    def target(self, name: str) -> str | None:
        """The parameter that the tensor `name` makes, alone or with others."""
        return self._targets.get(_stem(name))

    def leaves(self, info: TensorInfo) -> bool:
        """Whether the tensor is taken as it is: asked with an array of its shape that takes no memory."""
        if len(info.shape) > 2:
            return False
        empty = np.broadcast_to(np.float32(0), tuple(reversed(info.shape)))
        result = self._process(empty, info.name, {})
        return result.weights is empty and result.name == info.name

    def apply(self, target: str, sources: list[StoredTensor]) -> torch.Tensor:
        """The values of the parameter `target`, float32."""
        held: dict[str, torch.Tensor] = {}
        made: torch.Tensor | None = None
        for source in sources:
            result = self._process(source.load(torch.float32).numpy(), source.name, held)
            if result.name is not None:
                made = torch.from_numpy(np.ascontiguousarray(result.weights))
        made = held.get(target, made)
        if made is None:
            raise file_invalid(f"transformers makes nothing of the tensors for {target}")
        return made

    def _process(self, values: npt.NDArray[np.float32], name: str, held: dict[str, torch.Tensor]) -> Any:
        try:
            return self._layout.process(
                values, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": held}
            )
        except (ValueError, RuntimeError, IndexError, KeyError, TypeError) as error:
            raise file_invalid(f"tensor {name} does not fit the model: {error!s:.200}", tensors=[name]) from None


def _as_parameter(name: str, skeleton: Skeleton) -> str:
    """What an unknown tensor would be called in the model: its layer decides whether it concerns the Shard."""
    place = place_of(name)
    return f"{skeleton.decoder_name}.{skeleton.layers_name}.{place}.{name}" if isinstance(place, int) else name


def _stored(files: OpenFiles, paths: Sequence[Path], info: TensorInfo) -> StoredTensor:
    path = paths[info.file]
    plain = _PLAIN.get(info.type)
    if plain is not None:
        fill = partial(fill_plain, files, path, info.offset, plain)
    else:
        fill = partial(_fill_blocks, files, path, info)
    return StoredTensor(info.name, tuple(reversed(info.shape)), plain or torch.float32, info.nbytes, fill)


def _entry(info: TensorInfo, index: int) -> TensorInfo:
    """Entry `index` of the outermost dimension, as a tensor whose outermost dimension is 1."""
    nbytes = info.nbytes // info.shape[-1]
    return replace(info, shape=(*info.shape[:-1], 1), offset=info.offset + index * nbytes, nbytes=nbytes)


def _fill_blocks(files: OpenFiles, path: Path, info: TensorInfo, out: torch.Tensor) -> None:
    """Dequantise into `out`, a chunk of rows at a time."""
    width = info.shape[0]
    rows = math.prod(info.shape[1:])
    row_bytes = info.nbytes // rows
    kind = GGMLQuantizationType(info.type_id)
    flat = out.view(rows, width)
    step = max(1, CHUNK_BYTES // row_bytes)
    buffer = np.empty((min(step, rows), row_bytes), dtype=np.uint8)
    for start in range(0, rows, step):
        part = buffer[: min(step, rows - start)]
        files.read(path, info.offset + start * row_bytes, part.data.cast("B"))
        try:
            values = dequantize(part, kind)
        except NotImplementedError:
            raise file_invalid(f"this engine does not read {info.type}, the type of tensor {info.name}") from None
        target = flat[start : start + len(part)]
        if target.dtype == torch.float32:
            np.copyto(target.numpy(), values)  # without torch's threads, which cost more than they bring here
        else:
            target.copy_(torch.from_numpy(values))


def _fill(target: str, infos: list[TensorInfo], stored: Stored, transform: Transform, weights: ShardWeights) -> None:
    """One parameter from the tensors that make it, with transformers' changes of layout in between."""
    if len(infos) == 1 and transform.leaves(infos[0]):
        weights.read(target, stored(infos[0]))
        return
    if len(infos[0].shape) < 3:
        weights.put(target, transform.apply(target, [stored(info) for info in infos]))
        return
    # A stack of matrices (experts): one at a time, so that little is held twice.
    result = weights.empty(target)
    if any(info.shape[-1] != len(result) for info in infos):
        raise file_invalid(f"the tensors for {target} do not fit it", tensors=[info.name for info in infos])
    for index in range(len(result)):
        one = transform.apply(target, [stored(_entry(info, index)) for info in infos])
        if one.shape[1:] != result.shape[1:]:
            raise file_invalid(f"the tensors for {target} do not fit it", tensors=[info.name for info in infos])
        result[index] = one[0]
    weights.put(target, result)


def _divide_frequencies(skeleton: Skeleton, factors: torch.Tensor, architecture: str) -> None:
    """Apply the file's own rotary factors, one a frequency: a longer context by slower rotation."""
    owners = [m for m in skeleton.decoder.modules() if isinstance(m._buffers.get("inv_freq"), torch.Tensor)]
    if len(owners) != 1 or owners[0].inv_freq.shape != factors.shape:
        raise _unsupported(architecture, f"its {_ROPE_FACTORS} do not fit the model")
    for name in ("inv_freq", "original_inv_freq"):
        if name in owners[0]._buffers:
            owners[0]._buffers[name] = owners[0]._buffers[name] / factors
