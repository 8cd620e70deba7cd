"""`openai` for Python, as it is, against a route of two Nodes in real processes."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.route import CALL, CITY, GREETING, RESULT, Route

CLIENT = "openai-python"
HI: Any = [{"role": "user", "content": "Hi"}]
ASKED: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
FLAT_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}


class City(pydantic.BaseModel):
    city: str
    degrees: int


def version(client: str) -> str:
    return importlib.metadata.version("openai")


@pytest.fixture
def client(route: Route) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{route.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def test_models(client: openai.OpenAI, route: Route) -> None:
    assert [model.id for model in client.models.list()] == [route.model]
    assert client.models.retrieve(route.model).id == route.model


def test_chat(client: openai.OpenAI, route: Route) -> None:
    answer = client.chat.completions.create(model=route.model, messages=HI, temperature=0)
    assert answer.choices[0].message.content == GREETING
    assert answer.usage is not None and answer.usage.total_tokens > answer.usage.completion_tokens > 0


def test_stream(client: openai.OpenAI, route: Route) -> None:
    text, usage = "", []
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model=route.model, messages=HI, temperature=0, stream=True, stream_options=options
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage += [chunk.usage] if chunk.usage else []
    assert text == GREETING and len(usage) == 1


def test_stream_helper(client: openai.OpenAI, route: Route) -> None:
    with client.chat.completions.stream(model=route.model, messages=HI, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == GREETING
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


def test_n_and_logprobs(client: openai.OpenAI, route: Route) -> None:
    answer = client.chat.completions.create(
        model=route.model, messages=HI, temperature=0, n=2, logprobs=True, top_logprobs=2, max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "length" and choice.logprobs is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content or []] == [2] * 4


def test_completions(client: openai.OpenAI, route: Route) -> None:
    answer = client.completions.create(model=route.model, prompt="Hi", temperature=0)
    assert answer.choices[0].text == GREETING
    streamed = client.completions.create(model=route.model, prompt="Hi", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == GREETING


def test_responses(client: openai.OpenAI, route: Route) -> None:
    answer = client.responses.create(model=route.model, input="Hi", temperature=0)
    assert (answer.output_text, answer.status) == (GREETING, "completed")
    with client.responses.stream(model=route.model, input="Hi", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == GREETING


def test_tools_loop(client: openai.OpenAI, route: Route) -> None:
    messages = list(ASKED)
    answer = client.chat.completions.create(model=route.model, messages=messages, tools=[TOOL], temperature=0)
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (CALL["name"], CALL["arguments"])
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    again = client.chat.completions.create(model=route.model, messages=messages, tools=[TOOL], temperature=0)
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == (RESULT, "stop")


def test_tools_loop_streamed(client: openai.OpenAI, route: Route) -> None:
    """What the client's own accumulator made of the deltas is sent back as it is."""
    messages = list(ASKED)
    with client.chat.completions.stream(model=route.model, messages=messages, tools=[TOOL], temperature=0) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    assert call.function.parsed_arguments == CALL["arguments"]
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    with client.chat.completions.stream(model=route.model, messages=messages, tools=[TOOL], temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == RESULT


def test_responses_tools_loop(client: openai.OpenAI, route: Route) -> None:
    answer = client.responses.create(model=route.model, input=ASKED, tools=[FLAT_TOOL], temperature=0)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments) == CALL["arguments"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    again = client.responses.create(
        model=route.model, input=[*ASKED, *answer.output, result], tools=[FLAT_TOOL], temperature=0
    )
    assert again.output_text == RESULT


def test_required_tool(client: openai.OpenAI, route: Route) -> None:
    pytest.importorskip("llguidance")
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model=route.model, messages=ASKED, tools=[TOOL], tool_choice=choice, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and json.loads(call.function.arguments) == CALL["arguments"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, at each parsed message it sends
def test_structured_output(client: openai.OpenAI, route: Route) -> None:
    """`.parse` of chat and of responses; its answer goes back as the turn that it is."""
    pytest.importorskip("llguidance")
    asked: Any = [{"role": "user", "content": "Oslo as JSON"}]
    answer = client.chat.completions.parse(model=route.model, messages=asked, response_format=City, temperature=0)
    assert answer.choices[0].message.parsed == City.model_validate(CITY)
    follow: Any = [*asked, answer.choices[0].message, {"role": "user", "content": "Again"}]
    again = client.chat.completions.parse(model=route.model, messages=follow, response_format=City, temperature=0)
    assert again.choices[0].message.parsed == City.model_validate(CITY)
    response = client.responses.parse(model=route.model, input="Oslo as JSON", text_format=City, temperature=0)
    assert response.output_parsed == City.model_validate(CITY)
    turns: Any = [{"role": "user", "content": "Oslo as JSON"}, *response.output, {"role": "user", "content": "Again"}]
    response = client.responses.parse(model=route.model, input=turns, text_format=City, temperature=0)
    assert response.output_parsed == City.model_validate(CITY)


def test_parsed_tool(client: openai.OpenAI, route: Route) -> None:
    tool: Any = openai.pydantic_function_tool(City, name="get_weather", description="Weather of a city")
    answer = client.chat.completions.parse(model=route.model, messages=ASKED, tools=[TOOL, _other(tool)], temperature=0)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == CALL["arguments"]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    again = client.chat.completions.parse(
        model=route.model, messages=[*ASKED, answer.choices[0].message, result], tools=[TOOL], temperature=0
    )
    assert again.choices[0].message.content == RESULT


def _other(tool: Any) -> Any:
    return {**tool, "function": {**tool["function"], "name": "other"}}


def test_embeddings(client: openai.OpenAI, route: Route) -> None:
    answer = client.embeddings.create(model=route.model, input=["one", "two"])
    assert [item.index for item in answer.data] == [0, 1] and answer.usage.prompt_tokens > 0
    assert len(answer.data[0].embedding) == len(answer.data[1].embedding) > 0
    assert answer.data[0].embedding != answer.data[1].embedding


def test_errors(client: openai.OpenAI, route: Route) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=route.model, messages=HI, temperature=3)
    assert refused.value.param == "temperature"


async def test_async_stream(route: Route) -> None:
    async with openai.AsyncOpenAI(base_url=f"{route.url}/v1", api_key="none", timeout=20) as client:
        stream = await client.chat.completions.create(model=route.model, messages=HI, temperature=0, stream=True)
        text = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    assert "".join(text) == GREETING
