"""Answers as the official client reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.template import Templates
from shardline.settings import Settings
from tests.support.gateway_stand import MODEL, Fail, Open, Prefilled, Refuse, Stand, say, standing

KEY = "sk-alice-0123456789"
PIECES = [b"Gr\xc3", b"\xbc\xc3", b"\x9fe", b" hello", b" world"]
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def stand(tmp_path: Path, shared_templates: Templates) -> AsyncIterator[Stand]:
    made = Stand(settings=Settings(keep_alive_comment_s=0.05, telemetry_comment_s=0.0), pieces=PIECES)
    made.script = lambda request: [Open(), Prefilled(9), *say(*PIECES)]
    async with standing(tmp_path, stand=made, templates=shared_templates, keys=[KEY]):
        yield made


@pytest.fixture
async def client(stand: Stand) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key=KEY, timeout=20) as made:
        yield made


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


async def test_a_whole_chat_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Grüße hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (21, 5, 26)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_extra is not None and answer.model_extra["telemetry"]["phase"] == "completed"
    assert answer.system_fingerprint is not None


async def test_a_streamed_chat_answer(client: openai.AsyncOpenAI) -> None:
    """Comments, telemetry and progress between the chunks do not disturb the client."""
    text, usage, roles = "", None, []
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=HI,
        stream=True,
        extra_body={
            "stream_options": {"include_usage": True, "include_telemetry": True},
            "return_progress": True,
            "timings_per_token": True,
        },
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            assert "\ufffd" not in (choice.delta.content or "")
    assert text == "Grüße hello world"
    assert roles == ["assistant"]
    assert usage is not None and usage.completion_tokens == 5


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    for streamed in (False, True):
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            logprobs=True,
            top_logprobs=2,
            stream=streamed,
        )
        tokens = []
        if isinstance(answer, openai.AsyncStream):
            async for chunk in answer:
                for choice in chunk.choices:
                    if choice.logprobs is not None and choice.logprobs.content:
                        tokens += choice.logprobs.content
        else:
            assert answer.choices[0].logprobs is not None
            tokens = answer.choices[0].logprobs.content or []
        assert [bytes(token.bytes or []) for token in tokens] == PIECES
        assert all(token.logprob == -0.5 and len(token.top_logprobs) == 2 for token in tokens)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hi", logprobs=1, n=2, echo=False)
    assert [choice.text for choice in answer.choices] == ["Grüße hello world"] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset == [0, 2, 3, 5, 11]
    text = ""
    async for chunk in await client.completions.create(model=MODEL, prompt=[1, 2], stream=True, echo=True):
        text += chunk.choices[0].text
    assert text == "\x01\x02Grüße hello world"


async def test_stop_and_limit(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HI, stop=["lo wo"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Grüße hel", "stop")
    answer = await client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=4)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Grüße hello", "length")


async def test_errors_are_the_clients_own_classes(client: openai.AsyncOpenAI, stand: Stand) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    asked = len(stand.generations)
    stand.script = lambda request: [*say(b" hello"), Fail(ShardlineError("node_lost", "gone", node="n-1"))]
    with pytest.raises(openai.APIStatusError) as lost:
        await client.chat.completions.create(model=MODEL, messages=HI)
    assert (lost.value.status_code, lost.value.code) == (502, "node_lost")
    # x-should-retry: false. The client did not ask again by itself.
    assert len(stand.generations) == asked + 1


async def test_a_failure_in_the_stream_raises_in_the_client(client: openai.AsyncOpenAI, stand: Stand) -> None:
    stand.script = lambda request: [*say(b" hello"), Fail(ShardlineError("node_lost", "n-1 is gone", node="n-1"))]
    text = ""
    with pytest.raises(openai.APIError) as caught:
        async for chunk in await client.chat.completions.create(model=MODEL, messages=HI, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == " hello"
    assert caught.value.code == "node_lost"
    assert isinstance(caught.value.body, dict) and caught.value.body["node"] == "n-1"


async def test_a_full_queue_is_tried_again_by_the_client(client: openai.AsyncOpenAI, stand: Stand) -> None:
    refusals = iter([True, False])
    full = ShardlineError("queue_full", "full", retry_after=1)
    stand.script = lambda request: [Refuse(full)] if next(refusals) else say(b" world")
    answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == " world"
