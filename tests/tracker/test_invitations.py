from __future__ import annotations

import pytest

from shardline.errors import ShardlineError
from shardline.tracker.invitations import ADDRESSES, GUESS_WINDOW_S, GUESSES, KEPT, Guesses, Invitations

NOW = 1_800_000_000.0


def refusal(invitations: Invitations, token: str, now: float = NOW) -> str:
    with pytest.raises(ShardlineError) as caught:
        invitations.check(token, now)
    assert caught.value.code == "join_refused"
    assert token not in caught.value.message or not token
    return str(caught.value.details["reason"])


def test_a_token_works_once_for_its_time() -> None:
    invitations = Invitations([], 60)
    token = invitations.make(NOW)
    assert len(token) == 22
    invitations.check(token, NOW + 59)
    assert refusal(invitations, token, NOW + 60) == "expired"
    invitations.use(token)
    assert refusal(invitations, token) == "used"
    assert refusal(invitations, "x" * 22) == refusal(invitations, "") == "unknown"


def test_what_is_kept_tells_no_token_and_knows_them_again() -> None:
    first = Invitations([], 60)
    used, fresh = first.make(NOW), first.make(NOW)
    first.use(used)
    assert used not in repr(first.kept) and fresh not in repr(first.kept)
    again = Invitations(first.kept, 60)
    again.check(fresh, NOW)
    assert refusal(again, used) == "used"


def test_the_oldest_make_room() -> None:
    invitations = Invitations([], 60)
    tokens = [invitations.make(NOW) for _ in range(KEPT + 1)]
    assert len(invitations.kept) == KEPT
    assert refusal(invitations, tokens[0]) == "unknown"
    invitations.check(tokens[1], NOW)


def test_guesses_are_bounded_by_address() -> None:
    guesses = Guesses()
    for _ in range(GUESSES):
        guesses.check("10.0.0.9", NOW)
        guesses.wrong("10.0.0.9", NOW)
    with pytest.raises(ShardlineError) as caught:
        guesses.check("10.0.0.9", NOW + 10)
    assert caught.value.code == "queue_full"
    assert caught.value.details["retry_after"] == GUESS_WINDOW_S - 10 + 1
    guesses.check("10.0.0.8", NOW + 10)
    guesses.check("10.0.0.9", NOW + GUESS_WINDOW_S)
    for number in range(ADDRESSES):
        guesses.wrong(f"10.1.{number >> 8}.{number & 255}", NOW)
    guesses.check("10.0.0.9", NOW)
