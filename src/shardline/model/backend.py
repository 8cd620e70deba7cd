"""The engine seam: what a backend must do, and the values that go in and out of it.

A backend is synchronous, holds one Shard, and is called by one thread only (`tokenize` by two others). Outside of tests
it lives in the worker process (model/worker.py); the Node sees it through the asynchronous `Engine` of model/engine.py.
Sampling is not a backend's work: it returns logits, model/generation.py makes tokens of them for every engine alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardline.model.pooling import Embeddings
from shardline.wire.messages import EngineInfo, Pooling, Sampling
from shardline.wire.steps import SeamLayout

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """What to load: layers [first, last) of the model at `model` (a GGUF file, a safetensors folder, a script)."""

    model: str
    first: int
    last: int
    threads: int = 0
    """0: as the engine thinks right."""
    dtype: str | None = None
    """Residual dtype, or None for the engine's own."""
    context_length: int | None = None
    """None: what the model was trained for."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardDescription:
    """What was loaded."""

    model_name: str
    content_id: str
    first: int
    last: int
    n_layers: int
    engine: EngineInfo
    layout_in: SeamLayout
    layout_out: SeamLayout
    """Empty layout in front of the head and behind the tail."""
    kv_bytes_per_token: int
    weight_bytes: int
    context_length: int
    vocab_size: int
    rollback: bool
    text_digest: str | None = None
    """SHA-256 (hex) of `text_bundle()`; head and tail only."""
    kv_capacity_tokens: int | None = None
    """What the engine's caches can hold in all; None: bounded by memory alone."""
    slots: int | None = None
    """How many slots can be open at a time; None: no bound of the engine's own."""
    state_bytes: int = 0
    """What each open slot takes at most beside its tokens: recurrent and rolling states. 0 too where the engine has
    taken the memory of all of them when it loaded."""
    embeddings: Embeddings | None = None
    """Of a tail; None: the engine makes no vectors of prompts."""

    @property
    def is_head(self) -> bool:
        return self.first == 0

    @property
    def is_tail(self) -> bool:
        return self.last == self.n_layers


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One session's new rows in one engine call. Head: `tokens` feed the embedding; else `hidden` is the input."""

    slot: int
    position: int
    rows: int
    tokens: Buffer
    """I32 little-endian, [rows]. Empty, for one row of a Shard that is the whole model: the token that the batch before
    this one sampled for the slot. No backend sees that (model/generation.py)."""
    hidden: tuple[Buffer, ...]
    """One C-contiguous buffer a tensor of `layout_in`, [rows, *shape]."""
    want_output: bool
    """On the tail: return the logits of the last row. Elsewhere ignored: all rows are returned."""
    embed_rows: int = 0
    """On the tail, and then without `want_output`: return the last so many rows as they are behind the final norm."""


@dataclass(frozen=True, slots=True)
class BackendOutput:
    """Per entry: the rows of `layout_out`, or on the tail the logits of the last row (float32, [vocab_size], an
    object with the buffer protocol), or neither where no output was wanted. They may be views of the engine's own
    memory: valid until the next call of the backend."""

    hidden: tuple[Buffer, ...] = ()
    logits: Any | None = None
    embedded: Any | None = None
    """What `embed_rows` asked for: float32, [embed_rows, width], an array of numpy's kind."""


class Backend(Protocol):
    """One loaded Shard. Faults are `ShardlineError` (`engine_error`, `engine_out_of_memory`, `rollback_unsupported` …);
    `engine_lost` says that the whole engine is unusable and must be started again."""

    def describe(self) -> ShardDescription: ...

    def open(self, slot: int) -> None:
        """Make an empty cache for `slot` (a small integer that is not open)."""

    def fork(self, source: int, target: int, tokens: int) -> None:
        """Make a cache for `target`, which is not open, that holds the first `tokens` (1 to `kv_tokens(source)`) of
        `source`, which stays as it is. Exact, or `rollback_unsupported`; `target` is then not open, or empty."""

    def close(self, slot: int) -> None:
        """Free the cache of `slot`; closing what is not open is nothing."""

    def run(self, entries: Sequence[BackendEntry]) -> list[BackendOutput | Exception]:
        """Compute one batch; each slot occurs once, `position` equals `kv_tokens(slot)`. An entry that fails alone
        (its slot is then closed by the caller) stands as an exception in its place."""

    def rollback(self, slot: int, position: int) -> None:
        """Drop everything at and above `position`, exactly; `rollback_unsupported` where that cannot be."""

    def kv_tokens(self, slot: int) -> int:
        """Tokens held for `slot`, read from the cache itself."""

    def save(self, slot: int) -> bytes: ...

    def restore(self, slot: int, state: bytes) -> None: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text. Called from threads of its own, two at a time, while anything else runs: it shares no
        state with the rest, and should release the interpreter while it works."""

    def text_bundle(self) -> bytes | None:
        """MessagePack of `wire.messages.TextBundle`; head and tail only."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a slot begins with: the first `tokens` of the kept slot `source`, which stays kept; where `source` is the
    slot itself, it is taken over, and what it held above is dropped."""

    source: int
    tokens: int
    ids: bytes
    """Token ids of these, I32 little-endian; the tail's sampler wants them, other Shards may get none."""


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """What the engine must know to open a slot. `sampling` is None on Shards that are not the tail."""

    prompt_tokens: int
    max_tokens: int
    sampling: Sampling | None = None
    reuse: Reuse | None = None
    pooling: Pooling | None = None
    """On the tail: the prompt becomes a vector, pooled so, and nothing is generated."""
