"""Bencoding: vectors of BEP 3, one encoding a value, refusal of everything that is not it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.formats.bencode import decode, encode

values = st.recursive(
    st.integers(-(10**18), 10**18) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.binary(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        (b"spam", b"4:spam"),
        (b"", b"0:"),
        (3, b"i3e"),
        (-3, b"i-3e"),
        (0, b"i0e"),
        ([b"spam", b"eggs"], b"l4:spam4:eggse"),
        ({b"cow": b"moo", b"spam": b"eggs"}, b"d3:cow3:moo4:spam4:eggse"),
        ({b"spam": [b"a", b"b"], b"": 1}, b"d0:i1e4:spaml1:a1:bee"),
    ],
)
def test_vectors(value: Any, raw: bytes) -> None:
    assert encode(value) == raw
    assert decode(raw) == value


@given(values)
@settings(max_examples=100, deadline=None)
def test_round_trip(value: Any) -> None:
    assert decode(encode(value)) == value


@given(st.binary(max_size=40) | st.lists(st.sampled_from([b"d", b"l", b"e", b"i", b"1:", b"0", b"a"])).map(b"".join))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_value_with_this_encoding_or_refused(raw: bytes) -> None:
    try:
        value = decode(raw)
    except ShardlineError as error:
        assert error.code == "invalid_value"
    else:
        assert encode(value) == raw


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"i03e",
        b"i-0e",
        b"i1",
        b"ie",
        b"i99999999999999999999999e",
        b"04:spam",
        b"5:spam",
        b"999999999999:x",
        b"9999999999999999999999:x",
        b"-1:x",
        b"l",
        b"d3:cow",
        b"d3:cow3:moo",
        b"di1e3:mooe",
        b"d1:b1:x1:a1:xe",
        b"d1:a1:x1:a1:xe",
        b"i1ei2e",
        b"l" * 100_000,
        b"l" * 100 + b"e" * 100,
        b"x",
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_refused(raw: bytes) -> None:
    with pytest.raises(ShardlineError, match="not bencoded"):
        decode(raw)
