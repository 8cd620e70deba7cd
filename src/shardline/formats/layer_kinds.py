"""What each layer of a model is: windowed or not, recurrent or not, with an indexer of its own, sparse or dense.

Owns reading these facts as llama.cpp reads them: from the arrays of the file, else from the pattern that the
architecture's row has; and the same facts from a config.json. Whatever llama.cpp would not load is
`model_file_invalid`. Pure. Shown by tests/formats/test_layer_kinds.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.errors import ShardlineError
from shardline.formats.architectures import LlamaRules
from shardline.formats.gguf import Array, GGUFHeader
from shardline.formats.shape import CONTEXT_LIMIT, WIDTH_LIMIT, ConfigFields, ModelShape

Flags = tuple[bool, ...]

_FULL_ATTENTION_INTERVAL = 4
_SHARED_INDEXERS_FROM_CONTEXT = 1 << 20
"""Models with a shorter context have an indexer in every layer, if nothing else is said."""


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """One flag a layer of a route; None where the model does not make the difference."""

    windowed: Flags | None = None
    recurrent: Flags | None = None
    attending: Flags | None = None
    """Layers with attention, in a model that has recurrent ones."""
    indexed: Flags | None = None
    """Layers with an indexer of their own."""
    sparse: Flags | None = None
    """Layers behind the leading dense ones."""
    headed: Flags | None = None
    """Layers with attention heads, in a model where their number differs from layer to layer."""
    group: int = 1
    """Layers that belong together, counted from 0."""


class ArchitectureKeys:
    """The keys `ARCHITECTURE.…` of a header, checked."""

    def __init__(self, header: GGUFHeader, shape: ModelShape) -> None:
        self.header = header
        self.shape = shape

    def name(self, key: str) -> str:
        return f"{self.shape.architecture}.{key}"

    def integer(self, key: str, default: int, limit: int = WIDTH_LIMIT) -> int:
        value = self.header.integer(self.name(key), default)
        if not 0 <= value <= limit:
            raise _bad(f"key {self.name(key)} is {value}, expected 0 to {limit}")
        return value

    def number(self, key: str, default: float) -> float:
        return self.header.number(self.name(key), default)

    def per_layer(self, key: str) -> Sequence[int | float] | None:
        """The entries of a per-layer array that belong to layers of a route; None where it is a number or absent."""
        name = self.name(key)
        value = self.header.kv.get(name)
        if not isinstance(value, Array):
            return None
        numbers = self.header.numbers(name)
        if len(numbers) not in (self.shape.n_layers, self.blocks):
            raise _bad(f"key {name} has {len(numbers)} entries for {self.blocks} layers")
        return numbers[: self.shape.n_layers]

    @property
    def blocks(self) -> int:
        """All blocks of the file, those for prediction too."""
        return self.header.integer(self.name("block_count"))


def layer_kinds(header: GGUFHeader, shape: ModelShape, rules: LlamaRules) -> LayerKinds:
    """What each layer is; `model_file_invalid` where the file contradicts itself."""
    keys = ArchitectureKeys(header, shape)
    recurrent = _recurrent(keys, rules)
    windowed = _windowed(keys, rules)
    lead = keys.integer("leading_dense_block_count", 0)
    heads = keys.per_layer("attention.head_count")
    return LayerKinds(
        windowed=windowed,
        recurrent=recurrent,
        attending=_attending(keys, recurrent, rules),
        indexed=_indexed(keys) if rules.indexers else None,
        sparse=tuple(i >= lead for i in range(shape.n_layers)) if rules.sparse_layer else None,
        headed=tuple(count > 0 for count in heads) if heads is not None else None,
        group=_group(keys, rules, windowed is not None),
    )


def _windowed(keys: ArchitectureKeys, rules: LlamaRules) -> Flags | None:
    window = rules.window
    if window is None:
        return None
    size = keys.integer("attention.sliding_window", 0 if window.optional else 1, CONTEXT_LIMIT)
    if size == 0:
        return None
    flags = keys.per_layer("attention.sliding_window_pattern")
    if flags is not None:
        return tuple(bool(flag) for flag in flags)
    if window.period is None:
        raise _bad(f"key {keys.name('attention.sliding_window_pattern')} is missing")
    period = keys.integer("attention.sliding_window_pattern", window.period)
    everything = 0 if window.dense_first else period - 1
    return tuple(period == 0 or i % period != everything for i in range(keys.shape.n_layers))


def _recurrent(keys: ArchitectureKeys, rules: LlamaRules) -> Flags | None:
    n_layers = keys.shape.n_layers
    if rules.recurrent is None:
        return None
    if rules.recurrent == "interval":
        flags = keys.per_layer("attention.recurrent_layers")
        if flags is not None:
            return tuple(bool(flag) for flag in flags)
        interval = keys.integer("full_attention_interval", _FULL_ATTENTION_INTERVAL)
        if interval == 0:
            raise _bad(f"key {keys.name('full_attention_interval')} is 0")
        return tuple((i + 1) % interval != 0 for i in range(n_layers))
    heads = _numbers(keys, "attention.head_count_kv")
    if rules.recurrent == "no_kv_heads":
        return tuple(count == 0 for count in heads)
    widths = _numbers(keys, "feed_forward_length")
    return tuple(count == 0 and width == 0 for count, width in zip(heads, widths, strict=True))


def _attending(keys: ArchitectureKeys, recurrent: Flags | None, rules: LlamaRules) -> Flags | None:
    if recurrent is None:
        return None
    if rules.recurrent == "no_kv_heads_no_ffn":
        return tuple(count > 0 for count in _numbers(keys, "attention.head_count_kv"))
    return tuple(not flag for flag in recurrent)


def _numbers(keys: ArchitectureKeys, key: str) -> Sequence[int | float]:
    numbers = keys.per_layer(key)
    return numbers if numbers is not None else (keys.integer(key, 0),) * keys.shape.n_layers


def _indexed(keys: ArchitectureKeys) -> Flags:
    flags = keys.per_layer("attention.indexer.types")
    if flags is not None:
        return tuple(bool(flag) for flag in flags)
    if keys.integer("context_length", 0, CONTEXT_LIMIT) < _SHARED_INDEXERS_FROM_CONTEXT:
        return (True,) * keys.shape.n_layers
    # llama.cpp's own table: the first two layers, and from then on the first of every four.
    return tuple(i < 2 or (i < 78 and (i - 2) % 4 == 0) for i in range(keys.shape.n_layers))


def _group(keys: ArchitectureKeys, rules: LlamaRules, windowed: bool) -> int:
    group = rules.align if windowed or not rules.align_windowed else 1
    step = keys.integer(rules.align_key, 1) if rules.align_key is not None else 1
    # A step of 0 means that there are no such layers.
    return math.lcm(group, max(1, step))


def layer_kinds_of_config(config: Mapping[str, Any], shape: ModelShape, rules: LlamaRules) -> LayerKinds:
    """The same facts, as far as a config.json states them; `model_file_invalid` where a list is too short."""
    fields = ConfigFields.of(config)
    n_layers = shape.n_layers
    types = fields.names("layer_types")
    if types and len(types) < n_layers:
        raise _bad(f"config.json: layer_types has {len(types)} entries for {n_layers} layers")
    interval = fields.get("full_attention_interval", WIDTH_LIMIT)
    recurrent = None
    if types and {"linear_attention", "conv", "mamba"} & set(types):
        recurrent = tuple(name != "full_attention" for name in types[:n_layers])
    elif not types and rules.recurrent is not None:
        recurrent = tuple((i + 1) % (interval or _FULL_ATTENTION_INTERVAL) != 0 for i in range(n_layers))
    windowed = tuple(name == "sliding_attention" for name in types[:n_layers]) if types else None
    lead = fields.get("first_k_dense_replace", WIDTH_LIMIT) or 0
    return LayerKinds(
        windowed=windowed if rules.window is not None and windowed is not None and any(windowed) else None,
        recurrent=recurrent,
        attending=tuple(not flag for flag in recurrent) if recurrent is not None else None,
        indexed=_indexed_by_config(fields, n_layers) if rules.indexers else None,
        sparse=tuple(i >= lead for i in range(n_layers)) if rules.sparse_layer else None,
        group=rules.align,
    )


def _indexed_by_config(fields: ConfigFields, n_layers: int) -> Flags:
    types = fields.names("indexer_types")
    if types:
        if len(types) < n_layers:
            raise _bad(f"config.json: indexer_types has {len(types)} entries for {n_layers} layers")
        return tuple(name == "full" for name in types[:n_layers])
    period = max(1, fields.get("index_topk_freq", WIDTH_LIMIT) or 1)
    offset = fields.get("index_skip_topk_offset", WIDTH_LIMIT)
    dense = 2 if offset is None else offset
    return tuple(max(i - dense + 1, 0) % period == 0 for i in range(n_layers))


def _bad(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", message, reason="damaged")
