"""The Hot KV State of one slot: a transformers cache for the layers of the Shard, counted, rolled back and saved.

Owns when a rollback is exact and the form of a saved slot (one safetensors document). Knows no model and computes
nothing. Numbers are read from the cache itself, never kept beside it. Shown by tests/model/test_torch_cache.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from shardline.errors import ShardlineError
from shardline.formats.safetensors import parse_header

FORM = "shardline-slot-1"
_ROOM = 32
"""Tokens that a cache grows by at least, and the multiple that it grows to."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of full attention in memory with room behind them.

    transformers' own layer makes a new tensor of everything at each step: at position 1,500 of a small model that is
    a quarter of the time. Here a step writes its own rows only; `keys` and `values` are views of what is in use, and
    hold the same numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self._rooms: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, rows, width]; return all that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        if not self._rooms or self._rooms[0].shape[-2] < end:
            self._rooms = [_room(self.keys, key_states, used, end), _room(self.values, value_states, used, end)]
        keys, values = self._rooms
        keys[:, :, used:end] = key_states
        values[:, :, used:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace everything that is held."""
        self.lazy_initialization(keys, values)
        self._rooms = []
        self.keys, self.values = keys, values

    def reset(self) -> None:
        self._rooms = []
        super().reset()


def _room(held: torch.Tensor, new: torch.Tensor, used: int, end: int) -> torch.Tensor:
    """Memory for `end` tokens and an eighth more, with what is held in front."""
    capacity = -(-(end + end // 8) // _ROOM) * _ROOM
    room = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
    if used:
        room[:, :, :used] = held
    return room


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for the layers that `config` describes."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What one layer keeps: shapes of keys and values for one token ([heads, width]), dtype, and its window."""

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    window: int | None
    """None: full attention."""

    @property
    def bytes_per_token(self) -> int:
        return (self.keys[0] * self.keys[1] + self.values[0] * self.values[1]) * self.dtype.itemsize

    def kept(self, tokens: int) -> int:
        """How many of `tokens` positions are still in the cache."""
        return tokens if self.window is None else min(tokens, self.window - 1)


def window_of(layer: DynamicLayer) -> int | None:
    return int(layer.sliding_window) if layer.is_sliding else None


def forms_of(cache: DynamicCache) -> tuple[LayerForm, ...]:
    """The forms of all layers of a cache that holds something."""
    return tuple(
        LayerForm(
            (layer.keys.shape[1], layer.keys.shape[3]),
            (layer.values.shape[1], layer.values.shape[3]),
            layer.keys.dtype,
            window_of(layer),
        )
        for layer in cache.layers
    )


def tokens_in(cache: DynamicCache) -> int:
    """Positions that the cache has seen, as its first layer counts them."""
    return int(cache.get_seq_length())


def check_exact(cache: DynamicCache, position: int) -> None:
    """`rollback_unsupported` where what the cache was at `position` is not in it any more: a sliding window that has
    moved on no longer holds what came before it."""
    tokens = tokens_in(cache)
    if not 0 <= position <= tokens:
        raise ShardlineError(
            "rollback_unsupported", f"position {position} lies outside of the {tokens} tokens held", position=position
        )
    windows = [w for w in map(window_of, cache.layers) if w is not None]
    if position < tokens and windows and tokens >= min(windows):
        raise ShardlineError(
            "rollback_unsupported",
            f"the sliding window of {min(windows)} has passed: {tokens} tokens are held",
            position=position,
        )


def rollback(cache: DynamicCache, position: int) -> None:
    """Drop all at and above `position`. Exact, or `rollback_unsupported`."""
    check_exact(cache, position)
    tokens = tokens_in(cache)
    if position == 0:
        cache.reset()
    elif position < tokens:
        cache.crop(position - tokens)


def fork(source: DynamicCache, target: DynamicCache, position: int) -> None:
    """Fill an empty cache with a copy of what `source` was at `position`. Exact, or `rollback_unsupported`."""
    check_exact(source, position)
    if any(held.keys.shape[-2] < position for held in source.layers):
        raise ShardlineError(
            "rollback_unsupported", f"a sliding window has moved on before position {position}", position=position
        )
    for held, layer in zip(source.layers, target.layers, strict=True):
        layer.update(held.keys[:, :, :position], held.values[:, :, :position])


def save(cache: DynamicCache, shard: str) -> bytes:
    """The cache as one safetensors document; `shard` says whose it is (any text, compared by `restore`)."""
    tensors = {}
    tokens = tokens_in(cache)
    if tokens:
        for index, layer in enumerate(cache.layers):
            tensors[f"{index}.keys"] = layer.keys.contiguous()
            tensors[f"{index}.values"] = layer.values.contiguous()
    # One entry only: the writer keeps no order among several, and a state shall have the same bytes every time.
    return bytes(save_tensors(tensors, {"slot": f"{FORM} {tokens} {shard}"}))


def restore(cache: DynamicCache, state: bytes, shard: str, forms: tuple[LayerForm, ...]) -> None:
    """Fill an empty cache from what `save` gave; `snapshot_invalid` for what is damaged, or not of this Shard."""
    label, tensors = _read(state)
    form, _, rest = label.partition(" ")
    count, _, owner = rest.partition(" ")
    if form != FORM or owner != shard:
        raise _invalid("it is of another Shard")
    if not count.isdecimal():
        raise _invalid("it does not say how many tokens it holds")
    tokens = int(count)
    expected = {
        f"{index}.{part}": ((1, shape[0], form.kept(tokens), shape[1]), form.dtype)
        for index, form in enumerate(forms)
        for part, shape in (("keys", form.keys), ("values", form.values))
        if tokens
    }
    if {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} != expected:
        raise _invalid("its tensors are not those of this Shard")
    for index, layer in enumerate(cache.layers if tokens else ()):
        keys, values = tensors[f"{index}.keys"], tensors[f"{index}.values"]
        if isinstance(layer, RoomyLayer):
            layer.hold(keys, values)
        else:
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, tokens


def _read(state: bytes) -> tuple[str, dict[str, torch.Tensor]]:
    try:
        header = parse_header(state, len(state))
        return header.metadata.get("slot", ""), load_tensors(state)
    except (ShardlineError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise _invalid(f"it is damaged ({error!s:.100})") from None


def _invalid(why: str) -> ShardlineError:
    return ShardlineError("snapshot_invalid", f"this saved slot cannot be restored: {why}")
