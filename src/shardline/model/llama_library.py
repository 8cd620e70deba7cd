"""llama.cpp as a C library: found, checked, declared; its log kept.

Owns the one place where the library is loaded and its functions get their C types. Refuses any version but the one
whose structs were read: they change without notice, and a wrong layout is wrong numbers or a crash, not an error.
Knows nothing of models, contexts or Shards. Shown by tests/model/test_llama_library.py.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from shardline.errors import ShardlineError

VERSIONS: Mapping[str, str] = {"0.3.36": "0c1e57098bba43ac29e6e3b677cdceebdd22334f"}
"""Versions of llama-cpp-python that were verified, each with the llama.cpp commit that it carries."""

ADVICE = "Install the engine: pip install 'shardline[llama]' (it compiles for some minutes), or choose --engine torch."
LOG_LEVELS = {1: "debug", 2: "info", 3: "warning", 4: "error"}
_CONTINUED = 5
_WARNING = 3
_KEPT_LINES = 20
_EXPECTED = re.compile(r"adding \d+ dummy tokens|n_ctx_seq \(\d+\) > n_ctx_train|model default pooling_type is \[\d+\]")
"""Warnings that follow from how Shards are run: a part has no vocabulary, one context holds many sessions, and rows are
pooled here."""

LLAMA_MAX_SEQ = 256
F16 = 1
ROPE_MULTI = frozenset({8, 40})
"""Rope types that take four positions a row: MROPE, IMROPE."""

FunctionTypes = tuple[Any, tuple[Any, ...]]
"""Result, arguments; a string names a struct that is handed over by value."""
_CONTEXT = MODEL = VOCAB = MEMORY = SAMPLER = TENSOR = c_void_p

_FUNCTIONS: dict[str, FunctionTypes] = {
    "llama_backend_init": (None, ()),
    "llama_model_load_from_file": (MODEL, (c_char_p, "llama_model_params")),
    "llama_model_free": (None, (MODEL,)),
    "llama_model_get_vocab": (VOCAB, (MODEL,)),
    "llama_model_n_embd": (c_int32, (MODEL,)),
    "llama_model_n_embd_inp": (c_int32, (MODEL,)),
    "llama_model_n_embd_out": (c_int32, (MODEL,)),
    "llama_model_n_swa": (c_int32, (MODEL,)),
    "llama_model_size": (ctypes.c_uint64, (MODEL,)),
    "llama_model_rope_type": (c_int32, (MODEL,)),
    "llama_model_is_recurrent": (c_bool, (MODEL,)),
    "llama_model_is_hybrid": (c_bool, (MODEL,)),
    "llama_model_has_encoder": (c_bool, (MODEL,)),
    "llama_init_from_model": (_CONTEXT, (MODEL, "llama_context_params")),
    "llama_free": (None, (_CONTEXT,)),
    "llama_n_ctx": (c_uint32, (_CONTEXT,)),
    "llama_get_memory": (MEMORY, (_CONTEXT,)),
    "llama_decode": (c_int32, (_CONTEXT, "Batch")),
    "llama_synchronize": (None, (_CONTEXT,)),
    "llama_get_logits_ith": (c_void_p, (_CONTEXT, c_int32)),
    "llama_set_embeddings": (None, (_CONTEXT, c_bool)),
    "llama_get_embeddings": (c_void_p, (_CONTEXT,)),
    "llama_memory_seq_rm": (c_bool, (MEMORY, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (MEMORY, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (MEMORY, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (MEMORY, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (_CONTEXT, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (_CONTEXT, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (_CONTEXT, c_void_p, c_size_t, c_int32)),
    "llama_sampler_chain_init": (SAMPLER, ("llama_sampler_chain_params",)),
    "llama_sampler_chain_add": (None, (SAMPLER, SAMPLER)),
    "llama_sampler_init": (SAMPLER, (c_void_p, c_void_p)),
    "llama_sampler_free": (None, (SAMPLER,)),
    "llama_tokenize": (c_int32, (VOCAB, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_vocab_n_tokens": (c_int32, (VOCAB,)),
    "llama_token_to_piece": (c_int32, (VOCAB, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    "llama_set_embeddings_layer_inp": (None, (_CONTEXT, c_uint32, c_bool)),
    "llama_get_embeddings_layer_inp": (c_void_p, (_CONTEXT, c_uint32)),
    "llama_set_embeddings_nextn": (None, (_CONTEXT, c_bool, c_bool)),
    "llama_get_embeddings_nextn": (c_void_p, (_CONTEXT,)),
    "ggml_commit": (c_char_p, ()),
    "ggml_graph_get_tensor": (TENSOR, (c_void_p, c_char_p)),
    "ggml_set_output": (None, (TENSOR,)),
    "ggml_get_name": (c_char_p, (TENSOR,)),
    "ggml_get_data": (c_void_p, (TENSOR,)),
    "ggml_nbytes": (c_size_t, (TENSOR,)),
    "ggml_backend_tensor_get": (None, (TENSOR, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_dev_count": (c_size_t, ()),
    "ggml_backend_dev_get": (c_void_p, (c_size_t,)),
    "ggml_backend_dev_name": (c_char_p, (c_void_p,)),
    "ggml_backend_dev_description": (c_char_p, (c_void_p,)),
    "ggml_backend_dev_type": (c_int32, (c_void_p,)),
    "ggml_get_type_traits": (c_void_p, (c_int32,)),
}
"""Name -> result, arguments. A string names a struct that is handed over by value: of llama_cpp, or `Batch`."""

_MANGLED = {
    "llama_set_embeddings_layer_inp": "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    "llama_get_embeddings_layer_inp": "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "llama_set_embeddings_nextn": "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    "llama_get_embeddings_nextn": "_Z26llama_get_embeddings_nextnP13llama_context",
}
"""Functions of the staging header have C++ names."""

_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max_per_seq": 1,
    "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1,
    "yarn_ext_factor": -1.0, "yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0,
    "defrag_thold": -1.0, "type_k": F16, "type_v": F16, "offload_kqv": True, "no_perf": True, "op_offload": True,
    "swa_full": True, "kv_unified": False,
}  # fmt: skip
"""What the library fills in where the layout is the one that was read; everything else is zero."""


class Batch(ctypes.Structure):
    """`llama_batch`, its pointers as plain addresses: they are set at every step, and this is the cheap way."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    ]


