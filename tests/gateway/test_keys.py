"""API keys: who is who, and what a wrong one gets."""

from __future__ import annotations

import hashlib

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.keys import ANYBODY, ApiKeys

KEY = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


def keys() -> ApiKeys:
    return ApiKeys.from_lines(["# ours", "", f"alice:{hashlib.sha256(KEY.encode()).hexdigest()}", f"  {OTHER}\n"])


def test_names_and_unnamed_keys() -> None:
    assert keys().principal(f"Bearer {KEY}") == "alice"
    assert keys().principal(f"bearer  {OTHER} ") == f"key-{hashlib.sha256(OTHER.encode()).hexdigest()[:12]}"


@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xff"])
def test_others_are_refused(sent: str | None) -> None:
    with pytest.raises(ShardlineError) as caught:
        keys().principal(sent)
    assert caught.value.code == "unauthorized"
    assert KEY not in caught.value.message


def test_without_keys_everybody_is_one() -> None:
    assert ApiKeys.from_lines([]).principal(None) == ANYBODY
    assert ApiKeys.from_lines(["#"]).principal("Bearer whatever") == ANYBODY


def test_keys_are_not_kept() -> None:
    assert OTHER not in repr(vars(keys()))


@pytest.mark.parametrize(
    "lines",
    [["short"], [KEY, KEY], ["a:" + "0" * 64, "a:" + "1" * 64], ["a key with spaces in it"], ["anybody:" + "0" * 64]],
)
def test_bad_lines_are_refused_by_number(lines: list[str]) -> None:
    with pytest.raises(ShardlineError) as caught:
        ApiKeys.from_lines(lines)
    assert caught.value.code == "setting_invalid"
    assert f"line {len(lines)}" in caught.value.message
    assert lines[-1] not in caught.value.message
