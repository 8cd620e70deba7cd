"""The step document: what crosses a Seam, as bytes (docs/protocol.md, "Step document").

A step document is one safetensors document (https://github.com/huggingface/safetensors, "Format"):
u64 little-endian header length, JSON header, tensor bytes. Its tensors, in this order:

    entries  U8  [n_entries, 40]      one fixed record an entry, `Entry`
    tokens   I32 [n_rows]             token id of every row
    …        the Seam layout's tensors, each [n_rows, *shape]; absent in front of the head

The rows of the entries follow one another in entry order. Metadata: `layout`, the digest of the Seam layout.
Pure: no I/O, no clock, no numpy. Everything is checked against the bytes that are there before it is used.
Shown by tests/wire/test_steps.py (golden vectors).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from shardline.errors import ShardlineError

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}
HEADER_LIMIT = 16 << 10
ENTRY_BYTES = 40
_ENTRY = struct.Struct("<16sIIIBBH8x")
_RESERVED = bytes(8)
_U64 = struct.Struct("<Q")
_REMEMBERED_BYTES = 1024

LANE_DECODE = 0
LANE_PREFILL = 1

FLAG_OUTPUT = 1
"""The tail makes a token from the last row of this entry."""
FLAG_LAST_CHUNK = 2
"""Last prefill chunk: decoding starts behind it."""
FLAG_ROLLBACK = 4
"""`position` lies below the accepted end on purpose: drop what is above it."""
_KNOWN_FLAGS = FLAG_OUTPUT | FLAG_LAST_CHUNK | FLAG_ROLLBACK


class Entry(NamedTuple):
    """One session's share of a step document. Packed as 40 bytes, little-endian, 8 of them reserved (zero)."""

    key: bytes
    """Session key, 16 random bytes."""
    seq: int
    """Number of this step within the session, from 0."""
    position: int
    """Where the first row sits in the context."""
    rows: int
    hop: int
    """Index on the route of the Node that receives this."""
    lane: int
    flags: int


