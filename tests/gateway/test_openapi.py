"""The document says what the Gateway does: its paths, its errors, its fields with their limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.errors import CATALOGUE, ShardlineError
from shardline.gateway import openapi, openapi_words
from shardline.gateway.openai_requests import chat_request, text_request
from shardline.gateway.openapi_operations import OPERATIONS, REQUESTS
from shardline.gateway.template import Templates
from tests.support.gateway_stand import standing

Json = dict[str, Any]
GATEWAY = Path(openapi.__file__).parent
DOCUMENT: Json = json.loads(openapi.document())
RECORD = json.loads((Path(__file__).parent / "client_fields.json").read_text(encoding="utf-8"))


def nodes(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from nodes(inner)


def test_its_paths_are_those_of_the_application() -> None:
    source = (GATEWAY / "app.py").read_text(encoding="utf-8")
    routes = re.findall(r'\("(GET|POST|DELETE)", (f?"[^"]*"|session), (?:self|page)', source)
    table = {
        (method.lower(), path.removeprefix("f").strip('"').replace("{session}", "session").replace(":path}", "}"))
        for method, path in routes
    }
    session = "/v1/route-sessions/{id}"
    table = {(method, re.sub(r"^session", session, path)) for method, path in table}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == table
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


def test_every_reference_leads_somewhere_and_every_schema_is_needed() -> None:
    led = {node["$ref"] for node in nodes(DOCUMENT) if isinstance(node.get("$ref"), str)}
    for reference in led:
        place = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
    assert {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]} <= led


def test_every_error_of_the_gateway_is_one_of_its_responses() -> None:
    raised: set[str] = set()
    for path in GATEWAY.glob("*.py"):
        raised |= set(re.findall(r'ShardlineError\(\s*"([a-z_]+)"', path.read_text(encoding="utf-8")))
    named = {code for operation in OPERATIONS for code in operation.faults}
    of_the_start = {"setting_invalid", "state_unwritable", "insecure_listener"}
    assert raised - of_the_start <= named | openapi_words.KEY | openapi_words.ALWAYS
    for operation in OPERATIONS:
        responses = DOCUMENT["paths"][operation.path][operation.method]["responses"]
        assert {str(CATALOGUE[code].status) for code in operation.faults} <= set(responses)


@pytest.mark.parametrize("path", RECORD["fields"])
def test_every_field_of_ours_says_that_it_is_one(path: str) -> None:
    (body,) = [operation.body for operation in OPERATIONS if operation.path == path and operation.body is not None]
    properties = DOCUMENT["components"]["schemas"][openapi.request_name(body)]["properties"]
    theirs = {re.split(r"[.\[]", name)[0] for name in RECORD["fields"][path]}
    older = {"model", "temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n", "logprobs"}
    of_chats = {"response_format"}  # OpenAI's own, which completions do not have there
    for name in set(properties) - theirs - older - of_chats:
        said = properties[name]["description"]
        assert said.startswith("Extension") or openapi.EFFECT in properties[name], name


def test_every_word_is_of_a_field() -> None:
    names = {name for body in REQUESTS for name in openapi.schemas()[openapi.request_name(body)]["properties"]}
    nested = {"include_usage", "include_telemetry", "include_obfuscation", "reasoning_content"}
    assert set(openapi_words.FIELDS) <= names | nested | {"disable_parallel_tool_use"}


LIMITED = [
    (read, name, keyword, shape[keyword])
    for read, request in ((chat_request, "ChatRequest"), (text_request, "CompletionRequest"))
    for name, shape in DOCUMENT["components"]["schemas"][request]["properties"].items()
    for keyword in ("minimum", "exclusiveMinimum", "maximum")
    if keyword in shape
]


@pytest.mark.parametrize(("read", "name", "keyword", "limit"), LIMITED, ids=lambda value: str(value)[:30])
def test_limits_are_those_of_the_readers(read: Any, name: str, keyword: str, limit: float) -> None:
    body: Json = {"model": "m", "messages": [{"role": "user", "content": "a"}], "logprobs": True}
    if read is text_request:
        body = {"model": "m", "prompt": "a"}

    def ask(value: float) -> None:
        read(json.dumps({**body, name: value}).encode())

    step = 1 if isinstance(limit, int) and keyword != "maximum" else 0.001
    beyond = limit + 1 if keyword == "maximum" else limit - step
    if keyword == "exclusiveMinimum":
        beyond = limit
    else:
        ask(limit)
    with pytest.raises(ShardlineError) as caught:
        ask(beyond)
    assert (caught.value.code, caught.value.param) == ("invalid_value", name)


def test_two_schemas_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openapi, "REQUESTS", dict.fromkeys(REQUESTS, "Same"))
    monkeypatch.setattr(openapi, "request_name", lambda body: "SameRequest")
    with pytest.raises(ValueError, match="SameRequest"):
        openapi.schemas()


async def test_it_is_given_out_without_a_key(tmp_path: Path, shared_templates: Templates) -> None:
    async with standing(tmp_path, templates=shared_templates, keys=["k" * 32]) as stand:
        assert (await stand.get("/v1/models")).status_code == 401
        answer = await stand.get("/openapi.json")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.content == openapi.document()
    assert msgspec.json.decode(answer.content)["openapi"] == "3.1.0"
