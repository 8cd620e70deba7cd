"""What a Node knows of its model before an engine loads it: layers, bytes, identity; and how much KV it may promise.

Owns the reading of headers for planning, for each kind of model file. No weights are read (the digest of a file that
was never seen is computed once, and cached). Shown by tests/node/test_plan.py.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from shardline.artifact.identity import content_id
from shardline.errors import ShardlineError
from shardline.formats import gguf_files, layers, safetensors
from shardline.model.backend import ShardDescription
from shardline.options import NodeOptions

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_KV_TOKENS_WANTED = 65_536
"""What a Node offers when there is memory for more: enough for many sessions, not the whole machine."""
_KV_SHARE = 0.5
"""Part of the memory left that the caches may take."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as placement sees it. Bytes are in the engine's dtype."""

    name: str
    content_id: str
    n_layers: int
    engine_class: str
    """As far as it is known before loading: the backend."""
    layer_bytes: list[int]
    embedding_bytes: int
    output_bytes: int
    kv_reserve_bytes: int = 0


def inspect_model(options: NodeOptions) -> ModelFacts:
    """Read the headers of `options.model`; blocking. Raises `model_file_invalid` or `setting_invalid`."""
    path = Path(options.model)
    if not path.exists():
        raise ShardlineError("model_file_invalid", f"there is no file or folder {options.model!r}", param="model")
    facts = _inspect_script(path) if options.engine == "scripted" else _inspect_weights(path, options)
    if options.content_id is not None and options.content_id != facts.content_id:
        raise ShardlineError(
            "model_file_invalid", f"expected the Model Artifact {options.content_id}, the file is {facts.content_id}"
        )
    return facts


class _Script(msgspec.Struct):
    """The part of a script that planning needs (all of it: model/scripted.py)."""

    model: str
    n_layers: int


def _inspect_script(path: Path) -> ModelFacts:
    raw = path.read_bytes()
    try:
        script = msgspec.json.decode(raw, type=_Script)
    except msgspec.MsgspecError as error:
        raise ShardlineError("model_file_invalid", f"{path.name} is no script: {error}") from None
    return ModelFacts(
        name=script.model,
        content_id="mac1-" + hashlib.sha256(raw).hexdigest(),
        n_layers=script.n_layers,
        engine_class="scripted",
        layer_bytes=[1] * script.n_layers,
        embedding_bytes=1,
        output_bytes=1,
    )


def _inspect_weights(path: Path, options: NodeOptions) -> ModelFacts:
    cache = options.state_dir / "content-ids"
    if path.is_dir():
        return _inspect_folder(path, options, cache)
    model = gguf_files.read_model(path)
    header = model.header
    architecture = header.text("general.architecture") or ""
    n_layers = header.integer(f"{architecture}.block_count") or 0
    element_bytes = _DTYPE_BYTES.get(options.dtype or "float32", 4)
    sizes = {name: math.prod(t.shape) * element_bytes for name, t in model.tensors.items()}
    name = header.text("general.name") or path.stem
    return _facts(name, content_id(path, cache_dir=cache), n_layers, sizes, options)


def _inspect_folder(path: Path, options: NodeOptions, cache: Path) -> ModelFacts:
    folder = safetensors.read_folder(path)
    config = safetensors.read_object(path / "config.json", 16 << 20)
    text = config.get("text_config")
    counts = [c.get("num_hidden_layers") for c in (config, text) if isinstance(c, dict)]
    n_layers = next((n for n in counts if isinstance(n, int) and n > 0), 0)
    stored = _DTYPE_BYTES.get(options.dtype or "")
    sizes = {name: math.prod(t.shape) * (stored or _STORED_BYTES.get(t.dtype, 4)) for name, t in folder.tensors.items()}
    return _facts(path.resolve().name, content_id(path, cache_dir=cache), n_layers, sizes, options)


def _facts(name: str, identity: str, n_layers: int, sizes: dict[str, int], options: NodeOptions) -> ModelFacts:
    if n_layers < 1:
        raise ShardlineError("model_file_invalid", "the header does not say how many layers there are")
    layer_bytes = [0] * n_layers
    embedding = output = shared = 0
    for tensor, size in sizes.items():
        place = layers.place_of(tensor)
        if isinstance(place, int):
            if place < n_layers:
                layer_bytes[place] += size
        elif place == "embedding":
            embedding += size
        elif place == "output":
            output += size
        else:
            shared += size
    if layers.is_tied(sizes):
        output += embedding
    return ModelFacts(
        name=name,
        content_id=identity,
        n_layers=n_layers,
        engine_class=options.engine,
        layer_bytes=layer_bytes,
        embedding_bytes=embedding + shared,
        output_bytes=output,
    )


def kv_capacity(options: NodeOptions, shard: ShardDescription) -> int:
    """KV tokens that a Node may promise: the operator's number, the engine's own, or what half of the memory left
    holds, at most 65,536 and one full context at least (if that does not fit, loading was the last step that did)."""
    if options.kv_tokens is not None:
        return options.kv_tokens
    if shard.kv_capacity_tokens is not None:
        return shard.kv_capacity_tokens
    memory = psutil.virtual_memory().available
    if options.memory_bytes is not None:
        memory = min(memory, max(0, options.memory_bytes - shard.weight_bytes))
    fits = int(memory * _KV_SHARE) // max(1, shard.kv_bytes_per_token)
    if fits < 16:
        raise ShardlineError(
            "memory_insufficient", f"{memory} bytes are left for KV, a token needs {shard.kv_bytes_per_token}"
        )
    return min(fits, max(_KV_TOKENS_WANTED, shard.context_length))
