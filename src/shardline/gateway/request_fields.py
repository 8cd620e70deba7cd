"""What a field of a request may hold, said once in its annotation: readers check by it, the schema of the API shows it.

Owns the marks of request structs and the checks that follow from a mark alone; what depends on several fields, or on
the model, is the readers'. It knows no field of its own. Pure. Shown by tests/gateway/test_request_fields.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec import Meta

from shardline.gateway.json_body import refuse, unsupported

INT64 = 1 << 63
NOT_SENT: Any = msgspec.field(default_factory=msgspec.Raw)
"""Default of a field of type Raw; unlike an empty Raw itself, a schema can be made of it."""
_ASKS_AT_MOST = 200
"""Bytes of a value that can still be one of those that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included unless `above`: then `low` itself is not."""

    low: float
    high: float
    above: bool = False

    def check(self, name: str, value: float) -> None:
        """Raises `invalid_value` of the field `name`."""
        if not (self.low < value or (value == self.low and not self.above)) or value > self.high:
            refuse(name, f"'{name}' must be {self._words(value)}, not {number_text(value)}")

    def _words(self, value: float) -> str:
        if self.high >= INT64 - 1:  # what a 64-bit integer holds: one end at a time says more
            return f"at most {self.high}" if value > self.high else f"at least {self.low}"
        return f"above {self.low:g} and at most {self.high:g}" if self.above else f"{self.low:g} to {self.high:g}"


def number_text(value: float) -> str:
    if abs(value) < INT64:
        return f"{value:g}" if isinstance(value, float) else str(value)
    return "a larger number" if value > 0 else "a smaller number"


def shown(**keywords: Any) -> Meta:
    """Keywords of JSON Schema that the reader of the field keeps to in its own words."""
    return Meta(extra_json_schema=keywords)


def within(low: float, high: float, *, above: bool = False) -> Meta:
    """A number in this `Range`; `check_ranges` checks it."""
    lower = "exclusiveMinimum" if above else "minimum"
    return Meta(extra={"range": Range(low, high, above)}, extra_json_schema={lower: low, "maximum": high})


def one_of(values: Iterable[Any], *, optional: bool = False) -> Meta:
    """One of `values`, by which the reader checks it; null too where it is `optional`."""
    return shown(enum=[*values, None] if optional else list(values))


def matching(pattern: re.Pattern[str]) -> Meta:
    """A string that matches as a whole; the reader checks it by `fullmatch`."""
    return shown(pattern=f"^(?:{pattern.pattern})$")


def texts_or_ids(most: int, *, least: int = 0) -> Meta:
    """A string, token ids, or a list of at most `most` of either, not mixed; strings have `least` characters."""
    text = {"type": "string", "minLength": least}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    lists = [{"type": "array", "items": one, "minItems": 1, "maxItems": most} for one in (text, ids)]
    return shown(oneOf=[text, ids, *lists])


def only(*values: str) -> Meta:
    """Null, or one of these JSON values, all of which ask for nothing; `check_nothing_asked` refuses all others."""
    return Meta(extra={"only": values}, extra_json_schema={"enum": [None, *map(msgspec.json.decode, values)]})


def neutral(*values: Any) -> Meta:
    """One of `values`, null among them, all of which ask for nothing; the reader refuses all others."""
    return Meta(extra={"neutral": True}, extra_json_schema={"enum": list(values)})


NO_EFFECT = Meta(extra={"no_effect": True})
"""Taken, because clients send it on their own; no answer is another one for it."""

# Numbers that several requests have.
TOKENS = within(1, INT64 - 1)
TEMPERATURE = within(0, 2)
TOP_P = within(0, 1, above=True)
TOP_K = within(-1, INT64 - 1)


@cache
def marks(kind: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """What the annotation of each field says beyond its type: field name -> the `extra` of its marks."""
    return {
        name: {
            key: value
            for mark in getattr(hint, "__metadata__", ())
            if isinstance(mark, Meta)
            for key, value in (mark.extra or {}).items()
        }
        for name, hint in get_type_hints(kind, include_extras=True).items()
    }


def check_ranges(sent: msgspec.Struct) -> None:
    """Raises `invalid_value` for a number outside its range."""
    for name, mark in marks(type(sent)).items():
        allowed = mark.get("range")
        if isinstance(allowed, Range) and (value := getattr(sent, name)) is not None:
            allowed.check(name, value)


def check_nothing_asked(sent: msgspec.Struct, why: Mapping[str, str] | None = None, *, at: str = "") -> None:
    """Raises `unsupported_parameter` for a field with the mark `only` that asks for something. `at`: where `sent`
    stands in the body; `why`: a reason by field."""
    for name, mark in marks(type(sent)).items():
        values = mark.get("only")
        if values is None or _asks_nothing(bytes(getattr(sent, name)), values):
            continue
        where = f"{at}.{name}" if at else name
        reason = (why or {}).get(name) or (f"only {' or '.join(values)} is" if values else "")
        unsupported(where, f"'{where}' is not supported" + (f": {reason}" if reason else ""))


def _asks_nothing(sent: bytes, values: tuple[str, ...]) -> bool:
    if sent in (b"", b"null"):
        return True
    if len(sent) > _ASKS_AT_MOST:
        return False
    try:
        plain = msgspec.json.encode(msgspec.json.decode(sent))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return plain.decode() in ("null", *values)
