"""Tools and thinking over a whole route, with the official client: calls, half calls, results, and what is no call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.support.api_cluster import CHAT, ApiCluster, Json, api_cluster

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<tool_call></tool_call><|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<call {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}<|end|>"
    "{% endfor %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
)
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"asks for the {name}",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
ASKED: list[Any] = [{"role": "user", "content": "Oslo?"}]


def call(name: str, city: str = "Oslo") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def pieces(text: str, size: int = 5) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@asynccontextmanager
async def saying(folder: Path, text: str, **more: Any) -> AsyncIterator[tuple[ApiCluster, AsyncOpenAI]]:
    script = {"answer": pieces(text), "chat_template": TEMPLATE, **more}
    async with (
        api_cluster(folder, script=script) as cluster,
        AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield cluster, client


async def streamed(client: AsyncOpenAI, **fields: Any) -> Json:
    """What a client has that collects deltas by index."""
    out: Json = {"content": "", "reasoning": "", "calls": {}, "reasons": []}
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            delta = choice.delta
            out["content"] += delta.content or ""
            out["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for piece in delta.tool_calls or []:
                one = out["calls"].setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
                one["id"] += piece.id or ""
                one["name"] += piece.function.name or "" if piece.function else ""
                one["arguments"] += piece.function.arguments or "" if piece.function else ""
            if choice.finish_reason:
                out["reasons"].append(choice.finish_reason)
    return out


def summary(streamed_answer: Json) -> Json:
    calls = [(one["name"], json.loads(one["arguments"])) for _, one in sorted(streamed_answer["calls"].items())]
    return {"content": streamed_answer["content"], "calls": calls, "reason": streamed_answer["reasons"]}


async def test_two_calls_at_once_and_their_results(tmp_path: Path) -> None:
    async with saying(tmp_path, "I look.\n" + call("weather") + "\n" + call("time", "Rome")) as (cluster, client):
        fields = {"model": cluster.model, "messages": ASKED, "tools": TOOLS, "temperature": 0}
        answer = (await client.chat.completions.create(**fields)).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", "I look.")
        made = answer.message.tool_calls or []
        assert [(c.function.name, json.loads(c.function.arguments)) for c in made] == [  # type: ignore[union-attr]
            ("weather", {"city": "Oslo"}),
            ("time", {"city": "Rome"}),
        ]
        assert len({c.id for c in made}) == 2 and all(c.type == "function" and len(c.id) == 9 for c in made)
        stream = await streamed(client, **fields)
        assert summary(stream) == {
            "content": "I look.",
            "calls": [("weather", {"city": "Oslo"}), ("time", {"city": "Rome"})],
            "reason": ["tool_calls"],
        }
        assert sorted(stream["calls"]) == [0, 1]
        results = [{"role": "tool", "tool_call_id": c.id, "content": "4"} for c in made]
        again = await client.chat.completions.create(
            **{**fields, "messages": [*ASKED, answer.message.model_dump(exclude_none=True), *results]}
        )
        assert again.choices[0].finish_reason == "tool_calls"
        assert again.usage is not None and again.usage.prompt_tokens > 100


@pytest.mark.parametrize(
    ("text", "limit", "reason"),
    [
        ('<tool_call>{"name":"weather","argum', 100, "stop"),
        (call("weather"), 5, "length"),
        (call("nothing"), 100, "stop"),
        ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', 100, "stop"),
    ],
)
async def test_what_is_no_whole_call_is_content(tmp_path: Path, text: str, limit: int, reason: str) -> None:
    async with saying(tmp_path, text) as (cluster, client):
        fields = {"model": cluster.model, "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": limit}
        answer = (await client.chat.completions.create(**fields)).choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == (reason, None)
        assert answer.message.content == "".join(pieces(text)[:limit])
        assert summary(await streamed(client, **fields)) == {
            "content": answer.message.content,
            "calls": [],
            "reason": [reason],
        }


async def test_tools_that_must_not_be_called_are_not_read(tmp_path: Path) -> None:
    async with saying(tmp_path, call("weather")) as (cluster, client):
        for choice in ({"tools": TOOLS, "tool_choice": "none"}, {}):
            answer = await client.chat.completions.create(model=cluster.model, messages=ASKED, **choice)  # type: ignore[call-overload]
            assert answer.choices[0].message.content == call("weather")
            assert answer.choices[0].finish_reason == "stop"


async def test_a_model_that_would_rather_talk_must_call(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    named = {"type": "function", "function": {"name": "time"}}
    async with saying(tmp_path, "No, thank you.", sharpness=1.5, eos=True) as (cluster, client):
        for choice, names in (("required", {"weather", "time"}), (named, {"time"})):
            fields = {"model": cluster.model, "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "seed": 3}
            fields |= {"max_tokens": 1000, "parallel_tool_calls": False, "temperature": 0}
            answer = (await client.chat.completions.create(**fields)).choices[0]
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            (made,) = answer.message.tool_calls or []
            assert made.function.name in names  # type: ignore[union-attr]
            assert json.loads(made.function.arguments)["city"] in ("Oslo", "Rome")  # type: ignore[union-attr]
            stream = summary(await streamed(client, **fields))
            assert [stream["calls"][0][0], stream["reason"]] == [made.function.name, ["tool_calls"]]  # type: ignore[union-attr]


async def test_a_schema_of_a_tool_that_cannot_be_kept_to(tmp_path: Path) -> None:
    """Where it is only offered it harms nothing; where a call must be made it is refused by name."""
    pytest.importorskip("llguidance")
    odd = {"type": "object", "properties": {"p": {"type": "string", "pattern": "^(?!x)a$"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    async with saying(tmp_path, call("weather")) as (cluster, client):
        answer = await client.chat.completions.create(model=cluster.model, messages=ASKED, tools=tools)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "tool_calls"
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(
                model=cluster.model,
                messages=ASKED,
                tools=tools,
                tool_choice="required",  # type: ignore[call-overload]
            )
        assert (refused.value.code, refused.value.param) == ("grammar_invalid", "tool_choice")
        assert "look-around" in str(refused.value)


async def test_thinking_is_split_off_and_counted(tmp_path: Path) -> None:
    async with saying(tmp_path, "Why not.\n</think>\n\nYes.") as (cluster, client):
        body = {"model": cluster.model, "messages": ASKED, "chat_template_kwargs": {"enable_thinking": True}}
        answer = (await cluster.http.post(cluster.url + CHAT, json=body)).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Why not.", "Yes.")
        assert (
            0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]
        )
        stream = await streamed(
            client, model=cluster.model, messages=ASKED, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        )
        assert (stream["reasoning"], stream["content"], stream["reasons"]) == ("Why not.", "Yes.", ["stop"])
        inline = (await cluster.http.post(cluster.url + CHAT, json={**body, "reasoning_format": "none"})).json()
        assert inline["choices"][0]["message"]["content"] == "Why not.\n</think>\n\nYes."
        short = (await cluster.http.post(cluster.url + CHAT, json={**body, "max_tokens": 1})).json()
        (choice,) = short["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
        assert choice["message"]["reasoning_content"] == "Why n"


async def test_a_schema_behind_the_thinking(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    async with saying(tmp_path, "Hm, no JSON.</think>None") as (cluster, _):
        body = {"model": cluster.model, "messages": ASKED, "response_format": form, "temperature": 0}
        answer = (
            await cluster.http.post(
                cluster.url + CHAT, json={**body, "chat_template_kwargs": {"enable_thinking": True}}
            )
        ).json()
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm, no JSON." and json.loads(message["content"]) in (1, 2)


async def test_a_model_whose_template_knows_no_tools(tmp_path: Path) -> None:
    async with api_cluster(tmp_path) as cluster:
        body = {"model": cluster.model, "messages": ASKED}
        for fields, param in (({"tools": TOOLS}, "tools"), ({"reasoning_effort": "low"}, "reasoning_effort")):
            answer = await cluster.http.post(cluster.url + CHAT, json={**body, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)


async def test_logprobs_beside_calls(tmp_path: Path) -> None:
    async with saying(tmp_path, "I look.\n" + call("weather")) as (cluster, client):
        fields = {"model": cluster.model, "messages": ASKED, "tools": TOOLS, "logprobs": True, "temperature": 0}
        answer = (await client.chat.completions.create(**fields)).choices[0]
        whole = [item.token for item in (answer.logprobs and answer.logprobs.content) or []]
        assert "".join(whole) == "I look.\n" + call("weather")
        seen: list[str] = []
        async for chunk in await client.chat.completions.create(stream=True, **fields):
            for choice in chunk.choices:
                seen += [item.token for item in (choice.logprobs and choice.logprobs.content) or []]
        assert seen == whole
