"""Bounded reader of GGUF headers, versions 2 and 3, little-endian: metadata and the tensor table.

Owns the header: everything in it is checked against limits and against the bytes that the file has before it is
used or allocated for. It reads no tensor data, knows no architecture, and raises one error, `model_file_invalid`,
whose `reason` is one of not_a_model, damaged, byte_order, newer, unsupported, incomplete.
Limits: docs/decisions/0003-own-readers.md. Shown by tests/formats/test_gguf.py and test_gguf_hostile.py.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardline.errors import ShardlineError
from shardline.formats.foreign import SNIFF_BYTES, describe_foreign
from shardline.formats.ggml_types import BLOCK_TYPES, REMOVED_TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
KEYS_LIMIT = 4096
TENSORS_LIMIT = 200_000
KEY_BYTES_LIMIT = 65_535
TENSOR_NAME_BYTES_LIMIT = 255
STRING_BYTES_LIMIT = 16 << 20
ARRAY_LIMIT = 4_000_000
STRINGS_LIMIT = 4_000_000
"""Strings in all arrays of a header together: each costs a step of a Python loop."""
DIMS_LIMIT = 4
ELEMENTS_LIMIT = 1 << 48
ALIGNMENT_LIMITS = (8, 65_536)
HEADER_BYTES_LIMIT = 128 << 20
DEFAULT_ALIGNMENT = 32

_FIRST_READ = 1 << 20
_READ_GROWTH = 4
_PREFIX_BYTES = 24
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PREFIX = struct.Struct("<4sIQQ")

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, tuple[str, struct.Struct]] = {
    0: ("u8", struct.Struct("<B")),
    1: ("i8", struct.Struct("<b")),
    2: ("u16", struct.Struct("<H")),
    3: ("i16", struct.Struct("<h")),
    4: ("u32", struct.Struct("<I")),
    5: ("i32", struct.Struct("<i")),
    6: ("f32", struct.Struct("<f")),
    _BOOL: ("bool", struct.Struct("<B")),
    10: ("u64", struct.Struct("<Q")),
    11: ("i64", struct.Struct("<q")),
    12: ("f64", struct.Struct("<d")),
}
_TYPECODES = {
    "u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i",
    "u64": "Q", "i64": "q", "f32": "f", "f64": "d", "bool": "B",
}  # fmt: skip

_UNKNOWN_SIZE = 1 << 60

Reason = Literal["not_a_model", "damaged", "byte_order", "newer", "unsupported", "incomplete"]
_LEAD: dict[Reason, str] = {
    "not_a_model": "not a GGUF model",
    "damaged": "damaged GGUF file",
    "byte_order": "GGUF file of another byte order",
    "newer": "GGUF file for a newer program",
    "unsupported": "GGUF file not supported",
    "incomplete": "GGUF header not complete",
}


def _bad(reason: Reason, message: str, **details: Any) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"{_LEAD[reason]}: {message}", reason=reason, **details)


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, as it stands in the file; decoded by `GGUFHeader.strings` and `.numbers`."""

    kind: str
    """u8 … f64, bool or string."""
    count: int
    raw: bytes

    def __len__(self) -> int:
        return self.count


