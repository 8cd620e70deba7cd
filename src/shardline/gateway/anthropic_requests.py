"""`POST /v1/messages`: its body into that of a chat request, or an error that names the field.

Owns which fields of Anthropic's Messages API there are. Ranges and templates are those of chat completions; what is
told to a cache changes no answer and is taken as it comes. Pure. Shown by tests/gateway/test_anthropic.py; the list of
fields is docs/api.md.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from shardline.gateway.json_body import decode_body, refuse, unsupported
from shardline.gateway.openai_answers import Json
from shardline.gateway.openai_requests import STOP_CHARACTERS, STOPS
from shardline.gateway.request_fields import (
    NO_EFFECT,
    NOT_SENT,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    TOP_P,
    check_nothing_asked,
    matching,
    one_of,
    only,
    shown,
)
from shardline.gateway.tools_request import FUNCTIONS, NAME

T = TypeVar("T")

NAMES = {"stop": "stop_sequences", "min_tokens": "max_tokens"}
"""Fields of the chat request that have another name here."""
ROLES = ("user", "assistant")


BLOCK_TYPES = ("text", "thinking", "tool_use", "tool_result")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ResultBlock(msgspec.Struct, forbid_unknown_fields=True):
    """What a function has answered: text."""

    type: Annotated[str, one_of(("text",))]
    text: str | None = None
    cache_control: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    citations: Annotated[msgspec.Raw, only("[]")] = NOT_SENT
    source: Annotated[msgspec.Raw, only()] = NOT_SENT


class Block(msgspec.Struct, forbid_unknown_fields=True):
    """Text, the thinking of an earlier answer, a call, or what came of one; blocks of other types are refused by that
    type."""

    type: Annotated[str, one_of(BLOCK_TYPES)]
    text: str | None = None
    thinking: str | None = None
    signature: Annotated[str | None, NO_EFFECT] = None
    cache_control: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    citations: Annotated[msgspec.Raw, only("[]")] = NOT_SENT
    source: Annotated[msgspec.Raw, only()] = NOT_SENT
    data: Annotated[msgspec.Raw, only()] = NOT_SENT
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: Annotated[str, one_of(ROLES)]
    content: str | Annotated[list[Block], shown(minItems=1)]


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, matching(NAME)]
    type: Annotated[str | None, one_of(("custom",), optional=True)] = None
    description: str | None = None
    input_schema: Annotated[msgspec.Raw, shown(type=["object", "null"])] = NOT_SENT
    strict: bool | None = None
    cache_control: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, one_of((*_CHOICES, "tool"))]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: Annotated[str | None, NO_EFFECT] = None


_STOP = shown(minLength=1, maxLength=STOP_CHARACTERS)


class MessagesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/messages`. Null is as if absent. Fields of type Raw are checked by name, not decoded."""

    model: str
    messages: Annotated[list[Turn], shown(minItems=1)]
    max_tokens: Annotated[int, TOKENS]
    system: str | list[Block] | None = None
    stop_sequences: Annotated[list[Annotated[str, _STOP]] | None, shown(maxItems=STOPS)] = None
    temperature: Annotated[float | None, TEMPERATURE] = None
    top_p: Annotated[float | None, TOP_P] = None
    top_k: Annotated[int | None, TOP_K] = None
    stream: bool | None = None
    tools: Annotated[list[Tool] | None, shown(maxItems=FUNCTIONS)] = None
    tool_choice: ToolChoice | None = None
    # They change no answer.
    metadata: Annotated[Metadata | None, NO_EFFECT] = None
    cache_control: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    # Not supported: here to take null, and the values that ask for nothing.
    service_tier: Annotated[msgspec.Raw, only('"auto"', '"standard_only"')] = NOT_SENT
    thinking: Annotated[msgspec.Raw, only('{"type":"disabled"}')] = NOT_SENT
    output_config: Annotated[msgspec.Raw, only()] = NOT_SENT
    output_format: Annotated[msgspec.Raw, only()] = NOT_SENT
    container: Annotated[msgspec.Raw, only()] = NOT_SENT
    context_management: Annotated[msgspec.Raw, only()] = NOT_SENT
    inference_geo: Annotated[msgspec.Raw, only()] = NOT_SENT
    mcp_servers: Annotated[msgspec.Raw, only("[]")] = NOT_SENT


