"""What one layer keeps of a session, from a model's header or config.json: rows by token, windows, fixed states.

Owns the arithmetic of Hot KV State at a given length, layer by layer: keys and values, latent rows (MLA), windows, rows
for several tokens (compressed attention), indexer keys, recurrent and rolling states. What the files do not say is
None. What an engine really holds, it says itself. Pure. Shown by tests/formats/test_session_state.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.formats.gguf import GGUFHeader
from shardline.formats.layer_kinds import ArchitectureKeys, LayerKinds
from shardline.formats.layers import check_range
from shardline.formats.shape import WIDTH_LIMIT, ConfigFields, ModelShape

_FIXED_BYTES = 4
"""Recurrent and rolling states are kept in float32, whatever keys and values are."""
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@dataclass(frozen=True, slots=True)
class Rows:
    """`elements` numbers for every `every` tokens, of the last `window` of them only where there is a window."""

    elements: int
    every: int = 1
    window: int | None = None

    def count(self, tokens: int) -> int:
        held = tokens if self.window is None else min(tokens, self.window)
        return held // self.every * self.elements


@dataclass(frozen=True, slots=True)
class LayerState:
    """All that one layer keeps of one session."""

    rows: tuple[Rows, ...] = ()
    fixed_elements: int = 0
    """Numbers in float32, as many at any length."""

    def bytes_at(self, tokens: int, element_bytes: int) -> int:
        """Of a session of `tokens` tokens, its rows kept with `element_bytes` a number."""
        return sum(row.count(tokens) for row in self.rows) * element_bytes + self.fixed_elements * _FIXED_BYTES

    @property
    def rewinds(self) -> bool:
        """Whether every earlier state can be had back from what is kept, at any length."""
        return not self.fixed_elements and all(row.every == 1 and row.window is None for row in self.rows)


def state_bytes(states: Sequence[LayerState], first: int, last: int, *, tokens: int, element_bytes: int) -> int:
    """Hot KV State of layers [first, last) for one session of `tokens` tokens; `layers_invalid` outside the model."""
    check_range(first, last, len(states))
    return sum(state.bytes_at(tokens, element_bytes) for state in states[first:last])


def states_of_gguf(header: GGUFHeader, shape: ModelShape, kinds: LayerKinds) -> tuple[LayerState, ...] | None:
    """What each layer keeps, as llama.cpp keeps it; None where the header does not say it."""
    keys = ArchitectureKeys(header, shape)
    index_width = keys.integer("attention.indexer.key_length", 0)
    if shape.architecture == "deepseek4":
        name = keys.name("attention.compress_ratios")
        ratios = header.numbers(name) if name in header.kv else ()
        return _compressed([int(ratio) for ratio in ratios], shape, index_width)
    # Of the gated delta net and of the state space models alike: a state, and the inputs that a convolution still sees.
    inner, size = keys.integer("ssm.inner_size", 0), keys.integer("ssm.state_size", 0)
    seen = max(0, keys.integer("ssm.conv_kernel", 1) - 1)
    fixed = inner * size + seen * (inner + 2 * keys.integer("ssm.group_count", 0) * size)
    return _plain(shape, kinds, index_width, fixed)


def states_of_config(config: Mapping[str, Any], shape: ModelShape, kinds: LayerKinds) -> tuple[LayerState, ...] | None:
    """What each layer keeps, as the model's own implementation keeps it; None where config.json does not say it."""
    fields = ConfigFields.of(config)
    index_width = fields.get("index_head_dim", WIDTH_LIMIT) or 0
    if shape.architecture == "deepseek_v4":
        return _compressed(compress_ratios(fields), shape, index_width)
    key_heads, key_width, heads, width = (
        fields.get(f"linear_{name}", WIDTH_LIMIT) or 0
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    )
    seen = (fields.get("linear_conv_kernel_dim", WIDTH_LIMIT) or 1) - 1
    fixed = heads * width * key_width + seen * (heads * width + 2 * key_heads * key_width)
    return _plain(shape, kinds, index_width, fixed)


def compress_ratios(fields: ConfigFields) -> tuple[int, ...]:
    """How many tokens a compressed row stands for, layer by layer; 0 where a layer has a window alone."""
    ratios = fields.numbers("compress_ratios", WIDTH_LIMIT)
    return ratios or tuple(_RATIOS.get(name, 0) for name in fields.names("layer_types"))


def _compressed(ratios: Sequence[int], shape: ModelShape, index_width: int) -> tuple[LayerState, ...] | None:
    """DeepSeek-V4: a window everywhere, and behind it a row for each block of tokens; small blocks have an indexer.

    The list of ratios may be longer than the model: it then goes on with layers that predict.
    """
    width, window = shape.key_width, shape.sliding_window
    if len(ratios) < shape.n_layers or not width or not window:
        return None
    return tuple(_compressed_layer(ratio, width, index_width, window) for ratio in ratios[: shape.n_layers])


def _compressed_layer(ratio: int, width: int, index_width: int, window: int) -> LayerState:
    rows = [Rows(width, window=window)]
    if not ratio:
        return LayerState(tuple(rows))
    # The block that is not full yet, as values and as gates; small blocks overlap, in two series.
    series = 2 if ratio == _RATIOS["compressed_sparse_attention"] else 1
    rows.append(Rows(width, every=ratio))
    fixed = 2 * (series * ratio) * (series * width)
    if series > 1 and index_width:
        rows.append(Rows(index_width, every=ratio))
        fixed += 2 * (series * ratio) * (series * index_width)
    return LayerState(tuple(rows), fixed)


def _plain(shape: ModelShape, kinds: LayerKinds, index_width: int, fixed: int) -> tuple[LayerState, ...] | None:
    states = []
    for layer in range(shape.n_layers):
        elements = shape.kv_elements(layer)
        if elements is None:
            return None
        recurrent = kinds.recurrent is not None and kinds.recurrent[layer]
        attending = not recurrent if kinds.attending is None else kinds.attending[layer]
        rows = [Rows(elements)] if attending and elements else []
        # A GGUF header and the table of architectures say it layer by layer: some keep values beside keys, some none.
        kept = shape.indexer[layer] if shape.indexer else index_width
        if attending and kept and (kinds.indexed is None or kinds.indexed[layer]):
            rows.append(Rows(kept))
        states.append(LayerState(tuple(rows), fixed if recurrent else 0))
    return tuple(states)
