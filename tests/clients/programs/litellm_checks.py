"""litellm: `openai/MODEL` with the Gateway as `api_base`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pydantic
from reporting import AS_JSON, GREETING, MODEL, RESULT, URL, WEATHER, run

GATEWAY = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0, "timeout": 20}
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(pydantic.BaseModel):
    city: str
    degrees: int


def chat() -> None:
    answer = litellm.completion(messages=HI, temperature=0, **GATEWAY)
    assert answer.choices[0].message.content == GREETING, answer
    assert answer.usage.completion_tokens > 0


def stream() -> None:
    options = {"include_usage": True}
    chunks = list(litellm.completion(messages=HI, temperature=0, stream=True, stream_options=options, **GATEWAY))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == GREETING, text
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 0


def async_stream() -> None:
    async def ask() -> str:
        answer = await litellm.acompletion(messages=HI, temperature=0, stream=True, **GATEWAY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    assert asyncio.run(ask()) == GREETING


def text_completion() -> None:
    gateway = {**GATEWAY, "model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(prompt="Hi", temperature=0, **gateway)
    assert answer.choices[0].text == GREETING, answer


def tools_loop() -> None:
    """The message goes back as the library made it; then what its stream builder made of deltas."""
    for streamed in (False, True):
        messages: list[Any] = [{"role": "user", "content": WEATHER}]
        answer = litellm.completion(messages=messages, tools=[TOOL], temperature=0, stream=streamed, **GATEWAY)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}, message
        result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "21"}
        messages += [message, result]
        again = litellm.completion(messages=messages, tools=[TOOL], temperature=0, **GATEWAY)
        assert again.choices[0].message.content == RESULT, again
        messages[1] = message.model_dump()
        again = litellm.completion(messages=messages, tools=[TOOL], temperature=0, **GATEWAY)
        assert again.choices[0].message.content == RESULT, again


def structured_output() -> None:
    asked = [{"role": "user", "content": AS_JSON}]
    answer = litellm.completion(messages=asked, response_format=City, temperature=0, **GATEWAY)
    assert City.model_validate_json(answer.choices[0].message.content).degrees == 21


def responses() -> None:
    answer = litellm.responses(input="Hi", temperature=0, **GATEWAY)
    assert answer.output_text == GREETING, answer


def embeddings() -> None:
    answer = litellm.embedding(input=["one", "two"], **GATEWAY)
    assert [item["index"] for item in answer.data] == [0, 1] and len(answer.data[0]["embedding"]) > 0, answer


def errors() -> None:
    try:
        litellm.completion(messages=HI, **{**GATEWAY, "model": "openai/nobody"})
    except litellm.NotFoundError as error:
        assert "nobody" in str(error)
    else:
        raise AssertionError("a model that nobody serves was answered")


if __name__ == "__main__":
    run(chat, stream, async_stream, text_completion, tools_loop, structured_output, responses, embeddings, errors)
