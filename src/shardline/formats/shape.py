"""The measures of a model that its own files state: layers, widths, heads, vocabulary, context.

Owns reading them from GGUF metadata or from a config.json, with checks: any integer type passes, a value that cannot be
true is `model_file_invalid` and named. What is not stated is None; nothing is guessed from an architecture's name, but
for what the table of architectures knows of its caches.
Pure. Shown by tests/formats/test_shape.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.errors import ShardlineError
from shardline.formats.architectures import LlamaRules, of_gguf
from shardline.formats.gguf import Array, GGUFHeader
from shardline.formats.soundness import LAYERS_LIMIT, check_numbers

WIDTH_LIMIT = 1 << 24
CONTEXT_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Measures of a model; per-layer tuples have `n_layers` entries."""

    architecture: str
    """`general.architecture`, or `model_type` of the text model."""
    n_layers: int
    """Layers of a route; those for multi-token prediction are not counted."""
    hidden_size: int
    vocab_size: int | None
    context_length: int | None
    kv_heads: tuple[int, ...] | None
    """Heads that a layer keeps keys and values of; 0 in a layer that keeps none."""
    key_width: int | None
    """Elements of one head's key."""
    value_width: int | None
    latent_width: int | None = None
    """Elements that a layer with compressed KV (MLA) keeps for a token, all heads together."""
    sliding_window: int | None = None
    indexer: tuple[int, ...] = ()
    """Elements that a layer keeps of a token to find by which rows it attends to; empty: no layer does."""

    def kv_elements(self, layer: int) -> int | None:
        """Elements of keys and values that `layer` keeps of one token; None where the files do not say it."""
        if self.latent_width is not None:
            return self.latent_width
        if self.kv_heads is None or self.key_width is None or self.value_width is None:
            return None
        return self.kv_heads[layer] * (self.key_width + self.value_width)

    def cache_elements(self, layer: int) -> int | None:
        """The same with what its indexer keeps: all that grows with each token."""
        elements = self.kv_elements(layer)
        return None if elements is None else elements + (self.indexer[layer] if self.indexer else 0)


def shape_of_gguf(header: GGUFHeader) -> ModelShape:
    """Measures from the metadata of a GGUF model (its first part), all of whose numbers can be true."""
    check_numbers(header)
    fields = _Gguf(header)
    blocks = fields.need("block_count", LAYERS_LIMIT)
    predicting = fields.get("nextn_predict_layers", LAYERS_LIMIT) or 0
    if predicting >= blocks:
        raise _bad(f"key {fields.name('nextn_predict_layers')} is {predicting}, of {blocks} layers")
    n_layers = blocks - predicting
    hidden = fields.need("embedding_length", WIDTH_LIMIT)
    heads = fields.per_layer("attention.head_count", blocks)
    kv_heads = fields.per_layer("attention.head_count_kv", blocks) or heads
    width = hidden // max(heads) if heads and max(heads) and hidden % max(heads) == 0 else None
    vocabulary = fields.get("vocab_size", WIDTH_LIMIT)
    tokens = header.kv.get("tokenizer.ggml.tokens")
    if vocabulary is None and isinstance(tokens, Array):
        vocabulary = tokens.count
    rank = fields.get("attention.kv_lora_rank", WIDTH_LIMIT)
    return ModelShape(
        architecture=fields.architecture,
        n_layers=n_layers,
        hidden_size=hidden,
        vocab_size=vocabulary,
        context_length=fields.get("context_length", CONTEXT_LIMIT) or None,
        kv_heads=kv_heads[:n_layers] if kv_heads else None,
        key_width=fields.get("attention.key_length", WIDTH_LIMIT) or width,
        value_width=fields.get("attention.value_length", WIDTH_LIMIT) or width,
        latent_width=rank + (fields.get("rope.dimension_count", WIDTH_LIMIT) or 0) if rank else None,
        sliding_window=fields.get("attention.sliding_window", CONTEXT_LIMIT) or None,
        indexer=_indexer(fields, blocks)[:n_layers],
    )


