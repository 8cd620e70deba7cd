"""Open WebUI: not the program, whose front needs a browser, but the requests that its backend sends to a server of
the OpenAI API, as its source makes them: the list of models, chats, tools, and what it asks for beside the chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.clients.route import CALL, CITY, GREETING, RESULT, TITLE, Route

CLIENT = "open-webui"
KEY = "sk-open-webui-0123456789"
PERSON = {
    "X-OpenWebUI-User-Name": "Ada%20L",
    "X-OpenWebUI-User-Id": "6f1",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "c-1",
}
SPEC = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city"}},
        "required": ["city"],
    },
}
ASKED = {"role": "user", "content": "How is the weather in Oslo?"}


def version(client: str) -> str:
    return "request shapes"


class Backend:
    """Asks as its router of OpenAI connections does."""

    def __init__(self, url: str, model: str, http: httpx.AsyncClient) -> None:
        self.url = url
        self.model = model
        self.http = http

    async def models(self, key: str = KEY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.http.get(f"{self.url}/models", headers={**headers, **PERSON})

    async def post(self, messages: list[Any], **more: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **PERSON}
        body = {"model": self.model, "messages": messages, **more}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return await self.http.post(f"{self.url}/chat/completions", content=json.dumps(body), headers=headers)

    async def streamed(self, messages: list[Any], **more: Any) -> list[Any]:
        """The chunks, as its middleware reads lines: what does not begin with `data:` is passed over."""
        answer = await self.post(messages, stream=True, **more)
        assert answer.status_code == 200, answer.text
        assert "text/event-stream" in answer.headers["content-type"]
        lines = [line for line in answer.text.split("\n") if line.startswith("data:")]
        assert lines.pop().strip() == "data: [DONE]"
        return [json.loads(line.removeprefix("data:")) for line in lines]


@pytest.fixture
async def backend(route: Route) -> AsyncIterator[Backend]:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
        yield Backend(f"{route.url}/v1", route.model, http)


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_models(backend: Backend) -> None:
    """With a key and without; each has an `id`, and a `name` only if it is one."""
    for key in (KEY, ""):
        listed = (await backend.models(key)).json()
        assert [model["id"] for model in listed["data"]] == [backend.model]
        assert all(model.get("name", "x") for model in listed["data"])


async def test_models_behind_keys(backend: Backend, route: Route) -> None:
    """A server with keys: the right one, a wrong one, none. The verdict is JSON with `error`, which it shows."""
    with route.guarded(KEY) as url:
        behind = Backend(f"{url}/v1", backend.model, backend.http)
        assert [model["id"] for model in (await behind.models()).json()["data"]] == [backend.model]
        for key in ("sk-wrong-0123456789", ""):
            refused = await behind.models(key)
            assert refused.status_code == 401 and refused.json()["error"]["message"]
        assert text_of(await behind.streamed([{"role": "user", "content": "Hi"}])) == GREETING


async def test_chat(backend: Backend) -> None:
    """With a system prompt and all parameters of its panel that are not Ollama's; usage comes once, in the end."""
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    params = {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 128,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repeat_penalty": 1.1,
        "seed": 42,
        "stop": ["<end>"],
        "logit_bias": {"5": 10},
    }
    chunks = await backend.streamed(messages, **params)
    assert text_of(chunks) == GREETING
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usage) == 1 and usage[0]["completion_tokens"] > 0


async def test_metadata(backend: Backend) -> None:
    """Its pipelines leave in `metadata` what they know: ids of the chat, of tools and files, nested and null."""
    metadata = {
        "user_id": "6f1",
        "chat_id": "c-1",
        "message_id": "m-1",
        "session_id": "s-1",
        "tool_ids": ["server:0", "web_search"],
        "tool_servers": [],
        "files": None,
        "features": {"web_search": False, "code_interpreter": False},
        "variables": {"{{USER_NAME}}": "Ada"},
    }
    chunks = await backend.streamed([{"role": "user", "content": "Hi"}], metadata=metadata, user="6f1")
    assert text_of(chunks) == GREETING


async def test_title_tags_and_follow_ups(backend: Backend) -> None:
    """What it asks for after each first answer: one message, not streamed, an answer that has JSON in it."""
    prompt = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Output:\n"
    prompt += "JSON\n### Chat History:\n<chat_history>\nUSER: Hi\nASSISTANT: " + GREETING + "\n</chat_history>"
    for limit in ({"max_completion_tokens": 1000}, {}):
        answer = await backend.post([{"role": "user", "content": prompt}], stream=False, **limit)
        content = answer.json()["choices"][0]["message"]["content"]
        assert json.loads(content[content.find("{") : content.rfind("}") + 1]) == TITLE


async def test_tools_by_prompt(backend: Backend) -> None:
    """Its own way of tools: they stand in the system prompt, and the answer is read as JSON."""
    system = f"Available Tools: {json.dumps([SPEC])}\nReturn only the JSON object."
    query = 'Query: History:\nUSER: """Oslo?"""\nQuery: Oslo as JSON'
    messages = [{"role": "system", "content": system}, {"role": "user", "content": query}]
    answer = await backend.post(messages, stream=False, metadata={"task": "function_calling"})
    content = answer.json()["choices"][0]["message"]["content"]
    assert json.loads(content[content.find("{") : content.rfind("}") + 1]) == CITY


@pytest.mark.parametrize("spec", [SPEC, {"type": "function", **SPEC}], ids=["spec", "typed_spec"])
async def test_native_tools(backend: Backend, spec: Any) -> None:
    """Streamed; calls are put together by index and sent back with it. Specs from tool servers have a `type`, too."""
    tools = [{"type": "function", "function": spec}]
    calls: dict[int, Any] = {}
    for chunk in await backend.streamed([ASKED], tools=tools):
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls") or []:
                known = calls.setdefault(delta["index"], delta)
                if known is not delta:
                    known["function"]["arguments"] += delta["function"].get("arguments", "")
    assert [json.loads(call["function"]["arguments"]) for call in calls.values()] == [CALL["arguments"]]
    turn = {"role": "assistant", "content": "", "tool_calls": list(calls.values())}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "21"}
    assert text_of(await backend.streamed([ASKED, turn, result], tools=tools)) == RESULT


async def test_errors(backend: Backend) -> None:
    """Before the stream an error has its status and is JSON, although a stream was asked for."""
    answer = await backend.post([{"role": "user", "content": "Hi"}], stream=True, temperature=3)
    assert answer.status_code == 400 and answer.headers["content-type"].startswith("application/json")
    assert "temperature" in answer.json()["error"]["message"]
