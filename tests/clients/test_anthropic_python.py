"""`anthropic` for Python, as it is, against a route of two Nodes in real processes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.route import CALL, GREETING, RESULT, Route

CLIENT = "anthropic-python"
HI: Any = [{"role": "user", "content": "Hi"}]
ASKED: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}


def version(client: str) -> str:
    return importlib.metadata.version("anthropic")


@pytest.fixture
def client(route: Route) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=route.url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


def test_messages(client: anthropic.Anthropic, route: Route) -> None:
    answer = client.messages.create(model=route.model, max_tokens=100, system="Be kind.", messages=HI)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": GREETING}]
    assert answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0


def test_stream(client: anthropic.Anthropic, route: Route) -> None:
    with client.messages.stream(model=route.model, max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream) == GREETING
        assert stream.get_final_message().stop_reason == "end_turn"


def test_tools_loop(client: anthropic.Anthropic, route: Route) -> None:
    messages = list(ASKED)
    answer = client.messages.create(model=route.model, max_tokens=200, messages=messages, tools=[TOOL])
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert (call.name, call.input, answer.stop_reason) == (CALL["name"], CALL["arguments"], "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(model=route.model, max_tokens=200, messages=messages, tools=[TOOL]) as stream:
        assert "".join(stream.text_stream) == RESULT


def test_errors(client: anthropic.Anthropic, route: Route) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=9, messages=HI)
