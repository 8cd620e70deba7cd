"""Whether the numbers of a GGUF header can be true, before anything is started with them.

Owns the refusals that an engine would only make after seconds, by ending, or by numbers that are none: values outside
of what any model has, keys that contradict one another or the tensor table, and (for llama.cpp) keys that are stored as
a kind that the library does not read. Each names its key. What a model is, it does not say. Pure.
Shown by tests/formats/test_soundness.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardline.errors import ShardlineError
from shardline.formats.architectures import of_gguf
from shardline.formats.gguf import Array, GGUFHeader
from shardline.formats.layers import place_of
from shardline.formats.vocabulary import check_distinct, has_vocabulary

LAYERS_LIMIT = 4096
CONTEXT_LIMIT = (1 << 31) - 1
"""Tokens. Engines count positions in 32 bits."""
FLOAT_LIMIT = 1e12
"""Beyond any scale, base or bound of a model; products of such numbers leave the range of float32."""
EXPERTS_LIMIT = 512
"""Of llama.cpp, which ends when there are more."""

_COUNTS = (
    "context_length", "embedding_length", "feed_forward_length", "vocab_size", "expert_count",
    "expert_used_count", "rope.dimension_count", "rope.scaling.original_context_length",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
)  # fmt: skip
_FRACTIONS = (
    "rope.freq_base", "rope.scaling.factor", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
)  # fmt: skip
"""Keys that llama.cpp reads as u32 and as f32 and nothing else, whatever the architecture, and that parts of a model
have as they are."""
_NEEDED = ("context_length", "embedding_length", "block_count")


class _Keys:
    """The keys `ARCHITECTURE.…` of a header."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.architecture = header.text("general.architecture")

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def count(self, key: str) -> int | None:
        """A number for all layers; None where the key is absent or an array."""
        name = self.name(key)
        value = self.header.kv.get(name)
        return None if value is None or isinstance(value, Array) else self.header.integer(name)

    def of_layers(self, key: str, blocks: int) -> list[int]:
        """For each layer; empty where the key is absent, or of another length, or there are too many layers."""
        name = self.name(key)
        if blocks > LAYERS_LIMIT:
            return []
        if isinstance(self.header.kv.get(name), Array):
            numbers = [int(number) for number in self.header.numbers(name)]
            return numbers if len(numbers) == blocks else []
        number = self.count(key)
        return [] if number is None else [number] * blocks

    def fractions(self) -> Iterator[tuple[str, float]]:
        """Name and value of every number that is no integer."""
        prefix = f"{self.architecture}."
        for name, value in self.header.kv.items():
            if not name.startswith(prefix):
                continue
            if isinstance(value, float):
                yield name, value
            elif isinstance(value, Array) and value.kind in ("f32", "f64"):
                for number in self.header.numbers(name):
                    yield name, float(number)


def check_numbers(header: GGUFHeader) -> None:
    """`model_file_invalid`, naming the key, for numbers that no model has, whichever engine computes it."""
    keys = _Keys(header)
    for name, value in keys.fractions():
        _check_fraction(name.removeprefix(f"{keys.architecture}."), name, value)
    context = keys.count("context_length")
    if context is not None and not 1 <= context <= CONTEXT_LIMIT:
        raise _bad(f"key {keys.name('context_length')} is {context}, expected 1 to {CONTEXT_LIMIT}")
    _check_heads(keys)
    _check_experts(keys)


def _check_fraction(key: str, name: str, value: float) -> None:
    if not math.isfinite(value) or abs(value) > FLOAT_LIMIT:
        raise _bad(f"key {name} is {value:g}, expected a number of at most {FLOAT_LIMIT:g}")
    if key.startswith("rope.freq_base") and value <= 0:
        raise _bad(f"key {name} is {value:g}, expected a number above 0")
    if key == "rope.scaling.factor" and value < 0:
        raise _bad(f"key {name} is {value:g}, expected 0 or more")
    if key.endswith("_epsilon") and not 0 <= value < 1:
        raise _bad(f"key {name} is {value:g}, expected 0 to 1")


