"""Which form of an answer a request asks for, and what is refused before any Node hears of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.openai_requests import chat_request, text_request
from shardline.gateway.structured import in_lark
from shardline.wire.messages import GRAMMAR_BYTES, Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": 1e3}}}


def asked(**fields: Any) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return chat_request(json.dumps(body).encode()).asked.sampling.grammar


def asked_format(form: Any) -> Grammar | None:
    return asked(response_format=form)


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_no_form_is_none(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None
    assert asked(**fields, grammar="", regex=None) is None


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text", "schema": SCHEMA},
        {"type": "text", "json_schema": {"schema": SCHEMA}},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA},
    ],
    ids=json.dumps,
)
def test_a_schema_at_a_type_that_has_none_is_not_passed_over(form: Any) -> None:
    with pytest.raises(ShardlineError) as caught:
        asked_format(form)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "response_format")
    assert form["type"] in caught.value.message


def test_a_schema_goes_on_as_it_was_written() -> None:
    """The order of its members says in which order they come in the answer."""
    made = asked_format({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}})
    assert made == Grammar(kind="json_schema", text=json.dumps(SCHEMA), field="response_format")
    for strict in (False, None):
        again = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": strict, "description": "d"}}
        assert asked_format(again) == made


def test_json_object_is_any_object_or_what_its_schema_says() -> None:
    made = asked_format({"type": "json_object"})
    assert made is not None and json.loads(made.text) == {"type": "object"}
    made = asked_format({"type": "json_object", "schema": SCHEMA})
    assert made is not None and json.loads(made.text) == SCHEMA


def test_grammar_and_regex_on_both_endpoints() -> None:
    assert asked(grammar='root ::= "a"') == Grammar(kind="grammar", text='root ::= "a"', field="grammar")
    body = json.dumps({"model": "m", "prompt": "x", "regex": "a+"}).encode()
    assert text_request(body).asked.sampling.grammar == Grammar(kind="regex", text="a+", field="regex")
    body = json.dumps({"model": "m", "prompt": "x", "response_format": {"type": "json_object"}}).encode()
    assert text_request(body).asked.sampling.grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"grammar": "start: /a/", "regex": "a"}, "regex"),
        ({"grammar": "x" * (GRAMMAR_BYTES + 1)}, "grammar"),
        ({"grammar": 1}, "grammar"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ShardlineError) as refused:
        asked(**fields)
    assert (refused.value.code, refused.value.param) == ("invalid_value", param)


def test_a_schema_in_a_grammar_is_compiled_as_we_say() -> None:
    made = json.loads(in_lark({**SCHEMA, "x-guidance": {"lenient": True}}).removeprefix("%json "))
    assert made.pop("x-guidance") == {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
    assert made == SCHEMA
    assert json.loads(in_lark(json.dumps(SCHEMA))[6:]) == json.loads(in_lark(SCHEMA)[6:])
