"""The PyTorch engine: a `Backend` over transformers model classes, with one cache a slot.

Owns the way between buffers and tensors, the slots, and what is told about the loaded Shard. Entries of a batch run
one after another, so that a session computes the same whatever else is in its batch. Sampling is not done here, and
weights come from torch_safetensors.py and torch_gguf.py. Shown by tests/model/test_torch_backend.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig

from shardline.errors import ShardlineError
from shardline.formats.gguf_files import read_model
from shardline.formats.safetensors import read_folder
from shardline.model import torch_cache
from shardline.model.backend import BackendEntry, BackendOutput, Buffer, ShardDescription, ShardSpec
from shardline.model.generation import fault_of
from shardline.model.pooling import Embeddings, embeddings_of_config, embeddings_of_gguf
from shardline.model.tokenizer import ModelText, text_of_folder, text_of_gguf
from shardline.model.torch_build import build, check_range, cut, fill_buffers
from shardline.model.torch_gguf import config_of, load_gguf, quantisation_of
from shardline.model.torch_layers import LayerForm
from shardline.model.torch_safetensors import ENGINE_DTYPES, checkpoint_dtype, load_safetensors, read_config
from shardline.model.torch_seam import TORCH_DTYPES, ShardInput
from shardline.model.torch_shard import TorchShard
from shardline.model.torch_weights import Progress, ShardWeights, raw_bytes
from shardline.wire.messages import EngineInfo


@dataclass(frozen=True, slots=True)
class _Source:
    """A model on disk, its header read: what differs between the two containers."""

    name: str
    config: PreTrainedConfig
    dtype: torch.dtype
    """The engine's dtype where none is asked for."""
    quantisation: str
    fill: Callable[[ShardWeights], None]
    text: Callable[[int], ModelText | None]
    """From the context length."""
    embeddings: Callable[[int], Embeddings]
    """From the width of rows behind the final norm."""


def load(spec: ShardSpec, *, progress: Progress | None = None) -> TorchBackend:
    """Load the Shard of `spec`: a GGUF file or a safetensors folder. `progress` hears of bytes filled and in all.

    `spec.options`: `content_id`, the identity of the model's files (computed by the caller; "" if it is absent).
    Raises `model_file_invalid`, `architecture_unsupported`, `layers_invalid`, `setting_invalid`,
    `engine_out_of_memory`.
    """
    unknown = set(spec.options) - {"content_id"}
    if unknown:
        raise ShardlineError("setting_invalid", f"the PyTorch engine has no option {', '.join(sorted(unknown))}")
    if spec.threads:
        torch.set_num_threads(spec.threads)
    source = _open(Path(spec.model))
    dtype = _dtype(spec.dtype) or source.dtype
    try:
        skeleton = build(source.config, dtype)
        check_range(spec.first, spec.last, skeleton.n_layers)
        weights = ShardWeights(skeleton, spec.first, spec.last, progress)
        fill_buffers(skeleton, spec.first, spec.last)
        source.fill(weights)
        weights.finish()
        cut(skeleton, spec.first, spec.last)
        shard = TorchShard(skeleton, spec.first, spec.last)
        forms = shard.observe()
    except (MemoryError, RuntimeError) as error:
        raise fault_of(error) from error
    context = _context_length(spec, source.config)
    text = source.text(context) if shard.is_head or shard.is_tail else None
    description = ShardDescription(
        model_name=source.name,
        content_id=str(spec.options.get("content_id", "")),
        first=spec.first,
        last=spec.last,
        n_layers=skeleton.n_layers,
        engine=_engine_info(dtype, source.quantisation),
        layout_in=shard.ends.layout_in,
        layout_out=shard.ends.layout_out,
        kv_bytes_per_token=sum(form.bytes_per_token for form in forms),
        weight_bytes=weights.nbytes,
        context_length=context,
        vocab_size=shard.vocab_size,
        rollback=all(form.window is None and form.positional for form in forms),
        state_bytes=sum(form.fixed_bytes for form in forms),
        text_digest=text.digest if text is not None else None,
        embeddings=source.embeddings(shard.hidden_size) if shard.is_tail else None,
    )
    return TorchBackend(shard, description, forms, text)


