"""Canonical JSON: the vectors of RFC 8785 that the subset covers, and refusals of everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.wire.canonical import DEPTH_LIMIT, INTEGER_LIMIT, NotCanonical, decode, encode

# RFC 8785, sections 3.2.2 and 3.2.4, without the numbers that are no integers.
RFC_STRING = "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/"
RFC_BYTES = bytes.fromhex(
    "7b 22 6c 69 74 65 72 61 6c 73 22 3a 5b 6e 75 6c 6c 2c 74 72 75 65 2c 66 61 6c 73 65 5d 2c"
    "22 73 74 72 69 6e 67 22 3a 22 e2 82 ac 24 5c 75 30 30 30 66 5c 6e 41 27 42 5c 22 5c 5c 5c 5c 5c 22 2f 22 7d"
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-INTEGER_LIMIT, INTEGER_LIMIT)
    | st.text(st.characters(max_codepoint=0x24F, exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(max_codepoint=127)), inner),
    max_leaves=20,
)


def test_strings_and_literals_of_the_rfc() -> None:
    assert encode({"string": RFC_STRING, "literals": [None, True, False]}) == RFC_BYTES
    assert decode(RFC_BYTES) == {"string": RFC_STRING, "literals": [None, True, False]}


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        (0, b"0"),
        (INTEGER_LIMIT, b"9007199254740991"),
        (-INTEGER_LIMIT, b"-9007199254740991"),
        ("\u0080\u00f6\u05d3\U0001f602", '"\u0080\u00f6\u05d3\U0001f602"'.encode()),
        ("\b\t\n\f\r\x0b\x1f\x7f</script>", b'"\\b\\t\\n\\f\\r\\u000b\\u001f\x7f</script>"'),
        ({"\r": 1, "1": 2, "": 3, "<": 4, "a": 5, "B": 6}, b'{"":3,"\\r":1,"1":2,"<":4,"B":6,"a":5}'),
        ([], b"[]"),
        ({}, b"{}"),
    ],
)
def test_forms(value: Any, raw: bytes) -> None:
    assert encode(value) == raw
    assert decode(raw) == value


@given(values)
@settings(max_examples=100, deadline=None)
def test_what_is_encoded_is_decoded_and_is_one_sequence_of_bytes(value: Any) -> None:
    try:
        raw = encode(value)
    except NotCanonical:
        return
    assert decode(raw) == value
    assert raw == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" {}",
        b"{}\n",
        b'{"a": 1}',
        b'{"b":1,"a":2}',
        b'{"a":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"x":{"a":1,"a":1}}',
        b"-0",
        b"01",
        b"1.0",
        b"1e2",
        b"1.5",
        b"9007199254740992",
        b"-9007199254740992",
        b"9" * 400,
        b"9" * 5000,
        b"1e400",
        b"NaN",
        b"Infinity",
        b'"\\u0041"',
        b'"\\/"',
        b'"\\u000F"',
        b'"\xff"',
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        '"e\u0301"'.encode(),
        '{"\u00e9":1}'.encode(),
        b"[" * 100_000 + b"]" * 100_000,
        b"[" * (DEPTH_LIMIT + 2) + b"]" * (DEPTH_LIMIT + 2),
        b'{"a":1}{"b":2}',
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_other_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(NotCanonical):
        decode(raw)


@pytest.mark.parametrize("value", [1.0, float("nan"), INTEGER_LIMIT + 1, {"\u00e9": 1}, {1: 2}, "e\u0301", "\ud800"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(NotCanonical):
        encode(value)