def _indexer(fields: _Gguf, blocks: int) -> tuple[int, ...]:
    width = fields.get("attention.indexer.key_length", WIDTH_LIMIT)
    if not width:
        return ()
    rules = of_gguf(fields.architecture).llama or LlamaRules()
    lead = (fields.get("leading_dense_block_count", WIDTH_LIMIT) or 0) if rules.sparse_layer else 0
    # Layers that share the indexer of another keep nothing of their own.
    own = fields.per_layer("attention.indexer.types", blocks) or (1,) * blocks
    kept = width * (2 if rules.indexer_values else 1)
    return tuple(kept if layer >= lead and own[layer] else 0 for layer in range(blocks))


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Measures from a config.json; of a model with several modalities, those of its text model."""
    fields = ConfigFields.of(config)
    n_layers = fields.need("num_hidden_layers", LAYERS_LIMIT, "n_layer", "num_layers")
    hidden = fields.need("hidden_size", WIDTH_LIMIT, "n_embd", "d_model")
    heads = fields.get("num_attention_heads", WIDTH_LIMIT, "n_head")
    kv_heads = fields.get("num_key_value_heads", WIDTH_LIMIT) or heads
    width = fields.get("head_dim", WIDTH_LIMIT) or (hidden // heads if heads and hidden % heads == 0 else None)
    rank = fields.get("kv_lora_rank", WIDTH_LIMIT)
    windowed = fields.fields.get("use_sliding_window") is not False
    return ModelShape(
        architecture=fields.architecture,
        n_layers=n_layers,
        hidden_size=hidden,
        vocab_size=fields.get("vocab_size", WIDTH_LIMIT),
        context_length=fields.get("max_position_embeddings", CONTEXT_LIMIT, "n_positions", "n_ctx"),
        kv_heads=(kv_heads,) * n_layers if kv_heads else None,
        key_width=width,
        value_width=width,
        latent_width=rank + (fields.get("qk_rope_head_dim", WIDTH_LIMIT) or 0) if rank else None,
        sliding_window=(fields.get("sliding_window", CONTEXT_LIMIT) or None) if windowed else None,
    )


class _Gguf:
    """The keys `ARCHITECTURE.…` of a header."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.architecture = header.text("general.architecture")

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str, limit: int) -> int | None:
        name = self.name(key)
        return _checked(name, self.header.integer(name), limit) if name in self.header.kv else None

    def need(self, key: str, limit: int) -> int:
        name = self.name(key)
        return _positive(name, self.header.integer(name), limit)

    def per_layer(self, key: str, layers: int) -> tuple[int, ...] | None:
        """A number for all layers, or an array with one for each."""
        name = self.name(key)
        value = self.header.kv.get(name)
        if not isinstance(value, Array):
            number = self.get(key, WIDTH_LIMIT)
            return None if number is None else (number,) * layers
        numbers = self.header.numbers(name)
        if len(numbers) != layers:
            raise _bad(f"key {name} has {len(numbers)} entries for {layers} layers")
        return tuple(_checked(name, number, WIDTH_LIMIT) for number in numbers)


class ConfigFields:
    """The fields of a config.json; further names of a field are those that older model types use."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        architecture = fields.get("model_type")
        if not isinstance(architecture, str) or not architecture:
            raise _bad("config.json has no model_type")
        self.architecture = architecture

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ConfigFields:
        """Those of the text model, where there are several modalities."""
        text = config.get("text_config")
        return cls(text if isinstance(text, Mapping) else config)

    def numbers(self, name: str, limit: int) -> tuple[int, ...]:
        """A list of numbers, one a layer and perhaps more; empty where it is absent."""
        values = self.fields.get(name)
        if values is None:
            return ()
        if not isinstance(values, list) or len(values) > 2 * LAYERS_LIMIT:
            raise _bad(f"config.json: {name} is no list of numbers")
        return tuple(_checked(f"config.json: {name}", value, limit) for value in values)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of words, one a layer and perhaps more; empty where it is absent."""
        values = self.fields.get(name)
        if values is None:
            return ()
        if (
            not isinstance(values, list)
            or len(values) > 2 * LAYERS_LIMIT
            or not all(isinstance(v, str) for v in values)
        ):
            raise _bad(f"config.json: {name} is no list of words")
        return tuple(values)

    def get(self, name: str, limit: int, *older: str) -> int | None:
        for key in (name, *older):
            value = self.fields.get(key)
            if value is not None:
                return _checked(f"config.json: {key}", value, limit)
        return None

    def need(self, name: str, limit: int, *older: str) -> int:
        value = self.get(name, limit, *older)
        if value is None:
            raise _bad(f"config.json: {name} is missing")
        return _positive(f"config.json: {name}", value, limit)


def _checked(name: str, value: object, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise _bad(f"{name} is {value!r:.60}, expected an integer from 0 to {limit}")
    return value


def _positive(name: str, value: object, limit: int) -> int:
    number = _checked(name, value, limit)
    if number == 0:
        raise _bad(f"{name} is 0")
    return number


def _bad(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", message, reason="damaged")
