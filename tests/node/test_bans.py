"""Bans: short for who may have had an accident, longer each time, and never for ever."""

from __future__ import annotations

from shardline.node.bans import FIRST_S, GROWTH, LONGEST_S, NAMES_LIMIT, Bans


def test_a_ban_ends_and_the_next_one_is_longer() -> None:
    bans = Bans()
    assert not bans.holds("n-one", 0.0)
    assert bans.ban("n-one", 0.0)
    assert not bans.ban("n-one", 1.0), "it is banned already"
    assert bans.holds("n-one", FIRST_S - 1) and not bans.holds("n-one", FIRST_S)
    assert bans.ban("n-one", FIRST_S)
    assert bans.holds("n-one", FIRST_S + GROWTH * FIRST_S - 1)
    assert not bans.holds("n-one", FIRST_S + GROWTH * FIRST_S)
    assert bans.names(FIRST_S) == ["n-one"]


def test_none_is_longer_than_a_day() -> None:
    bans, now = Bans(), 0.0
    for _ in range(1000):
        assert bans.ban("n-one", now)
        now += LONGEST_S
        assert not bans.holds("n-one", now)


def test_whoever_has_many_names_costs_no_more_memory_than_this() -> None:
    bans = Bans()
    for number in range(NAMES_LIMIT + 50):
        bans.ban(f"n-{number}", float(number))
    assert len(bans.names(0.0)) == NAMES_LIMIT
    assert bans.holds(f"n-{NAMES_LIMIT + 49}", NAMES_LIMIT + 50.0) and not bans.holds("n-0", 60.0)


def test_a_new_ban_holds_though_all_others_are_longer() -> None:
    bans = Bans()
    for now in (0.0, FIRST_S):
        for number in range(NAMES_LIMIT):
            bans.ban(f"n-{number}", now)
    assert bans.ban("n-new", FIRST_S) and bans.holds("n-new", FIRST_S + 1)
