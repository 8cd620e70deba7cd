"""The patched llama.cpp that loads layers of a file alone: found, opened, declared.

Owns where `make upstream` leaves it, and the one struct and the functions that the patch changes. Everything else is
llama_library.py's. Refuses a library that has not these functions, and never takes the stock one in its place.
Shown by tests/upstream/test_window_engine.py.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from ctypes import c_bool, c_int32, c_void_p
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from shardline.model.llama_library import (
    FunctionTypes,
    LlamaLibrary,
    checked,
    declare,
    open_libraries,
    unavailable,
    verified_package,
)

ADVICE = "Build it in a clone: make upstream. Or name one: --set llama_window_library=/path/to/libllama.so"
BUILT = Path("build") / "bin" / ("libllama.dylib" if sys.platform == "darwin" else "libllama.so")
"""Below the folder of a version."""
_FUNCTIONS: Mapping[str, FunctionTypes] = {
    "llama_set_embeddings_layer_inp": (c_int32, (c_void_p, c_int32, c_bool)),
    "llama_get_embeddings_layer_inp": (c_void_p, (c_void_p, c_int32)),
    "llama_model_n_embd_layer_inp": (c_int32, (c_void_p, c_int32)),
    "llama_model_can_split_at": (c_bool, (c_void_p, c_int32)),
}
_DEFAULTS = {"il_begin": 0, "il_end": -1}


class WindowStructs:
    """The structs of llama_cpp, but for the one that the patch makes longer, and what returns it."""

    def __init__(self, package: Any, libraries: list[ctypes.CDLL]) -> None:
        self._package = package

        class llama_model_params(ctypes.Structure):
            _fields_ = (*package.llama_model_params._fields_, ("il_begin", c_int32), ("il_end", c_int32))

        self.llama_model_params = llama_model_params
        for name, result in (
            ("llama_model_default_params", llama_model_params),
            ("llama_context_default_params", package.llama_context_params),
        ):
            setattr(self, name, declare(libraries, name, (result, ())))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)


def built_library() -> Path:
    """Where `make upstream` leaves the library for the installed version; it may not be there."""
    folder = Path("~/.cache").expanduser() / "shardline" / "upstream"
    try:
        return folder / metadata.version("llama-cpp-python") / BUILT
    except metadata.PackageNotFoundError:
        raise unavailable("the llama-window engine needs llama-cpp-python too: it is not installed") from None


def window_library(path: str = "") -> LlamaLibrary:
    """The library at `path`, or that of `make upstream`. `engine_unavailable` where it is not built, not patched, or of
    another version than the installed llama-cpp-python, whose structs it is read with."""
    main = Path(path) if path else built_library()
    if not main.is_file():
        raise unavailable("the patched library of llama.cpp is not built", ADVICE)
    return _opened(main.resolve())


@cache
def _opened(main: Path) -> LlamaLibrary:
    # Before llama_cpp brings its own: a library takes the ggml that is loaded already, if its name is the same.
    libraries = open_libraries(main)
    if not hasattr(libraries[0], "llama_model_can_split_at"):
        raise unavailable("the library that was named is llama.cpp without the patch", ADVICE)
    package = verified_package()
    structs = WindowStructs(package.llama_cpp, libraries)
    version = str(package.__version__)
    return checked(libraries, structs, version, functions=_FUNCTIONS, model_defaults=_DEFAULTS)
