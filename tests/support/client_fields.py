"""Every field that the types of the clients `openai` and `anthropic` can send, and what the readers do with each.

Owns the walk through their TypedDicts: each field alone, in the smallest request that may have it, at any depth where
what stands around it is taken. `python -m tests.support.client_fields` writes the outcome for the installed clients to
tests/gateway/client_fields.json, of which docs/reference/conformance.md is made.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

import msgspec
import typing_extensions
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming, CompletionCreateParamsStreaming
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import response_create_params as response_params

from shardline.errors import ShardlineError
from shardline.gateway import openapi
from shardline.gateway.anthropic_requests import messages_request
from shardline.gateway.embeddings_request import embeddings_request
from shardline.gateway.openai_requests import chat_request, text_request
from shardline.gateway.responses_requests import responses_request

Json = dict[str, Any]
RECORD = Path(__file__).resolve().parents[1] / "gateway" / "client_fields.json"
DEPTH = 5
HONOURED, NO_EFFECT, NEUTRAL, REFUSED = "honoured", "no effect", "neutral only", "refused"


@dataclass(frozen=True)
class Endpoint:
    path: str
    client: str
    params: tuple[Any, ...]
    """TypedDicts of the whole request."""
    read: Callable[[bytes], object]
    schema: str
    samples: Mapping[str, Any]
    """Values where the first one of a type would not do: by name of the field, wherever it stands."""


def _as_chat(translate: Callable[[bytes], tuple[Json, object]]) -> Callable[[bytes], object]:
    def read(body: bytes) -> object:
        chat, _ = translate(body)
        return chat_request(msgspec.json.encode({k: v for k, v in chat.items() if v is not None}), own=True)

    return read


_TOOL: Json = {"type": "function", "function": {"name": "f"}}
_COMMON: Json = {"model": "m", "name": "f", "logit_bias": {"5": 1}, "arguments": "{}", "parameters": {"type": "object"}}
_USER: Json = {"role": "user", "content": "a"}
_SCHEMA: Json = {"schema": {"type": "object"}}
ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions",
        "openai",
        (chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming),
        chat_request,
        "ChatRequest",
        {**_COMMON, "messages": [_USER], "tools": [_TOOL], **_SCHEMA},
    ),
    Endpoint(
        "/v1/completions",
        "openai",
        (CompletionCreateParamsNonStreaming, CompletionCreateParamsStreaming),
        text_request,
        "CompletionRequest",
        {**_COMMON, "prompt": "a", "best_of": 2},
    ),
    Endpoint(
        "/v1/responses",
        "openai",
        (response_params.ResponseCreateParamsNonStreaming, response_params.ResponseCreateParamsStreaming),
        _as_chat(responses_request),
        "ResponsesRequest",
        {**_COMMON, "input": "a", "tools": [{"type": "function", "name": "f", "parameters": None, "strict": None}]}
        | _SCHEMA,
    ),
    Endpoint(
        "/v1/messages",
        "anthropic",
        (MessageCreateParamsNonStreaming, MessageCreateParamsStreaming),
        _as_chat(messages_request),
        "MessagesRequest",
        {**_COMMON, "messages": [_USER], "input_schema": {"type": "object"}, "input": {}}
        | {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ),
    Endpoint(
        "/v1/embeddings",
        "openai",
        (EmbeddingCreateParams,),
        embeddings_request,
        "EmbeddingsRequest",
        {**_COMMON, "input": "a"},
    ),
)
WITH: dict[str, Json] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": ...},
    "parallel_tool_calls": {"tools": ...},
}
"""What a field needs beside it; `...`: the sample of that name."""
ALSO: dict[str, Json] = {
    "ChatCompletionAssistantMessageParam": {"content": "a"},
    "JSONSchema": _SCHEMA,
    "FunctionCallOutput": {"call_id": "c"},
    "ResponseFormatTextJSONSchemaConfigParam": _SCHEMA,
}
"""What the readers ask for where the type does not, by its name."""


def outcomes(endpoint: Endpoint) -> dict[str, str]:
    """Path of a field -> what is done with it. Raises whatever a reader raises that is not of the catalogue."""
    found: dict[str, str] = {}
    for params in endpoint.params:
        minimal = {**_smallest(params, endpoint.samples), "model": "m"}
        if endpoint.path == "/v1/responses":  # where OpenAI does without, it is in what was stored
            minimal["input"] = "a"
        for name, kind in _hints(params).items():
            if name in ("model",) or name in found:
                continue
            beside = {k: endpoint.samples[k] if v is ... else v for k, v in WITH.get(name, {}).items()}

            def body(value: Any, name: str = name, beside: Json = beside, minimal: Json = minimal) -> Json:
                # No conversation ends with a call of a tool.
                talk = name in ("messages", "input") and isinstance(value, list) and isinstance(value[0], dict)
                return {**minimal, **beside, name: [*value, _USER] if talk else value}

            _ask(endpoint, name, kind, body, found)
    return found


def _ask(
    endpoint: Endpoint, path: str, kind: Any, body: Callable[[Any], Json], found: dict[str, str], depth: int = 0
) -> None:
    name = re.split(r"[.\[\]]+", path.rstrip("]"))[-1]
    value = (
        endpoint.samples.get(name, _sample(kind, endpoint.samples))
        if depth == 0
        else _sample(kind, endpoint.samples, name)
    )
    found[path] = _outcome(endpoint, path, body(value))
    if found[path] != HONOURED or depth >= DEPTH:
        return
    for label, shape, wrap in _shapes(kind):
        at = f"{path}{label}"
        smallest = _smallest(shape, endpoint.samples)
        refused = _refused(endpoint, body(wrap(smallest)))
        if refused is not None:
            by_name = refused.code == "unsupported_parameter" or not _knows(endpoint, path, shape)
            assert by_name, f"{endpoint.path} {at}: {refused.message}"
            found[at] = REFUSED
            continue
        for member, member_kind in _hints(shape).items():
            if not _is_tag(member, member_kind):
                _ask(
                    endpoint,
                    f"{at}.{member}",
                    member_kind,
                    lambda v, member=member, smallest=smallest, wrap=wrap: body(wrap({**smallest, member: v})),
                    found,
                    depth + 1,
                )


def _refused(endpoint: Endpoint, body: Json) -> ShardlineError | None:
    try:
        endpoint.read(json.dumps(body).encode())
    except ShardlineError as error:
        assert error.fault.status == 400 and error.param, body
        return error
    return None


def _knows(endpoint: Endpoint, path: str, shape: Any) -> bool:
    """Whether objects of this `type` or `role` are in our schema."""
    tags = {name: typing_extensions.get_args(_plain(k))[0] for name, k in _hints(shape).items() if _is_tag(name, k)}
    return any(
        all(tag in inner["properties"].get(name, {}).get("enum", ()) for name, tag in tags.items())
        for schema in _found(endpoint, path)
        for inner in _inner(schema)
        if tags
    )


def _outcome(endpoint: Endpoint, path: str, body: Json) -> str:
    error = _refused(endpoint, body)
    effects = {schema.get(openapi.EFFECT) for schema in _found(endpoint, path)}
    if error is not None and error.code == "unsupported_parameter":
        assert openapi.NO_EFFECT not in effects
        return NEUTRAL if openapi.NEUTRAL in effects else REFUSED
    if error is not None:
        # A value that the field does not have; it is one of ours all the same.
        assert error.code == "invalid_value" and _has(endpoint, path), f"{endpoint.path} {path}: {error.message} {body}"
        return HONOURED
    assert _has(endpoint, path), f"{endpoint.path} {path} was taken, and is in no schema"
    if effects and None not in effects:
        return NEUTRAL if openapi.NEUTRAL in effects else NO_EFFECT
    return HONOURED


# ---- in our schema ---------------------------------------------------------------------------------------------------

_SCHEMAS: Json = openapi.schemas()


def _found(endpoint: Endpoint, path: str) -> list[Json]:
    schemas = [_SCHEMAS[endpoint.schema]]
    for step in [step for step in re.sub(r"\[[^]]*\]", "", path).split(".") if step]:
        schemas = [inner["properties"][step] for s in schemas for inner in _inner(s) if step in inner["properties"]]
    return schemas


def _inner(schema: Json) -> Iterator[Json]:
    """Every object that it may be, or be a list of."""
    if "$ref" in schema:
        yield from _inner(_SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if "properties" in schema:
        yield schema
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _inner(one)
    if isinstance(schema.get("items"), dict):
        yield from _inner(schema["items"])


def _has(endpoint: Endpoint, path: str) -> bool:
    return bool(_found(endpoint, path)) or any("properties" not in s for s in _parents(endpoint, path))


def _parents(endpoint: Endpoint, path: str) -> list[Json]:
    """Objects around it of which any member is taken, as a JSON schema or arguments."""
    parent = path.rpartition(".")[0]
    return [s for s in _found(endpoint, parent) if not list(_inner(s))] if parent else []


# ---- in their types --------------------------------------------------------------------------------------------------


def _plain(kind: Any) -> Any:
    """Without Required, Annotated and the like."""
    while typing_extensions.get_origin(kind) in (
        *(typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated, typing_extensions.Annotated),
    ):
        kind = typing_extensions.get_args(kind)[0]
    return kind


def _hints(shape: Any) -> dict[str, Any]:
    return typing_extensions.get_type_hints(shape, include_extras=True)


def _arms(kind: Any) -> list[Any]:
    kind = _plain(kind)
    if typing_extensions.get_origin(kind) in (Union, types.UnionType):
        return [arm for one in typing_extensions.get_args(kind) for arm in _arms(one)]
    return [] if kind is type(None) else [kind]


def _item(kind: Any) -> Any:
    """The type of its items, where it is a list; else None."""
    origin = typing_extensions.get_origin(kind)
    if origin is None or origin in (dict, Literal) or typing_extensions.is_typeddict(kind):
        return None
    arguments = typing_extensions.get_args(kind)
    return arguments[0] if len(arguments) == 1 else None


def _shapes(kind: Any) -> Iterator[tuple[str, Any, Callable[[Json], Any]]]:
    """Every TypedDict that a value may be, or be a list of: how it is called, itself, and how it is put there."""
    for arm in _arms(kind):
        if typing_extensions.is_typeddict(arm):
            yield _tag(arm), arm, lambda value: value
        item = _item(arm)
        for one in _arms(item) if item is not None else ():
            if typing_extensions.is_typeddict(one):
                yield _tag(one) or "[]", one, lambda value: [value]


def _tag(shape: Any) -> str:
    for name in ("type", "role"):
        kind = _plain(_hints(shape).get(name))
        if _is_tag(name, kind):
            return f"[{typing_extensions.get_args(kind)[0]}]"
    return ""


def _is_tag(name: str, kind: Any) -> bool:
    return name in ("role", "type") and typing_extensions.get_origin(_plain(kind)) is Literal


def _smallest(shape: Any, samples: Mapping[str, Any]) -> Json:
    return {
        name: _sample(kind, samples, name)
        for name, kind in _hints(shape).items()
        if typing_extensions.get_origin(kind) is typing_extensions.Required or _is_tag(name, kind)
    } | ALSO.get(shape.__name__, {})


def _sample(kind: Any, samples: Mapping[str, Any], name: str = "") -> Any:
    arms = _arms(kind)
    if name in samples and not _is_tag(name, kind):
        return samples[name]
    kind = arms[0]
    simple = {str: "x", int: 1, float: 0.5, bool: True}
    if kind in simple:
        return simple[kind]
    if typing_extensions.get_origin(kind) is Literal:
        return typing_extensions.get_args(kind)[0]
    if typing_extensions.is_typeddict(kind):
        return _smallest(kind, samples)
    item = _item(kind)
    return [_sample(item, samples)] if item is not None else {"a": "b"}


def record() -> Json:
    clients = sorted({endpoint.client for endpoint in ENDPOINTS})
    return {
        "clients": {name: importlib.metadata.version(name) for name in clients},
        "fields": {endpoint.path: outcomes(endpoint) for endpoint in ENDPOINTS},
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
