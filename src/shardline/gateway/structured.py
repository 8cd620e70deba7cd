"""What a request says of the form of its answer: `response_format`, `grammar` and `regex`, as the `Grammar` of a tail.

Owns their fields, what is refused before any Node is asked, and how a schema is written into a grammar. Whether a
grammar can be kept to, only the tail knows (model/grammar.py). Pure. Shown by tests/gateway/test_structured.py.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from shardline.gateway.json_body import refuse, unsupported
from shardline.gateway.request_fields import NO_EFFECT, NOT_SENT, one_of, shown
from shardline.wire.messages import GRAMMAR_BYTES, Grammar

ANY_OBJECT = '{"type":"object"}'
_WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""Between two tokens of JSON: a small model that may go on with blank space does so until its limit."""


FORMATS = ("text", "json_object", "json_schema")


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: Annotated[msgspec.Raw, shown(type="object")]
    name: Annotated[str | None, NO_EFFECT] = None
    description: Annotated[str | None, NO_EFFECT] = None
    strict: Annotated[bool | None, NO_EFFECT] = None
    """Every schema is kept to, whatever this says."""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, one_of(FORMATS)]
    json_schema: JsonSchema | None = None
    schema: Annotated[msgspec.Raw, shown(type=["object", "null"])] = NOT_SENT
    """llama-server's, with `json_object`."""


def grammar_of(response_format: ResponseFormat | None, grammar: str | None, regex: str | None) -> Grammar | None:
    """The one form that is asked for; None where none is. Raises `invalid_value`."""
    made = [form for form in (_format(response_format), _text("grammar", grammar), _text("regex", regex)) if form]
    if len(made) > 1:
        refuse(made[1].field, f"'{made[0].field}' and '{made[1].field}' both say what the answer may be: send one")
    return checked(made[0]) if made else None


def checked(grammar: Grammar) -> Grammar:
    """`grammar`, if it is no larger than a control message may be."""
    size = len(grammar.text.encode()) + len(grammar.before.encode())
    if size > GRAMMAR_BYTES:
        refuse(grammar.field, f"'{grammar.field}' makes a grammar of {size} bytes, at most {GRAMMAR_BYTES} are taken")
    return grammar


def _text(field: str, sent: str | None) -> Grammar | None:
    """An empty string is none, as llama-server's clients mean it."""
    if not sent:
        return None
    return Grammar(kind="regex" if field == "regex" else "grammar", text=sent, field=field)


def _format(sent: ResponseFormat | None) -> Grammar | None:
    field = "response_format"
    if sent is None:
        return None
    for name, of in (("schema", "json_object"), ("json_schema", "json_schema")):
        if sent.type in FORMATS and sent.type != of and _has(sent, name):
            refuse(field, f"'{field}' of type {sent.type} has no '{name}'")
    if sent.type == "text":
        return None
    if sent.type == "json_object":
        schema = _given(sent.schema) or ANY_OBJECT
    elif sent.type == "json_schema":
        schema = _given(sent.json_schema.schema) if sent.json_schema is not None else ""
        if not schema:
            refuse(field, f"'{field}' of type json_schema needs 'json_schema' with a 'schema'")
    else:
        unsupported(field, f"'{field}': its type must be one of {', '.join(FORMATS)}, not '{sent.type[:40]}'")
    if not schema.startswith("{"):
        refuse(field, f"'{field}': the schema must be an object")
    return Grammar(kind="json_schema", text=schema, field=field)


def _has(sent: ResponseFormat, name: str) -> bool:
    value = getattr(sent, name)
    return bool(_given(value)) if isinstance(value, msgspec.Raw) else value is not None


def _given(sent: msgspec.Raw) -> str:
    text = bytes(sent).strip().decode()
    return "" if text == "null" else text


def in_lark(schema: str | dict[str, Any]) -> str:
    """A schema as a rule of a Lark grammar."""
    members: dict[str, Any] = (
        msgspec.json.decode(schema, type=dict[str, msgspec.Raw]) if isinstance(schema, str) else schema
    )
    return "%json " + msgspec.json.encode({**members, "x-guidance": _WHITESPACE}).decode()
