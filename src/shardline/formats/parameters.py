"""How many numbers each part of a model has, computed from its config.json alone: for planning where no file is.

Owns one formula for each kind of attention and of feed-forward layer, and the list of model types that they hold for;
of others nothing is guessed. Also what a number takes: by the configuration's dtype or quantisation, or scaled to the
size of a build. Tensor tables, where there are any, are the better source (memory.py). Pure. Shown by
tests/formats/test_parameters.py, against the models of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.errors import ShardlineError
from shardline.formats.memory import WeightBytes
from shardline.formats.session_state import compress_ratios
from shardline.formats.shape import WIDTH_LIMIT, ConfigFields, ModelShape

_BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}
_FP8_BITS, _FP4_BITS = 8.0, 4.25
"""Scales included: one byte for 32 numbers of four bits; those of blocks of 128 by 128 are nothing."""


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Numbers of one layer: those that every token is computed with, and those of all its routed experts."""

    always: int
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of a whole model, layers for prediction not counted."""

    layers: tuple[LayerParameters, ...]
    embedding: int
    output: int
    """Matrix, norm and what else stands behind the last layer; the matrix not, where it is the embedding's."""
    tied: bool
    used: float
    """The part of routed experts that one token is computed with."""

    @property
    def total(self) -> int:
        return self.embedding + self.output + sum(layer.always + layer.experts for layer in self.layers)

    @property
    def active(self) -> int:
        """Numbers that are read for one token, its row of the embedding not counted."""
        tied = self.embedding if self.tied else 0
        read = sum(layer.always + round(layer.experts * self.used) for layer in self.layers)
        return tied + self.output + read


@dataclass(frozen=True, slots=True)
class Bits:
    """What a number takes, on average, scales included."""

    always: float
    experts: float
    ends: float
    """Of the embedding and the output matrix."""

    @classmethod
    def equal(cls, bits: float) -> Bits:
        """As much everywhere."""
        return cls(bits, bits, bits)

    @classmethod
    def of_build(cls, parameters: Parameters, size_bytes: int, dense: float) -> Bits:
        """Those of a build of that size, whose numbers outside of routed experts take `dense` bits each."""
        experts = sum(layer.experts for layer in parameters.layers)
        left = 8 * size_bytes - dense * (parameters.total - experts)
        if left < 0 or not experts:
            raise ShardlineError(
                "setting_invalid",
                f"a build of {size_bytes} bytes has no room for {dense:g} bits a number outside of routed experts",
                param="dense_bits",
            )
        return cls(dense, left / experts, dense)