def _open(path: Path) -> _Source:
    """Read the headers of the model at `path`; a folder is safetensors, a file is GGUF (with its other parts)."""
    if path.is_dir():
        folder = read_folder(path)
        config = read_config(folder)
        return _Source(
            name=path.resolve().name,
            config=config,
            dtype=checkpoint_dtype(folder, config),
            quantisation="none",
            fill=lambda weights: load_safetensors(folder, weights),
            text=lambda context: text_of_folder(path, config, config.get_text_config().vocab_size, context),
            embeddings=lambda width: embeddings_of_config(config.get_text_config(), width),
        )
    model = read_model(path)
    config = config_of(model)
    return _Source(
        name=model.header.text("general.name", path.stem),
        config=config,
        dtype=torch.float32,
        quantisation=quantisation_of(model),
        fill=lambda weights: load_gguf(model, weights),
        text=lambda context: text_of_gguf(model.header, config.vocab_size, context),
        embeddings=lambda width: embeddings_of_gguf(model.header, width, width),
    )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if dtype not in ENGINE_DTYPES:
        raise ShardlineError(
            "setting_invalid",
            f"dtype {name!r:.40}; the PyTorch engine has float32, bfloat16 and float16",
            param="dtype",
        )
    return dtype  # type: ignore[no-any-return]


def _context_length(spec: ShardSpec, config: PreTrainedConfig) -> int:
    trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    if spec.context_length is not None and spec.context_length < 1:
        raise ShardlineError("setting_invalid", f"context length {spec.context_length}", param="context_length")
    lengths = [length for length in (trained, spec.context_length) if length is not None]
    if not lengths:
        raise ShardlineError("setting_invalid", "the model names no context length: give one", param="context_length")
    return min(lengths)


def _engine_info(dtype: torch.dtype, quantisation: str) -> EngineInfo:
    build_name = f"torch {torch.__version__}, transformers {transformers.__version__}"
    name = str(dtype).removeprefix("torch.")
    return EngineInfo(
        backend="torch",
        engine_class="/".join(
            ("torch", str(torch.__version__), f"transformers-{transformers.__version__}", quantisation, name)
        ),
        build=build_name,
        dtype=name,
        quantisation=quantisation,
        device="cpu",
        threads=torch.get_num_threads(),
    )


