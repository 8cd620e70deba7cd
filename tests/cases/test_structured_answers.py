"""Answers that must have a form, over whole routes: kept to, or refused with a reason before the first token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_cluster import CHAT, Json, api_cluster

pytest.importorskip("llguidance")
TALKER: Json = {"answer": ["Sure", "! ", "Here ", "it ", "is"], "sharpness": 1.5, "eos": True}
"""A model that would rather talk than write JSON; its other choices are as good as even."""
SMALL = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "level": {"enum": ["low", "high"]}},
    "required": ["ok", "level"],
    "additionalProperties": False,
}
UNKEEPABLE: list[tuple[Any, str]] = [
    ({"type": "string", "pattern": "^(?!x)a$"}, "look-around"),
    ({"not": {"type": "null"}}, "not"),
    ({"type": "nope"}, "nope"),
]


def schema(value: Any, **more: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value, **more}}}


async def test_schema_grammar_and_regex_on_a_route_of_two(tmp_path: Path) -> None:
    async with api_cluster(tmp_path, script=TALKER) as cluster:
        for extra in ({}, {"temperature": 1.0, "seed": 4}, {"n": 3, "seed": 1, "temperature": 1}):
            answer = await cluster.answer(max_tokens=200, **schema(SMALL), **extra)
            for choice in answer["choices"]:
                value = json.loads(choice["text"])
                assert choice["finish_reason"] == "stop"
                assert set(value) == {"ok", "level"} and value["level"] in ("low", "high")
        stream = await cluster.read(max_tokens=200, **schema(SMALL))
        assert set(json.loads(stream.text)) == {"ok", "level"}
        assert (await cluster.text(regex="[a-c]{4}-[0-9]", max_tokens=50))[4] == "-"
        assert await cluster.text(grammar='root ::= "yes" | "no"', max_tokens=9) in ("yes", "no")
        assert await cluster.text(grammar='start: "yes" | "no"', max_tokens=9) in ("yes", "no")
        body = {"model": cluster.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
        chat = await cluster.http.post(cluster.url + CHAT, json={**body, **schema(SMALL, strict=True)})
        assert set(json.loads(chat.json()["choices"][0]["message"]["content"])) == {"ok", "level"}


async def test_an_answer_that_is_valid_by_itself_is_left_alone(tmp_path: Path) -> None:
    said = ['{"ok"', ": ", "true", ', "level": ', '"low"', "}"]
    async with api_cluster(tmp_path, script={"answer": said}) as cluster:
        answer = await cluster.answer(**schema(SMALL), logprobs=0)
        (choice,) = answer["choices"]
        assert choice["text"] == "".join(said)
        assert choice["logprobs"]["tokens"] == said
        assert answer["usage"]["completion_tokens"] == len(said) + 1


async def test_what_cannot_be_kept_to_is_a_400_with_the_reason_streamed_and_not(tmp_path: Path) -> None:
    async with api_cluster(tmp_path, script=TALKER) as cluster:
        for value, reason in UNKEEPABLE:
            for stream in (False, True):
                answer = await cluster.ask(stream=stream, **schema(value))
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (
                    400,
                    "grammar_invalid",
                    "response_format",
                )
                assert reason in error["message"] and not error["retryable"]
        for field, text in (("grammar", "start: nothing"), ("regex", "(")):
            error = (await cluster.ask(**{field: text})).json()["error"]
            assert (error["code"], error["param"]) == ("grammar_invalid", field)
        await cluster.until_free()
        assert await cluster.text(max_tokens=1) == "Sure"


async def test_json_that_is_cut_by_the_limit_says_length(tmp_path: Path) -> None:
    async with api_cluster(tmp_path, script=TALKER) as cluster:
        (choice,) = (await cluster.answer(max_tokens=5, **schema(SMALL)))["choices"]
        assert choice["finish_reason"] == "length" and choice["text"].startswith("{")


async def test_two_thousand_properties_and_a_schema_that_names_itself(tmp_path: Path) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    async with api_cluster(tmp_path, script=TALKER) as cluster:
        for value, first in ((many, "{"), (tree, "["), ({"type": "string", "pattern": "abc"}, '"')):
            answer = await cluster.answer(max_tokens=8, **schema(value))
            assert answer["choices"][0]["text"].startswith(first)


async def test_a_follow_up_that_begins_with_what_is_kept_keeps_to_its_grammar(tmp_path: Path) -> None:
    """The sampler of a forked cache has seen the prompt, and nothing of the answer."""
    prompt = "a prompt that is long enough for a whole block of tokens, and then some more " * 2
    async with api_cluster(tmp_path, script=TALKER) as cluster:
        first = await cluster.answer(prompt, max_tokens=200, **schema(SMALL))
        again = await cluster.answer(prompt, max_tokens=200, **schema(SMALL))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert json.loads(again["choices"][0]["text"])


async def test_in_a_worker_process_too(tmp_path: Path) -> None:
    async with api_cluster(tmp_path, script=TALKER, inline=False) as cluster:
        assert await cluster.text(regex="[0-9]{3}", max_tokens=9)
        error = (await cluster.ask(**schema({"type": "nope"}))).json()["error"]
        assert (error["code"], error["param"]) == ("grammar_invalid", "response_format")
