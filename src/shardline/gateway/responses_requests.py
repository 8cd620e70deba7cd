"""`POST /v1/responses`: its body into that of a chat request, or an error that names the field.

Owns which fields of OpenAI's Responses API there are, and that nothing is stored: what refers to an earlier answer is
refused. Ranges and templates are those of chat completions. Pure. Shown by tests/gateway/test_responses.py; the list of
fields is docs/api.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shardline.gateway.json_body import decode_body, refuse, unsupported
from shardline.gateway.openai_answers import Json

T = TypeVar("T")

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "min_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of the chat request that have another name here."""
ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """Only text is supported; parts of other types are refused by that type."""

    type: str
    text: str | None = None
    annotations: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()
    refusal: msgspec.Raw = msgspec.Raw()
    image_url: msgspec.Raw = msgspec.Raw()
    detail: msgspec.Raw = msgspec.Raw()
    file_id: msgspec.Raw = msgspec.Raw()
    file_data: msgspec.Raw = msgspec.Raw()
    file_url: msgspec.Raw = msgspec.Raw()
    filename: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message, a call, what came of one, or the reasoning of an earlier answer; items of other types are refused by
    that type."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    summary: msgspec.Raw = msgspec.Raw()
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw()
    strict: bool | None = None


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.Raw()
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Null is as if absent. Fields of type Raw are checked by name, not decoded."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Sent by clients on their own; they change no answer.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not supported: here to take null, and the values that ask for nothing (`_NOTHING_ASKED`).
    service_tier: msgspec.Raw = msgspec.Raw()
    max_tool_calls: msgspec.Raw = msgspec.Raw()
    include: msgspec.Raw = msgspec.Raw()
    truncation: msgspec.Raw = msgspec.Raw()
    top_logprobs: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_cache_options: msgspec.Raw = msgspec.Raw()
    prompt_cache_retention: msgspec.Raw = msgspec.Raw()
    context_management: msgspec.Raw = msgspec.Raw()
    moderation: msgspec.Raw = msgspec.Raw()


