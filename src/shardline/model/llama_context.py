"""A model and a context of llama.cpp, made and freed: how a Shard is loaded and what its context is set up with.

Owns the two pointers, and the order in which they are freed. The set-up follows what makes a split exact and admission
true: one KV buffer for all sequences, flash attention, one ubatch a call. Refuses to know slots and rows.
Shown by tests/model/test_llama_shard.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardline.errors import ShardlineError
from shardline.formats.gguf_files import part_paths
from shardline.model.llama_library import LLAMA_MAX_SEQ, LlamaLibrary
from shardline.model.llama_tap import Tap
from shardline.options import LOAD_STEPS

Progress = Callable[[int, int], None]

TAP_SEQUENCE = LLAMA_MAX_SEQ - 1
"""Belongs to the tap and is in no batch. It takes no room: KV and recurrent states are for lower ids."""
SESSIONS_LIMIT = TAP_SEQUENCE
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
"""What keys and values may be kept in, with the library's numbers. Flash attention computes with all of them."""
_FLASH_ATTENTION_ON = 1
_POOLING_NONE = 0


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """What a context is made with."""

    kv_tokens: int
    """Of all sequences together; the library rounds up to a multiple of 256."""
    sessions: int
    rows: int
    """Most rows of one call."""
    outputs: int
    """Most rows of one call that logits, or rows behind the final norm, are wanted of."""
    threads: int
    kv_type: str
    swa_full: bool
    """Keep what a sliding window has passed: more memory, and any rollback is exact."""
    prefill_threads: int | None = None
    """For calls of several rows a sequence; None: as many as for one."""
    unpooled: bool = False
    """The model names a pooling of its own, and rows are wanted as they are."""

    @property
    def most_outputs(self) -> int:
        """Each sequence may want one."""
        return max(self.outputs, self.sessions)


def usable_cores() -> int:
    """Physical cores that this process may use: a second thread on a core only waits for the same arithmetic units."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


class LlamaModel:
    """A loaded model, or with `vocab_only` its vocabulary alone (then safe to use from any thread)."""

    def __init__(
        self,
        library: LlamaLibrary,
        path: Path,
        *,
        vocab_only: bool = False,
        gpu_layers: int = -1,
        window: tuple[int, int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load the file (of a split model, its first part). `window`: only these layers [first, last), which a patched
        library alone can (llama_window_library.py). `model_file_invalid` with the library's words where it refuses the
        file, `engine_out_of_memory` where it found no memory."""
        params = library.structs.llama_model_default_params()
        params.vocab_only = vocab_only
        params.n_gpu_layers = gpu_layers
        if window is not None:
            params.il_begin, params.il_end = window
        # Referred to until the load is done.
        watch = library.structs.llama_progress_callback(_heard(progress))
        params.progress_callback = watch
        library.log.clear()
        self._library = library
        self.pointer: int | None = library.c.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise load_fault(library, "model_file_invalid", f"llama.cpp does not load {path.name!r:.200}")
        give_back_pages(part_paths(path))

    @property
    def vocabulary(self) -> int:
        pointer: int = self._library.c.llama_model_get_vocab(self.pointer)
        return pointer

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a state that cannot be taken back."""
        c = self._library.c
        return bool(c.llama_model_is_recurrent(self.pointer) or c.llama_model_is_hybrid(self.pointer))

    def close(self) -> None:
        if self.pointer:
            self._library.c.llama_model_free(self.pointer)
            self.pointer = None


class LlamaContext:
    """A context of a model, with its tap where the residual is wanted."""

    def __init__(self, library: LlamaLibrary, model: LlamaModel, plan: ContextPlan, tap: Tap | None) -> None:
        """Raises `engine_out_of_memory` where the library finds no memory, `architecture_unsupported` where the tap
        finds no residual or the model is no decoder (the library would end the process at its first text),
        `engine_error` for anything else."""
        self._library = library
        self._tap = tap
        if library.c.llama_model_has_encoder(model.pointer):
            raise _no_decoder("it has an encoder")
        params = _params(library.structs, plan)
        if tap is not None:
            tap.prepare(params)
        library.log.clear()
        self.pointer: int | None = library.c.llama_init_from_model(model.pointer, params)
        try:
            if not self.pointer:
                raise load_fault(library, "engine_error", "llama.cpp makes no context for this Shard")
            self.memory: int = library.c.llama_get_memory(self.pointer)
            if not self.memory:
                raise _no_decoder("it keeps nothing of a text, as models do that embed or diffuse")
            self.kv_tokens: int = library.c.llama_n_ctx(self.pointer)
            if tap is not None:
                tap.attach(self.pointer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.pointer:
            self._library.c.llama_free(self.pointer)
            self.pointer = None
        if self._tap is not None:
            self._tap.close()


def _no_decoder(why: str) -> ShardlineError:
    return ShardlineError("architecture_unsupported", f"the model does not write a text token by token: {why}")


def _params(structs: Any, plan: ContextPlan) -> Any:
    params = structs.llama_context_default_params()
    params.n_ctx = plan.kv_tokens
    params.n_batch = params.n_ubatch = plan.rows
    params.n_seq_max = plan.sessions
    params.n_outputs_max = plan.most_outputs
    params.n_threads = plan.threads
    params.n_threads_batch = plan.prefill_threads or plan.threads
    params.flash_attn_type = _FLASH_ATTENTION_ON
    params.type_k = params.type_v = KV_TYPES[plan.kv_type]
    params.kv_unified = True
    params.swa_full = plan.swa_full
    if plan.unpooled:
        params.pooling_type = _POOLING_NONE
    return params


def give_back_pages(paths: Iterable[Path]) -> None:
    """Let go of the pages of mapped model files that loading has touched: weights that the library has laid out anew
    are in memory of its own, and would count twice. Those that it uses where they lie come back, without a read, as
    they are used. Linux only; elsewhere, and where the system refuses, nothing changes."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    try:
        files = {path.stat().st_ino for path in paths}
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        # Private writable pages would lose what was written: only what is the file's alone.
        if "w" not in fields[1] and int(fields[4]) in files:
            first, last = (int(address, 16) for address in fields[0].split("-"))
            libc.madvise(first, last - first, mmap.MADV_DONTNEED)


def load_fault(library: LlamaLibrary, code: str, what: str) -> ShardlineError:
    """The error for a load that failed, with the library's own words."""
    words = library.log.last_words()
    if "failed to allocate" in words or "out of memory" in words or "bad_alloc" in words:
        code = "engine_out_of_memory"
    return ShardlineError(code, f"{what}: {words[:400] or 'it does not say why'}")


def _heard(progress: Progress | None) -> Callable[[float, object], bool]:
    last = -1

    def on_progress(share: float, _user: object) -> bool:
        nonlocal last
        done = int(share * LOAD_STEPS)
        if progress is not None and done != last:
            last = done
            progress(done, LOAD_STEPS)
        return True

    return on_progress
