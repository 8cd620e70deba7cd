"""Canonical JSON (RFC 8785) for what is signed or named by its digest: one value, one sequence of bytes.

A strict subset, so that no two programs can differ over it: integers below 2^53 and no other numbers, keys in ASCII,
strings in Unicode normal form C. `decode` refuses bytes that are not exactly what `encode` would give: equal keys,
spaces, other escapes, another order. Pure. Shown by tests/wire/test_canonical.py.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import msgspec

INTEGER_LIMIT = (1 << 53) - 1
"""Largest integer that every JSON reader keeps."""
DEPTH_LIMIT = 16


class NotCanonical(ValueError):
    """The bytes or the value are not canonical JSON. The message says why."""


def encode(value: Any) -> bytes:
    """The canonical bytes of JSON values or msgspec structs; raises `NotCanonical` where there are none."""
    check(msgspec.to_builtins(value))
    return write(value)


def write(value: Any) -> bytes:
    """As `encode`, of a value that is known to be in the subset: not checked again."""
    return msgspec.json.encode(value, order="sorted")


def decode(raw: bytes) -> Any:
    """The value of canonical bytes. Bound the length before: memory is some multiple of it."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise NotCanonical(f"it is no JSON document: {words_of(error)}") from None
    check(value)
    if write(value) != raw:
        raise NotCanonical("it is not in canonical form (RFC 8785): a key stands twice, or order or spacing differ")
    return value


def words_of(error: Exception) -> str:
    """What a decoder says, fit for a terminal: it may quote what it read."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(error)[:300])


def check(value: Any) -> None:
    """Refuse values that the subset has no form for (`NotCanonical`)."""
    level, depth = [value], 0
    while level:
        if depth > DEPTH_LIMIT:
            raise NotCanonical(f"it is nested deeper than {DEPTH_LIMIT} levels")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                _check_keys(item)
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
            else:
                _check_plain(item)
        level, depth = below, depth + 1


def _check_keys(item: dict[Any, Any]) -> None:
    for key in item:
        # ASCII: there the order of code points and that of UTF-16 units, which RFC 8785 asks for, are the same.
        if not isinstance(key, str) or not key.isascii():
            raise NotCanonical(f"the key {key!r:.60} is not ASCII")


def check_text(text: str) -> None:
    """Refuse a string that has another form as well (`NotCanonical`)."""
    if text.isascii():
        return
    if not unicodedata.is_normalized("NFC", text):
        raise NotCanonical(f"the string {text!r:.60} is not in normal form C")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise NotCanonical("a string has half a surrogate pair")


def _check_plain(item: Any) -> None:
    if isinstance(item, str):
        check_text(item)
    elif isinstance(item, int):
        if not -INTEGER_LIMIT <= item <= INTEGER_LIMIT:
            raise NotCanonical(f"the integer {hex(item):.20} is not below 2^53")
    elif item is not None:
        raise NotCanonical(f"{item!r:.40} is a {type(item).__name__}: integers are the only numbers")