def _check_heads(keys: _Keys) -> None:
    recurrent = of_gguf(keys.architecture).rollback == "never"
    blocks = keys.count("block_count") or 0
    for key in ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"):
        if keys.count(key) == 0 and not recurrent:
            raise _bad(f"key {keys.name(key)} is 0")
    heads, kept = (keys.of_layers(key, blocks) for key in ("attention.head_count", "attention.head_count_kv"))
    for layer, (all_heads, kv_heads) in enumerate(zip(heads, kept, strict=False)):
        if all_heads and kv_heads and all_heads % kv_heads:
            name = keys.name("attention.head_count_kv")
            raise _bad(f"key {name} is {kv_heads} for layer {layer}, which does not divide its {all_heads} heads")
    turned = keys.count("rope.dimension_count")
    if turned is not None and turned % 2:
        raise _bad(f"key {keys.name('rope.dimension_count')} is {turned}, expected an even number")


def _check_experts(keys: _Keys) -> None:
    experts, used = keys.count("expert_count") or 0, keys.count("expert_used_count") or 0
    if used > experts or (experts > 0 and used < 1):
        raise _bad(f"key {keys.name('expert_used_count')} is {used}, of {experts} experts")


def check_for_llama(header: GGUFHeader) -> None:
    """`model_file_invalid`, naming the key, for what llama.cpp does not load, or ends at, in any architecture."""
    keys = _Keys(header)
    for key in _NEEDED:
        header.integer(keys.name(key))
    wanted = {keys.name(key): "u32" for key in _COUNTS} | {keys.name(key): "f32" for key in _FRACTIONS}
    wanted |= {key: "u32" for key in header.kv if key.startswith("tokenizer.ggml.") and key.endswith("_token_id")}
    for name, kind in wanted.items():
        if header.kinds.get(name, kind) not in (kind, "array"):
            raise _bad(f"key {name} is stored as {header.kinds[name]}, which llama.cpp does not read: it wants {kind}")
    if (keys.count("expert_count") or 0) > EXPERTS_LIMIT:
        raise _bad(f"key {keys.name('expert_count')} is {keys.count('expert_count')}, {EXPERTS_LIMIT} is the limit")
    if has_vocabulary(header):
        check_distinct(header)
    _check_tensors(keys)


def _check_tensors(keys: _Keys) -> None:
    """The keys against the tensors of this file: those that every architecture has alike, and more in those that both
    engines were proven with."""
    header = keys.header
    blocks = header.integer(keys.name("block_count"))
    width = header.integer(keys.name("embedding_length"))
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != width:
        raise _bad(f"key {keys.name('embedding_length')} is {width}, the embedding has rows of {embedding.shape[0]}")
    beyond = [name for name in header.tensors if isinstance(place := place_of(name), int) and place >= blocks]
    if beyond:
        raise _bad(f"key {keys.name('block_count')} is {blocks}, but there is a tensor {beyond[0]}")
    if of_gguf(keys.architecture).torch != "supported":
        return  # others fuse matrices, or count otherwise: who knows them all?
    inner = keys.of_layers("feed_forward_length", blocks)
    for layer, length in enumerate(inner):
        down = header.tensors.get(f"blk.{layer}.ffn_down.weight")
        if down is not None and down.shape[0] != length:
            raise _bad(f"key {keys.name('feed_forward_length')} is {length}, {down.name} has rows of {down.shape[0]}")
    _check_keys_of_heads(keys, blocks, width)


def _check_keys_of_heads(keys: _Keys, blocks: int, width: int) -> None:
    heads = keys.of_layers("attention.head_count", blocks)
    if not any(heads):
        raise _bad(f"key {keys.name('attention.head_count')} is missing")
    turned, whole = keys.count("rope.dimension_count"), keys.count("attention.key_length") or width // max(heads)
    if turned is not None and not 0 < turned <= whole:
        raise _bad(f"key {keys.name('rope.dimension_count')} is {turned}, of heads with a width of {whole}")
    kept = keys.of_layers("attention.head_count_kv", blocks) or heads
    for layer, (all_heads, kv_heads) in enumerate(zip(heads, kept, strict=False)):
        if not all_heads:
            continue
        for tensor, key in (("attn_k", "attention.key_length"), ("attn_v", "attention.value_length")):
            matrix = keys.header.tensors.get(f"blk.{layer}.{tensor}.weight")
            widths = {keys.count(key) or width // all_heads, keys.count(f"{key}_swa")}
            if matrix is None or len(matrix.shape) != 2 or matrix.shape[1] in {kv_heads * (w or 0) for w in widths}:
                continue
            raise _bad(
                f"{kv_heads} heads of key {keys.name('attention.head_count_kv')} with a width of"
                f" {keys.count(key) or width // all_heads} do not make the {matrix.shape[1]} rows of {matrix.name}"
            )


def _bad(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"damaged GGUF file: {message}", reason="damaged")
