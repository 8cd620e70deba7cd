"""The Hot KV State of one slot: a transformers cache for the layers of the Shard, counted, rolled back and saved.

Owns when a rollback is exact and the form of a saved slot (one safetensors document). Knows no model and computes
nothing. Numbers are read from the cache itself, never kept beside it. Shown by tests/model/test_torch_cache.py.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from shardline.errors import ShardlineError
from shardline.formats.safetensors import parse_header
from shardline.model.torch_layers import (
    LayerForm,
    counts_tokens,
    form_of,
    is_positional,
    put_back,
    tensors_of,
    window_of,
)

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


class SlotCache(DynamicCache):  # type: ignore[misc]
    """The cache of one slot. It counts its tokens itself where no layer of the Shard does."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        made: list[Any] = self.layers
        self.layers: list[Any] = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in made]
        self._counting = next((layer for layer in self.layers if counts_tokens(layer)), None)
        self._seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that the cache has seen."""
        if self._counting is None:
            return self._seen
        return int(self._counting.get_seq_length())

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask is for; without attention nothing is masked by it."""
        if self._counting is None:
            return self._seen + query_length, 0
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def note(self, tokens: int) -> None:
        """So many tokens went through all layers."""
        self._seen += tokens

    def reset(self) -> None:
        super().reset()
        self._seen = 0


def new_cache(config: PreTrainedConfig) -> SlotCache:
    """An empty cache for the layers that `config` describes."""
    return SlotCache(config)


def forms_of(cache: SlotCache) -> tuple[LayerForm, ...]:
    """The forms of all layers of a cache that holds something."""
    return tuple(form_of(layer) for layer in cache.layers)


def tokens_in(cache: SlotCache) -> int:
    """Positions that the cache has seen, as its layers count them."""
    return cache.get_seq_length()


def check_exact(cache: SlotCache, position: int) -> None:
    """`rollback_unsupported` where what the cache was at `position` is not in it any more: a sliding window that has
    moved on no longer holds what came before it, and a recurrent or compressed state never does."""
    tokens = tokens_in(cache)
    if not 0 <= position <= tokens:
        raise ShardlineError(
            "rollback_unsupported", f"position {position} lies outside of the {tokens} tokens held", position=position
        )
    if position == tokens:
        return
    if not all(is_positional(layer) for layer in cache.layers):
        raise ShardlineError(
            "rollback_unsupported",
            f"its layers keep a state that cannot be taken back: {tokens} tokens are held",
            position=position,
        )
    windows = [w for w in map(window_of, cache.layers) if w is not None]
    if windows and tokens >= min(windows):
        raise ShardlineError(
            "rollback_unsupported",
            f"the sliding window of {min(windows)} has passed: {tokens} tokens are held",
            position=position,
        )


def rollback(cache: SlotCache, position: int) -> None:
    """Drop all at and above `position`. Exact, or `rollback_unsupported`."""
    check_exact(cache, position)
    tokens = tokens_in(cache)
    if position == tokens:
        return
    if position == 0:
        cache.reset()
    else:
        cache.crop(position - tokens)


def fork(source: SlotCache, target: SlotCache, position: int) -> None:
    """Fill an empty cache with a copy of what `source` was at `position`. Exact, or `rollback_unsupported`; a copy of
    all that it holds is always exact."""
    check_exact(source, position)
    for held, layer in zip(source.layers, target.layers, strict=True):
        form = form_of(held)
        tensors = tensors_of(held, form)
        if is_positional(held) and window_of(held) is None:
            layer.update(tensors["keys"][:, :, :position], tensors["values"][:, :, :position])
            if "indexer_keys" in tensors:
                layer.update_indexer(tensors["indexer_keys"][:, :position])
        elif position < tokens_in(source):
            layer.update(tensors["keys"][:, :, :position], tensors["values"][:, :, :position])
        else:
            put_back(layer, form, {name: tensor.clone() for name, tensor in tensors.items()}, position)
    target.note(position)


def save(cache: SlotCache, shard: str) -> bytes:
    """The cache as one safetensors document; `shard` says whose it is (any text, compared by `restore`)."""
    tensors: dict[str, torch.Tensor] = {}
    tokens = tokens_in(cache)
    if tokens:
        for index, layer in enumerate(cache.layers):
            held = tensors_of(layer, form_of(layer))
            tensors |= {f"{index}.{name}": tensor.clone().contiguous() for name, tensor in held.items()}
    # One entry only: the writer keeps no order among several, and a state shall have the same bytes every time.
    return bytes(save_tensors(tensors, {"slot": f"{FORM} {tokens} {shard}"}))


def restore(cache: SlotCache, state: bytes, shard: str, forms: tuple[LayerForm, ...]) -> None:
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
        f"{index}.{name}": what
        for index, layer_form in enumerate(forms)
        for name, what in (layer_form.expected(tokens) if tokens else {}).items()
    }
    if {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} != expected:
        raise _invalid("its tensors are not those of this Shard")
    for index, layer in enumerate(cache.layers if tokens else ()):
        prefix = f"{index}."
        held = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if isinstance(layer, RoomyLayer):
            layer.hold(held["keys"], held["values"])
        else:
            put_back(layer, forms[index], held, tokens)
    cache.note(tokens)


def _read(state: bytes) -> tuple[str, dict[str, torch.Tensor]]:
    try:
        header = parse_header(state, len(state))
        return header.metadata.get("slot", ""), load_tensors(state)
    except (ShardlineError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise _invalid(f"it is damaged ({error!s:.100})") from None


def _invalid(why: str) -> ShardlineError:
    return ShardlineError("snapshot_invalid", f"this saved slot cannot be restored: {why}")