class TypeTraits(ctypes.Structure):
    """`ggml_type_traits`: how values of one tensor type are stored."""

    _fields_ = [
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
    ]


class Log:
    """The library's log: warnings and errors go to standard error, but for those that are no news. The last lines of
    any kind are kept for errors."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._lines: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)
        self._level = 0
        self._part = ""
        self.callback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(self._take)

    def _take(self, level: int, text: bytes, _user: int | None) -> None:
        if level != _CONTINUED:
            self._level = level
        *lines, self._part = (self._part + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if not line.strip():
                continue
            self._lines.append((self._level, line.strip()))
            if self._level >= _WARNING and not _EXPECTED.search(line):
                self._write(f"llama.cpp {LOG_LEVELS.get(self._level, 'log')}: {line.strip()}\n")

    def clear(self) -> None:
        self._lines.clear()

    def last_words(self, count: int = 3) -> str:
        """The last warnings and errors since `clear`, in one line; "" where there was none."""
        lines = list(self._lines)  # another thread may be told something meanwhile
        return " | ".join([line for level, line in lines if level >= _WARNING][-count:])


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    description: str
    accelerator: bool


@dataclass(frozen=True, slots=True)
class LlamaLibrary:
    """The loaded library. `c` has the declared functions as attributes, `structs` the structs of llama_cpp."""

    c: Any
    structs: Any
    version: str
    """Of llama-cpp-python."""
    commit: str
    """Of llama.cpp."""
    log: Log

    @property
    def build(self) -> str:
        return f"llama.cpp {self.commit[:7]} (llama-cpp-python {self.version})"

    def devices(self) -> tuple[Device, ...]:
        c = self.c
        found = [c.ggml_backend_dev_get(i) for i in range(c.ggml_backend_dev_count())]
        return tuple(
            Device(
                c.ggml_backend_dev_name(d).decode(),
                c.ggml_backend_dev_description(d).decode("utf-8", "replace"),
                c.ggml_backend_dev_type(d) in (1, 2),
            )
            for d in found
        )

    def type_traits(self, type_id: int) -> TypeTraits:
        address: int = self.c.ggml_get_type_traits(type_id)
        return TypeTraits.from_address(address)


@cache
def library() -> LlamaLibrary:
    """Load and check the library; once a process, as it has one log and one set of devices.

    `engine_unavailable` where it is missing, of a version that was not verified, or not as its version should be.
    """
    package = verified_package()
    return checked(open_libraries(Path(str(package.llama_cpp._lib._name))), package.llama_cpp, str(package.__version__))


def checked(
    libraries: list[ctypes.CDLL],
    structs: Any,
    version: str,
    *,
    functions: Mapping[str, FunctionTypes] | None = None,
    model_defaults: Mapping[str, Any] | None = None,
) -> LlamaLibrary:
    """The library in `libraries`, its functions declared, its structs found to be `structs`, its log taken.

    `functions`, `model_defaults`: what it has beside what every one has. `engine_unavailable` where it is another one.
    """
    log = Log(sys.stderr.write)
    c: Any = _Functions(libraries, structs, _FUNCTIONS | dict(functions or {}))
    take_log = declare(libraries, "llama_log_set", (None, (c_void_p, c_void_p)))
    check_layout(
        _filled(libraries, "llama_model_default_params", structs.llama_model_params),
        _MODEL_DEFAULTS | dict(model_defaults or {}),
    )
    check_layout(_filled(libraries, "llama_context_default_params", structs.llama_context_params), _CONTEXT_DEFAULTS)
    check_commit(c.ggml_commit().decode(), VERSIONS[version])
    # Only now: a library that is refused stays loaded, and would call a function that is gone.
    take_log(log.callback, None)
    c.llama_backend_init()
    return LlamaLibrary(c, structs, version, VERSIONS[version], log)


def verified_package() -> ModuleType:
    """`llama_cpp`, of a verified version."""
    try:
        import llama_cpp
        import llama_cpp.llama_cpp
    except ImportError as error:
        raise unavailable(f"the llama engine needs llama-cpp-python: {error.name or error} is not installed") from None
    except (OSError, RuntimeError) as error:  # a library that was built for another machine or is cut short
        raise unavailable(f"llama-cpp-python cannot be loaded: {error!s:.200}") from None
    check_version(str(llama_cpp.__version__))
    return llama_cpp  # type: ignore[no-any-return]


def check_version(version: str) -> None:
    if version not in VERSIONS:
        verified = " or ".join(VERSIONS)
        raise unavailable(
            f"llama-cpp-python {version:.40} is not one that this engine was verified with",
            f"Install the verified version: pip install llama-cpp-python=={verified}",
        )


def check_commit(built: str, verified: str) -> None:
    """`engine_unavailable` where the library says that it is of another commit. Some builds do not know theirs."""
    commit = built.removesuffix("-dirty")
    if commit not in ("", "unknown") and not verified.startswith(commit):
        raise unavailable(f"llama.cpp {commit:.40} is in place of {verified[:7]}, which this engine was verified with")


def open_libraries(main: Path) -> list[ctypes.CDLL]:
    """libllama first, then the ggml libraries beside it: elsewhere than on Linux a library does not show the names of
    those that it needs. New handles: C types declared here do not change those that the package declared."""
    try:
        found = [ctypes.CDLL(str(main))]
        for stem in ("libggml", "libggml-base", "ggml", "ggml-base"):
            path = main.with_name(stem + main.suffix)
            if path.exists():
                found.append(ctypes.CDLL(str(path)))
    except OSError as error:
        raise unavailable(f"the shared library of llama.cpp cannot be loaded: {error!s:.200}") from None
    return found


class _Functions:
    """The declared functions as attributes."""

    def __init__(self, libraries: list[ctypes.CDLL], structs: Any, table: Mapping[str, FunctionTypes]) -> None:
        for name, (result, arguments) in table.items():
            kinds = tuple(_struct(structs, a) if isinstance(a, str) else a for a in arguments)
            setattr(self, name, declare(libraries, name, (result, kinds)))


def _struct(structs: Any, name: str) -> Any:
    return Batch if name == Batch.__name__ else getattr(structs, name)


def declare(libraries: list[ctypes.CDLL], name: str, types: FunctionTypes) -> Any:
    """The function `name` of the first library that has it; `engine_unavailable` where none has."""
    for library in libraries:
        for symbol in (name, _MANGLED.get(name)):
            if symbol is not None and hasattr(library, symbol):
                function = library[symbol]  # an object of its own: one function may be declared in two ways
                function.restype, function.argtypes = types[0], list(types[1])
                return function
    raise unavailable(f"the library of llama.cpp has no function {name}")


def _filled(libraries: list[ctypes.CDLL], name: str, struct: Any) -> Any:
    """A struct as the library fills it, with room behind it: a longer one of another version does no harm."""

    class Padded(ctypes.Structure):
        _fields_ = [("params", struct), ("behind", c_uint8 * 256)]

    return declare(libraries, name, (Padded, ()))()


def check_layout(filled: Any, defaults: Mapping[str, Any]) -> None:
    """`engine_unavailable` where a struct that the library filled does not read as it should."""
    for name, kind in filled.params._fields_:
        value = getattr(filled.params, name)
        if name in ("n_threads", "n_threads_batch"):
            right = 1 <= value <= 4096
        elif name in defaults or kind in (c_bool, c_float, c_int32, c_uint32, c_size_t, c_int8):
            right = value == defaults.get(name, 0)
        else:
            right = not value
        if not right:
            raise unavailable(f"{type(filled.params).__name__}.{name} reads as {value!r:.40}: not the layout expected")


def unavailable(why: str, advice: str = ADVICE) -> ShardlineError:
    return ShardlineError("engine_unavailable", why, advice=advice)
