"""`POST /v1/responses`: its body into that of a chat request, or an error that names the field.

Owns which fields of OpenAI's Responses API there are, and that nothing is stored: what refers to an earlier answer is
refused. Ranges and templates are those of chat completions. Pure. Shown by tests/gateway/test_responses.py; the list of
fields is docs/api.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from shardline.gateway.json_body import decode_body, refuse, unsupported
from shardline.gateway.openai_answers import Json
from shardline.gateway.request_fields import (
    NO_EFFECT,
    NOT_SENT,
    TEMPERATURE,
    TOKENS,
    TOP_P,
    check_nothing_asked,
    matching,
    neutral,
    one_of,
    only,
    shown,
)
from shardline.gateway.structured import FORMATS
from shardline.gateway.tools_request import FUNCTIONS, NAME, ONLY_FUNCTION, TOOL_CHOICES

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
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
VERBOSITY = "medium"
_TEXTS = ("input_text", "output_text", "text")
_THOUGHTS = ("reasoning_text",)
_NONE = neutral(None, "")


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """Only text is supported; parts of other types are refused by that type."""

    type: Annotated[str, one_of((*_TEXTS, *_THOUGHTS))]
    text: str | None = None
    annotations: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    logprobs: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    parsed: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    """What a client read out of `text`."""
    refusal: Annotated[msgspec.Raw, only()] = NOT_SENT
    image_url: Annotated[msgspec.Raw, only()] = NOT_SENT
    detail: Annotated[msgspec.Raw, only()] = NOT_SENT
    file_id: Annotated[msgspec.Raw, only()] = NOT_SENT
    file_data: Annotated[msgspec.Raw, only()] = NOT_SENT
    file_url: Annotated[msgspec.Raw, only()] = NOT_SENT
    filename: Annotated[msgspec.Raw, only()] = NOT_SENT
    input_audio: Annotated[msgspec.Raw, only()] = NOT_SENT


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message, a call, what came of one, or the reasoning of an earlier answer; items of other types are refused by
    that type."""

    type: Annotated[str, one_of(ITEM_TYPES)] = "message"
    role: Annotated[str | None, one_of(ROLES, optional=True)] = None
    content: str | list[ContentPart] | None = None
    id: Annotated[str | None, NO_EFFECT] = None
    status: Annotated[str | None, NO_EFFECT] = None
    phase: Annotated[str | None, NO_EFFECT] = None
    summary: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    encrypted_content: Annotated[str | None, _NONE] = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    parsed_arguments: Annotated[msgspec.Raw, NO_EFFECT] = NOT_SENT
    """What a client read out of `arguments`."""
    output: str | list[ContentPart] | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, ONLY_FUNCTION]
    name: Annotated[str | None, matching(NAME)] = None
    description: str | None = None
    parameters: Annotated[msgspec.Raw, shown(type=["object", "null"])] = NOT_SENT
    strict: bool | None = None


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, ONLY_FUNCTION]
    name: str | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, one_of(FORMATS)]
    name: Annotated[str | None, NO_EFFECT] = None
    description: Annotated[str | None, NO_EFFECT] = None
    schema: Annotated[msgspec.Raw, shown(type=["object", "null"])] = NOT_SENT
    strict: Annotated[bool | None, NO_EFFECT] = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Annotated[str | None, neutral(VERBOSITY, None)] = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Annotated[str | None, _NONE] = None
    generate_summary: Annotated[str | None, _NONE] = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Annotated[bool | None, neutral(False, None)] = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`. Null is as if absent. Fields of type Raw are checked by name, not decoded."""

    model: str
    input: str | Annotated[list[InputItem], shown(minItems=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, TOKENS] = None
    temperature: Annotated[float | None, TEMPERATURE] = None
    top_p: Annotated[float | None, TOP_P] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: Annotated[bool | None, neutral(False, None)] = None
    tools: Annotated[list[FunctionTool] | None, shown(maxItems=FUNCTIONS)] = None
    tool_choice: Annotated[str, one_of(TOOL_CHOICES)] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Sent by clients on their own; they change no answer.
    metadata: Annotated[dict[str, str] | None, NO_EFFECT] = None
    user: Annotated[str | None, NO_EFFECT] = None
    safety_identifier: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[str | None, NO_EFFECT] = None
    # Not supported: here to take null, and the values that ask for nothing.
    service_tier: Annotated[msgspec.Raw, only('"auto"', '"default"')] = NOT_SENT
    max_tool_calls: Annotated[msgspec.Raw, only()] = NOT_SENT
    include: Annotated[msgspec.Raw, only("[]")] = NOT_SENT
    truncation: Annotated[msgspec.Raw, only('"disabled"')] = NOT_SENT
    top_logprobs: Annotated[msgspec.Raw, only("0")] = NOT_SENT
    background: Annotated[msgspec.Raw, only("false")] = NOT_SENT
    previous_response_id: Annotated[msgspec.Raw, only()] = NOT_SENT
    conversation: Annotated[msgspec.Raw, only()] = NOT_SENT
    prompt: Annotated[msgspec.Raw, only()] = NOT_SENT
    prompt_cache_options: Annotated[msgspec.Raw, only()] = NOT_SENT
    prompt_cache_retention: Annotated[msgspec.Raw, only()] = NOT_SENT
    context_management: Annotated[msgspec.Raw, only("[]")] = NOT_SENT
    moderation: Annotated[msgspec.Raw, only()] = NOT_SENT


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
        tools=[{**msgspec.structs.asdict(tool), "parameters": _raw(tool.parameters)} for tool in sent.tools or []],
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
    check_nothing_asked(sent, _WHY)
    if sent.stream_options is not None and sent.stream_options.include_obfuscation:
        unsupported("stream_options.include_obfuscation", "obfuscation of events is not supported")
    if sent.text is not None and sent.text.verbosity not in (None, VERBOSITY):
        unsupported("text.verbosity", f"'text.verbosity' may be {VERBOSITY} only")
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
    return _text(item.content or "", f"{at}.content", _THOUGHTS)


def _text(content: str | list[ContentPart], at: str, types: tuple[str, ...]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in types:
            unsupported(f"{at}[{index}].type", f"'{at}[{index}]': content of type '{part.type[:40]}' is not supported")
        check_nothing_asked(part, at=f"{at}[{index}]")
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
    asked = _format(text)
    if asked["type"] != "json_schema":
        # A schema goes along, to be refused there.
        return None if asked == {"type": "text"} else {n: asked[n] for n in ("type", "schema") if n in asked}
    return {"type": "json_schema", "json_schema": {name: value for name, value in asked.items() if name != "type"}}
