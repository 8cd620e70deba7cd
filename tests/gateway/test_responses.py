"""`POST /v1/responses`: as the official client reads it, event by event, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.responses_requests import ResponsesBody, responses_request
from shardline.gateway.template import Templates
from shardline.settings import Settings
from tests.support.dialects import CALL, THINKING, bytewise, named_events
from tests.support.gateway_stand import MODEL, Fail, Json, Refuse, Stand, Wait, bundle, say, standing

KEY = "sk-alice-0123456789"
PIECES = [b"Gr\xc3", b"\xbc\xc3", b"\x9fe", b" hello"]
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}


@pytest.fixture
async def stand(tmp_path: Path, shared_templates: Templates) -> AsyncIterator[Stand]:
    made = Stand(settings=Settings(keep_alive_comment_s=0.05, client_stall_s=0.5), pieces=PIECES)
    made.script = lambda request: say(*PIECES)
    async with standing(tmp_path, stand=made, templates=shared_templates, keys=[KEY]):
        yield made


@pytest.fixture
async def client(stand: Stand) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key=KEY, timeout=20, max_retries=0) as made:
        yield made


async def raw(stand: Stand, **fields: Any) -> list[tuple[str, Json]]:
    """The events of a stream; comments left out."""
    body = {"model": MODEL, "input": "Hi", "stream": True, **fields}
    answer = await stand.post("/v1/responses", body, authorization=f"Bearer {KEY}")
    assert answer.status_code == 200, answer.text
    return named_events(answer.text)


async def test_a_whole_answer(client: openai.AsyncOpenAI, stand: Stand) -> None:
    answer = await client.responses.create(
        model=MODEL, instructions="Be brief.", input="Hi", temperature=0.5, top_p=0.9, max_output_tokens=9, store=False
    )
    assert answer.output_text == "Grüße hello"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.usage is not None
    prompt = len("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    marks = 5 * (len("<|im_start|>") - 1) - 2 * 2  # each is one token; the ends are two letters shorter
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (prompt - marks, 4)
    assert answer.usage.total_tokens == prompt - marks + 4
    request = stand.generations[0].request
    assert (request.max_tokens, request.sampling.temperature, request.sampling.top_p) == (9, 0.5, 0.9)
    assert (answer.instructions, answer.temperature, answer.max_output_tokens) == ("Be brief.", 0.5, 9)


async def test_a_streamed_answer(client: openai.AsyncOpenAI) -> None:
    text, names = "", []
    async with client.responses.stream(model=MODEL, input=[{"role": "user", "content": "Hi"}]) as stream:
        async for event in stream:
            names.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
        final = await stream.get_final_response()
    assert text == final.output_text == "Grüße hello"
    assert final.status == "completed" and final.usage is not None and final.usage.output_tokens == 4
    assert (names[0], names[-1]) == ("response.created", "response.completed")


async def test_every_event_in_order_with_characters_in_several_tokens(stand: Stand) -> None:
    stand.script = lambda request: say(b"\xf0", b"\x9f", b"\x98", b"\x80")
    events = await raw(stand)
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for _, event in events] == list(range(9))
    assert all(event["type"] == name for name, event in events)
    assert events[4][1]["delta"] == events[5][1]["text"] == "😀"
    final = events[-1][1]["response"]
    assert final["output"] == [events[7][1]["item"]]
    assert final["output"][0]["content"][0]["text"] == "😀"
    assert final["usage"]["output_tokens"] == 4
    ids = {event["item_id"] for _, event in events if "item_id" in event}
    assert ids == {final["output"][0]["id"]}


async def test_streamed_and_whole_say_the_same(stand: Stand) -> None:
    answer = await stand.post("/v1/responses", {"model": MODEL, "input": "Hi"}, authorization=f"Bearer {KEY}")
    whole, streamed = answer.json(), (await raw(stand))[-1][1]["response"]
    for response in (whole, streamed):
        for name in ("id", "created_at", "telemetry"):
            del response[name]
        del response["output"][0]["id"]
    assert streamed == whole


async def test_an_answer_that_was_cut(stand: Stand, client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "Grüße"
    assert (await raw(stand, max_output_tokens=3))[-1][0] == "response.incomplete"


async def test_an_answer_without_a_word(stand: Stand, client: openai.AsyncOpenAI) -> None:
    stand.script = lambda request: []
    answer = await client.responses.create(model=MODEL, input="Hi")
    assert (answer.status, answer.output_text, len(answer.output)) == ("completed", "", 1)


async def test_a_failure_within_the_stream(stand: Stand) -> None:
    lost = ShardlineError("node_lost", "n-1 is gone", node="n-1")
    stand.script = lambda request: [*say(b"a", b"b"), Fail(lost)]
    name, event = (await raw(stand))[-1]
    response = event["response"]
    assert (name, response["status"]) == ("response.failed", "failed")
    assert (response["error"]["code"], response["error"]["message"]) == ("node_lost", "n-1 is gone")
    assert response["error"]["tokens_delivered"] == 2
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "ab"


async def test_a_refusal_has_its_status(stand: Stand, client: openai.AsyncOpenAI) -> None:
    stand.script = lambda request: [Refuse(ShardlineError("queue_full", "too many wait", retry_after=3))]
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.responses.create(model=MODEL, input="Hi", stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nope", input="Hi")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_session(stand: Stand, client: openai.AsyncOpenAI, stream: bool) -> None:
    stand.script = lambda request: [*say(b"a"), Wait(asyncio.Event())]
    asking = asyncio.create_task(client.responses.create(model=MODEL, input="Hi", stream=stream))
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


async def test_silence_is_kept_alive(stand: Stand) -> None:
    go = asyncio.Event()
    stand.script = lambda request: [*say(b"a"), Wait(go), *say(b"b")]
    body = {"model": MODEL, "input": "Hi", "stream": True}
    seen = []
    headers = {"authorization": f"Bearer {KEY}"}
    async with stand.http.stream("POST", f"{stand.url}/v1/responses", json=body, headers=headers) as answer:
        async for line in answer.aiter_lines():
            seen.append(line)
            if sum(line.startswith(": shardline {") for line in seen) == 2:
                go.set()
    assert "event: response.completed" in seen


async def test_reasoning_and_calls(tmp_path: Path, shared_templates: Templates) -> None:
    stand = Stand()
    stand.script = lambda request: bytewise("Let me see.</think>Well: " + CALL)
    async with (
        standing(tmp_path, stand=stand, templates=shared_templates, text=bundle(THINKING)),
        openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="none", timeout=20) as client,
    ):
        answer = await client.responses.create(model=MODEL, input="Hi", tools=[TOOL])
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output_text.strip() == "Well:"
        call: Any = answer.output[2]
        assert (call.name, json.loads(call.arguments), call.status) == (
            "get_weather",
            {"city": "Köln"},
            "completed",
        )
        async with client.responses.stream(model=MODEL, input="Hi", tools=[TOOL]) as stream:
            async for _ in stream:
                pass
            final: Any = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[0].content[0].text == "Let me see."
        assert final.output[2].arguments == call.arguments
        # What came of it is sent back with all that the model had said.
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        asked: Any = [{"role": "user", "content": "Hi"}, *answer.output, result]
        await client.responses.create(model=MODEL, input=asked, tools=[TOOL])
        prompt = bytes(token for token in stand.generations[-1].request.prompt if token < 256).decode()
        assert "(Let me see.)" in prompt and "get_weather" in prompt and "tool\nsunny" in prompt
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input=asked[:-1], tools=[TOOL])
        assert caught.value.param == "input"


async def test_a_form_is_kept_to(stand: Stand, client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    await client.responses.create(model=MODEL, input="Hi", text=form)
    grammar = stand.generations[0].request.sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema"


REFUSED: list[tuple[Json, str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"text": {"format": {"type": "nope"}}}, "text"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"seed": 1}, "seed"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"input": "x" * 5000}, "input"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[json.dumps(fields)[:60] for fields, _ in REFUSED])
async def test_what_is_refused_is_named(stand: Stand, fields: Json, param: str) -> None:
    body = {"model": MODEL, "input": "Hi", **fields}
    answer = await stand.post("/v1/responses", body, authorization=f"Bearer {KEY}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert "max_completion_tokens" not in error["message"] and "'messages'" not in error["message"]
    assert not stand.generations


async def test_tools_are_repeated_as_they_are_meant(tmp_path: Path, shared_templates: Templates) -> None:
    """One without parameters, too: what was not sent must not leave a hole in the answer."""
    async with standing(tmp_path, templates=shared_templates, text=bundle(THINKING)) as stand:
        answer = await stand.post(
            "/v1/responses", {"model": MODEL, "input": "Hi", "tools": [{"type": "function", "name": "f"}, TOOL]}
        )
        bare, whole = answer.json()["tools"]
        assert bare == {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
        assert whole["parameters"] == TOOL["parameters"]


def test_null_is_as_if_absent() -> None:
    names = [field.name for field in msgspec.structs.fields(ResponsesBody) if not field.required]
    body = {"model": "m", "input": "Hi", **dict.fromkeys(names)}
    assert responses_request(json.dumps(body).encode()) == responses_request(b'{"model":"m","input":"Hi"}')
