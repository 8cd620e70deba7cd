"""Writes GGUF bytes for tests: right ones from plain values, and wrong ones where a test asks for them.

Written from the format's description, without the reader's tables, so that one checks the other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"),
    "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Typed:
    """A value of a given kind, where the kind that `encode_value` would choose is not the one wanted."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Raw:
    """The bytes of a key's type and value, as they shall stand in the file."""

    raw: bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor to write. `data` None: zeros of the size of F32; the other fields overrule what is right."""

    name: str | bytes
    shape: Sequence[int] = (32,)
    type_id: int = 0
    data: bytes | None = None
    offset: int | None = None
    n_dims: int | None = None

    @property
    def payload(self) -> bytes:
        return bytes(4 * math.prod(self.shape)) if self.data is None else self.data


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def encode_array(kind: str, values: Sequence[Any], count: int | None = None) -> bytes:
    count = len(values) if count is None else count
    if kind == "string":
        return struct.pack("<IIQ", ARRAY, STRING, count) + b"".join(string(v) for v in values)
    number, form = KINDS[kind]
    return struct.pack(f"<IIQ{len(values)}{form}", ARRAY, number, count, *values)


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return ("u32" if value < 1 << 32 else "u64") if value >= 0 else "i32"
    return "f32" if isinstance(value, float) else "string"


def encode_value(value: Any) -> bytes:
    """Type and value of a key, from a Python value: bool, int, float, str, bytes, a list of these, Typed or Raw."""
    if isinstance(value, Raw):
        return value.raw
    kind, value = (value.kind, value.value) if isinstance(value, Typed) else (None, value)
    if isinstance(value, list):
        return encode_array(kind or _kind_of(value[0] if value else 0), value)
    if isinstance(value, str | bytes):
        return struct.pack("<I", STRING) + string(value)
    number, form = KINDS[kind or _kind_of(value)]
    return struct.pack(f"<I{form}", number, value)


def gguf_bytes(
    keys: Mapping[str, Any] | Sequence[tuple[str | bytes, Any]] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    tail: bytes = b"",
) -> bytes:
    """A whole file. `alignment` places the data; it is no key unless `keys` has it."""
    pairs = list(keys.items()) if isinstance(keys, Mapping) else list(keys)
    head = struct.pack(
        "<4sIQQ",
        b"GGUF",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_keys is None else n_keys,
    )
    parts = [head, *(string(key) + encode_value(value) for key, value in pairs)]
    data = bytearray()
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        n_dims = len(tensor.shape) if tensor.n_dims is None else tensor.n_dims
        parts.append(string(tensor.name))
        parts.append(struct.pack(f"<I{len(tensor.shape)}QIQ", n_dims, *tensor.shape, tensor.type_id, offset))
        data += tensor.payload
        data += bytes(-len(data) % alignment)
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment) + bytes(data) + tail


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "c", "d", "e"],
    "tokenizer.ggml.token_type": Typed("i32", [3, 3, 1, 1, 1, 1, 1, 1]),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
"""Metadata of a tiny llama with tied embeddings; its tensors: `llama_tensors()`."""


def llama_tensors(layers: int = 2) -> list[Tensor]:
    tensors = [Tensor("token_embd.weight", (32, 8)), Tensor("output_norm.weight", (32,))]
    for i in range(layers):
        shapes = {
            "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 16), "attn_v": (32, 16), "attn_output": (32, 32),
            "ffn_norm": (32,), "ffn_gate": (32, 64), "ffn_up": (32, 64), "ffn_down": (64, 32),
        }  # fmt: skip
        tensors += [Tensor(f"blk.{i}.{name}.weight", shape) for name, shape in shapes.items()]
    return tensors
