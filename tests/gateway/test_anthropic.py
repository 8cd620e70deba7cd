"""`POST /v1/messages`: as Anthropic's client reads it, event by event, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest

from shardline.errors import CATALOGUE, ShardlineError
from shardline.gateway.anthropic_answers import error_body
from shardline.gateway.anthropic_requests import MessagesBody, messages_request
from shardline.gateway.template import Templates
from shardline.settings import Settings
from tests.support.dialects import CALL, THINKING, bytewise, named_events
from tests.support.gateway_stand import MODEL, Fail, Json, Refuse, Stand, Wait, bundle, say, standing

KEY = "sk-alice-0123456789"
PIECES = [b"Gr\xc3", b"\xbc\xc3", b"\x9fe", b" hello", b" EN", b"D and more"]
HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {}}}}


@pytest.fixture
async def stand(tmp_path: Path, shared_templates: Templates) -> AsyncIterator[Stand]:
    made = Stand(settings=Settings(keep_alive_comment_s=0.05, client_stall_s=0.5), pieces=PIECES)
    made.script = lambda request: say(*PIECES[:4])
    async with standing(tmp_path, stand=made, templates=shared_templates, keys=[KEY]):
        yield made


@pytest.fixture
async def client(stand: Stand) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=stand.url, api_key=KEY, timeout=20, max_retries=0) as made:
        yield made


async def raw(stand: Stand, **fields: Any) -> list[tuple[str, Json]]:
    """The events of a stream; comments left out."""
    body = {"model": MODEL, "max_tokens": 50, "messages": HI, "stream": True, **fields}
    answer = await stand.post("/v1/messages", body, x_api_key=KEY)
    assert answer.status_code == 200, answer.text
    return named_events(answer.text)


async def test_a_whole_answer(client: anthropic.AsyncAnthropic, stand: Stand) -> None:
    answer = await client.messages.create(
        model=MODEL,
        max_tokens=9,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
    )
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Grüße hello"}]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    assert (answer.usage.output_tokens, answer.usage.cache_read_input_tokens) == (4, 0)
    request = stand.generations[0].request
    assert answer.usage.input_tokens == len(request.prompt)
    sampling = request.sampling
    assert (request.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 5)
    text = bytes(token for token in request.prompt if token < 256)
    assert text == b"system\nBe brief.\nuser\nHi\nassistant\n"


async def test_a_streamed_answer(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Grüße hello"
    assert (final.content[0].to_dict()["text"], final.stop_reason) == (text, "end_turn")
    assert final.usage.output_tokens == 4 and final.usage.input_tokens > 0


async def test_every_event_in_order_with_characters_in_several_tokens(stand: Stand) -> None:
    stand.script = lambda request: say(b"\xf0", b"\x9f", b"\x98", b"\x80")
    events = await raw(stand)
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(event["type"] == name for name, event in events)
    assert events[0][1]["message"]["content"] == [] and events[0][1]["message"]["stop_reason"] is None
    assert events[2][1] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "😀"}}
    assert events[4][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[4][1]["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stops", "text", "found"),
    [
        (["END"], "Grüße hello ", "END"),
        (["nope", "o END", "END"], "Grüße hell", "o END"),
        (["hello", "END"], "Grüße ", "hello"),
        ([" hello"], "Grüße", " hello"),
        (["nope"], "Grüße hello END and more", None),
    ],
)
async def test_stop_sequences(stand: Stand, stops: list[str], text: str, found: str | None, stream: bool) -> None:
    """Which one it was is told, also where it completes a token that shows nothing."""
    stand.script = lambda request: say(*PIECES)
    if stream:
        events = await raw(stand, stop_sequences=stops)
        said = "".join(event["delta"]["text"] for name, event in events if name == "content_block_delta")
        end = events[-2][1]["delta"]
    else:
        body = {"model": MODEL, "max_tokens": 50, "messages": HI, "stop_sequences": stops}
        end = (await stand.post("/v1/messages", body, x_api_key=KEY)).json()
        said = end["content"][0]["text"]
    assert said == text
    assert (end["stop_reason"], end["stop_sequence"]) == ("end_turn" if found is None else "stop_sequence", found)
    assert stand.generations[0].stopped == (found is not None)


async def test_an_answer_that_was_cut_and_one_that_was_begun(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "I say"}]
    answer = await client.messages.create(model=MODEL, max_tokens=3, messages=begun)
    assert (answer.stop_reason, answer.content[0].to_dict()["text"]) == ("max_tokens", "Grüße")
    text = bytes(token for token in stand.generations[0].request.prompt if token < 256)
    assert text.endswith(b"assistant\nI say")


async def test_an_answer_without_a_word(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    stand.script = lambda request: []
    answer = await client.messages.create(model=MODEL, max_tokens=3, messages=HI)
    assert (answer.content, answer.stop_reason) == ([], "end_turn")
    assert [name for name, _ in await raw(stand)] == ["message_start", "message_delta", "message_stop"]


async def test_a_failure_within_the_stream(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    lost = ShardlineError("node_lost", "n-1 is gone", node="n-1")
    stand.script = lambda request: [*say(b"a", b"b"), Fail(lost)]
    name, event = (await raw(stand))[-1]
    assert (name, event["type"], event["error"]["type"]) == ("error", "error", "api_error")
    assert (event["error"]["message"], event["error"]["code"]) == ("n-1 is gone", "node_lost")
    with pytest.raises(anthropic.APIStatusError, match="n-1 is gone"):
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
            await stream.get_final_message()


async def test_refusals_have_their_status_and_their_type(stand: Stand, client: anthropic.AsyncAnthropic) -> None:
    stand.script = lambda request: [Refuse(ShardlineError("queue_full", "too many wait", retry_after=3))]
    for stream in (False, True):
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")
        assert body["request_id"] == caught.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="nope", max_tokens=9, messages=HI)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_keys(stand: Stand) -> None:
    """In either field; a wrong one is told in Anthropic's shape."""
    body = {"model": MODEL, "max_tokens": 9, "messages": HI}
    assert (await stand.post("/v1/messages", body, authorization=f"Bearer {KEY}")).status_code == 200
    assert (await stand.get("/v1/models", **{"x-api-key": KEY})).status_code == 200
    for fields in ({}, {"x_api_key": "wrong"}, {"x_api_key": KEY, "authorization": "Bearer wrong"}):
        answer = await stand.post("/v1/messages", body, **fields)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert {generation.request.key_id for generation in stand.generations} != {"anybody"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_session(
    stand: Stand, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    stand.script = lambda request: [*say(b"a"), Wait(asyncio.Event())]
    asking = asyncio.create_task(client.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=stream))
    async with asyncio.timeout(5):
        while not (stand.generations and stand.generations[0].phase == "decode"):
            await asyncio.sleep(0.01)
        if stream:
            await (await asking).close()
        else:
            asking.cancel()
            await asyncio.wait([asking])
        while not stand.generations[0].over:
            await asyncio.sleep(0.01)
    assert stand.generations[0].cancelled is not None


async def test_thinking_and_calls(tmp_path: Path, shared_templates: Templates) -> None:
    stand = Stand()
    stand.script = lambda request: bytewise("Let me see.</think>" + CALL)
    async with (
        standing(tmp_path, stand=stand, templates=shared_templates, text=bundle(THINKING)),
        anthropic.AsyncAnthropic(base_url=stand.url, api_key="none", timeout=20) as client,
    ):
        answer = await client.messages.create(model=MODEL, max_tokens=200, messages=HI, tools=[TOOL])
        assert [block.type for block in answer.content] == ["thinking", "tool_use"]
        call: Any = answer.content[1]
        assert (call.name, call.input, answer.stop_reason) == ("get_weather", {"city": "Köln"}, "tool_use")
        async with client.messages.stream(model=MODEL, max_tokens=200, messages=HI, tools=[TOOL]) as stream:
            final: Any = await stream.get_final_message()
        assert (final.content[0].thinking, final.content[1].input) == ("Let me see.", {"city": "Köln"})
        # What came of it is sent back with all that the model had said.
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": True}
        turns: Any = [*HI, {"role": "assistant", "content": answer.content}]
        turns.append({"role": "user", "content": [result, {"type": "text", "text": "Well?"}]})
        choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
        await client.messages.create(model=MODEL, max_tokens=200, messages=turns, tools=[TOOL], tool_choice=choice)
        prompt = bytes(token for token in stand.generations[-1].request.prompt if token < 256).decode()
        assert "(Let me see.)" in prompt and "get_weather" in prompt
        assert "tool\nError: sunny\nuser\nWell?" in prompt


REFUSED: list[tuple[Json, str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": "x"}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"output_config": {"effort": "low"}}, "output_config"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
    ({"tool_choice": {"type": "nope"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"seed": 1}, "seed"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"system": [{"type": "image", "source": {}}]}, "system[0].type"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[json.dumps(fields)[:60] for fields, _ in REFUSED])
async def test_what_is_refused_is_named(stand: Stand, fields: Json, param: str) -> None:
    answer = await stand.post(
        "/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": HI, **fields}, x_api_key=KEY
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert "'stop'" not in error["message"]
    assert not stand.generations


async def test_what_is_no_json(stand: Stand) -> None:
    for body in (b"", b"{", b"[]", b'{"model":"a","model":"b"}'):
        answer = await stand.post("/v1/messages", body, x_api_key=KEY)
        assert (answer.status_code, answer.json()["type"]) == (400, "error")


def test_every_error_has_one_of_its_types() -> None:
    types = {
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
        "api_error",
    }
    assert {error_body(ShardlineError(code, "x"))["error"]["type"] for code in CATALOGUE} == types


def test_null_is_as_if_absent() -> None:
    names = [field.name for field in msgspec.structs.fields(MessagesBody) if not field.required]
    body = {"model": "m", "max_tokens": 1, "messages": HI}
    with_nulls = {**body, **dict.fromkeys(names)}
    assert messages_request(json.dumps(with_nulls).encode()) == messages_request(json.dumps(body).encode())
