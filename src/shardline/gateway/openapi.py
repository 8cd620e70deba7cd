"""`GET /openapi.json`: every public path of the Gateway as an OpenAPI 3.1 document.

Owns how structs become its schemas: those that read a request are those that describe it, marks and all
(request_fields.py), so that the document cannot say anything else than the readers do. Pure; the same for every Gateway
of a version. Shown by tests/gateway/test_openapi.py, and by Schemathesis in test_schemathesis.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from shardline import __version__
from shardline.errors import CATALOGUE
from shardline.gateway import openapi_answers as answers
from shardline.gateway import openapi_words as words
from shardline.gateway.openapi_operations import OPERATIONS, REF, REQUESTS, Json, Operation, of
from shardline.gateway.request_fields import marks
from shardline.wire.telemetry import TelemetryEvent

EFFECT = "x-shardline-effect"
"""Extension of OpenAPI at fields of requests: absent where they do what they say."""
NO_EFFECT, NEUTRAL = "none", "neutral only"
"""Whatever it holds changes nothing; it may only hold what asks for nothing."""


@cache
def document() -> bytes:
    """The document as JSON, members in a fixed order."""
    return msgspec.json.encode(openapi())


def openapi() -> Json:
    """The document; a new one each time."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shardline Gateway",
            "version": __version__,
            "summary": "OpenAI's API on a model that is split over several machines.",
            "description": "A field that would change the answer is honoured, or refused by name with status 400; "
            "it is never ignored. Null is as if a field was absent, wherever it may be null. "
            "Everything about each field: docs/api.md.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "security": [{"bearer": []}, {"apiKey": []}],
        "components": {
            "schemas": schemas(),
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key. Where none are configured, which is on loopback only, none is asked.",
                },
                "apiKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same, as Anthropic's clients send it.",
                },
            },
        },
    }


_HEADERS: dict[str, Json] = {
    "x-request-id": {
        "description": "The client's own, where it sent a sane one; all logs have it.",
        "schema": {"type": "string"},
    },
    "Shardline-Route-Session": {
        "description": "Ids of the Route Sessions, one for each choice, in order, separated by commas.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds, where a time is known.",
        "schema": {"type": "integer", "minimum": 1},
    },
}


def _headers(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *names)}


def _operation(operation: Operation) -> Json:
    made: Json = {"operationId": operation.name, "summary": operation.says, "tags": [operation.about]}
    if operation.parameters:
        made["parameters"] = list(operation.parameters)
    if operation.body is not None:
        schema = {"$ref": REF + request_name(operation.body)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    made["responses"] = {"200": _success(operation), **operation.more, **_errors(operation)}
    if not operation.keyed:
        made["security"] = []
    return made


def _success(operation: Operation) -> Json:
    content: Json = {kind: {} for kind in operation.texts}
    if operation.answer is not None:
        content["application/json"] = {"schema": of(operation.answer)}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": operation.events}
    headers = _headers(*(("Shardline-Route-Session",) if operation.sessions else ()))
    return {"description": "The answer.", "headers": headers, "content": content}


def _errors(operation: Operation) -> Json:
    """A response for each status of the catalogue that it can have, which names the codes."""
    codes = operation.faults | words.ALWAYS | (words.KEY if operation.keyed else frozenset())
    by_status: dict[int, list[str]] = {}
    for code in sorted(codes):
        by_status.setdefault(CATALOGUE[code].status, []).append(code)
    content = {"application/json": {"schema": of(operation.error)}}
    return {
        str(status): {
            "description": ", ".join(codes),
            "headers": _headers(*(("Retry-After",) if status in (429, 503) else ())),
            "content": content,
        }
        for status, codes in sorted(by_status.items())
    }


def schemas() -> Json:
    """All schemas, requests first; raises `ValueError` where two of them have one name."""
    made: Json = {}
    for name, schema in (*_requests(), *_answers()):
        if name in made:
            raise ValueError(f"two schemas are called {name}")
        made[name] = schema
    return made


def request_name(body: type[msgspec.Struct]) -> str:
    return REQUESTS[body] + "Request"


def _requests() -> Iterator[tuple[str, Json]]:
    for body, prefix in REQUESTS.items():
        components = _components([body])
        names = {name: request_name(body) if name == body.__name__ else prefix + name for name in components}
        structs = {struct.__name__: struct for struct in _structs(body)}
        for name, schema in components.items():
            _describe(schema, structs[name], told=name == body.__name__ or name in words.NESTED)
            yield names[name], _tidy(schema, names)


def _answers() -> Iterator[tuple[str, Json]]:
    kinds: dict[str, type] = {TelemetryEvent.__name__: TelemetryEvent}
    for operation in OPERATIONS:
        for kind in (operation.answer, operation.error):
            if kind is not None:
                kinds[kind.__name__] = kind
    for kind in (answers.ChatChunk, answers.TextChunk, answers.ResponseEvent, answers.MessageEvent):
        kinds[kind.__name__] = kind
    components = _components(kinds.values())
    names = {name: name for name in components}
    for name, schema in components.items():
        yield name, _tidy(schema, names)


def _components(kinds: Iterable[type]) -> dict[str, Json]:
    _, components = msgspec.json.schema_components(kinds, ref_template=REF + "{name}")
    return components


def _structs(kind: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    """`kind`, and every struct that it is made of."""
    found: set[type[msgspec.Struct]] = set()
    waiting: list[Any] = [msgspec.inspect.type_info(kind)]
    while waiting:
        info = waiting.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in found:
                continue
            found.add(info.cls)
            waiting += [member.type for member in info.fields]
        elif isinstance(info, msgspec.inspect.Type):
            parts = (getattr(info, name, None) for name in ("type", "types", "item_type", "key_type", "value_type"))
            for part in parts:
                waiting += list(part) if isinstance(part, tuple) else [part]
    return found


def _describe(schema: Json, struct: type[msgspec.Struct], *, told: bool) -> None:
    """Words for its fields, and what a mark means for them."""
    for name, mark in marks(struct).items():
        shape = schema["properties"][name]
        said = words.FIELDS.get(name, "") if told else ""
        if "only" in mark or mark.get("neutral"):
            shape[EFFECT] = NEUTRAL
            said = said or "Not supported: may only be what asks for nothing."
        elif mark.get("no_effect"):
            shape[EFFECT] = NO_EFFECT
            said = "Accepted; it changes nothing."
        if said:
            shape["description"] = said


def _tidy(node: Any, names: Mapping[str, str]) -> Any:
    """Without titles and null defaults, in its own words where it has two, and with references to `names`."""
    if isinstance(node, list):
        return [_tidy(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _tidy_member(key, value, names) for key, value in node.items() if not _is_noise(key, value, node)}
    first, *others = made.get("prefixItems", [None, ...])
    if all(other == first for other in others):
        del made["prefixItems"]
        made["items"] = first  # one schema for all says the same
    return made


def _tidy_member(key: str, value: Any, names: Mapping[str, str]) -> Any:
    if key == "properties":
        return {name: _tidy(schema, names) for name, schema in value.items()}
    if key == "$ref":
        return REF + names[value.removeprefix(REF)]
    if key == "description":
        return " ".join(value.split())
    return value if key in ("enum", "const", "default") else _tidy(value, names)


def _is_noise(key: str, value: Any, node: Json) -> bool:
    return key == "title" or (key == "default" and value is None) or (key == "anyOf" and "oneOf" in node)
