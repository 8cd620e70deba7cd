"""Marks in annotations: what they check, and what they show."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.request_fields import (
    NO_EFFECT,
    NOT_SENT,
    check_nothing_asked,
    check_ranges,
    marks,
    neutral,
    number_text,
    only,
    texts_or_ids,
    within,
)


class Body(msgspec.Struct):
    half: Annotated[float | None, within(0, 1, above=True)] = None
    count: Annotated[int | None, within(-1, (1 << 63) - 1)] = None
    tier: Annotated[msgspec.Raw, only('"auto"', "[]", '{"type":"disabled"}')] = NOT_SENT
    audio: Annotated[msgspec.Raw, only()] = NOT_SENT
    user: Annotated[str | None, NO_EFFECT] = None
    store: Annotated[bool | None, neutral(False, None)] = None
    plain: str = ""


def read(body: bytes) -> Body:
    return msgspec.json.decode(body, type=Body)


@pytest.mark.parametrize("value", [1, 0.5, 5e-324])
def test_numbers_in_range(value: float) -> None:
    check_ranges(Body(half=value))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (Body(half=0), "'half' must be above 0 and at most 1, not 0"),
        (Body(half=1.5), "'half' must be above 0 and at most 1, not 1.5"),
        (Body(count=-2), "'count' must be at least -1, not -2"),
        (Body(count=1 << 70), "'count' must be at most 9223372036854775807, not a larger number"),
    ],
)
def test_numbers_out_of_range(body: Body, words: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        check_ranges(body)
    assert (caught.value.code, caught.value.message) == ("invalid_value", words)
    assert caught.value.param == words.split("'")[1]


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"tier":null}', b'{"tier":"auto"}', b'{"tier": [ ]}', b'{"tier": { "type" : "disabled" },"audio":null}'],
)
def test_what_asks_for_nothing(body: bytes) -> None:
    check_nothing_asked(read(body))


@pytest.mark.parametrize(
    "value",
    [b'"flex"', b'"au to"', b"0", b"false", b'""', b"{}", b'[""]', b'"' + b"a" * 300 + b'"', b"[" * 150 + b"]" * 150],
)
def test_what_asks_for_something(value: bytes) -> None:
    with pytest.raises(ShardlineError) as caught:
        check_nothing_asked(read(b'{"tier":' + value + b"}"), {"tier": "because"}, at="messages[0]")
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "messages[0].tier")
    assert caught.value.message == "'messages[0].tier' is not supported: because"


def test_words_of_a_refusal_without_a_reason() -> None:
    for field, words in (
        ("tier", '\'tier\' is not supported: only "auto" or [] or {"type":"disabled"} is'),
        ("audio", "'audio' is not supported"),
    ):
        with pytest.raises(ShardlineError) as caught:
            check_nothing_asked(read(b'{"%b":5}' % field.encode()))
        assert caught.value.message == words


def test_marks_of_a_struct() -> None:
    found = marks(Body)
    assert found["audio"] == {"only": ()} and found["user"] == {"no_effect": True} and found["plain"] == {}
    assert found["store"] == {"neutral": True}


def test_what_a_schema_shows() -> None:
    shown = msgspec.json.schema(Body)["$defs"]["Body"]["properties"]
    assert (shown["half"]["exclusiveMinimum"], shown["half"]["maximum"]) == (0, 1)
    assert shown["tier"]["enum"] == [None, "auto", [], {"type": "disabled"}]
    assert shown["store"]["enum"] == [False, None]


def test_texts_or_ids() -> None:
    keywords: Any = texts_or_ids(3, least=1).extra_json_schema
    text, ids, texts, lists = keywords["oneOf"]
    assert (text["minLength"], texts["maxItems"], lists["items"]) == (1, 3, ids)


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5"), (0.25, "0.25"), (1 << 70, "a larger number"), (-1e300, "a smaller number")]
)
def test_number_text(value: float, text: str) -> None:
    assert number_text(value) == text
