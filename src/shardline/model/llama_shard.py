"""Loading a Shard for the llama.cpp engine: from a `ShardSpec` to a backend that is ready to compute.

Owns what is read of the files (a part knows itself from the keys of its own file, and the original is never looked at
for one), what the context is made with, and what is told of the Shard. Computing is in llama_backend.py.
Shown by tests/model/test_llama_shard.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.errors import ShardlineError
from shardline.formats import architectures
from shardline.formats.gguf import GGUFHeader, read_header
from shardline.formats.gguf_files import part_paths, read_model
from shardline.formats.layers import check_range
from shardline.formats.shape import ModelShape, shape_of_gguf
from shardline.model.backend import ShardDescription, ShardSpec
from shardline.model.llama_backend import LlamaBackend, LoadedShard
from shardline.model.llama_context import (
    KV_TYPES,
    SESSIONS_LIMIT,
    TAP_SEQUENCE,
    ContextPlan,
    LlamaContext,
    LlamaModel,
    Progress,
    usable_cores,
)
from shardline.model.llama_embedding import EmbeddingMatrix
from shardline.model.llama_library import ROPE_MULTI, LlamaLibrary, library
from shardline.model.llama_rows import RowArrays
from shardline.model.llama_tap import CallbackTap, SamplerTap, Tap, layer_input_tap, nextn_tap
from shardline.model.llama_text import LlamaText, check_text, has_text
from shardline.wire.messages import EngineInfo
from shardline.wire.steps import TOKENS_ONLY, LayoutTensor, SeamLayout

KV_TOKENS = 65_536
"""KV capacity where nobody says one: not more than a full context either."""
ROWS = 512
"""Rows of one call: the largest prefill chunk, unless more are asked for."""
SESSIONS = 64
SESSIONS_RECURRENT = 8
"""Each has a state of its own from the start, whether it is used or not."""
TAPS = ("sampler", "layer_end", "nextn", "callback")

_RECIPES = (1,)
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
                raise _setting(
                    name, f"{name} {getattr(options, name)!r:.40}; the llama engine has {', '.join(allowed)}"
                )
        for name, low, high in (("kv_tokens", 1, 1 << 31), ("sessions", 1, SESSIONS_LIMIT), ("rows", 1, 1 << 16)):
            value = getattr(options, name)
            if value is not None and not low <= value <= high:
                raise _setting(name, f"{name} is {value}, expected {low} to {high}")
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
    embedding_bytes: int = 0

    @property
    def whole(self) -> bool:
        return self.first == 0 and self.last == self.n_layers

    @property
    def quantisation(self) -> str:
        return quantisation_of(self.header)


def quantisation_of(header: GGUFHeader) -> str:
    """As what a model was quantised, in a word: `Q4_K_M`."""
    return _FILE_TYPES.get(header.integer("general.file_type", -1), "mixed")


def load(spec: ShardSpec, *, progress: Progress | None = None) -> LlamaBackend:
    """Load the Shard of `spec`: a whole GGUF model, or the Shard file that `spec.options` names.

    Raises `engine_unavailable`, `model_file_invalid`, `architecture_unsupported`, `layers_invalid`, `setting_invalid`,
    `engine_out_of_memory`.
    """
    options = Options.of(spec.options)
    if spec.dtype not in (None, "float32"):
        raise _setting("dtype", f"dtype {spec.dtype!r:.40}; the residual of the llama engine is float32")
    source = _source(spec, options)
    if source.whole:
        check_text(source.header)
    loaded = library()
    model = LlamaModel(loaded, source.path, gpu_layers=options.gpu_layers, progress=progress)
    try:
        return LlamaBackend(_prepare(spec, options, source, loaded, model))
    except BaseException:
        model.close()
        raise


def _source(spec: ShardSpec, options: Options) -> Source:
    if options.shard_file is None:
        model = read_model(spec.model)
        shape = shape_of_gguf(model.header)
        check_range(spec.first, spec.last, shape.n_layers)
        if (spec.first, spec.last) != (0, shape.n_layers):
            raise _setting("shard_file", f"layers {spec.first}:{spec.last} are a part, which needs a Shard file")
        return Source(part_paths(spec.model)[0], model.header, shape, 0, shape.n_layers, shape.n_layers)
    header = read_header(options.shard_file)
    if header.integer("shardline.recipe", 0) not in _RECIPES:
        raise _invalid(options.shard_file, "it was not made by a version of Shardline that this engine knows")
    first, last, n_layers = (int(n) for n in header.numbers("shardline.source.layers"))
    if (first, last) != (spec.first, spec.last):
        raise _invalid(options.shard_file, f"it has layers {first}:{last}, not {spec.first}:{spec.last}")
    if header.text("shardline.source.content_id", "") != options.content_id:
        raise _invalid(options.shard_file, "it is of another Model Artifact")
    shape = shape_of_gguf(header)
    if shape.n_layers != last - first:
        raise _invalid(options.shard_file, f"it has {shape.n_layers} layers, not {last - first}")
    return Source(options.shard_file, header, shape, first, last, n_layers)


def _prepare(spec: ShardSpec, options: Options, source: Source, loaded: LlamaLibrary, model: LlamaModel) -> LoadedShard:
    c, shape = loaded.c, source.shape
    width: int = c.llama_model_n_embd_inp(model.pointer)
    if not source.whole and width != shape.hidden_size:
        raise ShardlineError(
            "architecture_unsupported", f"rows of {width} go into {shape.architecture}, of {shape.hidden_size} come out"
        )
    embedding = _embedding(loaded, source) if source.first == 0 and not source.whole else None
    context_length = _context_length(spec, shape)
    kv_tokens = options.kv_tokens or min(context_length, KV_TOKENS)
    recurrent = model.recurrent
    plan = ContextPlan(
        kv_tokens=kv_tokens,
        sessions=options.sessions or (SESSIONS_RECURRENT if recurrent else SESSIONS),
        rows=options.rows,
        outputs=options.rows if source.last < source.n_layers else 0,
        threads=spec.threads or usable_cores(),
        kv_type=options.kv_type,
        swa_full=options.swa_full,
    )
    on_host = options.gpu_layers == 0 or not any(device.accelerator for device in loaded.devices())
    is_tail = source.last == source.n_layers
    tap = None if is_tail else _tap(loaded, options.tap, source, on_host)
    context = LlamaContext(loaded, model, plan, tap)
    text = _text(loaded, options, source, model, context_length)
    engine = _engine_info(loaded, source, plan, context)
    vocab_size = c.llama_vocab_n_tokens(model.vocabulary) if is_tail else embedding.rows if embedding else 0
    hidden = SeamLayout([LayoutTensor("hidden", "F32", (shape.hidden_size,))])
    description = ShardDescription(
        model_name=source.header.text("general.name", source.path.stem),
        content_id=options.content_id,
        first=source.first,
        last=source.last,
        n_layers=source.n_layers,
        engine=engine,
        layout_in=TOKENS_ONLY if source.first == 0 else hidden,
        layout_out=TOKENS_ONLY if is_tail else hidden,
        kv_bytes_per_token=_kv_bytes(loaded, shape, options.kv_type),
        weight_bytes=c.llama_model_size(model.pointer) + (embedding.nbytes if embedding else 0),
        context_length=context_length,
        vocab_size=vocab_size,
        rollback=not recurrent and (options.swa_full or not c.llama_model_n_swa(model.pointer)),
        text_digest=text.digest if text is not None else None,
        kv_capacity_tokens=context.kv_tokens,
        slots=plan.sessions,
    )
    return LoadedShard(
        library=loaded,
        model=model,
        context=context,
        arrays=RowArrays(
            rows=plan.rows,
            width=0 if source.whole else width,
            sequences=plan.sessions,
            multi=c.llama_model_rope_type(model.pointer) in ROPE_MULTI,
            outputs=tap is not None and tap.outputs,
        ),
        rows=plan.rows,
        sessions=plan.sessions,
        description=description,
        tap=tap,
        embedding=embedding,
        divisor=source.header.number("shardline.input.divisor", 1.0),
        equal_rows=recurrent,
        window=0 if options.swa_full else c.llama_model_n_swa(model.pointer),
        recurrent=recurrent,
        text=text,
        identity=_identity(description),
    )


def _embedding(loaded: LlamaLibrary, source: Source) -> EmbeddingMatrix:
    """The matrix behind the tensors of a head's file."""
    header = source.header

    def key(name: str) -> int:
        return header.integer(f"shardline.embedding.{name}")

    if key("width") != source.shape.hidden_size:
        raise _invalid(source.path, f"its embedding rows have {key('width')} values, not {source.shape.hidden_size}")
    return EmbeddingMatrix(
        loaded,
        source.path,
        offset=key("offset"),
        type_id=key("type"),
        rows=key("rows"),
        width=key("width"),
        scale=header.number("shardline.embedding.scale", 1.0),
    )


