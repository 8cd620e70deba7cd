"""What a Node knows of its model before an engine loads it: layers, bytes, identity; and how much KV it may promise.

Owns the reading of headers for planning, for each kind of model file. No weights are read (the digest of a file that
was never seen is computed once, and cached). Shown by tests/node/test_plan.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from shardline.artifact.identity import content_id
from shardline.artifact.model_view import make_view
from shardline.artifact.store import StoredArtifact
from shardline.artifact.stored_shard import check_headers, stored_model
from shardline.errors import ShardlineError
from shardline.formats import gguf_files, layers, memory, safetensors
from shardline.formats.architectures import LlamaRules, of_gguf
from shardline.formats.cuts import Cuts, cuts_for_window, cuts_of
from shardline.formats.gguf_files import GGUFModel
from shardline.formats.layer_kinds import layer_kinds
from shardline.formats.safetensors import SafetensorsFolder
from shardline.formats.session_state import states_of_gguf
from shardline.formats.shape import ModelShape, shape_of_config, shape_of_gguf
from shardline.model.backend import ShardDescription
from shardline.model.script import read_script
from shardline.options import LLAMA_ENGINES, NodeOptions

CONTENT_IDS = "content-ids"
"""In the state folder: the hashes of files that were read."""
_PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_TOKENS_RESERVED = 2_048
"""What placement leaves free for caches: a Node without room for a session is of no use."""
_KV_TOKENS_WANTED = 65_536
"""What a Node offers when there is memory for more: enough for many sessions, not the whole machine."""
_KV_TOKENS_SMALL = 16_384
_KV_TOKENS_LEAST = 256
_KV_RESERVED_SHARE = 0.25
"""Part of the memory left that is taken at once, whether it is used or not: other Nodes may start on the machine."""
_STATES_WANTED = 256
"""Sessions whose fixed states a Node sets memory aside for, where there is more."""
_LLAMA_KV_ELEMENT_BYTES = 2
LLAMA_STATES = 8
"""Sessions for whose fixed states the llama.cpp engine takes memory when it loads: as many as it serves at a time."""
_KV_SHARE = 0.5
"""Part of the memory left that the caches may take."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as placement sees it. Bytes are in the engine's dtype."""

    name: str
    """What clients call it: the name of the file or folder, as its owner gave it."""
    path: Path
    """What an engine is given: the file or folder. Of an artifact of the store it has holes, until all is fetched."""
    content_id: str
    n_layers: int
    engine_class: str
    """As far as it is known before loading: the backend."""
    layer_bytes: list[int]
    embedding_bytes: int
    output_bytes: int
    kv_reserve_bytes: int = 0
    kv_bytes_per_token: int = 0
    """Of all layers."""
    state_bytes: tuple[int, ...] = ()
    """What each layer keeps of a session however short it is; empty: nothing, or not known."""
    context_length: int | None = None
    legal_cuts: list[int] | None = None
    """Layers in front of which the engine can cut the model; None: all."""
    illegal_parts: list[tuple[int, int]] | None = None
    """Ranges between these that the engine cannot serve all the same."""


def inspect_model(options: NodeOptions) -> ModelFacts:
    """Read the headers of `options.model`; blocking. Raises `model_file_invalid` or `setting_invalid`."""
    path = Path(options.model or "")
    if options.model is None or not path.exists():
        raise ShardlineError("model_file_invalid", f"there is no file or folder {options.model!r}", param="model")
    try:
        facts = _inspect_script(path) if options.engine == "scripted" else _inspect_weights(path, options)
    except ShardlineError as error:
        if error.code != "model_file_invalid" or path.name in error.message:
            raise
        raise ShardlineError(
            error.code, f"{path.name}: {error.message}", param="model", advice=error.advice, **error.details
        ) from None
    if options.content_id is not None and options.content_id != facts.content_id:
        raise ShardlineError(
            "model_file_invalid", f"expected the Model Artifact {options.content_id}, the file is {facts.content_id}"
        )
    return facts


