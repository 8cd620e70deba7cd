"""Small GGUF models of several architectures, metadata and tensors of right names: for cutting, not for computing."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.formats.gguf_files import GGUFModel, read_model
from tests.support.gguf_writer import Tensor, Typed, gguf_bytes

WIDTH = 32
VOCABULARY = 64
CONTENT_ID = "mac1-" + "0123456789abcdef" * 4


def metadata(architecture: str, layers: int, keys: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Metadata of a model; `keys` are without the prefix of the architecture, None takes one away."""
    stated: dict[str, Any] = {
        "block_count": layers,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **(keys or {}),
    }
    return {
        "general.architecture": architecture,
        "general.name": "Small",
        "general.description": "left out of parts",
        **{f"{architecture}.{key}": value for key, value in stated.items() if value is not None},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCABULARY)],
        "tokenizer.ggml.token_type": Typed("i32", [1] * VOCABULARY),
        "tokenizer.ggml.merges": Typed("string", []),
        "tokenizer.chat_template": "{{ messages }}",
    }


def tensors(layers: int, extra: Sequence[Tensor] = (), *, tied: bool = True) -> list[Tensor]:
    """Tensors with recognisable bytes: no two tensors of a model are equal."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (WIDTH, VOCABULARY))]
    for layer in range(layers):
        shapes += [(f"blk.{layer}.attn_q.weight", (WIDTH, 8)), (f"blk.{layer}.attn_q_norm.weight", (8,))]
    shapes.append(("output_norm.weight", (WIDTH,)))
    if not tied:
        shapes.append(("output.weight", (WIDTH, VOCABULARY)))
    made = [Tensor(name, shape, data=content(name, shape)) for name, shape in shapes]
    return [*made, *extra]


def content(name: str, shape: Sequence[int]) -> bytes:
    """Bytes of an F32 tensor, made of its name; small positive numbers."""
    seed = sum(name.encode()) % 97
    count = math.prod(shape)
    return struct.pack(f"<{count}f", *(1 + (seed + 7 * i) % 101 / 64 for i in range(count)))


def small_model(
    folder: Path,
    architecture: str = "llama",
    layers: int = 8,
    keys: Mapping[str, Any] | None = None,
    *,
    tied: bool = True,
    extra: Sequence[Tensor] = (),
) -> GGUFModel:
    """A model written to `folder` and read again."""
    path = folder / f"{architecture}-{layers}.gguf"
    path.write_bytes(gguf_bytes(metadata(architecture, layers, keys), tensors(layers, extra, tied=tied)))
    return read_model(path)
