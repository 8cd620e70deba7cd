"""What of a request goes to the server behind a composite Node, and what is refused because nobody can promise it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.composite_requests import REFUSED, chat_calls, generations, text_calls
from shardline.gateway.openai_requests import ChatBody, TextBody, chat_request, text_request
from shardline.settings import Settings
from shardline.wire.composite import EXTRA, PASSED_CHAT, PASSED_TEXT
from shardline.wire.messages import ModelInfo

MODEL = ModelInfo(
    model="m", content_id="name1-x", engine_class="upstream/m", n_layers=1, context_length=1000, vocab_size=0,
    text_digest=None, text_nodes=[], head_nodes=[], ready=True, missing=[], kv_capacity_tokens=8000, composite=True,
)  # fmt: skip
SETTINGS = Settings(default_max_tokens=64)
OURS = frozenset(
    {"model", "stream", "stream_options", "n", "max_completion_tokens", "echo", "best_of", "timings_per_token"}
)
"""What the Gateway itself does."""
INERT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "modalities"})
NOT_SUPPORTED = frozenset(
    {
        *("functions", "function_call", "audio", "moderation", "prediction", "prompt_cache_options"),
        *("prompt_cache_retention", "verbosity", "web_search_options"),
    }
)
"""Refused of every model."""


def chat(**fields: Any) -> list[Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return chat_calls(chat_request(json.dumps(body).encode()), MODEL, SETTINGS)


def text(**fields: Any) -> list[Any]:
    return text_calls(text_request(json.dumps({"model": "m", "prompt": "Hi", **fields}).encode()), MODEL, SETTINGS)


@pytest.mark.parametrize(("body", "passed"), [(ChatBody, PASSED_CHAT), (TextBody, PASSED_TEXT)])
def test_every_field_has_one_place(body: type[msgspec.Struct], passed: frozenset[str]) -> None:
    """A field that is added to the API tomorrow must not be dropped on its way without a word."""
    places = [passed, EXTRA, frozenset(REFUSED), OURS, INERT, NOT_SUPPORTED]
    for name in body.__struct_fields__:
        assert sum(name in place for place in places) == 1, name


def test_only_what_was_sent_goes_along() -> None:
    (call,) = chat(temperature=0.0, top_p=None, user="me")
    assert call.fields == {"temperature": 0.0, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64}
    (call,) = text(stop="x", prompt=[1, 2], max_tokens=5)
    assert call.fields == {"stop": ["x"], "prompt": [1, 2], "max_tokens": 5}


def test_choices_differ_by_their_seed() -> None:
    assert [call.fields["seed"] for call in chat(n=3, seed=5)] == [5, 6, 7]
    calls = text(prompt=["a", "b"], n=2, seed=1)
    assert [(call.fields["prompt"], call.fields["seed"]) for call in calls] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_messages_leave_as_the_api_has_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    (made,) = chat(messages=sent)
    user, assistant, tool = made.fields["messages"]
    assert user == {"role": "user", "content": "Hello"}
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert (assistant["content"], assistant["reasoning_content"]) == (None, "hm") and "thinking" not in assistant
    assert tool == sent[2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"return_progress": True}, "return_progress"),
        ({"cache_prompt": False}, "cache_prompt"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
        ({"max_tokens": 1000}, "max_tokens"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ShardlineError) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_refused_of_texts() -> None:
    for fields, param in (
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt": [1], "echo": True}, "echo"),
    ):
        with pytest.raises(ShardlineError) as refused:
            text(**fields)
        assert refused.value.param == param


def test_what_asks_for_nothing_is_taken() -> None:
    (call,) = chat(logprobs=False, cache_prompt=True, reasoning_format="auto", return_progress=False)
    assert set(call.fields) == {"messages", "max_tokens"}


def test_a_place_is_a_whole_context() -> None:
    request = chat_request(json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 2}).encode())
    calls = chat_calls(request, MODEL, SETTINGS)
    made = generations(calls, request.asked, MODEL, SETTINGS, key_id="k", session="rs-1")
    assert [(g.kv_tokens, g.session, g.max_tokens, g.prompt) for g in made] == [
        (1000, "rs-1", 64, []),
        (1000, None, 64, []),
    ]
