"""Which tools a request names, whether they may or must be called, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.openai_requests import ChatRequest, chat_request


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def asked(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return chat_request(json.dumps(body).encode())


NAMED = {"type": "function", "function": {"name": "g"}}


def test_tools_that_may_must_or_must_not_be_called() -> None:
    both = [tool(), tool("g")]
    for nothing in (
        {},
        {"tools": None},
        {"tools": []},
        {"tools": both, "tool_choice": "none"},
        {"tool_choice": "auto"},
    ):
        assert asked(**nothing).tools is None
    may = asked(tools=both, parallel_tool_calls=False).tools
    assert may is not None and (may.required, may.named, may.parallel) == (False, None, False)
    must = asked(tools=both, tool_choice="required").tools
    assert must is not None and must.required and len(must.callable) == 2 and must.parallel
    one = asked(tools=both, tool_choice=NAMED).tools
    assert one is not None and one.required and [f.name for f in one.callable] == ["g"] and len(one.functions) == 2


def test_what_the_template_is_shown() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    made = asked(tools=[tool(description="does", parameters=schema, strict=True), tool("g")]).tools
    assert made is not None
    first, second = made.shown
    assert first == {"type": "function", "function": {"name": "f", "description": "does", "parameters": schema}}
    assert second["function"]["parameters"] == {"type": "object", "properties": {}}
    assert json.loads(made.functions[0].schema) == schema and list(made.functions[0].properties) == ["b", "a"]
    assert json.loads(made.functions[1].schema)["additionalProperties"] is False


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {}}]}, "unsupported_parameter", "tools"),
        ({"tools": [{"type": "function"}]}, "invalid_value", "tools"),
        ({"tools": [tool("a b")]}, "invalid_value", "tools"),
        ({"tools": [tool(), tool()]}, "invalid_value", "tools"),
        ({"tools": [tool(parameters=[1])]}, "invalid_value", "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "invalid_value", "tools"),
        ({"tools": [tool()], "tool_choice": "always"}, "invalid_value", "tool_choice"),
        ({"tools": [tool()], "tool_choice": NAMED}, "invalid_value", "tool_choice"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "unsupported_parameter",
            "tool_choice",
        ),
        ({"reasoning_format": "nope"}, "unsupported_parameter", "reasoning_format"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
        ({"chat_template_kwargs": {"__x": []}}, "invalid_value", "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ShardlineError) as refused:
        asked(**fields)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_variables_of_the_template() -> None:
    made = asked(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low", reasoning_format="none")
    assert made.variables == {"enable_thinking": False, "reasoning_effort": "low"}
    assert made.inline_reasoning and not asked().inline_reasoning
