"""SmolLM2 in llama.cpp through llama-cpp-python's functions alone: what the engine is compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as lib

Given = tuple[int, int, Sequence[int], bool]
"""Sequence, position, token ids, whether logits of the last are wanted."""


class Plain:
    """The unsplit model."""

    def __init__(self, path: Path, *, sequences: int = 9, context: int = 4096, rows: int = 512, threads: int = 1):
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = rows
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.flash_attn_type = 1
        params.swa_full = False
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def run(self, given: Sequence[Given]) -> list[np.ndarray | None]:
        """One llama_decode; copies of the logits that are wanted."""
        count = sum(len(tokens) for _, _, tokens, _ in given)
        batch = lib.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            at, last = 0, []
            for sequence, position, tokens, wanted in given:
                for i, token in enumerate(tokens):
                    batch.token[at] = token
                    batch.pos[at] = position + i
                    batch.n_seq_id[at] = 1
                    batch.seq_id[at][0] = sequence
                    batch.logits[at] = wanted and i == len(tokens) - 1
                    at += 1
                last.append(at - 1 if wanted else None)
            code = lib.llama_decode(self._context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            return [None if i is None else self._logits(i) for i in last]
        finally:
            lib.llama_batch_free(batch)

    def _logits(self, row: int) -> np.ndarray:
        pointer = lib.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,)).copy()

    def clear(self) -> None:
        lib.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)
