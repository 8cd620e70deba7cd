"""Digests of prompts: the same beginnings are named alike, by one key only."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.wire.prefix import BLOCK, BLOCKS, Prefix, blocks_in, check_prefix, common_blocks, digests_of, salt_of

SALT = salt_of("anyone")


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def test_a_digest_is_of_the_salt_the_digest_before_and_the_ids() -> None:
    ids = packed(list(range(70)))
    first = hashlib.sha256(SALT + bytes(16) + ids[:128]).digest()[:16]
    second = hashlib.sha256(SALT + first + ids[128:256]).digest()[:16]
    assert digests_of(SALT, ids) == first + second
    assert digests_of(SALT, packed(list(range(31)))) == b""


def test_one_key_never_finds_what_another_left() -> None:
    ids = packed(list(range(64)))
    mine, yours = (digests_of(salt_of(key), ids) for key in ("key-a", "key-b"))
    assert common_blocks(mine, yours) == 0
    assert len(SALT) == 16 and salt_of("anyone") == SALT


def test_no_more_blocks_than_the_bound() -> None:
    assert blocks_in(digests_of(SALT, bytes(4 * BLOCK * (BLOCKS + 3)))) == BLOCKS


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_common_blocks_are_those_of_the_ids(common: int, mine: int, yours: int) -> None:
    shared = [7] * (BLOCK * common)
    a, b = ([*shared, *[own] * (BLOCK * count)] for own, count in ((1, mine), (2, yours)))
    assert common_blocks(digests_of(SALT, packed(a)), digests_of(SALT, packed(b))) == common


def test_a_block_that_differs_in_one_token_ends_what_is_common() -> None:
    ids = list(range(BLOCK * 6))
    for at in (0, 31, 32, 100, 191):
        other = [*ids]
        other[at] += 1
        assert common_blocks(digests_of(SALT, packed(ids)), digests_of(SALT, packed(other))) == at // BLOCK


@pytest.mark.parametrize(
    "prefix",
    [
        Prefix(salt=b"short", digests=b""),
        Prefix(salt=SALT, digests=bytes(15)),
        Prefix(salt=SALT, digests=bytes(16 * (BLOCKS + 1))),
    ],
)
def test_what_no_gateway_makes_is_refused(prefix: Prefix) -> None:
    with pytest.raises(ShardlineError) as caught:
        check_prefix(prefix)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "prefix")
    check_prefix(Prefix(salt=SALT, digests=bytes(16 * BLOCKS)))
