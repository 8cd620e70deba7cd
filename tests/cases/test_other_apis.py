"""The Responses API, Anthropic's Messages API and llama-server's questions on a route of two Nodes, by the official
clients where there are some. What the Gateway does by itself is in tests/gateway/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from shardline.settings import Settings
from tests.support.api_cluster import COUNTING, ApiCluster, api_cluster, until

SLOW = {**COUNTING, "decode_ms": 5}
HI: Any = [{"role": "user", "content": "Hi"}]
SPLIT = {"answer": ["Gr", "ü", "ße", " 😀", "."]}
QUICK = Settings(drain_s=0.5, prefix_sessions=0)


def openai_client(cluster: ApiCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=20, max_retries=0)


def anthropic_client(cluster: ApiCluster) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", timeout=20, max_retries=0)


async def test_four_apis_give_one_answer(tmp_path: Path) -> None:
    """Text, prompt tokens and answer tokens are the same in all of them, streamed or not."""
    async with api_cluster(tmp_path, script=SPLIT, settings=QUICK) as cluster:
        async with openai_client(cluster) as client:
            chat = await client.chat.completions.create(model=cluster.model, messages=HI)
            assert chat.usage is not None
            expected = (chat.choices[0].message.content, chat.usage.prompt_tokens, chat.usage.completion_tokens)
            assert expected[0] == "Grüße 😀."
            response = await client.responses.create(model=cluster.model, input="Hi")
            assert response.usage is not None
            assert (response.output_text, response.usage.input_tokens, response.usage.output_tokens) == expected
            async with client.responses.stream(model=cluster.model, input=HI) as events:
                async for _ in events:
                    pass
                response = await events.get_final_response()
            assert response.usage is not None
            assert (response.output_text, response.usage.input_tokens, response.usage.output_tokens) == expected
        async with anthropic_client(cluster) as other:
            message: Any = await other.messages.create(model=cluster.model, max_tokens=50, messages=HI)
            assert (message.content[0].text, message.usage.input_tokens, message.usage.output_tokens) == expected
            async with other.messages.stream(model=cluster.model, max_tokens=50, messages=HI) as stream:
                message = await stream.get_final_message()
            assert (message.content[0].text, message.usage.input_tokens, message.usage.output_tokens) == expected
            message = await other.messages.create(
                model=cluster.model, max_tokens=50, messages=HI, stop_sequences=["nope", "e 😀"]
            )
            assert (message.content[0].text, message.stop_sequence) == ("Grüß", "e 😀")
        await cluster.until_free()


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_a_client_that_leaves_frees_every_node(tmp_path: Path, api: str) -> None:
    async with api_cluster(tmp_path, script=SLOW, settings=QUICK) as cluster:
        fields: Any = {"model": cluster.model, "stream": True}
        if api == "responses":
            async with openai_client(cluster) as client, await client.responses.create(input="Hi", **fields) as events:
                assert [event.type async for event in _first(events, 5)][-1] == "response.output_text.delta"
        else:
            async with anthropic_client(cluster) as other:
                stream = await other.messages.create(max_tokens=2000, messages=HI, **fields)
                assert [event.type async for event in _first(stream, 3)][-1] == "content_block_delta"
                await stream.close()

        async def cancelled() -> bool:
            return bool((await cluster.sessions())[0]["phase"] == "cancelled")

        await until(cancelled)
        await cluster.until_free()


async def _first(events: Any, count: int) -> Any:
    seen = 0
    async for event in events:
        yield event
        seen += 1
        if seen == count:
            return


async def test_a_lost_node_ends_the_stream_as_failed(tmp_path: Path) -> None:
    async with api_cluster(tmp_path, script=SLOW, settings=QUICK) as cluster, openai_client(cluster) as client:
        events = await client.responses.create(model=cluster.model, input="Hi", stream=True)
        text, last = "", None
        async for event in events:
            if event.type == "response.output_text.delta" and not text:
                await cluster.nodes[1].end()
            text += event.delta if event.type == "response.output_text.delta" else ""
            last = event
        assert last is not None and last.type == "response.failed", last
        assert last.response.status == "failed" and last.response.error is not None
        assert last.response.output_text == text != ""


async def test_tokens_and_back(tmp_path: Path) -> None:
    async with api_cluster(tmp_path, script=SPLIT) as cluster:
        answer = await cluster.http.post(f"{cluster.url}/tokenize", json={"content": "Grüße 😀"})
        tokens = answer.json()["tokens"]
        answer = await cluster.http.post(f"{cluster.url}/detokenize", json={"tokens": tokens})
        assert answer.json() == {"content": "Grüße 😀"}
        status, props = await cluster.get("/props")
        assert (status, props["model_alias"]) == (200, cluster.model)
        assert await cluster.get("/health") == (200, {"status": "ok"})
