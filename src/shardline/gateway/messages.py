"""Chat messages: what a client sends into what a chat template reads.

Owns roles, content parts, tool calls of earlier turns, and the rule for a trailing assistant message. Templates
come from strangers and read what they like, so every message leaves here in one form: content is a string, null is
nowhere. Pure. Shown by tests/gateway/test_messages.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from shardline.gateway.json_body import check_count, refuse, unsupported
from shardline.gateway.request_fields import NO_EFFECT, NOT_SENT, check_nothing_asked, one_of, only, shown

ROLES = ("system", "developer", "user", "assistant", "tool")


PART_TYPES = ("text",)


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One content part. Only text is supported; the others are known by name, so that they can be refused by it."""

    type: Annotated[str, one_of(PART_TYPES)]
    text: str | None = None
    refusal: Annotated[msgspec.Raw, only()] = NOT_SENT
    image_url: Annotated[msgspec.Raw, only()] = NOT_SENT
    input_audio: Annotated[msgspec.Raw, only()] = NOT_SENT
    video_url: Annotated[msgspec.Raw, only()] = NOT_SENT
    file: Annotated[msgspec.Raw, only()] = NOT_SENT


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = "{}"
    parsed_arguments: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    """What a client read out of `arguments`, and sends back beside them."""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str | None = None
    type: Annotated[str | None, one_of(("function",), optional=True)] = None
    index: Annotated[int | None, NO_EFFECT] = None
    function: FunctionCall | None = None
    custom: Annotated[msgspec.Raw, only()] = NOT_SENT


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: Annotated[str, one_of(ROLES)]
    content: str | Annotated[list[Part], shown(minItems=1)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # In answers of other servers, which clients send back as they are: empty, or not supported.
    refusal: Annotated[msgspec.Raw, only('""', "[]")] = NOT_SENT
    annotations: Annotated[msgspec.Raw, only("[]")] = NOT_SENT
    audio: Annotated[msgspec.Raw, only("[]")] = NOT_SENT
    function_call: Annotated[msgspec.Raw, only("[]")] = NOT_SENT
    # What a client read out of `content`, and sends back beside it.
    parsed: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT


def conversation(messages: list[Message]) -> tuple[list[dict[str, Any]], bool]:
    """The messages for the template, and whether the last one is the assistant's, to be continued."""
    if not messages:
        refuse("messages", "'messages' must hold at least one message")
    # JSON within strings of the JSON: what was one value of the body becomes as many as it holds.
    check_count(b",".join(_texts_of_arguments(messages)))
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    last = plain[-1]
    continued = last["role"] == "assistant"
    if continued and "tool_calls" in last:
        at = f"messages[{len(plain) - 1}].tool_calls"
        refuse(at, f"'{at}': the last message calls tools; send their results behind it")
    return plain, continued


def _plain(message: Message, at: str) -> dict[str, Any]:
    if message.role not in ROLES:
        refuse(f"{at}.role", f"'{at}.role' must be one of {', '.join(ROLES)}, not '{message.role[:40]}'")
    check_nothing_asked(message, at=at)
    calls = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or [])]
    if calls and message.role != "assistant":
        refuse(f"{at}.tool_calls", f"'{at}': only an assistant message may call tools")
    content = _content(message.content, f"{at}.content", optional=bool(calls))
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if calls:
        plain["tool_calls"] = calls
    if message.name is not None:
        plain["name"] = message.name
    if message.role == "tool" and message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and message.reasoning_content:
        # Two names are in use among templates.
        plain["reasoning_content"] = plain["thinking"] = message.reasoning_content
    return plain


def _content(content: str | list[Part] | None, at: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if not optional:
            refuse(at, f"'{at}' is required")
        return ""
    if not content:
        refuse(at, f"'{at}' must not be an empty list")
    return "".join(_part(part, f"{at}[{index}]") for index, part in enumerate(content))


def _part(part: Part, at: str) -> str:
    if part.type not in PART_TYPES:
        unsupported(f"{at}.type", f"'{at}': content of type '{part.type[:40]}' is not supported")
    check_nothing_asked(part, at=at)
    if part.text is None:
        refuse(f"{at}.text", f"the field '{at}.text' is required")
    return part.text


def _call(call: ToolCall, at: str) -> dict[str, Any]:
    if call.type not in (None, "function"):
        unsupported(at, f"'{at}': a tool call of type '{call.type[:40]}' is not supported")
    check_nothing_asked(call, at=at)
    if call.function is None:
        refuse(f"{at}.function", f"the field '{at}.function' is required")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    plain: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        plain["id"] = call.id
    return plain


def _texts_of_arguments(messages: list[Message]) -> Iterator[bytes]:
    for message in messages:
        for call in message.tool_calls or []:
            if call.function is not None and isinstance(call.function.arguments, str):
                yield call.function.arguments.encode()


def _arguments(sent: str | dict[str, Any]) -> Any:
    """As an object, which is what templates expect; text that is no object stays text."""
    if isinstance(sent, str):
        try:
            return msgspec.json.decode(sent, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return sent
    return sent