def _tap(loaded: LlamaLibrary, kind: str, source: Source, on_host: bool) -> Tap:
    """The way that `kind` names, where the table says that this architecture has it."""
    rules = architectures.llama_rules(architectures.of_gguf(source.shape.architecture))
    row_bytes = 4 * source.shape.hidden_size
    layers = source.last - source.first
    if kind in ("layer_end", "nextn") and kind not in rules.taps:
        raise _setting("tap", f"{source.shape.architecture} has no tap {kind}")
    if kind == "layer_end":
        return layer_input_tap(loaded, row_bytes, layers)
    if kind == "nextn":
        return nextn_tap(loaded, row_bytes)
    tensor = rules.residual.format(last=layers - 1)
    if kind == "callback":
        return CallbackTap(loaded, tensor, row_bytes)
    return SamplerTap(loaded, tensor, row_bytes, TAP_SEQUENCE, on_host=on_host)


def _text(
    loaded: LlamaLibrary, options: Options, source: Source, model: LlamaModel, context_length: int
) -> LlamaText | None:
    """Of heads and tails, where the model has a vocabulary."""
    if source.whole:
        if not has_text(source.header):
            return None
        return LlamaText(loaded, model.vocabulary, source.header, context_length)
    if options.vocabulary_file is None or (source.first > 0 and source.last < source.n_layers):
        return None
    header = read_header(options.vocabulary_file)
    if check_text(header) is None:
        return None
    vocabulary = LlamaModel(loaded, options.vocabulary_file, vocab_only=True)
    return LlamaText(loaded, vocabulary.vocabulary, header, context_length)


