"""What planning needs of a model, from any description of it: a GGUF header, a tensor table, or a config.json alone.

Owns putting the readers' facts together: shape, bytes by place, experts among them, state of a session, Seams, cuts.
Reads no file (cli/model_outline.py does) and places nothing (plan.py). Pure. Shown by tests/formats/test_outline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardline.errors import ShardlineError
from shardline.formats.architectures import Architecture, LlamaRules, of_gguf, of_model_type
from shardline.formats.cuts import Cuts, cuts_for_torch, cuts_of, cuts_of_config
from shardline.formats.gguf_files import GGUFModel
from shardline.formats.layer_kinds import LayerKinds, layer_kinds, layer_kinds_of_config
from shardline.formats.layers import SizedTensor
from shardline.formats.memory import WeightBytes, expert_bytes, kv_elements_of_tensors, weight_bytes
from shardline.formats.parameters import Bits, Parameters, bits_of_config, dtype_of, parameters_of_config, weights_of
from shardline.formats.seam import SeamShape, seam_of_config, seam_of_gguf
from shardline.formats.session_state import LayerState, Rows, states_of_config, states_of_gguf
from shardline.formats.shape import WIDTH_LIMIT, ConfigFields, ModelShape, shape_of_config, shape_of_gguf

Engine = Literal["llama", "torch"]
_FLOAT32 = 4
_FLOAT16 = 2
_SEAM_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Outline:
    """A model as planning sees it, for one engine."""

    source: str
    """From what it was made, in words: `GGUF header`, `config.json` …"""
    engine: Engine
    row: Architecture
    shape: ModelShape
    weights: WeightBytes
    experts: tuple[int, ...]
    """Bytes of routed experts, layer by layer, which `weights` has too."""
    used: float
    """The part of a layer's routed experts that one token is computed with."""
    states: tuple[LayerState, ...] | None
    """What each layer keeps of a session; None where the source does not say it."""
    kv_element_bytes: int
    seam: SeamShape | None
    """What crosses a cut; None where the source does not say it."""
    seam_dtype: str
    """The engine's own residual dtype, as safetensors names it."""
    cuts: Cuts
    quantised: bool = False
    """Whether a config.json says that its checkpoint is quantised."""
    parameters: Parameters | None = None
    """Numbers of the model, where they were computed from a config.json."""

    @property
    def n_layers(self) -> int:
        return self.shape.n_layers

    @property
    def size_bytes(self) -> int:
        return self.weights.of_shard(0, self.n_layers)


def outline_of_gguf(model: GGUFModel, engine: Engine) -> Outline:
    """From the headers of a GGUF model. Errors: those of `cuts_of`."""
    header = model.header
    shape = shape_of_gguf(header)
    row = of_gguf(shape.architecture)
    # llama.cpp computes from what is stored; PyTorch in float32, whatever it is stored in.
    element_bytes = _FLOAT32 if engine == "torch" else None
    cuts = cuts_of(header) if engine == "llama" else cuts_for_torch(row, shape)
    kinds = layer_kinds(header, shape, row.llama or LlamaRules())
    count = header.integer(f"{shape.architecture}.expert_count", 0)
    used = header.integer(f"{shape.architecture}.expert_used_count", 0)
    return Outline(
        source="GGUF header",
        engine=engine,
        row=row,
        shape=shape,
        weights=weight_bytes(model.tensors, shape.n_layers, element_bytes=element_bytes),
        experts=expert_bytes(model.tensors, shape.n_layers, element_bytes=element_bytes),
        used=_part(used, count),
        states=states_of_gguf(header, shape, kinds),
        kv_element_bytes=_FLOAT32 if engine == "torch" else _FLOAT16,
        seam=seam_of_gguf(header, shape, kinds),
        seam_dtype="F32",
        cuts=cuts,
    )