def inspect_stored(artifact: StoredArtifact, options: NodeOptions) -> ModelFacts:
    """The same of an artifact whose headers the store holds, once they are found equal to the signed table; blocking.

    Raises what `stored_model`, `check_headers` and `inspect_model` raise.
    """
    if artifact.bundle.manifest.format.container == "gguf":
        model = stored_model(artifact)
        name = _gguf_name(Path(artifact.bundle.manifest.files[0].path))
        return _facts_of_gguf(model, name, make_view(artifact), artifact.content_id, options)
    _check_reads_folders(options)
    check_headers(artifact)
    path = make_view(artifact)
    found = safetensors.read_folder(path)
    return _facts_of_folder(found, artifact.bundle.manifest.name, path, artifact.content_id, options)


def _inspect_script(path: Path) -> ModelFacts:
    script, digest = read_script(path)
    return ModelFacts(
        name=script.model,
        path=path,
        content_id=f"mac1-{digest}",
        n_layers=script.n_layers,
        engine_class="scripted",
        layer_bytes=[script.weight_bytes_per_layer] * script.n_layers,
        embedding_bytes=0,
        output_bytes=0,
    )


def _inspect_weights(path: Path, options: NodeOptions) -> ModelFacts:
    cache = options.state_dir / CONTENT_IDS
    if path.is_dir():
        _check_reads_folders(options)
        found = safetensors.read_folder(path)
        name = path.resolve().name
        return _facts_of_folder(found, name, path, content_id(path, cache_dir=cache), options)
    model = gguf_files.read_model(path)
    facts = _facts_of_gguf(model, _gguf_name(path), path, "", options)
    return replace(facts, content_id=content_id(path, cache_dir=cache))


def _check_reads_folders(options: NodeOptions) -> None:
    if options.engine in LLAMA_ENGINES:
        raise ShardlineError(
            "model_file_invalid",
            "it is a folder, and the llama engine reads GGUF files",
            advice="Give --engine torch for a safetensors folder, or name a GGUF file.",
        )


def _gguf_name(path: Path) -> str:
    return _PART.sub("", path.stem)


def _facts_of_folder(found: SafetensorsFolder, name: str, path: Path, content: str, options: NodeOptions) -> ModelFacts:
    wanted = _DTYPE_BYTES.get(options.dtype or "")
    return _facts(name, path, content, options, shape_of_config(found.config), found.tensors, wanted)


def _facts_of_gguf(model: GGUFModel, name: str, path: Path, content: str, options: NodeOptions) -> ModelFacts:
    shape = shape_of_gguf(model.header)
    # llama.cpp computes from what is stored; PyTorch in float32 unless told otherwise, whatever it is stored in.
    if options.engine not in LLAMA_ENGINES:
        wanted = _DTYPE_BYTES.get(options.dtype or "") or 4
        return _facts(name, path, content, options, shape, model.tensors, wanted)
    row = of_gguf(shape.architecture)
    kinds = layer_kinds(model.header, shape, row.llama or LlamaRules())
    states = states_of_gguf(model.header, shape, kinds) or ()
    cuts = cuts_of(model.header) if options.engine == "llama" else cuts_for_window(model.header)
    if options.first is not None and options.last is not None:
        cuts.check_part(options.first, options.last)
    facts = _facts(name, path, content, options, shape, model.tensors, None, cuts)
    return replace(facts, state_bytes=tuple(state.bytes_at(0, 0) for state in states))


def _facts(
    name: str,
    path: Path,
    content: str,
    options: NodeOptions,
    shape: ModelShape,
    tensors: Mapping[str, layers.SizedTensor],
    element_bytes: int | None,
    cuts: Cuts | None = None,
) -> ModelFacts:
    """`element_bytes`: of a number as the engine keeps it; None: as it is stored."""
    weights = memory.weight_bytes(tensors, shape.n_layers, element_bytes=element_bytes)
    kv_element_bytes = _LLAMA_KV_ELEMENT_BYTES if options.engine in LLAMA_ENGINES else element_bytes or 4
    kv = memory.kv_bytes_per_token(shape, 0, shape.n_layers, element_bytes=kv_element_bytes) or 0
    return ModelFacts(
        name=name,
        path=path,
        content_id=content,
        n_layers=shape.n_layers,
        engine_class=options.engine,
        layer_bytes=list(weights.layers),
        embedding_bytes=weights.embedding + weights.shared,
        output_bytes=weights.output + weights.tied,
        kv_reserve_bytes=kv * _KV_TOKENS_RESERVED,
        kv_bytes_per_token=kv,
        context_length=options.context_length or shape.context_length,
        legal_cuts=list(cuts.positions()) if cuts is not None else None,
        illegal_parts=cuts.illegal_parts() if cuts is not None else None,
    )


