"""Answers of `POST /v1/responses`: output items, their events, and the response object around them.

Owns the shapes and the order of events of OpenAI's Responses API. An answer that was cut, at its limit or by a filter
of the upstream of a composite model, is `incomplete`,
one that broke off is `failed`; both keep the text that there was. Pure. Shown by tests/gateway/test_responses.py.
"""

from __future__ import annotations

import itertools
import secrets
import time
from typing import Any

from shardline.errors import ShardlineError
from shardline.gateway.dialects import Ending, Event
from shardline.gateway.openai_answers import Json, Usage
from shardline.gateway.responses_requests import ResponsesAsked
from shardline.gateway.tools_parts import Call, Part, Reasoning

_CUT_BY = {"length": "max_output_tokens", "content_filter": "content_filter"}


class _Item:
    """An output item that is being written: the answer, or the reasoning before it."""

    def __init__(self, index: int, *, reasoning: bool) -> None:
        self.reasoning = reasoning
        self.id = ("rs_" if reasoning else "msg_") + secrets.token_hex(16)
        self.place = {"item_id": self.id, "output_index": index, "content_index": 0}
        self.kind = "reasoning_text" if reasoning else "output_text"
        self.texts: list[str] = []

    def part(self, text: str) -> Json:
        part: Json = {"type": self.kind, "text": text}
        return part if self.reasoning else {**part, "annotations": [], "logprobs": []}

    def shown(self, status: str, *, begun: bool = False) -> Json:
        content = [] if begun else [self.part("".join(self.texts))]
        if self.reasoning:
            return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class ResponseWords:
    """Implements `Words` for one response."""

    def __init__(self, asked: ResponsesAsked) -> None:
        self._asked = asked
        self._id = "resp_" + secrets.token_hex(24)
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._output: list[Json] = []
        self._item: _Item | None = None
        self._state: Json = {"status": "in_progress", "error": None, "incomplete_details": None, "usage": None}

    def opening(self, usage: Usage) -> list[Event]:
        return [
            self._event("response.created", response=self.answer()),
            self._event("response.in_progress", response=self.answer()),
        ]

    def add(self, part: Part) -> list[Event]:
        if isinstance(part, Call):
            return [*self._close("completed"), *self._call(part)]
        events: list[Event] = []
        reasoning = isinstance(part, Reasoning)
        if self._item is None or self._item.reasoning != reasoning:
            events += self._close("completed")
            events += self._begin(reasoning=reasoning)
        item = self._item
        if item is not None:
            item.texts.append(part.text)
            logprobs: Json = {} if reasoning else {"logprobs": []}
            events.append(self._event(f"response.{item.kind}.delta", **item.place, delta=part.text, **logprobs))
        return events

    def end(self, ending: Ending) -> list[Event]:
        cut = _CUT_BY.get(ending.reason)
        status = "completed" if cut is None else "incomplete"
        events: list[Event] = []
        if self._item is None and not self._output:
            events += self._begin(reasoning=False)  # an answer without a word is one all the same
        events += self._close(status)
        self._state = {
            "status": status,
            "error": None,
            "incomplete_details": None if cut is None else {"reason": cut},
            "usage": _usage(ending.usage),
            "telemetry": ending.telemetry,
        }
        return [*events, self._event(f"response.{status}", response=self.answer())]

    def fail(self, error: ShardlineError, usage: Usage) -> list[Event]:
        if self._item is not None:
            self._output.append(self._item.shown("incomplete"))
            self._item = None
        self._state = {
            "status": "failed",
            "error": error.body(),
            "incomplete_details": None,
            "usage": _usage(usage),
        }
        return [self._event("response.failed", response=self.answer())]

    def answer(self) -> Json:
        asked = self._asked
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": asked.model,
            **self._state,
            "output": list(self._output),
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "metadata": asked.metadata,
            "text": {"format": asked.text_format},
            "reasoning": {"effort": asked.effort, "summary": None},
            "user": asked.user,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "tools": asked.tools,
            "tool_choice": asked.tool_choice,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "service_tier": "default",
        }

    def _begin(self, *, reasoning: bool) -> list[Event]:
        item = self._item = _Item(len(self._output), reasoning=reasoning)
        shown = item.shown("in_progress", begun=True)
        return [
            self._event("response.output_item.added", output_index=len(self._output), item=shown),
            self._event("response.content_part.added", **item.place, part=item.part("")),
        ]

    def _call(self, call: Call) -> list[Event]:
        """A whole item: calls are known when they are complete."""
        place = {"item_id": "fc_" + secrets.token_hex(16), "output_index": len(self._output)}
        begun = {"id": place["item_id"], "type": "function_call", "call_id": call.id, "name": call.name}
        item = {**begun, "status": "completed", "arguments": call.arguments}
        self._output.append(item)
        return [
            self._event(
                "response.output_item.added",
                output_index=place["output_index"],
                item={**begun, "status": "in_progress", "arguments": ""},
            ),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _close(self, status: str) -> list[Event]:
        item, self._item = self._item, None
        if item is None:
            return []
        text = "".join(item.texts)
        shown = item.shown(status)
        self._output.append(shown)
        logprobs: Json = {} if item.reasoning else {"logprobs": []}
        return [
            self._event(f"response.{item.kind}.done", **item.place, text=text, **logprobs),
            self._event("response.content_part.done", **item.place, part=item.part(text)),
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=shown),
        ]

    def _event(self, name: str, /, **fields: Any) -> Event:
        return name, {"type": name, "sequence_number": next(self._numbers), **fields}


def _usage(usage: Usage) -> Json | None:
    if not usage.known:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