class TorchBackend:
    """One loaded Shard; implements `Backend`. Called by one thread."""

    def __init__(
        self,
        shard: TorchShard,
        description: ShardDescription,
        forms: tuple[LayerForm, ...],
        text: ModelText | None,
    ) -> None:
        self._shard = shard
        self._description = description
        self._forms = forms
        self._text = text
        self._slots: dict[int, torch_cache.SlotCache] = {}

    def describe(self) -> ShardDescription:
        return self._description

    def open(self, slot: int) -> None:
        """Make an empty cache. Raises `engine_error` where the slot is open."""
        if slot in self._slots:
            raise ShardlineError("engine_error", f"slot {slot} is open already")
        self._slots[slot] = self._shard.new_cache()

    def fork(self, source: int, target: int, tokens: int) -> None:
        """A copy of the first `tokens`. Exact, or `rollback_unsupported` where a sliding window has moved past them."""
        if target in self._slots:
            raise ShardlineError("engine_error", f"slot {target} is open already")
        cache = self._shard.new_cache()
        with torch.inference_mode():
            torch_cache.fork(self._cache(source), cache, tokens)
        self._slots[target] = cache

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def run(self, entries: Sequence[BackendEntry]) -> list[BackendOutput | Exception]:
        """One output or `ShardlineError` an entry, in order. After an error the slot's cache is not to be used."""
        results: list[BackendOutput | Exception] = []
        for entry in entries:
            try:
                results.append(self._run(entry))
            except Exception as error:  # of this entry alone: the others have caches of their own
                results.append(fault_of(error))
        return results

    def _run(self, entry: BackendEntry) -> BackendOutput:
        cache = self._cache(entry.slot)
        held = torch_cache.tokens_in(cache)
        if entry.position != held:
            raise ShardlineError("engine_error", f"rows for position {entry.position}, but the cache ends at {held}")
        if held + entry.rows > self._description.context_length:
            raise ShardlineError(
                "context_length_exceeded",
                f"{held + entry.rows} tokens, the context has {self._description.context_length}",
            )
        given = ShardInput(self._tokens(entry), self._rows(entry))
        if not self._shard.is_tail:
            return BackendOutput(hidden=tuple(_exported(tensor) for tensor in self._shard.hidden(given, cache)))
        if entry.want_output:
            return BackendOutput(logits=self._shard.logits(given, cache).numpy())
        (rows,) = self._shard.hidden(given, cache)
        if entry.embed_rows:
            return BackendOutput(embedded=rows[0, -entry.embed_rows :].float().numpy())
        return BackendOutput()

    def _tokens(self, entry: BackendEntry) -> torch.Tensor:
        ids = np.frombuffer(entry.tokens, dtype="<i4")
        if len(ids) != entry.rows or entry.rows < 1:
            raise ShardlineError("engine_error", f"{len(ids)} tokens for {entry.rows} rows")
        if ids.min() < 0 or ids.max() >= self._description.vocab_size:
            raise ShardlineError("engine_error", f"a token id is outside of 0 to {self._description.vocab_size - 1}")
        return torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)

    def _rows(self, entry: BackendEntry) -> tuple[torch.Tensor, ...]:
        """Copies, aligned as the allocator aligns: kernels may round differently on memory that lies otherwise."""
        layout = self._description.layout_in.tensors
        if len(entry.hidden) != len(layout):
            raise ShardlineError("engine_error", f"{len(entry.hidden)} tensors, {len(layout)} cross this Seam")
        made = []
        for given, tensor in zip(entry.hidden, layout, strict=True):
            rows = torch.empty((1, entry.rows, *tensor.shape), dtype=TORCH_DTYPES[tensor.dtype])
            data = memoryview(given).cast("B")
            if len(data) != rows.nbytes:
                raise ShardlineError("engine_error", f"{len(data)} bytes of {tensor.name} for {entry.rows} rows")
            raw_bytes(rows)[:] = data
            made.append(rows)
        return tuple(made)

    def _cache(self, slot: int) -> torch_cache.SlotCache:
        cache = self._slots.get(slot)
        if cache is None:
            raise ShardlineError("engine_error", f"slot {slot} is not open")
        return cache

    def rollback(self, slot: int, position: int) -> None:
        """Exact, or `rollback_unsupported`: with sliding windows only as long as none has moved on."""
        with torch.inference_mode():
            torch_cache.rollback(self._cache(slot), position)

    def kv_tokens(self, slot: int) -> int:
        return torch_cache.tokens_in(self._cache(slot))

    def save(self, slot: int) -> bytes:
        """The slot's cache as a safetensors document, exact to the bit."""
        with torch.inference_mode():
            return torch_cache.save(self._cache(slot), self._identity())

    def restore(self, slot: int, state: bytes) -> None:
        """Replace the cache of an open slot by what `save` gave on a Shard like this; else `snapshot_invalid`."""
        self._cache(slot)
        cache = self._shard.new_cache()
        torch_cache.restore(cache, state, self._identity(), self._forms)
        self._slots[slot] = cache

    def _identity(self) -> str:
        """What a saved slot belongs to: the same layers of the same model in the same engine class."""
        d = self._description
        parts = (d.content_id, d.engine.engine_class, str(d.first), str(d.last), str(d.n_layers))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids. `text_unavailable` on Shards and models without a tokenizer."""
        if self._text is None:
            raise ShardlineError("text_unavailable", "this Shard has no tokenizer")
        return self._text.tokenize(text, add_special=add_special, parse_special=parse_special)

    def text_bundle(self) -> bytes | None:
        """MessagePack of `TextBundle`; None on middle Shards, and where the model comes without a tokenizer."""
        return self._text.bundle if self._text is not None else None


def _exported(hidden: torch.Tensor) -> Buffer:
    """The memory of rows as bytes; the view keeps the tensor alive."""
    return raw_bytes(hidden.contiguous())
