"""Answers of `POST /v1/messages`: content blocks, their events, the message around them, and errors in its shape.

Owns the shapes and the order of events of Anthropic's Messages API, and which of its error types a status is. Thinking
has no signature here: what is sent back is not checked. Pure. Shown by tests/gateway/test_anthropic.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.gateway.dialects import Ending, Event
from shardline.gateway.openai_answers import Json, Usage
from shardline.gateway.tools_parts import Call, Part, Reasoning
from shardline.transport.bodies import send_json
from shardline.transport.boundary import error_headers

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageWords:
    """Implements `Words` for one message."""

    def __init__(self, model: str) -> None:
        self._id = "msg_" + secrets.token_hex(12)
        self._model = model
        self._blocks: list[Json] = []
        self._texts: list[str] = []
        """Of the block that is open."""
        self._open: str | None = None
        """Its type, which is the name of its field too."""
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}
        self._usage: Json = {}
        self._telemetry: Any = None

    def opening(self, usage: Usage) -> list[Event]:
        self._usage = _usage(usage)
        return [_event("message_start", message=self._message())]

    def add(self, part: Part) -> list[Event]:
        if isinstance(part, Call):
            return [*self._close(), *self._call(part)]
        kind = "thinking" if isinstance(part, Reasoning) else "text"
        events: list[Event] = []
        if self._open != kind:
            events += self._close()
            self._open = kind
            block = _block(kind, "")
            events.append(_event("content_block_start", index=len(self._blocks), content_block=block))
        self._texts.append(part.text)
        delta = {"type": f"{kind}_delta", kind: part.text}
        return [*events, _event("content_block_delta", index=len(self._blocks), delta=delta)]

    def end(self, ending: Ending) -> list[Event]:
        events = self._close()
        reason = _STOP_REASONS.get(ending.reason, "end_turn" if ending.stop is None else "stop_sequence")
        self._stop = {"stop_reason": reason, "stop_sequence": ending.stop if reason == "stop_sequence" else None}
        self._usage = _usage(ending.usage)
        self._telemetry = ending.telemetry
        return [*events, _event("message_delta", delta=self._stop, usage=self._usage), _event("message_stop")]

    def fail(self, error: ShardlineError, usage: Usage) -> list[Event]:
        return [("error", error_body(error))]

    def answer(self) -> Json:
        return {**self._message(), "telemetry": self._telemetry}

    def _message(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._blocks),
            **self._stop,
            "usage": self._usage,
        }

    def _call(self, call: Call) -> list[Event]:
        """A whole block: calls are known when they are complete."""
        index = len(self._blocks)
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        self._blocks.append({**block, "input": msgspec.json.decode(call.arguments, type=dict[str, Any])})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [
            _event("content_block_start", index=index, content_block={**block, "input": {}}),
            _event("content_block_delta", index=index, delta=delta),
            _event("content_block_stop", index=index),
        ]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._blocks.append(_block(self._open, "".join(self._texts)))
        self._open = None
        self._texts.clear()
        return [_event("content_block_stop", index=len(self._blocks) - 1)]


def error_body(error: ShardlineError, request_id: str | None = None) -> Json:
    """Anthropic's three fields; beside its type and message, our own fields of every error."""
    status = error.fault.status
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: Json = {"type": "error", "error": {**error.body(), "type": kind}}
    return body if request_id is None else {**body, "request_id": request_id}


async def with_its_errors(
    call: Callable[[Scope, Receive, Send], Awaitable[None]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer by `call`; what it refuses before its answer has begun goes out in Anthropic's shape."""
    started = False

    async def watched(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        await call(scope, receive, watched)
    except ShardlineError as error:
        if started:
            raise
        body = error_body(error, scope["state"]["request_id"])
        await send_json(send, body, error.fault.status, headers=error_headers(error))


def _block(kind: str, text: str) -> Json:
    block = {"type": kind, kind: text}
    return {**block, "signature": ""} if kind == "thinking" else block


def _event(name: str, /, **fields: Any) -> Event:
    return name, {"type": name, **fields}


def _usage(usage: Usage) -> Json:
    """Here what was cached is not among the input tokens, but beside them."""
    if not usage.known:
        return dict.fromkeys(
            ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
        )
    return {
        "input_tokens": usage.prompt_tokens - (usage.cached_tokens or 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
