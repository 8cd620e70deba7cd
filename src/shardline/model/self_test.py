"""The self-test of a loaded Shard, for any backend, and the prefill chunk that follows from its times.

Owns what a Shard must show before it counts for routes: outputs of the right shape and finite, a cache that grows by
what was fed and is empty after closing, the same answer in one piece and in two, another one for another context.
Knows no engine: numpy and the `Backend` protocol only. Shown by tests/model/test_self_test.py.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.errors import ShardlineError
from shardline.model.backend import Backend, BackendEntry, BackendOutput, Buffer, ShardDescription
from shardline.settings import Settings
from shardline.wire.messages import StepTimes
from shardline.wire.steps import LayoutTensor

SLOT = 1 << 30
"""Far from the slots of sessions, which count from 0."""
_ROWS = 32
_DECODES = 6
_REPEATS = 3
_CHUNKING_SHARE = 0.5
"""What cutting a prompt in two may change of an output, in parts of what another context changes."""

_TILE = 64
"""Rows of a call from which on llama.cpp computes attention on a processor tile by tile (ggml_fa_tile_config in
ggml-cpu). SmolLM2 on one core, 2,048 tokens: 22 s in calls of 16 or 32 rows, 15 s in calls of 64 or 128."""
_TILE_PATIENCE = 4

Floats = npt.NDArray[np.float32]


def self_test(backend: Backend) -> StepTimes:
    """Compute a prompt of random rows over the whole range and check it; leaves no slot open.

    Raises `numerical_error` for values that are not finite, `engine_error` for anything else that is not as it must
    be, and what the backend raises. Times are medians.
    """
    description = backend.describe()
    prompt = _Prompt.random(description, max(2, min(_ROWS, description.context_length - _DECODES)))
    run = _Run(backend, description)
    try:
        outputs, prefills = zip(*(run.prefill([prompt]) for _ in range(_REPEATS)), strict=True)
        halves, _ = run.prefill(prompt.split(prompt.rows - 1))
        changed, _ = run.prefill(prompt.with_another_row(prompt.rows - 2).split(prompt.rows - 1))
        run.check_chunking(outputs[0], halves, changed)
        decodes = [run.decode(prompt) for _ in range(min(_DECODES, description.context_length - prompt.rows))]
    finally:
        backend.close(SLOT)
    run.check_empty()
    return StepTimes(
        decode_ms=statistics.median(decodes or prefills), prefill_ms_per_row=statistics.median(prefills) / prompt.rows
    )


def choose_prefill_chunk(prefill_ms_per_row: float, settings: Settings) -> int:
    """The largest power of two of rows, within the limits of `settings`, that takes at most
    `prefill_chunk_target_ms`; the smallest one where even that takes longer. Up to `_TILE` rows may take four times
    as long."""
    chunk = settings.prefill_chunk_min
    while chunk * 2 <= settings.prefill_chunk_max:
        allowed_ms = settings.prefill_chunk_target_ms * (_TILE_PATIENCE if chunk * 2 <= _TILE else 1)
        if chunk * 2 * prefill_ms_per_row > allowed_ms:
            break
        chunk *= 2
    return chunk


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Input rows for any Shard: token ids (int32, [rows]), and behind the head one array a tensor of the layout."""

    tokens: npt.NDArray[np.int32]
    hidden: tuple[npt.NDArray[Any], ...]

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @classmethod
    def random(cls, description: ShardDescription, rows: int) -> _Prompt:
        rng = np.random.default_rng(0)
        # In the middle of a model, ids only pass by, and its vocabulary may not be known.
        tokens = rng.integers(0, description.vocab_size or 2, rows, dtype=np.int32)
        hidden = (_encoded(rng.standard_normal((rows, *t.shape)), t) for t in description.layout_in.tensors)
        return cls(tokens, tuple(hidden))

    def split(self, at: int) -> list[_Prompt]:
        return [self._part(slice(0, at)), self._part(slice(at, None))]

    def row(self, index: int) -> _Prompt:
        return self._part(slice(index, index + 1))

    def with_another_row(self, index: int) -> _Prompt:
        """The same, but row `index` is row 0 (or for a row 0, the last)."""
        order = np.arange(self.rows)
        order[index] = 0 if index else self.rows - 1
        tokens = self.tokens[order]
        if tokens[index] == self.tokens[index]:
            tokens[index] = self.tokens[index] - 1 if self.tokens[index] else 1
        return replace(self, tokens=tokens, hidden=tuple(h[order] for h in self.hidden))

    def _part(self, rows: slice) -> _Prompt:
        return _Prompt(self.tokens[rows], tuple(h[rows] for h in self.hidden))


