"""Request bodies: bytes of a stranger into a typed Struct, or an error of the catalogue that names the field.

Owns what JSON leaves open: a key that stands twice is refused, as are NaN, lone surrogates, a BOM and bytes that are
not UTF-8. It knows no field. Memory stays a small multiple of the body: fields are typed before they are built, and
what is made of too many small values is not built at all. Pure. Shown by tests/gateway/test_json_body.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from itertools import chain
from types import UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec.structs import fields

from shardline.errors import ShardlineError

T = TypeVar("T")

VALUES = 1_000_000
"""Most values of one body. Each takes up to some 100 bytes as an object, whatever it took as text."""
MEMBERS = 100_000
"""Most members of all objects of one body: these take the most."""

# Escapes, each with a little behind it. Bounded: one match must not hold the interpreter for long (nor go back).
_ESCAPES = re.compile(rb"(?:\\.[^\"\\]{0,64}+){1,8192}+", re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*+:")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*?)`(?: - at `(.*)`)?$", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*?)`(?: - at `(.*)`)?$", re.DOTALL)
_PATH = re.compile(r" - at `(.*)`$", re.DOTALL)
_INDICES = re.compile(r"(\[[0-9]+\])+$")
_STEPS = re.compile(r"\.[^.\[\]]+|\[[^\]]*\]")
_ALIKE = 0.84
"""How much alike a field is that may have been meant: one letter too many or too few, not another word."""
_LONGEST_NAME = 60
_JSON_NAMES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def decode_body(body: bytes, kind: type[T], *, own: bool = False) -> T:
    """`body` as a `kind`; raises `invalid_json`, `invalid_value` or `unsupported_parameter` with OpenAI's `param`, or
    `body_too_large` where it has too many values. `own`: it was encoded here, of a body that had no key twice."""
    check_count(body)
    try:
        value = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refused(str(error), kind) from None
    except RecursionError:
        raise ShardlineError("invalid_json", "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ShardlineError("invalid_json", f"the body is not JSON in UTF-8: {_why_no_json(body, error)}") from None
    doubled = None if own else duplicate_key(body)
    if doubled is not None:
        raise ShardlineError("invalid_json", f"the key '{_short(doubled)}' stands twice in one object", param=doubled)
    return value


def check_count(body: bytes) -> None:
    """Refuse more values or members than any request has, before one of them is an object; raises `body_too_large`."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") < VALUES and body.count(b":") <= MEMBERS:
        return  # whatever of these stands in strings
    values, members = 1, 0
    begin = 0
    for first, last in chain(_strings(body), [(len(body), len(body))]):
        # A value begins the body, a list or an object, or stands behind a comma.
        values += body.count(b",", begin, first) + body.count(b"[", begin, first) + body.count(b"{", begin, first)
        values -= body.count(b"[]", begin, first) + body.count(b"{}", begin, first)
        members += body.count(b":", begin, first)
        if values > VALUES or members > MEMBERS:
            many = f"{VALUES} values" if values > VALUES else f"{MEMBERS} members of objects"
            raise ShardlineError("body_too_large", f"the body has more than {many}")
        begin = last


def refuse(param: str, message: str) -> NoReturn:
    """A value that cannot be meant."""
    raise ShardlineError("invalid_value", message, param=param)


def unsupported(param: str, message: str, advice: str | None = None) -> NoReturn:
    """A value that can be meant, and is not done here: saying so beats an answer to another question. `advice`: where
    it is this model, not this API, that cannot do it."""
    raise ShardlineError("unsupported_parameter", message, param=param, advice=advice)


def duplicate_key(body: bytes) -> str | None:
    """The first key that stands twice in one object of `body`, which is valid JSON; else None."""
    if body.count(b":") < 2:
        return None
    enclosing: list[set[bytes]] = []
    begin = 0
    for first, last in _strings(body):
        _nest(body, begin, first, enclosing)
        begin = last
        if enclosing and _COLON.match(body, last):
            key = body[first + 1 : last - 1]
            if b"\\" in key:
                key = msgspec.json.decode(b'"' + key + b'"', type=str).encode()
            if key in enclosing[-1]:
                return key.decode()[:200]
            enclosing[-1].add(key)
    return None


def _nest(body: bytes, begin: int, end: int, enclosing: list[set[bytes]]) -> None:
    """Go into and out of the objects whose braces stand in [begin, end), where no string is."""
    opening, closing = body.find(b"{", begin, end), body.find(b"}", begin, end)
    while opening >= 0 or closing >= 0:
        if opening >= 0 and (closing < 0 or opening < closing):
            enclosing.append(set())
            opening = body.find(b"{", opening + 1, end)
        else:
            enclosing.pop()
            closing = body.find(b"}", closing + 1, end)


