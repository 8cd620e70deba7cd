"""What the caches of transformers' layers hold, kind by kind: keys and values, windows, indexer keys, blocks, states.

Owns the form of each: which tensors there are after so many tokens, how they are taken out and put back. What a cache
as a whole may do with them (roll back, fork, save) is torch_cache.py's. Shown by tests/model/test_torch_cache.py and
test_torch_states.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

ROW_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
"""Their contents are rows by position, and nothing else: they can be cut, counted and saved, whatever the model."""
STATE_LAYERS = (DeepseekV4HCACache, DeepseekV4CSACache, LinearAttentionLayer)
"""They keep a state besides, or instead, that has no positions: for architectures that were proven with them."""

_LENGTH = -1
"""Stands in a shape for the axis that grows."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a layer's cache: an attribute, or an entry of a dictionary that is one."""

    attribute: str
    key: str | int | None
    shape: tuple[int, ...]
    """`_LENGTH` at the axis that grows, if one does."""
    dtype: torch.dtype
    every: int = 1
    """One row for so many tokens."""
    rest: bool = False
    """Rows of the tokens behind the last full group of `every`, instead of rows of groups."""
    longest: int | None = None
    """Never more rows than this: what is older has gone."""
    begins: int = 0
    """Not there before so many tokens."""

    @property
    def name(self) -> str:
        return self.attribute if self.key is None else f"{self.attribute}.{self.key}"

    @property
    def bytes_per_token(self) -> float:
        """What one more token takes, windows or not."""
        if _LENGTH not in self.shape or self.rest:
            return 0.0
        return math.prod(n for n in self.shape if n != _LENGTH) * self.dtype.itemsize / self.every

    @property
    def fixed_bytes(self) -> int:
        """What it takes of a session however long, at most: all of it, or where it grows for a while only, its end."""
        row = math.prod(n for n in self.shape if n != _LENGTH) * self.dtype.itemsize
        if _LENGTH not in self.shape:
            return row
        return self.every * row if self.rest else (self.longest or 0) * row

    def shape_at(self, tokens: int) -> tuple[int, ...]:
        rows = tokens % self.every if self.rest else tokens // self.every
        rows = rows if self.longest is None else min(rows, self.longest)
        return tuple(rows if n == _LENGTH else n for n in self.shape)

    def of(self, layer: Any) -> torch.Tensor | None:
        held = getattr(layer, self.attribute)
        tensor: torch.Tensor | None = held if self.key is None else held[self.key]
        return tensor


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What one layer keeps."""

    parts: tuple[StoredPart, ...]
    window: int | None = None
    """None: nothing that it keeps goes away."""
    positional: bool = True
    """False: it has a state that no earlier one can be had back from."""

    @property
    def bytes_per_token(self) -> int:
        """An upper bound where there are windows; where a state stands beside a window, what grows behind it."""
        growing = (part for part in self.parts if self.positional or part.longest is None)
        return math.ceil(sum(part.bytes_per_token for part in growing))

    @property
    def fixed_bytes(self) -> int:
        """What a session takes beside `bytes_per_token`, at most."""
        return 0 if self.positional else sum(part.fixed_bytes for part in self.parts)

    def expected(self, tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of each tensor after so many tokens."""
        there = (part for part in self.parts if tokens >= max(1, part.begins))
        return {part.name: (part.shape_at(tokens), part.dtype) for part in there}


def is_positional(layer: Any) -> bool:
    """Whether all that it keeps are rows by position."""
    return type(layer) not in STATE_LAYERS


def counts_tokens(layer: Any) -> bool:
    return isinstance(layer, CacheLayerMixin)


def window_of(layer: Any) -> int | None:
    return int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None


def form_of(layer: Any) -> LayerForm:
    """The form of a layer that holds something."""
    if isinstance(layer, LinearAttentionLayer):
        states = {"conv_states": layer.conv_states, "recurrent_states": layer.recurrent_states}
        found = [(name, key, held) for name, by in states.items() for key, held in by.items() if held is not None]
        return LayerForm(tuple(StoredPart(n, k, tuple(t.shape), t.dtype) for n, k, t in found), positional=False)
    window = window_of(layer)
    kept = None if window is None else window - 1
    keys = _growing("keys", None, layer.keys, axis=-2, longest=kept)
    if isinstance(layer, DeepseekV4HCACache):
        return LayerForm((keys, *_block_parts(layer)), window, positional=False)
    parts = [keys, _growing("values", None, layer.values, axis=-2, longest=kept)]
    if isinstance(layer, DynamicIndexedLayer) and layer.indexer_keys is not None:
        parts.append(_growing("indexer_keys", None, layer.indexer_keys, axis=1))
    return LayerForm(tuple(parts), window)


def _growing(attribute: str, key: str | None, held: torch.Tensor, *, axis: int, **more: Any) -> StoredPart:
    shape = list(held.shape)
    shape[axis] = _LENGTH
    return StoredPart(attribute, key, tuple(shape), held.dtype, **more)


def _block_parts(layer: DeepseekV4HCACache) -> list[StoredPart]:
    """DeepSeek-V4: rows of full blocks, the tokens of the open one, and of overlapping blocks the last full one."""
    rate, parts = layer.compress_rate, []
    for name, rows in layer.compressed_kv.items():
        compressed = _growing("compressed_kv", name, rows, axis=1, every=rate)
        parts.append(compressed)
        for attribute in ("buffer_kv", "buffer_gate"):
            parts.append(_growing(attribute, name, getattr(layer, attribute)[name], axis=1, every=rate, rest=True))
        if isinstance(layer, DeepseekV4CSACache):
            shape = (compressed.shape[0], rate, compressed.shape[2])
            dtype = layer.buffer_kv[name].dtype
            gate = layer.buffer_gate[name].dtype if layer.overlap_gate[name] is None else layer.overlap_gate[name].dtype
            parts.append(StoredPart("overlap_kv", name, shape, dtype, begins=rate))
            parts.append(StoredPart("overlap_gate", name, shape, gate, begins=rate))
    return parts


def tensors_of(layer: Any, form: LayerForm) -> dict[str, torch.Tensor]:
    """All that it holds, by name."""
    held = {part.name: part.of(layer) for part in form.parts}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def put_back(layer: Any, form: LayerForm, tensors: Mapping[str, torch.Tensor], tokens: int) -> None:
    """Make an empty layer hold `tensors`, the state after so many tokens, exactly."""
    if isinstance(layer, LinearAttentionLayer):
        _put_states(layer, form, tensors)
        return
    keys, values = tensors["keys"], tensors.get("values", tensors["keys"])
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if layer.is_sliding:
        layer.cumulative_length = tokens
    if "indexer_keys" in tensors:
        layer.lazy_initialization_indexer(tensors["indexer_keys"])
        layer.indexer_keys = tensors["indexer_keys"]
    for part in form.parts:
        if part.key is not None and part.name in tensors:
            getattr(layer, part.attribute)[part.key] = tensors[part.name]
            if part.attribute == "compressed_kv":
                layer.entry_count[part.key] = tensors[part.name].shape[1]


def _put_states(layer: LinearAttentionLayer, form: LayerForm, tensors: Mapping[str, torch.Tensor]) -> None:
    for part in form.parts:
        tensor, index = tensors[part.name], part.key
        if part.attribute == "conv_states":
            layer.lazy_initialization(conv_states=tensor, state_idx=index)
            layer.conv_states[index].copy_(tensor)
        else:
            layer.lazy_initialization(recurrent_states=tensor, state_idx=index)
            layer.recurrent_states[index].copy_(tensor)
        layer.has_previous_state[index] = True
