"""`POST /v1/messages`: its body into that of a chat request, or an error that names the field.

Owns which fields of Anthropic's Messages API there are. Ranges and templates are those of chat completions; what is
told to a cache changes no answer and is taken as it comes. Pure. Shown by tests/gateway/test_anthropic.py; the list of
fields is docs/api.md.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from shardline.gateway.json_body import decode_body, refuse, unsupported
from shardline.gateway.openai_answers import Json

T = TypeVar("T")

NAMES = {"stop": "stop_sequences", "min_tokens": "max_tokens"}
"""Fields of the chat request that have another name here."""
ROLES = ("user", "assistant")


class ResultBlock(msgspec.Struct, forbid_unknown_fields=True):
    """What a function has answered: text."""

    type: str
    text: str | None = None
    cache_control: msgspec.Raw = msgspec.Raw()
    citations: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()


class Block(msgspec.Struct, forbid_unknown_fields=True):
    """Text, the thinking of an earlier answer, a call, or what came of one; blocks of other types are refused by that
    type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    cache_control: msgspec.Raw = msgspec.Raw()
    citations: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.Raw()
    strict: bool | None = None
    cache_control: msgspec.Raw = msgspec.Raw()


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class MessagesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Null is as if absent. Fields of type Raw are checked by name, not decoded."""

    model: str
    messages: list[Turn]
    max_tokens: int
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    # They change no answer.
    metadata: Metadata | None = None
    cache_control: msgspec.Raw = msgspec.Raw()
    # Not supported: here to take null, and the values that ask for nothing (`_NOTHING_ASKED`).
    service_tier: msgspec.Raw = msgspec.Raw()
    thinking: msgspec.Raw = msgspec.Raw()
    output_config: msgspec.Raw = msgspec.Raw()
    output_format: msgspec.Raw = msgspec.Raw()
    container: msgspec.Raw = msgspec.Raw()
    context_management: msgspec.Raw = msgspec.Raw()
    inference_geo: msgspec.Raw = msgspec.Raw()
    mcp_servers: msgspec.Raw = msgspec.Raw()


_NOTHING_ASKED: dict[str, tuple[str, ...]] = {
    "service_tier": ('"auto"', '"standard_only"'),
    "thinking": ('{"type":"disabled"}',),
    "output_config": (),
    "output_format": (),
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ("[]",),
}
_WHY = {"thinking": "a model thinks as its template has it; there is no budget"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_request(body: bytes) -> tuple[Json, str]:
    """The chat request of this body, and the model's name as it was sent; raises what docs/api.md says."""
    sent = decode_body(body, MessagesBody)
    for name, nothing in _NOTHING_ASKED.items():
        value = b"".join(bytes(getattr(sent, name)).split()).decode()
        if value not in ("", "null", *nothing):
            unsupported(name, f"'{name}' is not supported" + (f": {_WHY[name]}" if name in _WHY else ""))
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
    if bytes(block.citations) not in (b"", b"null", b"[]"):
        unsupported(f"{at}.citations", f"'{at}.citations' is not supported")
    return block.text
