"""How large anything may be that the Tracker is sent: a bound for every text, list, map and number of every message.

One walk over the message, so that a field that is added to the contract tomorrow has a bound from its first day.
What a value means is not judged here (admission.py, placement.py). Shown by tests/tracker/test_bounds.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardline.errors import ShardlineError
from shardline.wire.manifest import FILES_LIMIT

STATEMENT_LIMIT = 64 << 10
"""Characters of a signed statement; what of it is kept is smaller."""
ADVERTISEMENT_LIMIT = 1 << 20
"""Likewise, of one that tells pieces: a bit for each, and a line for each file."""
TEXT_LIMIT = 512
LIST_LIMIT = 256
NUMBER_LIMIT = 1 << 53
"""Above it a JSON number is another one in half of the world's parsers, and a float overflows sooner or later."""
SHARD_LIMIT = 16
PROBE_LIMIT = 64
LAYER_LIMIT = 1_024
_LIST_LIMITS = {
    "shards": SHARD_LIMIT,
    "peers": PROBE_LIMIT,
    "layer_bytes": LAYER_LIMIT,
    "legal_cuts": LAYER_LIMIT + 1,
    "illegal_parts": 4 * LAYER_LIMIT,
    "files": FILES_LIMIT,
}


def check_bounds(message: msgspec.Struct, code: str = "invalid_value") -> None:
    """Raise `code`, with the path of the value, unless everything in `message` is within its bound: texts of at most
    512 printable characters, lists and maps of at most 256 entries (or what their field has), numbers below 2^53."""
    for name in message.__struct_fields__:
        try:
            _check(name, name, getattr(message, name))
        except _OutOfBounds as found:
            raise ShardlineError(code, str(found), param=name) from None


class _OutOfBounds(Exception):
    """The message says where, and what the bound is; never the value."""


def _check(path: str, field: str, value: Any) -> None:
    if isinstance(value, str):
        if len(value) > TEXT_LIMIT:
            raise _OutOfBounds(f"{path} has {len(value)} characters, at most {TEXT_LIMIT} are taken")
        if not value.isprintable():
            raise _OutOfBounds(f"{path} is not printable")
    elif isinstance(value, int | float):
        if not abs(value) < NUMBER_LIMIT:  # as it is written: true of what is not a number, too
            raise _OutOfBounds(f"{path} is no number below 2^53")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check(f"{path}.{name}", name, getattr(value, name))
    elif isinstance(value, list | tuple | dict):
        limit = _LIST_LIMITS.get(field, LIST_LIMIT)
        if len(value) > limit:
            raise _OutOfBounds(f"{path} has {len(value)} entries, at most {limit} are taken")
        # Keys are named by their place: a path must not carry a stranger's text.
        items = value if not isinstance(value, dict) else [entry for item in value.items() for entry in item]
        for i, item in enumerate(items):
            _check(f"{path}[{i}]", "", item)
