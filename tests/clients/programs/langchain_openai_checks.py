"""langchain-openai: `ChatOpenAI` with the Gateway as `base_url`."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from reporting import AS_JSON, GREETING, MODEL, RESULT, URL, WEATHER, run

GATEWAY: Any = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
CHAT = ChatOpenAI(**GATEWAY)


class City(pydantic.BaseModel):
    """A city and how warm it is."""

    city: str = pydantic.Field(description="its name")
    degrees: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"21 in {city}"


def invoke() -> None:
    answer = CHAT.invoke("Hi")
    assert answer.content == GREETING, answer
    assert answer.usage_metadata["output_tokens"] > 0


def stream() -> None:
    chunks = list(ChatOpenAI(**GATEWAY, stream_usage=True).stream("Hi"))
    assert "".join(chunk.content for chunk in chunks) == GREETING
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata["output_tokens"] > 0


def async_stream() -> None:
    async def ask() -> str:
        return "".join([chunk.content async for chunk in CHAT.astream("Hi")])

    assert asyncio.run(ask()) == GREETING


def batch() -> None:
    assert [answer.content for answer in CHAT.batch(["Hi", "Hi", "Hi"])] == [GREETING] * 3


def bind_tools() -> None:
    """A loop; the call comes whole and streamed, and what the library made of it goes back."""
    chat = CHAT.bind_tools([get_weather])
    for streamed in (False, True):
        messages: list[Any] = [HumanMessage(WEATHER)]
        if streamed:
            chunks = list(chat.stream(messages))
            answer = chunks[0]
            for chunk in chunks[1:]:
                answer += chunk
        else:
            answer = chat.invoke(messages)
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"}), answer
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        assert chat.invoke([*messages, answer, result]).content == RESULT


def forced_tool() -> None:
    answer = CHAT.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(WEATHER)
    assert [call["args"] for call in answer.tool_calls] == [{"city": "Oslo"}]


def with_structured_output() -> None:
    """By a schema, by JSON mode, and by a function that must be called."""
    for method in ("json_schema", "json_mode"):
        answer = CHAT.with_structured_output(City, method=method).invoke(AS_JSON)
        assert answer == City(city="Oslo", degrees=21), (method, answer)
    answer = CHAT.with_structured_output(City, method="function_calling").invoke(AS_JSON)
    assert isinstance(answer, City)


def completions() -> None:
    assert OpenAI(**GATEWAY).invoke("Hi") == GREETING


def responses() -> None:
    chat = ChatOpenAI(**GATEWAY, use_responses_api=True)
    assert chat.invoke("Hi").text == GREETING
    call = chat.bind_tools([get_weather]).invoke(WEATHER)
    result = get_weather.invoke(call.tool_calls[0])
    assert chat.bind_tools([get_weather]).invoke([HumanMessage(WEATHER), call, result]).text == RESULT


def embeddings() -> None:
    """Texts, not token ids of a model that is none of ours."""
    gateway = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
    made = OpenAIEmbeddings(**gateway, check_embedding_ctx_length=False)
    one, two = made.embed_documents(["one", "two"])
    assert one != two and made.embed_query("one") == one


if __name__ == "__main__":
    run(
        invoke,
        stream,
        async_stream,
        batch,
        bind_tools,
        forced_tool,
        with_structured_output,
        completions,
        responses,
        embeddings,
    )