def _context_length(spec: ShardSpec, shape: ModelShape) -> int:
    trained = shape.context_length or KV_TOKENS
    if spec.context_length is None:
        return trained
    if not 1 <= spec.context_length <= trained:
        raise _setting(
            "context_length", f"context of {spec.context_length} tokens; the model was trained for {trained}"
        )
    return spec.context_length


def _kv_bytes(loaded: LlamaLibrary, shape: ModelShape, kv_type: str) -> int:
    traits = loaded.type_traits(KV_TYPES[kv_type])
    elements = sum(shape.kv_elements(layer) or 0 for layer in range(shape.n_layers))
    return int(elements * traits.type_size // traits.blck_size)


def _engine_info(loaded: LlamaLibrary, source: Source, plan: ContextPlan, context: LlamaContext) -> EngineInfo:
    """`engine_class` has everything that makes numbers differ and that a route must agree on."""
    parts = ["llama", loaded.commit[:7], source.quantisation, f"kv-{plan.kv_type}"]
    if any(name.endswith("rope_factors_long.weight") for name in source.header.tensors):
        # Which of the two sets of factors llama.cpp takes depends on the size of the whole KV buffer.
        key = f"{source.shape.architecture}.rope.scaling.original_context_length"
        trained = source.header.integer(key, source.shape.context_length or 0)
        parts.append("rope-long" if context.kv_tokens > trained else "rope-short")
    accelerators = [device.description for device in loaded.devices() if device.accelerator]
    return EngineInfo(
        backend="llama",
        engine_class="/".join(parts),
        build=loaded.build,
        dtype="float32",
        quantisation=source.quantisation,
        device=", ".join(accelerators) or "cpu",
        threads=plan.threads,
        commit=loaded.commit,
        kv_type=plan.kv_type,
        context_tokens=context.kv_tokens,
    )


def _identity(description: ShardDescription) -> bytes:
    """What a saved slot belongs to: the same layers of the same model in the same engine class."""
    d = description
    parts = (d.content_id, d.engine.engine_class, str(d.first), str(d.last), str(d.n_layers))
    return hashlib.sha256("\n".join(parts).encode()).digest()


def _setting(name: str, why: str) -> ShardlineError:
    return ShardlineError("setting_invalid", why, param=name)


def _invalid(path: Path, why: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"{path.name!r:.200} is no usable Shard file: {why}", reason="damaged")