def _strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the strings of `body` stand, quotes included; one that does not end goes to the end. In small steps: a
    thread that does this lets others run between two of them."""
    first = body.find(b'"')
    while first >= 0:
        last = _end_of_string(body, first + 1)
        yield first, last
        first = body.find(b'"', last)


def _end_of_string(body: bytes, at: int) -> int:
    """Behind the quote that ends the string in which `at` is."""
    while (quote := body.find(b'"', at)) >= 0:
        escape = body.find(b"\\", at, quote)
        if escape < 0:
            return quote + 1
        run = _ESCAPES.match(body, escape)
        if run is None:
            break  # the escape is all that is left
        at = run.end()
    return len(body)


def _why_no_json(body: bytes, error: Exception) -> str:
    if body.startswith(b"\xef\xbb\xbf"):
        return "it begins with a byte order mark"
    if not body.strip():
        return "it is empty"
    text = str(error).removeprefix("JSON is malformed: ")
    return "it ends too early, or in half a character" if text == "Input data was truncated" else _plain(text)


def _refused(text: str, kind: Any) -> ShardlineError:
    unknown = _UNKNOWN_FIELD.match(text)
    if unknown:
        param = _param(unknown[2], unknown[1])
        near = difflib.get_close_matches(unknown[1][:_LONGEST_NAME], _fields_at(kind, unknown[2] or "$"), 1, _ALIKE)
        message, advice = f"the field '{param}' is not supported", None
        if near:
            meant = _param(unknown[2], near[0])
            message, advice = f"{message}; did you mean '{meant}'?", f"Write '{meant}', or leave the field out."
        return ShardlineError("unsupported_parameter", message, param=param, advice=advice)
    missing = _MISSING_FIELD.match(text)
    if missing:
        param = _param(missing[2], missing[1])
        return ShardlineError("invalid_value", f"the field '{param}' is required", param=param)
    path = _PATH.search(text)
    why = _plain(text[: path.start()] if path else text)
    if path is None:
        return ShardlineError("invalid_json", f"the body must be one JSON object: {why}")
    where = _param(path[1], None)
    # OpenAI names the field, not the place in its list.
    return ShardlineError("invalid_value", f"'{where}': {why}", param=_INDICES.sub("", where))


def _fields_at(kind: Any, path: str) -> list[str]:
    """Names of the fields that an object may have at `path` of a `kind`, as `$.messages[...].tool_calls[0]`."""
    kinds = [kind]
    for step in _STEPS.findall(path):
        kinds = [inner for outer in kinds for inner in _inside(outer, step)]
    return sorted({field.encode_name for one in _flat(kinds) if _is_struct(one) for field in fields(one)})


def _inside(kind: Any, step: str) -> list[Any]:
    """The types of what `step`, `.name` or an index, leads to from a `kind`."""
    found: list[Any] = []
    for one in _flat([kind]):
        if not step.startswith("."):
            found += get_args(one)[-1:]  # of a list its items, of a dict its values
        elif _is_struct(one):
            found += [field.type for field in fields(one) if field.encode_name == step[1:]]
    return found


def _flat(kinds: list[Any]) -> Iterator[Any]:
    """Unions and annotations taken apart."""
    for kind in kinds:
        origin = get_origin(kind)
        if origin is Annotated:
            yield from _flat([get_args(kind)[0]])
        elif origin in (Union, UnionType):
            yield from _flat(list(get_args(kind)))
        else:
            yield kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _param(path: str | None, field: str | None) -> str:
    """`$.messages[0]` and `foo` -> `messages[0].foo`."""
    inside = (path or "$").removeprefix("$").removeprefix(".").replace("[...]", "")
    return _short(inside if field is None else f"{inside}.{field}" if inside else field)


def _plain(text: str) -> str:
    """What the decoder says, in JSON's words."""
    text = re.sub(r"`([^`]*)`", lambda m: _kinds(m[1]), text)
    return _short(text if text[1:2].isupper() else text[:1].lower() + text[1:])


def _kinds(union: str) -> str:
    """`str | array | null` -> string, array or null."""
    *others, last = [_JSON_NAMES.get(kind, kind) for kind in union.split(" | ")]
    return f"{', '.join(others)} or {last}" if others else last


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
