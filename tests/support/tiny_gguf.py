"""Complete GGUF files of tiny models: the library says which tensors a model has, a hash of the name their values.

`llama_model_init_from_user` builds a model from metadata alone and names every tensor that the architecture's loader
would take, with its shape; so a file made here has what llama.cpp expects, for every architecture that it knows.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants
from llama_cpp import llama_cpp as lib

from tests.support.gguf_writer import Tensor, gguf_bytes
from tests.support.tiny_models import WIDTH, TinyModel, metadata

F32, F16, Q4_0, I32 = 0, 1, 2, 26
_GGML = ctypes.CDLL(str(Path(lib.__file__).parent / "lib" / "libggml-base.so"))
_PREDICTING = "nextn_predict_layers"
_SHAPE_OFFSET = 16
"""Bytes of `type` and `buffer` in front of `ne[4]` in `ggml_tensor`."""


class _GGUFParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


_GGML.gguf_init_from_buffer.restype = ctypes.c_void_p
_GGML.gguf_init_from_buffer.argtypes = (ctypes.c_char_p, ctypes.c_size_t, _GGUFParams)
_GGML.gguf_free.argtypes = (ctypes.c_void_p,)
_GGML.ggml_get_name.restype = ctypes.c_char_p
_GGML.ggml_get_name.argtypes = (ctypes.c_void_p,)


def write_tiny_gguf(model: TinyModel, path: Path) -> Path:
    """Write the model's file; RuntimeError where the library takes no such model."""
    keys = metadata(model)
    # The library makes no blocks of its own for prediction: as ordinary ones they are as good, for nobody runs them.
    predicting = keys.get(f"{model.architecture}.{_PREDICTING}", 0)
    probed = {key: value for key, value in keys.items() if not key.endswith(_PREDICTING)}
    shapes = tensor_shapes(gguf_bytes(probed))
    if predicting:
        block = f"blk.{model.layers}."
        shapes = {n: shape for n, shape in shapes.items() if not n.startswith(block) or n.endswith(("weight", "bias"))}
        shapes[f"{block}nextn.eh_proj.weight"] = (2 * WIDTH, WIDTH)
        shapes[f"{block}nextn.enorm.weight"] = shapes[f"{block}nextn.hnorm.weight"] = (WIDTH,)
    tensors = [_tensor(model, name, shape) for name, shape in shapes.items() if _kept(model, name)]
    path.write_bytes(gguf_bytes(keys, tensors))
    return path


def tensor_shapes(header: bytes) -> dict[str, tuple[int, ...]]:
    """Name and shape (innermost first, no trailing ones) of each tensor that a model of this metadata has."""
    found: dict[str, tuple[int, ...]] = {}

    @lib.llama_model_set_tensor_data_t
    def note(tensor: int, _: object) -> None:
        name = _GGML.ggml_get_name(tensor).decode()
        shape = tuple((ctypes.c_int64 * 4).from_address(tensor + _SHAPE_OFFSET))
        while len(shape) > 1 and shape[-1] == 1:
            shape = shape[:-1]
        found.setdefault(name, shape)

    parsed = _GGML.gguf_init_from_buffer(header, len(header), _GGUFParams(True, None))
    if not parsed:
        raise RuntimeError("the library does not read this header")
    loaded = lib.llama_model_init_from_user(parsed, note, None, lib.llama_model_default_params())
    _GGML.gguf_free(parsed)
    if not loaded:
        raise RuntimeError("the library makes no model of this metadata")
    lib.llama_model_free(loaded)
    return found


def _kept(model: TinyModel, name: str) -> bool:
    if model.tied and name == "output.weight":
        return False
    return not name.split(".", 2)[-1].startswith(model.without or ("\0",))


def _tensor(model: TinyModel, name: str, shape: tuple[int, ...]) -> Tensor:
    values = tensor_values(name, shape)
    if model.quantised and len(shape) > 1:
        rows = values.reshape(-1, shape[0])
        return Tensor(name, shape, Q4_0, quants.quantize(rows, GGMLQuantizationType.Q4_0).tobytes())
    if "tid2eid" in name:
        return Tensor(name, shape, I32, _chosen_experts(model, name, shape).tobytes())
    if name == "token_embd.weight":
        return Tensor(name, shape, F16, values.astype("<f2").tobytes())
    return Tensor(name, shape, F32, values.astype("<f4").tobytes())


def _chosen_experts(model: TinyModel, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """For each token id as many different experts as are used, [vocabulary, used]."""
    rng = np.random.default_rng(len(name))
    count, ids = int(model.keys["expert_count"]), shape[1]
    return np.stack([rng.permutation(count)[: shape[0]] for _ in range(ids)]).astype("<i4")


def tensor_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values that depend on the name alone, scaled so that rows keep their size from layer to layer."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    noise = np.random.default_rng(seed).standard_normal(math.prod(shape), dtype=np.float32)
    if "ssm_a" in name:
        return -np.abs(noise) - np.float32(0.1)
    if "rope_freqs" in name or "rope_factors" in name:
        return np.float32(1) + np.abs(noise)
    if "norm" in name and name.endswith("weight"):
        return np.float32(1) + np.float32(0.2) * noise
    if len(shape) == 1:
        return np.float32(0.2) * noise
    if name == "token_embd.weight":
        return noise
    return noise / np.float32(math.sqrt(shape[0]))
