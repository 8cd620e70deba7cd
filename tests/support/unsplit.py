"""A GGUF file in the llama.cpp library, with no line of the product between: what a split is compared with.

Rows go in as tokens or as embeddings; rows inside come out by the library's evaluation callback, which can see any
tensor of the graph. All outputs of one call, in the order of its rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from llama_cpp import llama_cpp as lib

CONTEXT = 256
ROWS = 64
_FOUR_POSITIONS = (8, 40)
"""Rope types for which an embedded row has 4 positions."""

_GGML = ctypes.CDLL(str(Path(lib.__file__).parent / "lib" / "libggml-base.so"))
_GGML.ggml_get_name.restype = ctypes.c_char_p
_GGML.ggml_get_name.argtypes = (ctypes.c_void_p,)
_GGML.ggml_nbytes.restype = ctypes.c_size_t
_GGML.ggml_nbytes.argtypes = (ctypes.c_void_p,)
_GGML.ggml_backend_tensor_get.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


@dataclass(frozen=True)
class Rows:
    """New rows of one sequence, and the position of the first of them."""

    sequence: int
    position: int
    tokens: tuple[int, ...]


Call = tuple[Rows, ...]


def script(vocabulary: int, sequences: int, *, ragged: bool) -> tuple[Call, ...]:
    """The calls of a test: prefill, decode of 1, 1 and 2 rows; where there is room for three sequences also two prompts
    in one call, of different lengths where `ragged`, and all three decoding."""
    rng = np.random.default_rng(7)

    def rows(sequence: int, position: int, count: int) -> Rows:
        return Rows(sequence, position, tuple(int(t) for t in rng.integers(3, vocabulary, count)))

    alone: tuple[Call, ...] = ((rows(0, 0, 12),), (rows(0, 12, 1),), (rows(0, 13, 1),), (rows(0, 14, 2),))
    if sequences < 3:
        return alone
    third = 5 if ragged else 7
    return (
        *alone,
        (rows(1, 0, 7), rows(2, 0, third)),
        (rows(0, 16, 1), rows(1, 7, 1), rows(2, third, 1)),
    )


@dataclass(frozen=True)
class Outcome:
    """`inside`: the tapped tensors, [rows, width]. `logits`: [rows with an output, vocabulary], float32."""

    inside: dict[str, np.ndarray]
    logits: np.ndarray


class Unsplit:
    """One model and one context. `taps` are names of tensors whose rows are wanted."""

    def __init__(self, path: Path, sequences: int, taps: Iterable[str] = ()) -> None:
        params = lib.llama_model_default_params()
        params.use_mmap = True
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"the library does not load {path.name}")
        self._taps = frozenset(taps)
        self._inside: dict[str, np.ndarray] = {}
        self._callback = lib.ggml_backend_sched_eval_callback(self._see)
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = CONTEXT, ROWS, ROWS, sequences
        context.n_threads = context.n_threads_batch = 1
        context.kv_unified = True
        context.swa_full = False
        context.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if self._taps:
            context.cb_eval = self._callback
        self._context = lib.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"the library makes no context for {path.name}")
        self.vocabulary: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._four = lib.llama_model_rope_type(self._model) in _FOUR_POSITIONS

    def __enter__(self) -> Unsplit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)

    def _see(self, tensor: int, asking: bool, _: object) -> bool:
        name = _GGML.ggml_get_name(tensor).decode()
        if asking:
            return name in self._taps
        if name in self._taps:
            width = ctypes.c_int64.from_address(tensor + 16).value
            values = np.empty(_GGML.ggml_nbytes(tensor) // 4, np.float32)
            _GGML.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
            self._inside[name] = values.reshape(-1, width)
        return True

    def run(self, call: Call, embedded: np.ndarray | None = None, *, all_outputs: bool = True) -> Outcome:
        """Compute one call. Without `all_outputs` only the last row of each sequence has logits."""
        count = sum(len(rows.tokens) for rows in call)
        positions = np.concatenate([np.arange(r.position, r.position + len(r.tokens)) for r in call]).astype(np.int32)
        if self._four and embedded is not None:
            positions = np.concatenate([positions, positions, positions, np.zeros_like(positions)])
        sequences = np.concatenate([np.full(len(r.tokens), r.sequence) for r in call]).astype(np.int32)
        flags = np.ones(count, np.int8)
        if not all_outputs:
            flags[:] = 0
            flags[np.cumsum([len(r.tokens) for r in call]) - 1] = 1
        self._inside = {}
        batch = self._batch(call, embedded, positions, sequences, flags)
        code = lib.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        lib.llama_synchronize(self._context)
        return Outcome(self._inside, self._logits(np.flatnonzero(flags)))

    def _logits(self, rows: np.ndarray) -> np.ndarray:
        found = [lib.llama_get_logits_ith(self._context, int(row)) for row in rows]
        return np.stack([np.ctypeslib.as_array(f, (self.vocabulary,)).copy() for f in found])

    def _batch(self, call: Call, embedded: np.ndarray | None, *arrays: np.ndarray) -> object:
        positions, sequences, flags = arrays
        count = len(flags)
        tokens = np.array([t for rows in call for t in rows.tokens], np.int32)
        batch = lib.llama_batch()
        batch.n_tokens = count
        if embedded is None:
            batch.token = tokens.ctypes.data_as(ctypes.POINTER(lib.llama_token))
        else:
            embedded = np.ascontiguousarray(embedded, np.float32)
            batch.embd = embedded.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        ones = np.ones(count, np.int32)
        each = (ctypes.POINTER(lib.llama_seq_id) * count)(
            *(ctypes.cast(sequences.ctypes.data + 4 * i, ctypes.POINTER(lib.llama_seq_id)) for i in range(count))
        )
        batch.pos = positions.ctypes.data_as(ctypes.POINTER(lib.llama_pos))
        batch.n_seq_id = ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.seq_id = ctypes.cast(each, type(batch.seq_id))
        batch.logits = flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self._alive: Sequence[object] = (tokens, embedded, ones, each, positions, sequences, flags)
        return batch