_WHY = {"thinking": "a model thinks as its template has it; there is no budget"}


def messages_request(body: bytes) -> tuple[Json, str]:
    """The chat request of this body, and the model's name as it was sent; raises what docs/api.md says."""
    sent = decode_body(body, MessagesBody)
    check_nothing_asked(sent, _WHY)
    if not sent.messages:
        refuse("messages", "'messages' must hold at least one message")
    system = _system(sent.system)
    turns = [made for index, turn in enumerate(sent.messages) for made in _turns(turn, f"messages[{index}]")]
    choice = sent.tool_choice
    chat = {
        "model": sent.model,
        "messages": [*system, *turns],
        "max_tokens": sent.max_tokens,
        "stop": sent.stop_sequences,
        "temperature": sent.temperature,
        "top_p": sent.top_p,
        "top_k": sent.top_k,
        "stream": sent.stream,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(sent.tools or [])] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
    }
    return chat, sent.model


def _system(sent: str | list[Block] | None) -> list[Json]:
    if not sent:
        return []
    if isinstance(sent, str):
        return [{"role": "system", "content": sent}]
    return [{"role": "system", "content": "".join(_text(b, f"system[{i}]") for i, b in enumerate(sent))}]


def _turns(turn: Turn, at: str) -> list[Json]:
    """One message; of a user who sends what functions answered, one for each of those."""
    if turn.role not in ROLES:
        why = "; that text belongs into 'system'" if turn.role == "system" else ""
        refuse(f"{at}.role", f"'{at}.role' must be user or assistant, not '{turn.role[:40]}'{why}")
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if not turn.content:
        refuse(f"{at}.content", f"'{at}.content' must not be an empty list")
    blocks = [(block, f"{at}.content[{index}]") for index, block in enumerate(turn.content)]
    return [_answered(blocks)] if turn.role == "assistant" else _sent(blocks)


def _answered(blocks: list[tuple[Block, str]]) -> Json:
    texts, thoughts, calls = [], [], []
    for block, at in blocks:
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            function = {"name": _given(block.name, f"{at}.name"), "arguments": _given(block.input, f"{at}.input")}
            calls.append({"id": _given(block.id, f"{at}.id"), "type": "function", "function": function})
        else:
            texts.append(_text(block, at))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _sent(blocks: list[tuple[Block, str]]) -> list[Json]:
    messages: list[Json] = []
    for block, at in blocks:
        if block.type == "tool_result":
            call = _given(block.tool_use_id, f"{at}.tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call, "content": _result(block, at)})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += _text(block, at)
        else:
            messages.append({"role": "user", "content": _text(block, at)})
    return messages


def _result(block: Block, at: str) -> str:
    content = block.content or ""
    if not isinstance(content, str):
        content = "".join(_text(part, f"{at}.content[{index}]") for index, part in enumerate(content))
    return f"Error: {content}" if block.is_error else content  # templates know no other way to say so


def _tool(tool: Tool, at: str) -> Json:
    if tool.type not in (None, "custom"):
        unsupported("tools", f"'{at}': a tool of type '{tool.type[:40]}' is not supported")
    schema = tool.input_schema if bytes(tool.input_schema) else None
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict, "parameters": schema}
    return {"type": "function", "function": function}


def _choice(sent: ToolChoice) -> Any:
    if sent.type == "tool":
        return {"type": "function", "function": {"name": _given(sent.name, "tool_choice.name")}}
    if sent.type not in _CHOICES:
        refuse("tool_choice", f"'tool_choice.type' must be auto, any, tool or none, not '{sent.type[:40]}'")
    return _CHOICES[sent.type]


def _given(value: T | None, at: str) -> T:
    if value is None:
        refuse(at, f"the field '{at}' is required")
    return value


def _text(block: Block | ResultBlock, at: str) -> str:
    if block.type != "text":
        unsupported(f"{at}.type", f"'{at}': content of type '{block.type[:40]}' is not supported")
    if block.text is None:
        refuse(f"{at}.text", f"the field '{at}.text' is required")
    check_nothing_asked(block, at=at)
    return block.text
