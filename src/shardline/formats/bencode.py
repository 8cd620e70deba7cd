"""Bencoding (BEP 3): the one encoding of a value, and a bounded reader that takes nothing but that encoding.

Values are int, bytes, list and dict with keys of bytes. Equal or unsorted keys, leading zeros, bytes behind the end and
deep nesting are refused, so decoding and encoding again gives the same bytes. Pure. Shown by
tests/formats/test_bencode.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardline.errors import ShardlineError

DEPTH_LIMIT = 64

Value = int | bytes | Sequence["Value"] | Mapping[bytes, "Value"]
Decoded = int | bytes | list["Decoded"] | dict[bytes, "Decoded"]

_INTEGER = re.compile(rb"i(0|-?[1-9][0-9]{0,18})e")
_LENGTH = re.compile(rb"(0|[1-9][0-9]{0,11}):")


def encode(value: Value) -> bytes:
    """The bytes of `value`; a dict in the order of its keys' bytes."""
    out: list[bytes] = []
    _append(value, out)
    return b"".join(out)


def decode(raw: bytes) -> Decoded:
    """The value that `raw` is the encoding of; `invalid_value` names the byte where it is none."""
    value, end = _read(raw, 0, 0)
    if end != len(raw):
        raise _bad(end, "bytes behind the end")
    return value


def _append(value: Value, out: list[bytes]) -> None:
    if isinstance(value, int):
        out.append(b"i%de" % value)
    elif isinstance(value, bytes):
        out.append(b"%d:" % len(value))
        out.append(value)
    elif isinstance(value, Mapping):
        out.append(b"d")
        for key in sorted(value):
            _append(key, out)
            _append(value[key], out)
        out.append(b"e")
    else:
        out.append(b"l")
        for item in value:
            _append(item, out)
        out.append(b"e")


def _read(raw: bytes, at: int, depth: int) -> tuple[Decoded, int]:
    if depth > DEPTH_LIMIT:
        raise _bad(at, f"nested deeper than {DEPTH_LIMIT} levels")
    kind = raw[at : at + 1]
    if kind == b"i":
        found = _INTEGER.match(raw, at)
        if found is None:
            raise _bad(at, "not an integer")
        return int(found[1]), found.end()
    if kind == b"l":
        return _read_list(raw, at + 1, depth)
    if kind == b"d":
        return _read_dict(raw, at + 1, depth)
    return _read_bytes(raw, at)


def _read_bytes(raw: bytes, at: int) -> tuple[bytes, int]:
    found = _LENGTH.match(raw, at)
    if found is None:
        raise _bad(at, "neither a value nor the end of one")
    end = found.end() + int(found[1])
    if end > len(raw):
        raise _bad(at, f"a string of {int(found[1])} bytes, but {len(raw) - found.end()} are left")
    return raw[found.end() : end], end


def _read_list(raw: bytes, at: int, depth: int) -> tuple[list[Decoded], int]:
    items: list[Decoded] = []
    while raw[at : at + 1] != b"e":
        item, at = _read(raw, at, depth + 1)
        items.append(item)
    return items, at + 1


def _read_dict(raw: bytes, at: int, depth: int) -> tuple[dict[bytes, Decoded], int]:
    items: dict[bytes, Decoded] = {}
    last: bytes | None = None
    while raw[at : at + 1] != b"e":
        key, end = _read_bytes(raw, at)
        if last is not None and key <= last:
            raise _bad(at, "a key that does not stand behind the one before it")
        items[key], at = _read(raw, end, depth + 1)
        last = key
    return items, at + 1


def _bad(at: int, what: str) -> ShardlineError:
    return ShardlineError("invalid_value", f"not bencoded, at byte {at}: {what}")
