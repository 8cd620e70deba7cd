"""Every operation of the Gateway: its request, its answers, its events, and the errors that it can have.

Owns the table of which `GET /openapi.json` is made. Structs and schemas are those of the readers and of
openapi_answers.py, words those of openapi_words.py. Pure. Held equal to the table of app.py by
tests/gateway/test_openapi.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardline.gateway import openapi_answers as answers
from shardline.gateway import openapi_words as words
from shardline.gateway.anthropic_requests import MessagesBody
from shardline.gateway.embeddings_request import EmbeddingsBody
from shardline.gateway.llama_server_text import DetokenizeBody, TokenizeBody
from shardline.gateway.openai_requests import ChatBody, TextBody
from shardline.gateway.page import TYPES
from shardline.gateway.responses_requests import ResponsesBody
from shardline.gateway.sse import LAST_EVENT_ID
from shardline.wire.telemetry import TelemetryEvent

Json = dict[str, Any]
REF = "#/components/schemas/"
REQUESTS: dict[type[msgspec.Struct], str] = {
    ChatBody: "Chat",
    TextBody: "Completion",
    ResponsesBody: "Responses",
    MessagesBody: "Messages",
    EmbeddingsBody: "Embeddings",
    TokenizeBody: "Tokenize",
    DetokenizeBody: "Detokenize",
}
"""Every request with a body, and how the names of its schemas begin: two APIs may have a struct of one name."""
SESSION_ID = r"^rs-[0-9a-f]{24}$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    name: str
    method: str
    path: str
    says: str
    about: str
    """Its group."""
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    events: Json | None = None
    """The schema of one server-sent event, where it can answer with such."""
    texts: tuple[str, ...] = ()
    """Media types of answers that are no JSON."""
    parameters: tuple[Json, ...] = ()
    faults: frozenset[str] = frozenset()
    error: type[msgspec.Struct] = answers.ErrorAnswer
    keyed: bool = True
    sessions: bool = False
    """The answer names its Route Sessions in a header."""
    more: Mapping[str, Json] = field(default_factory=dict)
    """Further responses."""


def _event(*data: Json, named: bool = False, numbered: bool = False) -> Json:
    """One event whose `data` is JSON of one of these schemas, or the word `[DONE]`."""
    texts = [
        one if "const" in one else {"type": "string", "contentMediaType": "application/json", "contentSchema": one}
        for one in data
    ]
    properties: Json = {"data": texts[0] if len(texts) == 1 else {"anyOf": texts}}
    if named:
        properties["event"] = {"type": "string"}
    if numbered:
        properties["id"] = {"type": "string"}
    return {
        "type": "object",
        "description": "One server-sent event. Comment lines between events keep the connection alive.",
        "properties": properties,
        "required": sorted(properties),
    }


def of(kind: type) -> Json:
    """The schema of a struct, by reference."""
    return {"$ref": REF + kind.__name__}


_ERROR_EVENT = of(answers.ErrorAnswer)
_DONE: Json = {"const": "[DONE]"}


def _path_parameter(name: str, says: str, pattern: str | None = None) -> Json:
    schema: Json = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {"name": name, "in": "path", "required": True, "description": says, "schema": schema}


_SESSION = _path_parameter("id", "Of the Route Session: Shardline-Route-Session of the answer.", SESSION_ID)
_GENERATES = words.BODY | words.MODEL | words.ROUTE | words.SAMPLED
_CHATS = _GENERATES | words.TEMPLATE
_FOUND = frozenset({"session_not_found"})

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="createChatCompletion",
        method="post",
        path="/v1/chat/completions",
        says="Messages in, an answer out; streamed or whole.",
        about="openai",
        body=ChatBody,
        answer=answers.ChatCompletion,
        events=_event(of(answers.ChatChunk), _ERROR_EVENT, _DONE),
        faults=_CHATS,
        sessions=True,
    ),
    Operation(
        name="createCompletion",
        method="post",
        path="/v1/completions",
        says="Text or token ids in, text out.",
        about="openai",
        body=TextBody,
        answer=answers.TextCompletion,
        events=_event(of(answers.TextChunk), _ERROR_EVENT, _DONE),
        faults=_GENERATES,
        sessions=True,
    ),
    Operation(
        name="createResponse",
        method="post",
        path="/v1/responses",
        says="OpenAI's Responses API, stateless.",
        about="openai",
        body=ResponsesBody,
        answer=answers.Response,
        events=_event(of(answers.ResponseEvent), named=True),
        faults=_CHATS,
        sessions=True,
    ),
    Operation(
        name="createMessage",
        method="post",
        path="/v1/messages",
        says="Anthropic's Messages API.",
        about="anthropic",
        body=MessagesBody,
        answer=answers.Message,
        events=_event(of(answers.MessageEvent), named=True),
        faults=_CHATS,
        error=answers.AnthropicErrorAnswer,
        sessions=True,
    ),
    Operation(
        name="createEmbedding",
        method="post",
        path="/v1/embeddings",
        says="A vector of each input, also of a split model.",
        about="openai",
        body=EmbeddingsBody,
        answer=answers.Embeddings,
        faults=words.BODY | words.MODEL | words.ROUTE,
        sessions=True,
    ),
    Operation(
        name="tokenize",
        method="post",
        path="/tokenize",
        says="Token ids of a text, as llama-server gives them.",
        about="llama-server",
        body=TokenizeBody,
        answer=answers.Tokens,
        faults=words.BODY | words.MODEL | {"context_length_exceeded", "deadline"},
    ),
    Operation(
        name="detokenize",
        method="post",
        path="/detokenize",
        says="The text of token ids, control tokens included.",
        about="llama-server",
        body=DetokenizeBody,
        answer=answers.Content,
        faults=words.BODY | words.MODEL,
    ),
    Operation(
        name="getProps",
        method="get",
        path="/props",
        says="What a client of llama-server must know of a model.",
        about="llama-server",
        answer=answers.Props,
        parameters=(
            {
                "name": "model",
                "in": "query",
                "description": "Needed where several models are served.",
                "schema": {"type": "string"},
            },
        ),
        faults=words.MODEL | {"invalid_value"},
    ),
    Operation(
        name="listModels",
        method="get",
        path="/v1/models",
        says="What is served, whole or not.",
        about="openai",
        answer=answers.Models,
        faults=frozenset({"gateway_expelled", "tracker_unreachable"}),
    ),
    Operation(
        name="getModel",
        method="get",
        path="/v1/models/{id}",
        says="One of them.",
        about="openai",
        answer=answers.ModelEntry,
        parameters=(_path_parameter("id", "Its name, slashes included."),),
        faults=frozenset({"model_not_found", "gateway_expelled", "tracker_unreachable"}),
    ),
    Operation(
        name="listRouteSessions",
        method="get",
        path="/v1/route-sessions",
        says="Route Sessions of this key: those that run, and those of the last hour.",
        about="route sessions",
        answer=answers.Sessions,
    ),
    Operation(
        name="getRouteSession",
        method="get",
        path="/v1/route-sessions/{id}",
        says="The account of one, route and bytes over each Seam included.",
        about="route sessions",
        answer=answers.SessionRecord,
        parameters=(_SESSION,),
        faults=_FOUND,
    ),
    Operation(
        name="cancelRouteSession",
        method="delete",
        path="/v1/route-sessions/{id}",
        says="Cancel it: its KV is freed on every Node, its client gets the error cancelled.",
        about="route sessions",
        answer=answers.SessionRecord,
        parameters=(_SESSION,),
        faults=_FOUND,
    ),
    Operation(
        name="followRouteSession",
        method="get",
        path="/v1/route-sessions/{id}/telemetry",
        says="Its Generation Telemetry while it runs; what was kept comes first.",
        about="route sessions",
        events=_event(of(TelemetryEvent), numbered=True),
        parameters=(
            _SESSION,
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "Only events behind this one.",
                "schema": {"type": "string", "pattern": f"^{LAST_EVENT_ID.pattern}$"},
            },
        ),
        faults=_FOUND | {"invalid_value", "slow_client"},
    ),
    Operation(
        name="followLive",
        method="get",
        path="/v1/live",
        says="Sessions of this key and the cluster, as one stream that does not end: what the page shows.",
        about="page",
        events=_event({"type": ["object", "array"]}, named=True),
        faults=frozenset({"slow_client"}),
    ),
    Operation(
        name="getPage",
        method="get",
        path="/",
        says="The page; where it is switched off, what this is.",
        texts=("text/html", "text/plain"),
        about="page",
        keyed=False,
        more={"304": {"description": "Not modified."}},
    ),
    Operation(
        name="getPageFile",
        method="get",
        path="/page/{name}",
        says="A file of the page; not where the page is switched off.",
        texts=tuple(sorted(kind.decode().partition(";")[0] for kind in TYPES.values())),
        about="page",
        keyed=False,
        parameters=(_path_parameter("name", "Its path, slashes included."),),
        faults=frozenset({"not_found"}),
        more={"304": {"description": "Not modified."}},
    ),
    Operation(
        name="getHealth",
        method="get",
        path="/health",
        says="200 when a model has a whole route, as llama-server says it.",
        answer=answers.Health,
        faults=frozenset({"model_unavailable", "gateway_expelled", "tracker_unreachable"}),
        about="health",
        keyed=False,
    ),
    Operation(
        name="getReady",
        method="get",
        path="/readyz",
        says="200 with the models that have a whole route; else the missing layers.",
        answer=answers.Ready,
        faults=frozenset({"model_unavailable", "gateway_expelled", "tracker_unreachable"}),
        about="health",
        keyed=False,
    ),
    Operation(
        name="getLiveness",
        method="get",
        path="/healthz",
        says="200 while the process lives.",
        answer=answers.Live,
        about="health",
        keyed=False,
    ),
    Operation(
        name="getMetrics",
        method="get",
        path="/metrics",
        says="Prometheus text.",
        texts=("text/plain",),
        about="health",
        keyed=False,
    ),
    Operation(
        name="getOpenApi",
        method="get",
        path="/openapi.json",
        says="This document.",
        about="documentation",
        texts=("application/json",),
        keyed=False,
    ),
)