Value = bool | int | float | bytes | Array


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table, checked: the bytes [offset, offset + nbytes) lie inside the file."""

    name: str
    type: str
    """GGML type name: Q4_1, F32 …"""
    type_id: int
    shape: tuple[int, ...]
    """GGUF order: the innermost (contiguous) dimension first."""
    offset: int
    """From the start of the file."""
    nbytes: int
    file: int = 0
    """Index of the part, in a model that is split over several files."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A checked header. The accessors raise `model_file_invalid`, which names the key, where a value is absent (and
    no default was given) or of a wrong type; any integer width passes for an integer."""

    version: int
    alignment: int
    data_offset: int
    """Where tensor data begin, in bytes from the start of the file."""
    file_size: int
    warnings: list[str]
    kv: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    """In the order of the file's table, which is not always the order of the layers."""
    kinds: Mapping[str, str]
    """How each key of `kv` is stored: u8 … f64, bool, string or array. Whoever writes it again needs that."""

    def text(self, key: str, default: str | None = None) -> str:
        """A string for people: bytes that are not UTF-8 become replacement marks (the bytes stay in `kv`)."""
        value = self._value(key, default)
        if isinstance(value, str):
            return value
        if not isinstance(value, bytes):
            raise _wrong_kind(key, value, "a string")
        return value.decode("utf-8", "replace")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_kind(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite integer or floating-point value."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong_kind(key, value, "a number")
        if not math.isfinite(value):
            raise _bad("damaged", f"key {key} is {value}, expected a finite number")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise _wrong_kind(key, value, "a bool")
        return value

    def strings(self, key: str) -> list[bytes]:
        """An array of strings, decoded anew at each call."""
        value = self._value(key, None)
        if not isinstance(value, Array) or value.kind != "string":
            raise _wrong_kind(key, value, "an array of strings")
        raw, unpack = value.raw, _U64.unpack_from
        result = []
        start = 0
        for _ in range(value.count):
            end = start + 8 + unpack(raw, start)[0]
            result.append(raw[start + 8 : end])
            start = end
        return result

    def numbers(self, key: str) -> Sequence[int | float]:
        """An array of numbers as `array.array` of the width in the file; bools are 0 and 1."""
        value = self._value(key, None)
        if not isinstance(value, Array) or value.kind == "string":
            raise _wrong_kind(key, value, "an array of numbers")
        result = array(_TYPECODES[value.kind], value.raw)
        if sys.byteorder == "big":
            result.byteswap()
        return result

    def _value(self, key: str, default: str | float | None) -> str | Value:
        value = self.kv.get(key, default)
        if value is None:
            raise _bad("damaged", f"key {key} is missing")
        return value


def _wrong_kind(key: str, value: str | Value, expected: str) -> ShardlineError:
    if isinstance(value, Array):
        found = f"an array of {value.count} {value.kind}"
    elif isinstance(value, bytes):
        found = f"the string {value.decode('utf-8', 'replace')!r:.60}"
    else:
        found = f"the {type(value).__name__} {value!r:.40}"
    return _bad("damaged", f"key {key} is {found}, expected {expected}")


def read_header(path: Path | str) -> GGUFHeader:
    """Read and check the header of a GGUF file; reads in growing steps and no more than the header needs."""
    return _read(Path(path), beginning=False)


def read_beginning(path: Path | str) -> GGUFHeader:
    """The same of a file that may end behind its header; `file_size` is that of the whole one."""
    return _read(Path(path), beginning=True)


def _read(path: Path, *, beginning: bool) -> GGUFHeader:
    try:
        if not path.is_file():
            raise _bad("not_a_model", f"{path.name!r:.200} is not a file")
        with path.open("rb") as file:
            there = os.fstat(file.fileno()).st_size
            data = file.read(min(_FIRST_READ, there))
            while True:
                try:
                    return _parse_beginning(data) if beginning else parse_header(data, there)
                except ShardlineError as error:
                    needed = error.details.get("needed_bytes")
                    if needed is None:
                        raise
                more = file.read(min(there, max(needed, _READ_GROWTH * len(data))) - len(data))
                if not more:
                    raise _bad("damaged", f"its {there} bytes end inside the header, or became fewer meanwhile")
                data += more
    except OSError as error:
        raise _bad("not_a_model", f"{path.name!r:.200} cannot be read: {error.strerror or error!r:.100}") from None


def _parse_beginning(data: bytes) -> GGUFHeader:
    """As a file of any size, to learn how large it must be; then as the file of that size."""
    known = parse_header(data, _UNKNOWN_SIZE)
    return parse_header(data, max([known.data_offset, *(t.offset + t.nbytes for t in known.tensors.values())]))


def parse_header(data: bytes | bytearray | memoryview, file_size: int) -> GGUFHeader:
    """Check the header at the start of `data`, the first bytes of a file of `file_size` bytes.

    Where the header goes on behind `data`, the error has reason `incomplete` and `needed_bytes`, a lower bound.
    """
    cursor = _Cursor(bytes(data[: min(file_size, HEADER_BYTES_LIMIT)]), file_size)
    version, n_tensors, n_keys = _read_prefix(cursor)
    kv: dict[str, Value] = {}
    kinds: dict[str, str] = {}
    for index in range(n_keys):
        key = cursor.name(f"key {index}", KEY_BYTES_LIMIT)
        if key in kv:
            raise _bad("damaged", f"key {key} stands twice")
        kinds[key], kv[key] = cursor.value(key)
    alignment = _alignment(kv.get("general.alignment", DEFAULT_ALIGNMENT))
    rows = [cursor.tensor(index) for index in range(n_tensors)]
    data_offset = _align(cursor.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    for row in rows:
        if row.name in tensors:
            raise _bad("damaged", f"tensor {row.name} stands twice")
        tensors[row.name] = _place(row, data_offset, alignment, file_size)
    warnings = _check_layout(list(tensors.values()), data_offset, alignment, file_size)
    return GGUFHeader(version, alignment, data_offset, file_size, warnings, kv, tensors, kinds)


def _read_prefix(cursor: _Cursor) -> tuple[int, int, int]:
    """Magic, version and the two counts, each checked against the size of the file."""
    head, size = cursor.data[:SNIFF_BYTES], cursor.file_size
    if head[:4] != MAGIC:
        if len(head) < min(4, size):
            raise _bad("incomplete", "the first bytes are missing", needed_bytes=min(_PREFIX_BYTES, size))
        raise _bad("not_a_model", f"the file looks like {describe_foreign(head, size)}")
    _, version, n_tensors, n_keys = _PREFIX.unpack(cursor.take(_PREFIX_BYTES, "file header"))
    if version not in VERSIONS:
        raise _wrong_version(version)
    cursor.check_count("key count", n_keys, KEYS_LIMIT, _MIN_KEY_BYTES)
    cursor.check_count("tensor count", n_tensors, TENSORS_LIMIT, _MIN_TENSOR_BYTES)
    return version, n_tensors, n_keys


def _wrong_version(version: int) -> ShardlineError:
    expected = "this program reads versions 2 and 3"
    if version == 1:
        return _bad("unsupported", f"version 1; {expected}: convert the model again")
    if version and not version & 0xFFFF:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        return _bad("byte_order", f"version {swapped}, big-endian; {expected}, little-endian")
    if 3 < version <= 0xFFFF:
        return _bad("newer", f"version {version}; {expected}")
    return _bad("damaged", f"version {version}; {expected}")


def _alignment(value: Value) -> int:
    low, high = ALIGNMENT_LIMITS
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_kind("general.alignment", value, f"a power of two from {low} to {high}")
    if not low <= value <= high or value & (value - 1):
        raise _bad("damaged", f"key general.alignment is {value}, expected a power of two from {low} to {high}")
    return value


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the tensor table before its place in the file is checked; `offset` counts from the data."""

    name: str
    type_id: int
    block: BlockType
    shape: tuple[int, ...]
    offset: int


def _place(row: _Row, data_offset: int, alignment: int, file_size: int) -> TensorInfo:
    nbytes = math.prod(row.shape) // row.block.elements * row.block.size
    if row.offset % alignment:
        raise _bad("damaged", f"tensor {row.name} has offset {row.offset}, not a multiple of {alignment}")
    start = data_offset + row.offset
    if start + nbytes > file_size:
        raise _bad(
            "damaged",
            f"tensor {row.name} takes bytes {start} to {start + nbytes}, but the file has {file_size}: "
            "it is cut short, or the table is wrong",
        )
    return TensorInfo(row.name, row.block.name, row.type_id, row.shape, start, nbytes)


def _check_layout(tensors: list[TensorInfo], data_offset: int, alignment: int, file_size: int) -> list[str]:
    """Refuse tensors on the same bytes; warn of bytes that belong to none."""
    tensors.sort(key=lambda t: t.offset)
    unclaimed = 0
    end = data_offset
    previous = "the header"
    for tensor in tensors:
        if tensor.offset < end:
            raise _bad(
                "damaged",
                f"tensor {tensor.name} begins at byte {tensor.offset}, inside {previous}, which ends at {end}",
            )
        unclaimed += tensor.offset - _align(end, alignment)
        end = tensor.offset + tensor.nbytes
        previous = f"tensor {tensor.name}"
    warnings = []
    if unclaimed:
        warnings.append(f"{unclaimed} bytes between tensors belong to none")
    if file_size > _align(end, alignment):
        warnings.append(f"{file_size - _align(end, alignment)} bytes behind the last tensor belong to none")
    return warnings


class _Cursor:
    """A position in the header. Nothing is read past `data`, nothing is believed that the file has no bytes for."""

    __slots__ = ("data", "file_size", "position", "strings_left")

    def __init__(self, data: bytes, file_size: int) -> None:
        self.data = data
        self.file_size = file_size
        self.position = 0
        self.strings_left = STRINGS_LIMIT

    def require(self, count: int, what: str) -> None:
        end = self.position + count
        if end <= len(self.data):
            return
        if end > self.file_size:
            left = max(0, self.file_size - self.position)
            raise _bad("damaged", f"{what} takes {count} bytes, but {left} are left: the file is cut short or wrong")
        if end > HEADER_BYTES_LIMIT:
            raise _bad("unsupported", f"{what} lies behind the limit of {HEADER_BYTES_LIMIT} bytes for a header")
        raise _bad("incomplete", f"{what} lies behind the first {len(self.data)} bytes", needed_bytes=end)

    def take(self, count: int, what: str) -> bytes:
        self.require(count, what)
        start = self.position
        self.position = start + count
        return self.data[start : self.position]

    def u32(self, what: str) -> int:
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def check_count(self, what: str, count: int, limit: int, min_bytes: int) -> None:
        left = self.file_size - self.position
        if count * min_bytes > left:
            raise _bad("damaged", f"{what} is {count}, which takes at least {count * min_bytes} bytes; {left} are left")
        if count > limit:
            raise _bad("unsupported", f"{what} is {count}, the limit is {limit}")

    def name(self, what: str, limit: int) -> str:
        length = self.u64(what)
        if not 1 <= length <= limit:
            raise _bad("damaged", f"the name of {what} has {length} bytes, expected 1 to {limit}")
        raw = self.take(length, f"the name of {what}")
        name = raw.decode("ascii", "replace")
        if not name.isprintable() or not name.isascii():
            raise _bad("damaged", f"the name of {what} is not printable ASCII: {raw[:60]!r}")
        return name

    def value(self, key: str) -> tuple[str, Value]:
        """Kind and value."""
        type_id = self.u32(f"the type of key {key}")
        if type_id == _STRING:
            return "string", self.string(f"key {key}")
        if type_id == _ARRAY:
            return "array", self.array(key)
        kind, form = self.scalar_kind(key, type_id)
        value: int | float = form.unpack(self.take(form.size, f"key {key}"))[0]
        if kind == "bool":
            if value > 1:
                raise _bad("damaged", f"key {key} is a bool with the value {value}")
            return kind, value == 1
        return kind, value

    def string(self, what: str) -> bytes:
        length = self.u64(what)
        self.check_count(f"the length of {what}", length, STRING_BYTES_LIMIT, 1)
        return self.take(length, what)

    def scalar_kind(self, key: str, type_id: int) -> tuple[str, struct.Struct]:
        found = _SCALARS.get(type_id)
        if found is None:
            reason: Reason = "newer" if type_id <= 0xFFFF else "damaged"
            raise _bad(reason, f"key {key} has value type {type_id}; this program knows 0 to 12")
        return found

    def array(self, key: str) -> Array:
        type_id = self.u32(f"the element type of key {key}")
        count = self.u64(f"the length of key {key}")
        if type_id == _ARRAY:
            raise _bad("unsupported", f"key {key} is an array of arrays")
        if type_id == _STRING:
            self.check_count(f"the length of array {key}", count, ARRAY_LIMIT, 8)
            return self.string_array(key, count)
        kind, form = self.scalar_kind(key, type_id)
        self.check_count(f"the length of array {key}", count, ARRAY_LIMIT, form.size)
        raw = self.take(count * form.size, f"array {key}")
        if kind == "bool" and raw.count(0) + raw.count(1) != count:
            raise _bad("damaged", f"key {key} is an array of bools with a value above 1")
        return Array(kind, count, raw)

    def string_array(self, key: str, count: int) -> Array:
        """Step over `count` strings, each checked; the hot loop of this module (three per vocabulary entry)."""
        self.strings_left -= count
        if self.strings_left < 0:
            raise _bad("unsupported", f"more than {STRINGS_LIMIT} strings in arrays, counted at key {key}")
        self.require(8 * count, f"array {key}")
        data, unpack = self.data, _U64.unpack_from
        start = position = self.position
        last = len(data) - 8
        for index in range(count):
            if position > last:
                self.position = position
                self.require(8, f"string {index} of array {key}")
            length = unpack(data, position)[0]
            if length > STRING_BYTES_LIMIT:
                raise _bad("damaged", f"string {index} of array {key} has {length} bytes, limit {STRING_BYTES_LIMIT}")
            position += 8 + length
        self.position = start
        self.require(position - start, f"array {key}")
        self.position = position
        return Array("string", count, data[start:position])

    def tensor(self, index: int) -> _Row:
        name = self.name(f"tensor {index}", TENSOR_NAME_BYTES_LIMIT)
        n_dims = self.u32(f"the dimension count of tensor {name}")
        if not 1 <= n_dims <= DIMS_LIMIT:
            raise _bad("damaged", f"tensor {name} has {n_dims} dimensions, expected 1 to {DIMS_LIMIT}")
        shape = struct.unpack(f"<{n_dims}Q", self.take(8 * n_dims, f"the shape of tensor {name}"))
        if 0 in shape or math.prod(shape) > ELEMENTS_LIMIT:
            raise _bad("damaged", f"tensor {name} has the shape {shape}, expected 1 to 2^48 elements")
        type_id = self.u32(f"the type of tensor {name}")
        block = _block_type(name, type_id)
        if shape[0] % block.elements:
            raise _bad("damaged", f"tensor {name} has rows of {shape[0]}, not whole {block.name} blocks")
        return _Row(name, type_id, block, shape, self.u64(f"the offset of tensor {name}"))


def _block_type(name: str, type_id: int) -> BlockType:
    block = BLOCK_TYPES.get(type_id)
    if block is not None:
        return block
    if type_id in REMOVED_TYPES:
        old = REMOVED_TYPES[type_id]
        raise _bad("unsupported", f"tensor {name} has type {old}, which was removed from the format: convert again")
    reason: Reason = "newer" if type_id <= 0xFFFF else "damaged"
    raise _bad(reason, f"tensor {name} has type {type_id}; the highest known is {max(BLOCK_TYPES)}")
