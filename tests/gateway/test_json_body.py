"""Bodies from strangers: exact refusals, and duplicates found wherever they stand."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.gateway.anthropic_requests import MessagesBody
from shardline.gateway.json_body import decode_body, duplicate_key
from shardline.gateway.openai_requests import ChatBody, TextBody
from shardline.gateway.responses_requests import ResponsesBody


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    role: str


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    limit: int | None = None
    rate: float | None = None
    items: list[Inner] = []
    anything: msgspec.Raw = msgspec.Raw()


def refusal(body: bytes) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        decode_body(body, Outer)
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'"text"',
        b"{",
        b'{"model":"a"} x',
        b'\xef\xbb\xbf{"model":"a"}',
        b'{"model":"\xff"}',
        b'{"model":"\xed\xa0\xbd"}',
        b'{"model":"\\ud83d"}',
        b'{"model":"\\ude00"}',
        b'{"model":"a\\ud83dz"}',
        b'{"model":"a","rate":NaN}',
        b'{"model":"a","rate":Infinity}',
        b'{"model":"a","rate":-Infinity}',
        b'{"model":"a","anything":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"a","anything":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    error = refusal(body)
    assert error.code == "invalid_json"
    assert error.fault.status == 400
    assert len(error.message) < 500


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{}", "invalid_value", "model"),
        (b'{"model":null}', "invalid_value", "model"),
        (b'{"model":"a","limit":1.0}', "invalid_value", "limit"),
        (b'{"model":"a","limit":"5"}', "invalid_value", "limit"),
        (b'{"model":"a","limit":true}', "invalid_value", "limit"),
        (b'{"model":"a","limit":' + b"9" * 6000 + b"}", "invalid_value", "limit"),
        (b'{"model":"a","rate":1e999}', "invalid_value", "rate"),
        (b'{"model":"a","foo":1}', "unsupported_parameter", "foo"),
        (b'{"model":"a","items":{}}', "invalid_value", "items"),
        (b'{"model":"a","items":["x"]}', "invalid_value", "items"),
        (b'{"model":"a","items":[{"role":"u"},{}]}', "invalid_value", "items[1].role"),
        (b'{"model":"a","items":[{"role":"u","x":1}]}', "unsupported_parameter", "items[0].x"),
        (b'{"model":"a","model":"b"}', "invalid_json", "model"),
        (b'{"model":"a","\\u006dodel":"b"}', "invalid_json", "model"),
        (b'{"model":"a","items":[{"role":"u","role":"v"}]}', "invalid_json", "role"),
    ],
)
def test_the_field_is_named(body: bytes, code: str, param: str) -> None:
    error = refusal(body)
    assert (error.code, error.param) == (code, param)
    assert "`" not in error.message and "Expected" not in error.message


def test_a_long_unknown_name_is_cut() -> None:
    error = refusal(b'{"model":"a","' + b"x" * 100_000 + b'":1}')
    assert error.code == "unsupported_parameter"
    assert len(error.message) < 500 and error.param is not None and len(error.param) < 300


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"model":', "it ends too early"),
        (b"x", "invalid character (byte 0)"),
        (b'{"model" 5}', "expected ':' (byte 9)"),
        (b"\xef\xbb\xbf{}", "it begins with a byte order mark"),
        (b'{"model":"\xff"}', "invalid UTF-8 encoded string"),
    ],
)
def test_what_is_not_json_is_told_in_one_plain_sentence(body: bytes, why: str) -> None:
    message = refusal(body).message
    assert message.startswith(f"the body is not JSON in UTF-8: {why}") and "jSON" not in message


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        (b'{"model":"a","modell":"b"}', "model"),
        (b'{"model":"a","limits":1}', "limit"),
        (b'{"model":"a","items":[{"role":"x"},{"rol":"y"}]}', "items[1].role"),
        (b'{"model":"a","mood":1}', None),
        (b'{"model":"a","' + b"limit" * 50_000 + b'":1}', None),
    ],
)
def test_a_field_that_was_nearly_right_is_named(body: bytes, meant: str | None) -> None:
    error = refusal(body)
    assert error.code == "unsupported_parameter" and error.param is not None
    if meant is None:
        assert "did you mean" not in error.message and error.advice == error.fault.advice
    else:
        assert error.message.endswith(f"is not supported; did you mean '{meant}'?")
        assert error.advice == f"Write '{meant}', or leave the field out."


@pytest.mark.parametrize("kind", [ChatBody, TextBody, ResponsesBody, MessagesBody])
def test_fields_of_every_request_are_known_by_name(kind: type[msgspec.Struct]) -> None:
    body = {"model": "a", "temprature": 0, "messages": [], "prompt": "a", "max_tokens": 1, "input": "a"}
    sent = {name: value for name, value in body.items() if name in (*kind.__struct_fields__, "temprature")}
    with pytest.raises(ShardlineError, match="did you mean 'temperature'"):
        decode_body(msgspec.json.encode(sent), kind)


def test_json_words_not_python_words() -> None:
    assert "expected integer or null, got string" in refusal(b'{"model":"a","limit":"5"}').message


def test_sixteen_megabytes_of_escapes_take_linear_time() -> None:
    body = b'{"model":"' + b"\\n" * (8 << 20) + b'","limit":1}'
    began = time.process_time()
    assert decode_body(body, Outer).limit == 1
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (b'{"model":"a","anything":[1,2,3,4,5,6]}', False),
        (b'{"model":"a","anything":[1,2,3,4,5,6,7]}', True),
        (b'{"model":"a","anything":["x","y","z","u","v","w","q"]}', True),
        (b'{"model":"a","anything":[[],[],[],[],[],[],[]]}', True),
        (b'{"model":"a","anything":[-1.5e3,true,null,{},[],"",7]}', True),
        (b'{"model":"a,1,2,3,4,5,6,7,8,9,[,{,\\",1,2,3,4"}', False),
        (b'{"model":"a::::::::"}', False),
        (b'{"model":"a","anything":{"a":1,"b" : 2,"c":3}}', True),
        (b'{"model":"a","anything":{"a" : 1,"b\\n" :2}}', False),
    ],
)
def test_too_many_values_are_refused_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch, body: bytes, refused: bool
) -> None:
    """At most 9 values (the object, `a` and the list count) and 4 members here; what stands in a string is none."""
    monkeypatch.setattr("shardline.gateway.json_body.VALUES", 9)
    monkeypatch.setattr("shardline.gateway.json_body.MEMBERS", 4)
    if refused:
        assert refusal(body).code == "body_too_large"
    else:
        decode_body(body, Outer)


@pytest.mark.parametrize("escape", [r"\n", r"\"", r"\\", r"\u00e9", r"\"" + "x" * 70, r"\\" + "{" * 64 + '\\"}'])
@pytest.mark.parametrize("count", [1, 8191, 8192, 8193, 20_000])
def test_a_string_is_followed_to_its_end_however_many_escapes_it_has(escape: str, count: int) -> None:
    long = '"' + escape * count + '"'
    assert duplicate_key(f'{{"a":{long},"b":[{long}],{long}:1}}'.encode()) is None
    assert duplicate_key(f'{{"b":[{long},{{"a":1}}],"a":{long},"a":1}}'.encode()) == "a"


@pytest.mark.parametrize("end", ["", "\\", '\\"', "\\u00", "a" * 100])
def test_counting_a_body_that_breaks_off_in_a_string(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("shardline.gateway.json_body.VALUES", 3)
    assert refusal(b'{"model":"' + b",,," + end.encode()).code == "invalid_json"


def _json() -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", "{", '"', ":", "\\", "ü", "a b"])
    leaves = st.none() | st.integers(-5, 5) | st.sampled_from(['"', "{}", 'a":', "\\", "", "x:y"])
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(keys, inner), max_size=3).map(tuple)
    )


def _text(value: Any) -> str:
    """JSON text where tuples of pairs are objects, so that an object may hold a key twice."""
    if isinstance(value, tuple):
        return "{" + " , ".join(f"{json.dumps(k)} :{_text(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value)


@given(_json())
def test_duplicates_are_found_exactly(value: Any) -> None:
    text = _text(value)
    doubled: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        doubled.extend(name for name in names if names.count(name) > 1)
        return dict(pairs)

    json.loads(text, object_pairs_hook=note)
    found = duplicate_key(text.encode())
    assert (found is None) == (not doubled)
    assert found is None or found in doubled