def outline_of_config(
    config: Mapping[str, Any],
    engine: Engine,
    *,
    tensors: Mapping[str, SizedTensor] | None = None,
    dtype: str | None = None,
    bits: Callable[[Parameters], Bits] | None = None,
) -> Outline:
    """From a config.json. `tensors`: the table of its safetensors files, where they are there. Without: `bits` says
    what a number takes; else it is `dtype`, or as the configuration says.

    Errors: `model_file_invalid`; `architecture_unsupported` where no engine runs it or its size cannot be told.
    """
    shape = shape_of_config(config)
    row = of_model_type(shape.architecture)
    cuts = cuts_of_config(config, shape) if engine == "llama" else cuts_for_torch(row, shape)
    kinds = layer_kinds_of_config(config, shape, row.llama or LlamaRules())
    fields = ConfigFields.of(config)
    named = dtype or dtype_of(config)
    element_bytes = _FLOAT32 if named == "float32" else _FLOAT16
    parameters = None
    if tensors is not None:
        weights = weight_bytes(tensors, shape.n_layers, element_bytes=element_bytes if dtype is not None else None)
        experts = expert_bytes(tensors, shape.n_layers, element_bytes=element_bytes if dtype is not None else None)
        used = _config_part(fields)
    else:
        parameters = parameters_of_config(config, shape, indexed=kinds.indexed, recurrent=kinds.recurrent)
        if bits is not None:
            chosen = bits(parameters)
        else:
            chosen = bits_of_config(config) if dtype is None else Bits.equal(8 * element_bytes)
        weights, experts = weights_of(parameters, chosen)
        used = parameters.used
    return Outline(
        source="config.json" if tensors is None else "safetensors headers",
        engine=engine,
        row=row,
        shape=shape,
        weights=weights,
        experts=experts,
        used=used,
        states=states_of_config(config, shape, kinds),
        kv_element_bytes=_FLOAT16 if engine == "llama" else element_bytes,
        seam=seam_of_config(config, shape, kinds),
        seam_dtype="F32" if engine == "llama" else _SEAM_DTYPES.get(named, "BF16"),
        cuts=cuts,
        quantised=dtype is None and config.get("quantization_config") is not None,
        parameters=parameters,
    )


def outline_of_build(
    config: Mapping[str, Any], engine: Engine, size_bytes: int, *, dense_bits: float | None = None
) -> Outline:
    """From a config.json and the size of the files of one build of the model; `dense_bits`: what a number takes
    outside of routed experts, which take the rest. Errors: as those of `outline_of_config`, and `setting_invalid` for
    a size that no build has."""
    if dense_bits is None:
        return outline_of_config(config, engine, bits=lambda p: Bits.equal(8 * size_bytes / p.total))
    return outline_of_config(config, engine, bits=lambda p: Bits.of_build(p, size_bytes, dense_bits))


def outline_of_table(shape: ModelShape, tensors: Mapping[str, SizedTensor], engine: Engine) -> Outline:
    """From a tensor table and the few measures that a manifest states, without the header's own keys: what depends on
    those (Seams, states that are no rows, cuts of architectures with layers of several kinds) is not known.

    Errors: `architecture_unsupported` where no engine runs the architecture.
    """
    row = of_gguf(shape.architecture)
    element_bytes = _FLOAT32 if engine == "torch" else None
    elements = kv_elements_of_tensors(tensors, shape.n_layers)
    simple = row.rollback != "never" and row.layout == "hidden"
    states = tuple(LayerState((Rows(count),)) for count in elements) if elements is not None and simple else None
    return Outline(
        source="manifest",
        engine=engine,
        row=row,
        shape=shape,
        weights=weight_bytes(tensors, shape.n_layers, element_bytes=element_bytes),
        experts=expert_bytes(tensors, shape.n_layers, element_bytes=element_bytes),
        used=1.0,
        states=states,
        kv_element_bytes=_FLOAT32 if engine == "torch" else _FLOAT16,
        seam=SeamShape(shape.hidden_size) if simple and not _has_kinds(row) else None,
        seam_dtype="F32",
        cuts=_table_cuts(row, shape, engine),
    )


def _has_kinds(row: Architecture) -> bool:
    """Whether cuts depend on what each layer is, or on keys of the header."""
    rules = row.llama
    return rules is not None and rules != LlamaRules(rules.proof, rules.reason, output_required=rules.output_required)


def _table_cuts(row: Architecture, shape: ModelShape, engine: Engine) -> Cuts:
    cuts = cuts_for_torch(row, shape)
    if engine == "torch":
        return cuts
    rules = row.llama
    reason = "nobody has compared its parts with the whole" if rules is None else rules.reason
    if rules is not None and rules.proof != "refused":
        if not _has_kinds(row):
            return Cuts(shape, rules, None, LayerKinds())
        reason = "where it can be cut stands in the header of its file, not in the manifest"
    refusal = ShardlineError(
        "architecture_unsupported",
        f"no cut of this {row.name} model for llama.cpp is known: {reason}",
        advice="Name the GGUF file: its first bytes are enough.",
        architecture=row.name,
    )
    return Cuts(shape, None, refusal, LayerKinds())


def _config_part(fields: ConfigFields) -> float:
    count = fields.get("num_experts", WIDTH_LIMIT, "n_routed_experts", "num_local_experts") or 0
    return _part(fields.get("num_experts_per_tok", WIDTH_LIMIT, "experts_per_token") or 0, count)


def _part(used: int, count: int) -> float:
    return min(1.0, used / count) if count else 0.0
