"""The catalogue is whole: every code is used, every use is in it, and errors survive the way over the wire."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardline
from shardline.errors import CATALOGUE, ShardlineError, from_body

SOURCE = Path(shardline.__file__).parent


def used_codes() -> dict[str, list[str]]:
    """Code -> files whose text has it as a word in quotes."""
    found: dict[str, list[str]] = {code: [] for code in CATALOGUE}
    for path in SOURCE.rglob("*.py"):
        if path.name != "errors.py":
            for word in set(re.findall(r'"([a-z]+(?:_[a-z]+)*)"', path.read_text(encoding="utf-8"))) & set(found):
                found[word].append(path.name)
    return found


def test_every_code_is_raised_somewhere() -> None:
    assert [code for code, files in used_codes().items() if not files] == []


def test_every_code_that_is_raised_is_in_the_catalogue() -> None:
    for path in SOURCE.rglob("*.py"):
        for code in re.findall(r'ShardlineError\(\s*"(\w+)"', path.read_text(encoding="utf-8")):
            assert code in CATALOGUE, f"{path.name}: {code}"


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_row_is_whole(code: str) -> None:
    fault = CATALOGUE[code]
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)
    assert 400 <= fault.status <= 599
    assert fault.type.endswith("_error")
    assert len(fault.advice) > 10 and fault.advice[0].isupper()
    body = ShardlineError(code, "what happened", param="field", node="n-1").body()
    assert list(body)[:4] == ["message", "type", "param", "code"]
    assert (body["code"], body["param"], body["node"]) == (code, "field", "n-1")


def test_an_unknown_code_cannot_be_raised() -> None:
    with pytest.raises(KeyError):
        ShardlineError("no_such_code", "x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


@given(
    st.sampled_from(sorted(CATALOGUE)),
    st.text(max_size=50),
    st.none() | st.text(max_size=10),
    st.dictionaries(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), json_values, max_size=3),
)
def test_an_error_survives_the_wire(code: str, message: str, param: str | None, details: dict[str, object]) -> None:
    ours = {"message", "type", "param", "code", "retryable", "advice"}
    details = {key: value for key, value in details.items() if key not in ours}
    error = ShardlineError(code, message, param=param, **details)
    back = from_body(json.loads(json.dumps(error.body())))
    assert (back.code, back.message, back.param, back.details) == (code, message, param, details)


@given(
    json_values | st.dictionaries(st.sampled_from(["message", "code", "param", "self", "a-b", "details"]), json_values)
)
def test_whatever_the_other_side_sends_becomes_an_error(sent: object) -> None:
    error = from_body(sent)
    assert error.code in CATALOGUE
    json.dumps(error.body())


def test_a_code_of_a_newer_version_keeps_its_message() -> None:
    back = from_body({"message": "the moon is in the way", "code": "moon"}, fallback="node_lost")
    assert (back.code, back.message) == ("node_lost", "the moon is in the way")
