"""What is kept, what is found, what gives way: bounds, order, and nothing kept twice."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.node.prefixes import Kept, Prefixes
from shardline.wire.prefix import BLOCK, digests_of, salt_of

SALT = salt_of("anyone")
CAPACITY = 1000


def ids_of(*blocks: int) -> bytes:
    """One block of equal ids for each number."""
    return b"".join(struct.pack("<i", block) * BLOCK for block in blocks)


def kept(number: int, *blocks: int) -> Kept:
    ids = ids_of(*blocks)
    return Kept(number, digests_of(SALT, ids), ids)


def prompt(*blocks: int) -> bytes:
    return digests_of(SALT, ids_of(*blocks))


def numbers(prefixes: Prefixes) -> list[int]:
    return [k.number for k in prefixes]


def test_the_longest_common_beginning_is_found() -> None:
    prefixes = Prefixes(share=1.0, limit=1 << 20, count=9)
    for one in (kept(1, 1, 2, 3), kept(2, 1, 2, 4, 5), kept(3, 9)):
        assert prefixes.add(one, CAPACITY) == []
    match = prefixes.find(prompt(1, 2, 4, 6), 4 * BLOCK)
    assert match is not None and (match.kept.number, match.tokens) == (2, 3 * BLOCK)
    assert prefixes.find(prompt(2, 1), 2 * BLOCK) is None
    assert prefixes.find(b"", 5) is None


@pytest.mark.parametrize(("tokens", "expected"), [(64, 32), (65, 64), (96, 64), (97, 96), (33, 32), (32, None)])
def test_at_least_the_last_token_of_a_prompt_is_left(tokens: int, expected: int | None) -> None:
    prefixes = Prefixes(share=1.0, limit=1 << 20, count=9)
    prefixes.add(kept(1, 1, 2, 3, 4), CAPACITY)
    match = prefixes.find(prompt(1, 2, 3, 4)[: 16 * (tokens // BLOCK)], tokens)
    assert (None if match is None else match.tokens) == expected


def test_nothing_is_kept_twice() -> None:
    """A longer one takes the place of its own beginnings; what something else holds already is not kept."""
    prefixes = Prefixes(share=1.0, limit=1 << 20, count=9)
    first, other = kept(1, 1, 2), kept(2, 1, 7)
    prefixes.add(first, CAPACITY)
    prefixes.add(other, CAPACITY)
    longer = kept(3, 1, 2, 3)
    assert prefixes.add(longer, CAPACITY) == [first]
    assert prefixes.holds(prompt(1, 2)) and not prefixes.holds(prompt(1, 2, 3, 4))
    again = kept(4, 1, 2)
    assert prefixes.add(again, CAPACITY) == [again]
    assert sorted(numbers(prefixes)) == [2, 3]
    assert prefixes.tokens == 5 * BLOCK


def test_the_least_recently_used_goes_first() -> None:
    prefixes = Prefixes(share=1.0, limit=1 << 20, count=3)
    ones = [kept(n, n) for n in range(1, 5)]
    for one in ones[:3]:
        prefixes.add(one, CAPACITY)
    assert prefixes.find(prompt(1), 40) is not None  # used just now
    assert prefixes.add(ones[3], CAPACITY) == [ones[1]]
    assert numbers(prefixes) == [3, 1, 4]
    assert prefixes.remove(ones[2]) and not prefixes.remove(ones[2])
    assert prefixes.tokens == 2 * BLOCK


def test_the_share_bounds_what_is_kept_in_all_and_of_one() -> None:
    prefixes = Prefixes(share=0.2, limit=1 << 20, count=9)
    assert prefixes.whole(150, CAPACITY) == 128
    assert prefixes.whole(999, CAPACITY) == 192  # 200 tokens are 6 blocks
    for number in range(1, 4):
        prefixes.add(kept(number, number, number), CAPACITY)
    assert prefixes.tokens <= 200
    gone = prefixes.add(kept(9, 9, 9, 9, 9, 9, 9), CAPACITY)
    assert len(gone) == 3 and numbers(prefixes) == [9]


def test_off_means_that_nothing_is_kept() -> None:
    prefixes = Prefixes(share=0.5, limit=1 << 20, count=0)
    assert prefixes.off and prefixes.whole(500, CAPACITY) == 0
    assert not Prefixes(share=0.5, limit=1 << 20, count=1).off


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 3), min_size=1, max_size=6)), max_size=40))
def test_whatever_happens_bounds_hold_and_nothing_is_lost(steps: list[tuple[int, list[int]]]) -> None:
    """Every number that was given is either kept or was given back, once."""
    prefixes = Prefixes(share=0.5, limit=1 << 20, count=4)
    alive: set[int] = set()
    for number, (action, blocks) in enumerate(steps):
        if action < 2:
            alive.add(number)
            gone = prefixes.add(kept(number, *blocks), CAPACITY)
            for one in gone:
                alive.remove(one.number)
        elif action == 2 and len(prefixes):
            oldest = next(iter(prefixes))
            assert prefixes.remove(oldest)
            alive.remove(oldest.number)
        else:
            match = prefixes.find(prompt(*blocks), BLOCK * len(blocks))
            if match is not None:
                assert match.kept.ids[: 4 * match.tokens] == ids_of(*blocks)[: 4 * match.tokens]
                assert match.tokens < BLOCK * len(blocks)
        assert set(numbers(prefixes)) == alive
        assert prefixes.tokens == sum(k.tokens for k in prefixes) <= 500
        assert len(prefixes) <= 4
    assert {k.number for k in prefixes.clear()} == alive
    assert (len(prefixes), prefixes.tokens) == (0, 0)


def test_no_share_of_a_large_capacity_passes_the_limit() -> None:
    prefixes = Prefixes(share=1.0, limit=3 * BLOCK, count=9)
    assert prefixes.whole(10 * BLOCK, 1 << 20) == 3 * BLOCK
    first, second = kept(1, 1, 2), kept(2, 5, 6)
    assert prefixes.add(first, 1 << 20) == []
    assert prefixes.add(second, 1 << 20) == [first]
    assert prefixes.tokens == 2 * BLOCK
