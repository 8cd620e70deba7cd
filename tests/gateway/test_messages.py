"""Messages as clients send them, in the one form that templates get."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.json_body import VALUES, decode_body
from shardline.gateway.messages import FunctionCall, Message, ToolCall, conversation


class Body(msgspec.Struct):
    messages: list[Message]


def plain(*messages: Any) -> tuple[list[dict[str, Any]], bool]:
    return conversation(decode_body(json.dumps({"messages": messages}).encode(), Body).messages)


def refused(*messages: Any) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        plain(*messages)
    assert caught.value.fault.status == 400
    return caught.value


USER = {"role": "user", "content": "u"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_parts_are_joined_without_a_separator(role: str) -> None:
    (message, *_), _ = plain({"role": role, "content": PARTS}, USER)
    assert message == {"role": role, "content": "AB"}


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        ([], "invalid_value", "messages[0].content"),
        (None, "invalid_value", "messages[0].content"),
        (5, "invalid_value", "messages[0].content"),
        ({}, "invalid_value", "messages[0].content"),
        (["A"], "invalid_value", "messages[0].content"),
        ([{"type": "text"}], "invalid_value", "messages[0].content[0].text"),
        ([{"text": "A"}], "invalid_value", "messages[0].content[0].type"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "unsupported_parameter", "messages[0].content[0].type"),
        ([{"type": "input_audio", "input_audio": {}}], "unsupported_parameter", "messages[0].content[0].type"),
        ([*PARTS, {"type": "nope"}], "unsupported_parameter", "messages[0].content[2].type"),
        ([{"type": "text", "text": "A", "cache_control": {}}], "unsupported_parameter", None),
    ],
)
def test_other_content_is_refused_by_place(content: Any, code: str, param: str | None) -> None:
    error = refused({"role": "user", "content": content})
    assert error.code == code
    assert param is None or error.param == param


def test_the_type_of_an_unknown_part_is_named() -> None:
    assert "image_url" in refused({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}).message


@pytest.mark.parametrize("sent", [{"content": None}, {}, {"content": ""}])
def test_an_assistant_that_calls_tools_needs_no_content(sent: dict[str, Any]) -> None:
    messages, continued = plain(
        USER, {"role": "assistant", "tool_calls": [CALL], **sent}, {"role": "tool", "tool_call_id": "a", "content": "1"}
    )
    assert not continued
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}, "id": "a"}],
    }
    assert messages[2] == {"role": "tool", "content": "1", "tool_call_id": "a"}


def test_an_assistant_without_content_and_calls() -> None:
    assert refused(USER, {"role": "assistant"}, USER).param == "messages[1].content"
    assert plain(USER, {"role": "assistant", "content": ""}, USER)[0][1]["content"] == ""


def test_a_tool_without_content() -> None:
    assert refused({"role": "tool", "content": None}).param == "messages[0].content"


def test_what_other_servers_add_to_their_answers_is_taken_when_empty() -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None}
    assert plain(USER, {**answer, "function_call": None, "tool_calls": None, "name": None}, USER)[0][1] == {
        "role": "assistant",
        "content": "b",
    }
    assert refused(USER, {**answer, "refusal": "no"}, USER).param == "messages[1].refusal"
    assert refused(USER, {**answer, "audio": {"id": "x"}}, USER).param == "messages[1].audio"


def test_what_a_client_read_out_of_an_answer_is_not_looked_at() -> None:
    said = {"role": "assistant", "content": "{}", "parsed": {"a": [1]}}
    call = {"function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}}
    (_, first, second, _), _ = plain(USER, said, {"role": "assistant", "tool_calls": [call]}, USER)
    assert first == {"role": "assistant", "content": "{}"}
    assert second["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_unknown_fields_and_roles() -> None:
    assert refused({**USER, "foo": 1}).param == "messages[0].foo"
    assert refused({**USER, "role": "function"}).param == "messages[0].role"
    assert refused({"content": "x"}).param == "messages[0].role"
    assert refused({**USER, "tool_calls": [CALL]}).param == "messages[0].tool_calls"


def test_arguments_become_an_object_where_they_are_one() -> None:
    def arguments(sent: Any) -> Any:
        call = {"function": {"name": "f", "arguments": sent}}
        return plain(USER, {"role": "assistant", "tool_calls": [call]}, USER)[0][1]["tool_calls"][0]["function"][
            "arguments"
        ]

    assert arguments('{"x": 1}') == {"x": 1}
    assert arguments({"x": 1}) == {"x": 1}
    assert arguments("[1]") == "[1]"
    assert arguments('{"x": ') == '{"x": '


def test_a_call_of_another_kind() -> None:
    error = refused(USER, {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {}}]}, USER)
    assert error.code == "unsupported_parameter"


def test_a_trailing_assistant_message_is_continued() -> None:
    assert plain(USER, {"role": "assistant", "content": "The answer is "})[1]
    assert not plain(USER)[1]
    assert refused(USER, {"role": "assistant", "tool_calls": [CALL]}).param == "messages[1].tool_calls"


def test_reasoning_goes_by_both_names() -> None:
    (_, message, _), _ = plain(USER, {"role": "assistant", "content": "b", "reasoning_content": "why"}, USER)
    assert message["reasoning_content"] == message["thinking"] == "why"


def test_arguments_hold_no_more_values_than_a_body_may() -> None:
    """They are text of the body, and become objects of their own: over all calls together they have its limit."""
    half = '{"a":[' + "[]," * (VALUES // 2) + "0]}"
    call = ToolCall(id="a", type="function", function=FunctionCall(name="f", arguments=half))

    def asked(calls: int) -> list[Message]:
        return [Message(role="assistant", tool_calls=[call] * calls), Message(role="tool", content="1")]

    messages, _ = conversation(asked(1))
    assert len(messages[0]["tool_calls"][0]["function"]["arguments"]["a"]) == VALUES // 2 + 1
    with pytest.raises(ShardlineError) as caught:
        conversation(asked(2))
    assert caught.value.code == "body_too_large"