class _Needed:
    """The fields of a config.json that a formula cannot do without."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.fields = ConfigFields.of(config)

    def __call__(self, name: str, *older: str) -> int:
        return self.fields.need(name, WIDTH_LIMIT, *older)

    def get(self, name: str, *older: str) -> int:
        return self.fields.get(name, WIDTH_LIMIT, *older) or 0

    def says(self, name: str, default: bool = False) -> bool:
        value = self.fields.fields.get(name)
        return default if value is None else value is True


def _grouped_attention(f: _Needed, shape: ModelShape, layer: int) -> int:
    """Queries, keys, values and output, with biases and norms of heads where the type has them."""
    heads = f("num_attention_heads", "n_head")
    width = shape.key_width or shape.hidden_size // heads
    kv = (shape.kv_heads[layer] if shape.kv_heads else heads) * width
    total = shape.hidden_size * (2 * heads * width + 2 * kv)
    kind = shape.architecture
    if kind == "qwen2" or f.says("attention_bias", kind == "gpt_oss"):
        total += heads * width + 2 * kv + (0 if kind == "qwen2" else shape.hidden_size)
    if kind == "gpt_oss":
        total += heads
    if kind.startswith(("qwen3", "gemma3")):
        total += 2 * width
    if kind.startswith(("qwen3_5", "qwen3_next")):
        total += shape.hidden_size * heads * width  # queries come with a gate of their size
    return total


def _latent_attention(f: _Needed, shape: ModelShape, layer: int) -> int:
    heads, hidden = f("num_attention_heads"), shape.hidden_size
    latent, rope, nope, value = f("kv_lora_rank"), f("qk_rope_head_dim"), f("qk_nope_head_dim"), f("v_head_dim")
    rank = f.get("q_lora_rank")
    queries = heads * (nope + rope)
    total = rank * (hidden + 1 + queries) if rank else hidden * queries
    total += hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden
    return total


def _token_indexer(f: _Needed, shape: ModelShape) -> int:
    heads, width = f("index_n_heads"), f("index_head_dim")
    return f("q_lora_rank") * heads * width + shape.hidden_size * (width + heads) + 2 * width


def _delta_net(f: _Needed, shape: ModelShape) -> int:
    """A gated delta net in place of attention."""
    key_heads, heads = f("linear_num_key_heads"), f("linear_num_value_heads")
    key_width, width = f("linear_key_head_dim"), f("linear_value_head_dim")
    keys, values = key_heads * key_width, heads * width
    hidden = shape.hidden_size
    mixed = 2 * keys + values
    return (
        hidden * (mixed + values + 2 * heads)
        + mixed * f("linear_conv_kernel_dim")
        + 2 * heads
        + width
        + values * hidden
    )


def _compressed_attention(f: _Needed, shape: ModelShape, layer: int) -> int:
    """DeepSeek-V4: one row that is key and value, low ranks on both sides, and what compresses rows of older tokens."""
    hidden, heads, width = shape.hidden_size, f("num_attention_heads"), f("head_dim")
    rank, groups, out = f("q_lora_rank"), f("o_groups"), f("o_lora_rank")
    total = rank * (hidden + 1 + heads * width) + width * (hidden + 1) + heads
    total += heads * width * out + groups * out * hidden
    ratio = compress_ratios(f.fields)[layer]
    if not ratio:
        return total
    series = 2 if ratio == 4 else 1
    total += series * width * (2 * hidden + ratio) + width
    if series > 1:
        index_heads, index_width = f("index_n_heads"), f("index_head_dim")
        total += series * index_width * (2 * hidden + ratio) + index_width
        total += rank * index_heads * index_width + hidden * index_heads
    return total


def _dense_ffn(f: _Needed, shape: ModelShape) -> int:
    return 3 * shape.hidden_size * f("intermediate_size")


def _experts(f: _Needed, shape: ModelShape) -> LayerParameters:
    """Router, shared experts and routed ones."""
    hidden, count = shape.hidden_size, _expert_count(f)
    width = f("moe_intermediate_size", "intermediate_size")
    shared = f.get("n_shared_experts") * width or f.get("shared_expert_intermediate_size")
    always = hidden * count + 3 * hidden * shared
    kind = shape.architecture
    if f.get("n_routed_experts") and kind != "deepseek_v4":
        always += count  # a bias for the choice alone
    elif f.get("shared_expert_intermediate_size"):
        always += hidden  # a gate for the shared one
    each = 3 * hidden * width
    if kind == "gpt_oss":
        always += count
        each += 2 * width + hidden
    return LayerParameters(always, count * each)


def _expert_count(f: _Needed) -> int:
    return f.get("num_experts", "n_routed_experts", "num_local_experts")


def _layer(f: _Needed, shape: ModelShape, layer: int, attention: int) -> LayerParameters:
    hidden = shape.hidden_size
    norms = 4 if shape.architecture.startswith(("gemma2", "gemma3")) else 2
    dense = layer < _leading_dense(f) or layer in f.fields.numbers("mlp_only_layers", WIDTH_LIMIT)
    if not _expert_count(f) or dense:
        return LayerParameters(attention + norms * hidden + _dense_ffn(f, shape))
    found = _experts(f, shape)
    return LayerParameters(attention + norms * hidden + found.always, found.experts)


def _leading_dense(f: _Needed) -> int:
    types = f.fields.names("mlp_layer_types")
    return types.count("dense") if types else f.get("first_k_dense_replace")


def _plain_layer(f: _Needed, shape: ModelShape, layer: int) -> LayerParameters:
    return _layer(f, shape, layer, _grouped_attention(f, shape, layer))


def _latent_layer(f: _Needed, shape: ModelShape, layer: int) -> LayerParameters:
    return _layer(f, shape, layer, _latent_attention(f, shape, layer))


def _indexed_layer(f: _Needed, shape: ModelShape, layer: int, own: bool) -> LayerParameters:
    attention = _latent_attention(f, shape, layer) + (_token_indexer(f, shape) if own else 0)
    return _layer(f, shape, layer, attention)


def _mixed_layer(f: _Needed, shape: ModelShape, layer: int, recurrent: bool) -> LayerParameters:
    return _layer(f, shape, layer, _delta_net(f, shape) if recurrent else _grouped_attention(f, shape, layer))


def _streamed_layer(f: _Needed, shape: ModelShape, layer: int) -> LayerParameters:
    """DeepSeek-V4: streams are mixed in front of and behind attention and experts; some layers route by token id."""
    hidden, streams = shape.hidden_size, f("hc_mult")
    mixing = (2 + streams) * streams * (streams * hidden + 1) + 3
    found = _experts(f, shape)
    types = f.fields.names("mlp_layer_types")
    hashed = types[layer] == "hash_moe" if types else layer < f.get("num_hash_layers")
    choice = f("vocab_size") * f("num_experts_per_tok") if hashed else _expert_count(f)
    attention = _compressed_attention(f, shape, layer)
    return LayerParameters(attention + 2 * hidden + 2 * mixing + found.always + choice, found.experts)


_PLAIN = frozenset({
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3",
    "gemma3_text", "phi3", "gpt_oss", "granite", "granitemoe",
})  # fmt: skip
_MIXED = frozenset({"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"})


def parameters_of_config(
    config: Mapping[str, Any],
    shape: ModelShape,
    *,
    indexed: tuple[bool, ...] | None,
    recurrent: tuple[bool, ...] | None,
) -> Parameters:
    """The numbers of the model that this config.json describes. `indexed`, `recurrent`: as layer_kinds.py has them.

    Raises `architecture_unsupported` for a model type that no formula is known for, `model_file_invalid` where a field
    of the formula is missing.
    """
    f = _Needed(config)
    kind = shape.architecture
    layers: list[LayerParameters] = []
    for layer in range(shape.n_layers):
        if kind in _PLAIN:
            layers.append(_plain_layer(f, shape, layer))
        elif kind in _MIXED:
            layers.append(_mixed_layer(f, shape, layer, recurrent is not None and recurrent[layer]))
        elif kind == "deepseek_v3":
            layers.append(_latent_layer(f, shape, layer))
        elif kind == "glm_moe_dsa":
            layers.append(_indexed_layer(f, shape, layer, indexed is None or indexed[layer]))
        elif kind == "deepseek_v4":
            layers.append(_streamed_layer(f, shape, layer))
        else:
            raise ShardlineError(
                "architecture_unsupported",
                f"how many numbers a {kind} model has cannot be told from its config.json",
                advice="Name a GGUF file (its first bytes are enough) or the folder with its safetensors files.",
                architecture=kind,
            )
    tied = config.get("tie_word_embeddings", f.says("tie_word_embeddings", kind.startswith("gemma"))) is True
    matrix = f("vocab_size") * shape.hidden_size
    behind = shape.hidden_size + (0 if tied else matrix)
    if kind == "deepseek_v4":
        streams = f("hc_mult")
        behind += streams * (streams * shape.hidden_size + 1) + 1
    count = _expert_count(f)
    used = f("num_experts_per_tok", "experts_per_token") / count if count else 0.0
    return Parameters(tuple(layers), matrix, behind, tied, min(1.0, used))


def dtype_of(config: Mapping[str, Any]) -> str:
    """In what its checkpoint is stored and meant to run: `float32`, `float16` or `bfloat16`; the last where it names
    none of them."""
    text = ConfigFields.of(config).fields
    named = (fields.get(key) for fields in (config, text) for key in ("dtype", "torch_dtype"))
    return next((name for name in named if isinstance(name, str) and name in _BITS), "bfloat16")


def bits_of_config(config: Mapping[str, Any]) -> Bits:
    """What the checkpoint of this config.json takes: its dtype, or FP8 with experts in FP8 or FP4.

    Raises `architecture_unsupported` for a quantisation whose size is not known.
    """
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return Bits.equal(_BITS[dtype_of(config)])
    method = quantised.get("quant_method")
    if method != "fp8":
        raise ShardlineError(
            "architecture_unsupported",
            f"the size of a checkpoint with the quantisation {method!r:.40} is not known",
            advice="Say how large the files are: --size.",
        )
    experts = quantised.get("expert_dtype", config.get("expert_dtype"))
    return Bits(_FP8_BITS, _FP4_BITS if experts == "fp4" else _FP8_BITS, 16.0)


def weights_of(parameters: Parameters, bits: Bits) -> tuple[WeightBytes, tuple[int, ...]]:
    """Bytes by place, and those of routed experts among them, layer by layer."""
    experts = tuple(round(layer.experts * bits.experts / 8) for layer in parameters.layers)
    layers = tuple(
        round(layer.always * bits.always / 8) + size for layer, size in zip(parameters.layers, experts, strict=True)
    )
    embedding = round(parameters.embedding * bits.ends / 8)
    output = round(parameters.output * bits.ends / 8)
    return WeightBytes(layers, embedding, output, embedding if parameters.tied else 0, 0), experts