class LayoutTensor(NamedTuple):
    """One tensor of a Seam layout: safetensors dtype and the shape of one row."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


class SeamLayout:
    """Ordered list of the tensors that cross a Seam beside the token ids. Empty in front of the head."""

    __slots__ = ("_hash", "digest", "row_bytes", "tensors")

    def __init__(self, tensors: Sequence[LayoutTensor] = ()) -> None:
        names = [t.name for t in tensors]
        if len(set(names)) != len(names) or {"entries", "tokens", "__metadata__"} & set(names):
            raise ValueError("tensor names of a Seam layout are distinct, and not entries or tokens")
        for t in tensors:
            if t.dtype not in DTYPE_BYTES or not t.shape or any(n < 1 for n in t.shape):
                raise ValueError(f"bad Seam layout tensor {t}")
        self.tensors = tuple(tensors)
        self.row_bytes = sum(t.row_bytes for t in tensors)
        """Bytes of one row over all tensors, token id not counted."""
        canonical = msgspec.json.encode([[t.name, t.dtype, list(t.shape)] for t in self.tensors])
        self.digest = hashlib.sha256(canonical).hexdigest()[:16]
        self._hash = hash(self.tensors)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SeamLayout) and other.tensors == self.tensors)

    def __hash__(self) -> int:
        return self._hash

    def to_json(self) -> list[list[object]]:
        return [[t.name, t.dtype, list(t.shape)] for t in self.tensors]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[object]]) -> SeamLayout:
        return cls([LayoutTensor(str(n), str(d), tuple(int(x) for x in s)) for n, d, s in value])  # type: ignore[attr-defined]


TOKENS_ONLY = SeamLayout()
"""What stands in front of the head: token ids and nothing else."""


class Step(NamedTuple):
    """One decoded entry with its rows. `hidden` has one buffer a layout tensor, in layout order, C-contiguous."""

    entry: Entry
    tokens: bytes | memoryview
    """I32 little-endian, 4 bytes a row."""
    hidden: tuple[bytes | memoryview, ...]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor_decoder = msgspec.json.Decoder(_Tensor)
_meta_decoder = msgspec.json.Decoder(dict[str, str])


def encode(steps: Sequence[Step], layout: SeamLayout) -> list[bytes | memoryview]:
    """Build the step document of `steps`; returns its pieces in order, for one vectored write.

    Every buffer of a step must hold exactly `entry.rows` rows; checked, ValueError otherwise (our own fault).
    """
    n_rows = 0
    records = bytearray()
    tokens: list[bytes | memoryview] = []
    rows: list[list[bytes | memoryview]] = [[] for _ in layout.tensors]
    for entry, ids, hidden in steps:
        n = entry.rows
        records += _ENTRY.pack(*entry)
        n_rows += n
        if len(ids) != 4 * n or len(hidden) != len(rows):
            raise ValueError("step does not fit its entry")
        tokens.append(ids)
        for buffers, buffer, tensor in zip(rows, hidden, layout.tensors, strict=True):
            if len(buffer) != tensor.row_bytes * n:
                raise ValueError("step does not fit its Seam layout")
            buffers.append(buffer)
    pieces: list[bytes | memoryview] = [_header(len(tokens), n_rows, layout) + bytes(records), *tokens]
    for buffers in rows:
        pieces += buffers
    return pieces


@lru_cache(maxsize=1024)
def _header(entries: int, rows: int, layout: SeamLayout) -> bytes:
    """Length and header of a document. Remembered, because one decode step is like the last."""
    offset = ENTRY_BYTES * entries
    parts = [
        f'{{"__metadata__":{{"layout":"{layout.digest}"}},"entries":{{"dtype":"U8","shape":[{entries},{ENTRY_BYTES}],'
        f'"data_offsets":[0,{offset}]}}',
        f',"tokens":{{"dtype":"I32","shape":[{rows}],"data_offsets":[{offset},{offset + 4 * rows}]}}',
    ]
    offset += 4 * rows
    for t in layout.tensors:
        size = t.row_bytes * rows
        shape = ",".join(map(str, (rows, *t.shape)))
        parts.append(f',"{t.name}":{{"dtype":"{t.dtype}","shape":[{shape}],"data_offsets":[{offset},{offset + size}]}}')
        offset += size
    parts.append("}")
    header = "".join(parts).encode()
    header += b" " * (-len(header) % 8)
    return _U64.pack(len(header)) + header


def _bad(why: str) -> ShardlineError:
    return ShardlineError("frame_invalid", f"step document refused: {why}")


def decode(body: bytes | bytearray | memoryview, layout: SeamLayout) -> list[Step]:
    """Read a step document that must have exactly `layout`; views into `body`, nothing is copied.

    Raises `frame_invalid` for whatever does not fit, before a row is looked at.
    """
    view = memoryview(body)
    if len(view) < 8:
        raise _bad(f"{len(view)} bytes are less than a header length")
    (header_len,) = _U64.unpack_from(view)
    if header_len > HEADER_LIMIT or 8 + header_len > len(view):
        raise _bad(f"header of {header_len} bytes, limit {HEADER_LIMIT}, body of {len(view)}")
    data = view[8 + header_len :]
    read = _remembered_shapes if header_len <= _REMEMBERED_BYTES else _shapes
    entries, n_rows = read(bytes(view[8 : 8 + header_len]), layout, len(data))
    # Behind the entries: the token ids, then one tensor of the layout after another.
    sizes = (4, *(t.row_bytes for t in layout.tensors))
    starts = [ENTRY_BYTES * entries]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size * n_rows)
    steps = []
    row = 0
    for i in range(entries):
        raw = bytes(data[ENTRY_BYTES * i : ENTRY_BYTES * (i + 1)])
        entry = Entry(*_ENTRY.unpack(raw))
        end = row + entry.rows
        if entry.rows < 1 or end > n_rows:
            raise _bad(f"entry {i} claims {entry.rows} rows, {n_rows - row} are left")
        if entry.lane > LANE_PREFILL or entry.flags & ~_KNOWN_FLAGS or raw[32:] != _RESERVED:
            raise _bad(f"entry {i} has an unknown lane, flag or reserved byte")
        tokens, *hidden = [data[a + size * row : a + size * end] for a, size in zip(starts, sizes, strict=True)]
        steps.append(Step(entry, tokens, tuple(hidden)))
        row = end
    if row != n_rows:
        raise _bad(f"{n_rows} rows, but the entries claim {row}")
    return steps


def _shapes(header: bytes, layout: SeamLayout, size: int) -> tuple[int, int]:
    """Entries and rows of a document with this header and `size` bytes of data; all else follows from them."""
    return _check_shapes(_read_header(header, layout), layout, size)


_remembered_shapes = lru_cache(maxsize=1024)(_shapes)
"""For headers of a usual length: one decode step is like the last. What is refused is not remembered."""


def _read_header(raw: bytes, layout: SeamLayout) -> dict[str, _Tensor]:
    try:
        header = _header_decoder.decode(raw)
        meta = _meta_decoder.decode(header.pop("__metadata__", msgspec.Raw(b"{}")))
        tensors = {name: _tensor_decoder.decode(value) for name, value in header.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad(f"header: {error}") from None
    if meta.get("layout") != layout.digest:
        raise _bad(f"Seam layout {meta.get('layout')!r:.40}, expected {layout.digest!r}")
    expected = ["entries", "tokens", *(t.name for t in layout.tensors)]
    if list(tensors) != expected:
        raise _bad(f"tensors {list(tensors)!r:.200}, expected {expected}")
    return tensors


def _check_shapes(tensors: dict[str, _Tensor], layout: SeamLayout, size: int) -> tuple[int, int]:
    shape = tensors["entries"].shape
    entries = shape[0] if len(shape) == 2 else 0
    rows = tensors["tokens"].shape[0] if len(tensors["tokens"].shape) == 1 else 0
    if entries < 1 or rows < 1:
        raise _bad("no entries or no rows")
    wanted = [
        ("entries", "U8", [entries, ENTRY_BYTES], ENTRY_BYTES * entries),
        ("tokens", "I32", [rows], 4 * rows),
        *((t.name, t.dtype, [rows, *t.shape], t.row_bytes * rows) for t in layout.tensors),
    ]
    offset = 0
    for name, dtype, expected, length in wanted:
        t = tensors[name]
        if t.dtype != dtype or t.shape != expected:
            raise _bad(f"{name} is {t.dtype} {t.shape!r:.80}, expected {dtype} {expected}")
        if t.data_offsets != (offset, offset + length):
            raise _bad(f"{name} lies at {t.data_offsets!r:.80}, expected [{offset}, {offset + length}]")
        offset += length
    if offset != size:
        raise _bad(f"{size} bytes of data, expected {offset}")
    return entries, rows
