"""docs/api.md names every field, path and limit that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from shardline.gateway import (
    anthropic_requests,
    embeddings,
    embeddings_request,
    json_body,
    llama_server_text,
    responses_requests,
)
from shardline.gateway import openai_requests as requests
from shardline.gateway.messages import ROLES, FunctionCall, Message, Part, ToolCall
from shardline.gateway.structured import JsonSchema, ResponseFormat
from shardline.gateway.tools_request import FUNCTIONS, FunctionTool, NamedFunction, Tool, ToolChoice
from shardline.wire.messages import GRAMMAR_BYTES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
OTHER_PARTS = {"source", "data", "image_url", "detail", "file_id", "file_data", "file_url", "filename", "input_audio"}
"""Fields of parts and blocks that are refused by their type, which the page says of all of them."""
NAMED = set(re.findall(r"`([a-z_]+)`", PAGE))


@pytest.mark.parametrize(
    "kind",
    [
        *[requests.ChatBody, requests.TextBody, requests.StreamOptions, Message, Part, ToolCall, FunctionCall],
        *[ResponseFormat, JsonSchema, Tool, FunctionTool, ToolChoice, NamedFunction],
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_is_on_the_page(kind: type) -> None:
    assert not set(kind.__struct_fields__) - NAMED  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for module in (anthropic_requests, embeddings_request, llama_server_text, responses_requests)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    ],
    ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}",
)
def test_every_field_of_other_apis_is_on_the_page(kind: type) -> None:
    absent = set(kind.__struct_fields__) - NAMED  # type: ignore[attr-defined]
    assert absent <= OTHER_PARTS


def test_every_role_is_on_the_page() -> None:
    assert set(ROLES) <= NAMED


def test_every_path_is_on_the_page() -> None:
    source = (Path(requests.__file__).parent / "app.py").read_text(encoding="utf-8")
    routes = re.findall(r'\("(GET|POST|DELETE)", (?:f"\{session\}(/\w+)?"|session|"(/[^"]*)"), self', source)
    assert len(routes) >= 20
    for method, under, path in routes:
        full = path.replace("{id:path}", "{id}") or f"/v1/route-sessions/{{id}}{under}"
        assert f"`{method} {full}`" in PAGE


@pytest.mark.parametrize(
    "words",
    [
        f"at most {requests.BIASES} entries",
        f"up to {requests.STOPS} of at most {requests.STOP_CHARACTERS} characters",
        f"1 to {requests.CHOICES} choices",
        f"`top_logprobs` 0 to {requests.CHAT_LOGPROBS}",
        f"at most {requests.ANSWERS} answers a request",
        f"| `logprobs` | 0 to {requests.TEXT_LOGPROBS} |",
        f"up to {FUNCTIONS} functions",
        f"at most {GRAMMAR_BYTES:,} bytes",
        f"at most {embeddings_request.INPUTS:,} inputs",
        f"{embeddings.AT_A_TIME} at a time",
        f"the first {embeddings.SESSIONS_TOLD}",
        f"at most {json_body.VALUES:,} values and {json_body.MEMBERS:,} members of objects",
    ],
)
def test_limits_are_those_of_the_code(words: str) -> None:
    assert words in " ".join(PAGE.split()), "however its lines are broken"
