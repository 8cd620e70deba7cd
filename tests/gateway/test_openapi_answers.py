"""Answers of composite models are what the document says: what no upstream has told is null, and nothing is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.gateway import openapi_answers as answers
from tests.support.upstreams import MODEL, Reply, delta, said, sse, stub_cluster, usage

CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MORE = {"index": 0, "function": {"arguments": ""}}
TOOL = {"name": "f", "parameters": {"type": "object"}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
OPTIONS = {"include_usage": True, "include_telemetry": True}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "/v1/chat/completions": (
        answers.ChatCompletion,
        answers.ChatChunk,
        {**CHAT, "timings_per_token": True, "tools": [{"type": "function", "function": TOOL}]},
    ),
    "/v1/responses": (
        answers.Response,
        answers.ResponseEvent,
        {"input": "Hi", "tools": [{"type": "function", "strict": False, **TOOL}]},
    ),
    "/v1/messages": (
        answers.Message,
        answers.MessageEvent,
        {**CHAT, "max_tokens": 20, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ),
}
BODIES = {
    "all told": said("Hel", "lo"),
    "nothing told": sse(delta(content="a"), delta("length"), "[DONE]"),
    "no cache told": sse(delta(content="a"), delta("stop"), usage(5, 1), "[DONE]"),
    "filtered": sse(delta(reasoning_content="Hm"), delta(content="a"), delta("content_filter"), "[DONE]"),
    "calls": sse(delta(tool_calls=[CALL]), delta(tool_calls=[MORE]), delta("tool_calls"), usage(5, 1), "[DONE]"),
}


@pytest.mark.parametrize("path", KINDS)
async def test_every_kind_of_answer(tmp_path: Path, path: str) -> None:
    whole, event, fields = KINDS[path]
    async with stub_cluster(tmp_path) as (cluster, stub):
        for what, body in BODIES.items():
            stub.usual = Reply(body)
            answer = await cluster.http.post(f"{cluster.url}{path}", json={"model": MODEL, **fields})
            assert answer.status_code == 200, (what, answer.text)
            msgspec.json.decode(answer.content, type=whole)
            asked = {"model": MODEL, **fields, "stream": True}
            if "completions" in path:
                asked["stream_options"] = OPTIONS
            stream = await cluster.http.post(f"{cluster.url}{path}", json=asked)
            data = [line[6:] for line in stream.text.splitlines() if line.startswith("data: ")]
            for chunk in data:
                if chunk != "[DONE]":
                    assert "error" not in json.loads(chunk) or json.loads(chunk)["error"] is None, chunk
                    msgspec.json.decode(chunk, type=event)
            assert len(data) >= 3, what


async def test_completions(tmp_path: Path) -> None:
    async with stub_cluster(tmp_path) as (cluster, stub):
        stub.usual = Reply(sse({"choices": [{"text": "a", "finish_reason": "content_filter"}]}, "[DONE]"))
        for more in ({}, {"timings_per_token": True}):
            answer = await cluster.ask("Hi", max_tokens=5, **more)
            msgspec.json.decode(answer.content, type=answers.TextCompletion)
