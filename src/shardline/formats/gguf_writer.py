"""Encoder of GGUF headers, version 3, little-endian: keys of given kinds and a tensor table, into bytes.

Owns the encoding and the rules that stock readers have for it: tensor data follow the header in the order of the table,
each padded to the alignment, with no gap. It writes no file and knows no architecture. The same values give the same
bytes. Shown by tests/formats/test_gguf_writer.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardline.formats.ggml_types import BLOCK_TYPES
from shardline.formats.gguf import DEFAULT_ALIGNMENT, MAGIC, Array, GGUFHeader, Value

VERSION = 3

_STRING, _ARRAY = 8, 9
_KINDS: dict[str, tuple[int, str]] = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"),
    "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip


class Stored(NamedTuple):
    """A value of the metadata and how it is stored: u8 … f64, bool, string or array."""

    kind: str
    value: Value


class TensorRow(NamedTuple):
    """A row of the tensor table; its place follows from the rows before it."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    """Innermost dimension first."""

    @property
    def nbytes(self) -> int:
        block = BLOCK_TYPES[self.type_id]
        return math.prod(self.shape) // block.elements * block.size


def u32(value: int) -> Stored:
    return Stored("u32", value)


def u64(value: int) -> Stored:
    return Stored("u64", value)


def f32(value: float) -> Stored:
    return Stored("f32", value)


def text(value: str) -> Stored:
    return Stored("string", value.encode())


def array_of(kind: str, values: Sequence[int | float]) -> Stored:
    """An array of numbers or bools, each stored as `kind`."""
    return Stored("array", Array(kind, len(values), struct.pack(f"<{len(values)}{_KINDS[kind][1]}", *values)))


def stored_keys(header: GGUFHeader) -> dict[str, Stored]:
    """The metadata of a file that was read, ready to be written again."""
    return {key: Stored(header.kinds[key], value) for key, value in header.kv.items()}


def padding(position: int, alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Bytes from `position` to the next multiple of `alignment`."""
    return -position % alignment


def encode_header(keys: Mapping[str, Stored], rows: Sequence[TensorRow]) -> bytes:
    """The header of a file with these keys and tensors, padded: tensor data begin right behind it.

    `general.alignment` must not be among the keys: the default is used.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(rows), len(keys))]
    for key, stored in keys.items():
        parts += [_string(key.encode()), _value(stored)]
    offset = 0
    for row in rows:
        shape = struct.pack(f"<I{len(row.shape)}Q", len(row.shape), *row.shape)
        parts += [_string(row.name.encode()), shape, struct.pack("<IQ", row.type_id, offset)]
        offset += row.nbytes + padding(row.nbytes)
    header = b"".join(parts)
    return header + bytes(padding(len(header)))


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _value(stored: Stored) -> bytes:
    kind, value = stored
    if isinstance(value, bytes):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, Array):
        element = _STRING if value.kind == "string" else _KINDS[value.kind][0]
        return struct.pack("<IIQ", _ARRAY, element, value.count) + value.raw
    number, form = _KINDS[kind]
    return struct.pack(f"<I{form}", number, value)
