"""Runs a model whole and as a chain of Shard files, in stock llama.cpp, and prints how far the logits are apart.

A program of its own (`python -m tests.support.llama_chain WHOLE RESIDUAL PART …`), because llama.cpp ends the process
where it finds a fault. Written against the C functions alone, without the engine: it shows what the files are worth.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import llama_cpp.llama_cpp as C
import numpy as np
from gguf.quants import dequantize

from shardline.formats.gguf import GGUFHeader, read_header

STEPS = (range(3, 15), (101,), (7,), (42, 43))
"""Token ids of each call: a prefill, then decoding."""

_SILENT = C.llama_log_callback(lambda *_: None)
_BASE = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base*"))))
_BASE.ggml_get_name.restype = ctypes.c_char_p
_BASE.ggml_get_name.argtypes = [ctypes.c_void_p]
_BASE.ggml_nbytes.restype = ctypes.c_size_t
_BASE.ggml_nbytes.argtypes = [ctypes.c_void_p]
_BASE.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

M_ROPE = (8, 40)


class Loaded:
    """A file in llama.cpp, with one context; keeps the tensor called `tap` of each call."""

    def __init__(self, path: str, tap: str | None = None) -> None:
        self.rows: Any = None
        self.model = C.llama_model_load_from_file(path.encode(), C.llama_model_default_params())
        if not self.model:
            sys.exit(f"{path} does not load")
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256, 64, 64
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified, params.n_seq_max = True, 2
        self._tap = C.ggml_backend_sched_eval_callback(lambda tensor, ask, _: self._saw(tensor, ask, tap))
        if tap is not None:
            params.cb_eval = self._tap
        self.context = C.llama_init_from_model(self.model, params)
        self.width = C.llama_model_n_embd(self.model)
        self.vocabulary = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self.model))
        self.sections = C.llama_model_rope_type(self.model) in M_ROPE

    def _saw(self, tensor: int, ask: bool, tap: str | None) -> bool:
        if tap is None or _BASE.ggml_get_name(tensor) != tap.encode():
            return not ask
        if not ask:
            self.rows = np.empty(_BASE.ggml_nbytes(tensor) // 4, np.float32)
            _BASE.ggml_backend_tensor_get(tensor, self.rows.ctypes.data, 0, self.rows.nbytes)
        return True

    def run(self, position: int, tokens: Any, rows: Any = None) -> Any:
        """Logits of every row; `rows` in place of the tokens, if given."""
        count = len(tokens)
        # Four positions a row, where the model wants them: the batch has room for that many.
        batch = C.llama_batch_init(4 * count, 0 if rows is None else self.width, 1)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            if rows is None:
                batch.token[i] = token
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        if rows is not None:
            rows = np.ascontiguousarray(rows, np.float32)
            ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)
            for section in range(1, 4) if self.sections else ():
                for i in range(count):
                    batch.pos[section * count + i] = position + i if section < 3 else 0
        code = C.llama_decode(self.context, batch)
        if code:
            sys.exit(f"llama_decode says {code}")
        logits = [
            np.ctypeslib.as_array(C.llama_get_logits_ith(self.context, i), (self.vocabulary,)).copy()
            for i in range(count)
        ]
        C.llama_batch_free(batch)
        return np.array(logits)


def embedded(path: str, header: GGUFHeader, tokens: Any) -> Any:
    """The rows that the head's file has for tokens."""
    type_id, rows = header.integer("shardline.embedding.type"), header.integer("shardline.embedding.rows")
    kind = gguf.GGMLQuantizationType(type_id)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = header.integer("shardline.embedding.width") // block * size
    offset = header.integer("shardline.embedding.offset")
    matrix = np.memmap(path, np.uint8, "r", offset, (rows, row_bytes))
    found = dequantize(np.array(matrix[list(tokens)]), kind).astype(np.float32)
    return found * np.float32(header.number("shardline.embedding.scale"))


def chain(whole: str, residual: str, paths: list[str]) -> dict[str, float]:
    reference = Loaded(whole)
    parts = []
    for path in paths:
        header = read_header(path)
        first, last, n_layers = header.numbers("shardline.source.layers")
        tap = None if last == n_layers else residual.format(last=int(last - first) - 1)
        parts.append((Loaded(path, tap), np.float32(header.number("shardline.input.divisor"))))
    head = read_header(paths[0])
    worst, largest, position = 0.0, 0.0, 0
    for tokens in STEPS:
        expected = reference.run(position, tokens)
        rows = embedded(paths[0], head, tokens)
        logits = None
        for part, divisor in parts:
            logits = part.run(position, tokens, rows / divisor if divisor != 1 else rows)
            rows = part.rows.reshape(len(tokens), -1) if part.rows is not None else None
        position += len(tokens)
        worst = max(worst, float(np.abs(logits - expected).max()))
        largest = max(largest, float(np.abs(expected).max()))
    return {"difference": worst, "largest": largest}


if __name__ == "__main__":
    os.environ["GGML_NO_BACKTRACE"] = "1"
    C.llama_log_set(_SILENT, ctypes.c_void_p(0))
    C.llama_backend_init()
    print(json.dumps(chain(sys.argv[1], sys.argv[2], sys.argv[3:])))