class _Run:
    """One slot of the backend, fed and checked."""

    def __init__(self, backend: Backend, description: ShardDescription) -> None:
        self._backend = backend
        self._description = description

    def prefill(self, parts: list[_Prompt]) -> tuple[Floats, float]:
        """The output behind the last row, from an empty cache, and the milliseconds that it took."""
        self._backend.close(SLOT)
        self._backend.open(SLOT)
        self._check_kv(0)
        started = time.perf_counter()
        outputs = [self._feed(part) for part in parts]
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return outputs[-1], elapsed_ms

    def decode(self, prompt: _Prompt) -> float:
        """One more row; milliseconds."""
        started = time.perf_counter()
        self._feed(prompt.row(0))
        return (time.perf_counter() - started) * 1e3

    def _feed(self, part: _Prompt) -> Floats:
        held = self._backend.kv_tokens(SLOT)
        entry = BackendEntry(
            slot=SLOT,
            position=held,
            rows=part.rows,
            tokens=part.tokens.astype("<i4").tobytes(),
            hidden=tuple(h.tobytes() for h in part.hidden),
            want_output=True,
        )
        results = self._backend.run([entry])
        if len(results) != 1:
            raise _failed(f"one entry gave {len(results)} results")
        if isinstance(results[0], Exception):
            raise results[0]
        self._check_kv(held + part.rows)
        return self._last_row(results[0], part.rows)

    def _last_row(self, output: BackendOutput, rows: int) -> Floats:
        """The logits, or the last row of all tensors of the layout that are no positions, as one array; finite."""
        if self._description.is_tail:
            # A copy: what a backend returns may be its own memory, which the next call uses again.
            logits = np.array(output.logits, dtype=np.float32)
            if output.logits is None or logits.shape != (self._description.vocab_size,):
                raise _failed(f"logits of the shape {logits.shape}, expected {self._description.vocab_size}")
            values = logits
        else:
            tensors = self._description.layout_out.tensors
            if len(output.hidden) != len(tensors):
                raise _failed(f"{len(output.hidden)} tensors, the Seam layout has {len(tensors)}")
            pairs = zip(output.hidden, tensors, strict=True)
            read = [_decoded(buffer, t, rows) for buffer, t in pairs if t.dtype != "I32"]
            if not all(np.isfinite(r).all() for r in read):
                raise ShardlineError("numerical_error", "self-test: rows that are not finite")
            values = np.concatenate([r[-1].reshape(-1) for r in read])
        if not np.isfinite(values).all():
            raise ShardlineError("numerical_error", "self-test: logits that are not finite")
        return values

    def _check_kv(self, expected: int) -> None:
        held = self._backend.kv_tokens(SLOT)
        if held != expected:
            raise _failed(f"the cache holds {held} tokens, expected {expected}")

    def check_chunking(self, whole: Floats, halves: Floats, changed: Floats) -> None:
        """In two pieces the answer is that of one piece, up to rounding; of another context it is another answer."""
        by_context = float(np.linalg.norm(changed - halves))
        by_chunking = float(np.linalg.norm(whole - halves))
        if by_context == 0:
            raise _failed("the answer does not depend on the rows before the last")
        if by_chunking > _CHUNKING_SHARE * by_context:
            raise _failed(
                f"cutting the prompt in two changes the answer by {by_chunking:.3g}, another row by {by_context:.3g}"
            )

    def check_empty(self) -> None:
        """A slot that is opened again holds nothing of before."""
        self._backend.open(SLOT)
        try:
            self._check_kv(0)
        finally:
            self._backend.close(SLOT)


def _encoded(values: npt.NDArray[Any], tensor: LayoutTensor) -> npt.NDArray[Any]:
    if tensor.dtype == "I32":
        # Positions that a row looks at: its own, and those in front of it from the nearest on; then any that are there.
        row, back = np.indices(values.shape, dtype="<i4")
        positions: npt.NDArray[Any] = np.where(back <= row, row - back, back)
        return positions
    if tensor.dtype == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    if tensor.dtype not in kinds:
        raise _failed(f"rows of {tensor.dtype} cannot be tested")
    return values.astype(kinds[tensor.dtype])


def _decoded(buffer: Buffer, tensor: LayoutTensor, rows: int) -> Floats:
    """A buffer of rows as float32, [rows, *shape]."""
    view = memoryview(buffer).cast("B")
    if len(view) != rows * tensor.row_bytes:
        raise _failed(f"{len(view)} bytes of {tensor.name} for {rows} rows, expected {rows * tensor.row_bytes}")
    if tensor.dtype == "BF16":
        wide = np.frombuffer(view, "<u2").astype("<u4") << 16
        values = wide.view("<f4")
    else:
        values = np.frombuffer(view, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])
    return values.reshape(rows, math.prod(tensor.shape)).astype(np.float32)


def _failed(why: str) -> ShardlineError:
    return ShardlineError("engine_error", f"self-test: {why}")