def kv_reservation(options: NodeOptions, facts: ModelFacts, first: int, last: int) -> int:
    """KV tokens for an engine that takes the memory of all of them when it loads: the operator's number, or what a
    quarter of the memory left holds, but not more than some sessions need. Raises `memory_insufficient`."""
    if options.kv_tokens is not None:
        return options.kv_tokens
    weights = sum(facts.layer_bytes[first:last])
    states = LLAMA_STATES * sum(facts.state_bytes[first:last])
    left = psutil.virtual_memory().available
    if options.memory_bytes is not None:
        left = min(left, options.memory_bytes)
    per_token = max(1, facts.kv_bytes_per_token * (last - first) // facts.n_layers)
    fits = int(max(0, left - weights - states) * _KV_RESERVED_SHARE) // per_token
    if fits < _KV_TOKENS_LEAST:
        raise ShardlineError(
            "memory_insufficient",
            f"of {_mib(left)}, {_mib(weights + states)} are for weights{' and states' if states else ''}; "
            f"a quarter of what is left holds {fits} KV tokens",
            advice="Raise --memory, give the Node fewer layers, or say how much it may hold: --kv-tokens.",
        )
    context = facts.context_length or _KV_TOKENS_WANTED
    return min(fits, _KV_TOKENS_WANTED, max(_KV_TOKENS_SMALL, 2 * context))


@dataclass(frozen=True, slots=True)
class KvRoom:
    """What a Node may promise: tokens of all sessions together, and how many sessions (None: any number)."""

    tokens: int
    slots: int | None


def kv_room(options: NodeOptions, shard: ShardDescription) -> KvRoom:
    """The operator's number of tokens, the engine's own, or what half of the memory left holds, at most 65,536 and one
    full context at least (if that does not fit, loading was the last step that did).

    Where a session takes memory however short it is (recurrent layers), that of as many sessions is set aside first as
    a half of this holds: no session that is let in meets want of memory. Raises `memory_insufficient`.
    """
    if shard.kv_capacity_tokens is not None:  # the engine has taken its memory
        return KvRoom(options.kv_tokens or shard.kv_capacity_tokens, shard.slots)
    left = psutil.virtual_memory().available
    if options.memory_bytes is not None:
        left = min(left, max(0, options.memory_bytes - shard.weight_bytes))
    room, per_token = int(left * _KV_SHARE), shard.kv_bytes_per_token
    states = room // 2 if options.kv_tokens is None else room - options.kv_tokens * per_token
    slots = _slots(shard, states)
    if options.kv_tokens is not None:
        return KvRoom(options.kv_tokens, slots)
    fits = (room - (slots or 0) * shard.state_bytes) // max(1, per_token)
    if fits < 16:
        beside = f", a session {_mib(shard.state_bytes)} beside them" if shard.state_bytes else ""
        raise ShardlineError(
            "memory_insufficient",
            f"{_mib(left)} are left for KV, and a token needs {per_token} bytes{beside}",
            advice="Raise --memory, or give the Node fewer layers.",
        )
    return KvRoom(min(fits, max(_KV_TOKENS_WANTED, shard.context_length)), slots)


def _slots(shard: ShardDescription, room: int) -> int | None:
    """How many sessions have their fixed states in `room` bytes; at least one is let in."""
    if not shard.state_bytes:
        return shard.slots
    fit = max(1, min(_STATES_WANTED, room // shard.state_bytes))
    return fit if shard.slots is None else min(fit, shard.slots)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