_NOTHING_ASKED: dict[str, tuple[str, ...]] = {
    "service_tier": ('"auto"', '"default"'),
    "max_tool_calls": (),
    "include": ("[]",),
    "truncation": ('"disabled"',),
    "top_logprobs": ("0",),
    "background": ("false",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "context_management": ("[]",),
    "moderation": (),
}
_WHY = {
    "previous_response_id": "answers are not stored here: send the earlier items in 'input'",
    "conversation": "nothing is stored here: send the earlier items in 'input'",
    "background": "answers are not stored here: read this one while it is made",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesAsked:
    """What an answer repeats of its request."""

    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    text_format: Any
    effort: str | None
    user: str | None
    tools: Any
    tool_choice: Any
    parallel_tool_calls: bool


def responses_request(body: bytes) -> tuple[Json, ResponsesAsked]:
    """The chat request of this body, and what its answer repeats; raises what docs/api.md says."""
    sent = decode_body(body, ResponsesBody)
    _check_supported(sent)
    messages = _messages(sent)
    asked = ResponsesAsked(
        model=sent.model,
        instructions=sent.instructions,
        max_output_tokens=sent.max_output_tokens,
        temperature=1.0 if sent.temperature is None else sent.temperature,
        top_p=1.0 if sent.top_p is None else sent.top_p,
        metadata=sent.metadata or {},
        text_format=_format(sent.text),
        effort=None if sent.reasoning is None else sent.reasoning.effort,
        user=sent.user,
        tools=sent.tools or [],
        tool_choice=sent.tool_choice or "auto",
        parallel_tool_calls=sent.parallel_tool_calls is not False,
    )
    chat = {
        "model": sent.model,
        "messages": messages,
        "max_completion_tokens": sent.max_output_tokens,
        "temperature": sent.temperature,
        "top_p": sent.top_p,
        "stream": sent.stream,
        "response_format": _response_format(sent.text),
        "reasoning_effort": asked.effort,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(sent.tools or [])] or None,
        "tool_choice": _choice(sent.tool_choice),
        "parallel_tool_calls": sent.parallel_tool_calls,
    }
    return chat, asked


def _check_supported(sent: ResponsesBody) -> None:
    if sent.store:
        unsupported("store", "'store': answers are not stored here; say \"store\": false, or leave it out")
    for name, nothing in _NOTHING_ASKED.items():
        value = b"".join(bytes(getattr(sent, name)).split()).decode()
        if value not in ("", "null", *nothing):
            why = _WHY.get(name, f"only {' or '.join(nothing)} is supported" if nothing else "it is not supported")
            unsupported(name, f"'{name}': {why}")
    if sent.stream_options is not None and sent.stream_options.include_obfuscation:
        unsupported("stream_options.include_obfuscation", "obfuscation of events is not supported")
    if sent.text is not None and sent.text.verbosity not in (None, "medium"):
        unsupported("text.verbosity", "'text.verbosity' may be medium only")
    reasoning = sent.reasoning
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        unsupported("reasoning.summary", "'reasoning.summary': reasoning is given as it is, not summed up")


def _messages(sent: ResponsesBody) -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": sent.instructions}] if sent.instructions else []
    if isinstance(sent.input, str):
        return [*messages, {"role": "user", "content": sent.input}]
    if not sent.input:
        refuse("input", "'input' must not be an empty list")
    reasoning = ""
    for index, item in enumerate(sent.input):
        at = f"input[{index}]"
        if item.type == "reasoning":
            reasoning += _reasoning(item, at)
            continue
        message = _message(item, at)
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = ""  # what stands in front of nothing of the assistant's was cut off with its answer
        last = messages[-1] if messages else {}
        if item.type == "function_call" and last.get("role") == "assistant":
            # One turn of the model: its words, then all its calls.
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def _message(item: InputItem, at: str) -> Json:
    if item.type == "function_call":
        function = {"name": _given(item.name, f"{at}.name"), "arguments": _given(item.arguments, f"{at}.arguments")}
        call = {"id": _given(item.call_id, f"{at}.call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output":
        if item.output is None:
            refuse(f"{at}.output", f"the field '{at}.output' is required")
        output = _text(item.output, f"{at}.output", _TEXTS)
        return {"role": "tool", "tool_call_id": _given(item.call_id, f"{at}.call_id"), "content": output}
    if item.type != "message":
        unsupported(f"{at}.type", f"'{at}': an item of type '{item.type[:40]}' is not supported")
    if item.role not in ROLES:
        sent = "none" if item.role is None else f"'{item.role[:40]}'"
        refuse(f"{at}.role", f"'{at}.role' must be one of {', '.join(ROLES)}, not {sent}")
    if item.content is None or item.content == []:
        refuse(f"{at}.content", f"'{at}.content' is required")
    return {"role": item.role, "content": _text(item.content, f"{at}.content", _TEXTS)}


def _given(value: T | None, at: str) -> T:
    if value is None:
        refuse(at, f"the field '{at}' is required")
    return value


def _tool(tool: FunctionTool, at: str) -> Json:
    if tool.type != "function":
        unsupported("tools", f"'{at}': a tool of type '{tool.type[:40]}' is not supported")
    function: Json = {"name": _given(tool.name, f"{at}.name"), "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {**function, "parameters": _raw(tool.parameters)}}


def _choice(sent: str | NamedTool | None) -> Any:
    if not isinstance(sent, NamedTool):
        return sent
    if sent.type != "function":
        unsupported("tool_choice", f"'tool_choice' of type '{sent.type[:40]}' is not supported")
    return {"type": "function", "function": {"name": _given(sent.name, "tool_choice.name")}}


def _raw(sent: msgspec.Raw) -> msgspec.Raw | None:
    """None for what was not sent."""
    return sent if bytes(sent) else None


def _reasoning(item: InputItem, at: str) -> str:
    """What an earlier answer was thinking; encrypted reasoning of other servers cannot be read."""
    if item.encrypted_content:
        unsupported(f"{at}.encrypted_content", f"'{at}.encrypted_content' cannot be read here")
    return _text(item.content or "", f"{at}.content", ("reasoning_text",))


def _text(content: str | list[ContentPart], at: str, types: tuple[str, ...]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in types:
            unsupported(f"{at}[{index}].type", f"'{at}[{index}]': content of type '{part.type[:40]}' is not supported")
        if part.text is None:
            refuse(f"{at}[{index}].text", f"the field '{at}[{index}].text' is required")
        texts.append(part.text)
    return "".join(texts)


def _format(text: TextOptions | None) -> Any:
    """As it was asked for, text where nothing was."""
    if text is None or text.format is None:
        return {"type": "text"}
    fields = msgspec.structs.asdict(text.format)
    fields["schema"] = _raw(fields["schema"])
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(text: TextOptions | None) -> Any:
    shown = _format(text)
    if shown["type"] == "text":
        return None
    if shown["type"] != "json_schema":
        return shown
    return {"type": "json_schema", "json_schema": {name: value for name, value in shown.items() if name != "type"}}
