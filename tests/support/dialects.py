"""Shared by the tests of the Responses and the Messages API: a thinking model that calls tools, and named events."""

from __future__ import annotations

import json

from tests.support.gateway_stand import Act, Json, say

THINKING = (
    "{{ tools }}<tool_call></tool_call>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}{% if false %}</think>{% endif %}"
)
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'


def named_events(text: str) -> list[tuple[str, Json]]:
    """A whole stream of named events; comments left out."""
    events = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def bytewise(text: str) -> list[Act]:
    """One token a byte."""
    return say(*[bytes([byte]) for byte in text.encode()])
