"""What the llama.cpp engine is asked to load, and what the files say of it: options, and a header that was checked.

Owns the options of `ShardSpec` that this engine knows, and the keys by which a part knows itself: the original model is
never looked at for one. Nothing of the library is used. Shown by tests/model/test_llama_shard.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader, read_header
from shardline.formats.gguf_files import SHARD_LAYERS, part_paths, read_model
from shardline.formats.layers import check_range
from shardline.formats.shape import ModelShape, shape_of_gguf
from shardline.formats.shard_gguf import RECIPE
from shardline.model.backend import ShardSpec
from shardline.model.llama_context import KV_TYPES, SESSIONS_LIMIT

KV_TOKENS = 65_536
"""KV capacity where nobody says one: not more than a full context either."""
ROWS = 512
"""Rows of one call: the largest prefill chunk, unless more are asked for."""
TAPS = ("sampler", "layer_end", "nextn", "callback")

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""`general.file_type`: what the whole model was quantised as, the same in all its parts."""


@dataclass(frozen=True, slots=True)
class Options:
    """`ShardSpec.options` of this engine."""

    content_id: str = ""
    shard_file: Path | None = None
    """The Shard's own file; None: the whole model, from its original."""
    vocabulary_file: Path | None = None
    """For the text of a head or tail that is not the whole model."""
    kv_tokens: int | None = None
    sessions: int | None = None
    rows: int = ROWS
    kv_type: str = "f16"
    gpu_layers: int = -1
    """-1: all layers on the accelerators, if there are any."""
    swa_full: bool = False
    tap: str = "sampler"

    @classmethod
    def of(cls, values: dict[str, Any]) -> Options:
        """`setting_invalid` for what this engine does not know or cannot take."""
        unknown = set(values) - set(cls.__slots__)
        if unknown:
            raise ShardlineError("setting_invalid", f"the llama engine has no option {', '.join(sorted(unknown))}")
        given = {k: v for k, v in values.items() if v is not None}
        for name in ("shard_file", "vocabulary_file"):
            if name in given:
                given[name] = Path(given[name])
        options = cls(**given)
        for name, allowed in (("kv_type", tuple(KV_TYPES)), ("tap", TAPS)):
            if getattr(options, name) not in allowed:
                raise setting(name, f"{name} {getattr(options, name)!r:.40}; the llama engine has {', '.join(allowed)}")
        for name, low, high in (("kv_tokens", 1, 1 << 31), ("sessions", 1, SESSIONS_LIMIT), ("rows", 1, 1 << 16)):
            value = getattr(options, name)
            if value is not None and not low <= value <= high:
                raise setting(name, f"{name} is {value}, expected {low} to {high}")
        return options


@dataclass(frozen=True, slots=True)
class Source:
    """The file that is loaded, its header read."""

    path: Path
    header: GGUFHeader
    shape: ModelShape
    first: int
    last: int
    n_layers: int

    @property
    def whole(self) -> bool:
        return self.is_head and self.is_tail

    @property
    def is_head(self) -> bool:
        return self.first == 0

    @property
    def is_tail(self) -> bool:
        return self.last == self.n_layers

    @property
    def quantisation(self) -> str:
        return quantisation_of(self.header)


def quantisation_of(header: GGUFHeader) -> str:
    """As what a model was quantised, in a word: `Q4_K_M`."""
    return _FILE_TYPES.get(header.integer("general.file_type", -1), "mixed")


def read_source(spec: ShardSpec, options: Options) -> Source:
    if options.shard_file is None:
        model = read_model(spec.model)
        shape = shape_of_gguf(model.header)
        check_range(spec.first, spec.last, shape.n_layers)
        if (spec.first, spec.last) != (0, shape.n_layers):
            raise setting("shard_file", f"layers {spec.first}:{spec.last} are a part, which needs a Shard file")
        return Source(part_paths(spec.model)[0], model.header, shape, 0, shape.n_layers, shape.n_layers)
    header = read_header(options.shard_file)
    if header.integer("shardline.recipe", 0) != RECIPE:
        raise invalid(options.shard_file, "it was not made by a version of Shardline that this engine knows")
    first, last, n_layers = (int(n) for n in header.numbers(SHARD_LAYERS))
    if (first, last) != (spec.first, spec.last):
        raise invalid(options.shard_file, f"it has layers {first}:{last}, not {spec.first}:{spec.last}")
    if header.text("shardline.source.content_id", "") != options.content_id:
        raise invalid(options.shard_file, "it is of another Model Artifact")
    shape = shape_of_gguf(header)
    if shape.n_layers != last - first:
        raise invalid(options.shard_file, f"it has {shape.n_layers} layers, not {last - first}")
    return Source(options.shard_file, header, shape, first, last, n_layers)


def context_length(spec: ShardSpec, shape: ModelShape) -> int:
    trained = shape.context_length or KV_TOKENS
    if spec.context_length is None:
        return trained
    if not 1 <= spec.context_length <= trained:
        raise setting("context_length", f"context of {spec.context_length} tokens; the model was trained for {trained}")
    return spec.context_length


def setting(name: str, why: str) -> ShardlineError:
    return ShardlineError("setting_invalid", why, param=name)


def invalid(path: Path, why: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"{path.name!r:.200} is no usable Shard file: {why}", reason="damaged")
