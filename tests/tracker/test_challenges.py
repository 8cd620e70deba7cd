"""When a Node is asked for blocks, for how many, and what one failure, two failures and a success change."""

from __future__ import annotations

import pytest

from shardline.tracker.challenges import (
    AGAIN_S,
    JOIN_BLOCKS,
    PERIODIC_BLOCKS,
    RETRY_S,
    SUSPICION_BLOCKS,
    Docket,
    Subject,
    Summons,
)

A, B = Subject("n-a", "mac1-x"), Subject("n-b", "mac1-x")
EVERY_S = 180.0
MIB = 1 << 20


@pytest.fixture
def docket() -> Docket:
    return Docket(EVERY_S)


def take(docket: Docket, now: float, most: int = 4) -> list[Summons]:
    return docket.take(now, most)


def one(docket: Docket, now: float) -> Summons:
    (summons,) = take(docket, now)
    return summons


def failed_twice(docket: Docket, now: float) -> None:
    one(docket, now)
    assert docket.failed(A, "first", now) is False
    one(docket, now + RETRY_S)
    assert docket.failed(A, "second", now + RETRY_S) is True


def test_who_joins_is_asked_at_once_and_then_now_and_then(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    assert docket.proven(A) is None
    assert one(docket, 0.0) == Summons(A, JOIN_BLOCKS, of_everything=False)
    docket.passed(A, 1.0)
    assert docket.proven(A) is True
    assert take(docket, EVERY_S) == []
    assert one(docket, 1.0 + EVERY_S) == Summons(A, PERIODIC_BLOCKS, of_everything=False)


def test_nobody_is_asked_twice_at_a_time(docket: Docket) -> None:
    other = Subject(A.node, "mac1-y")
    docket.heard(A, MIB, 0.0)
    docket.heard(other, MIB, 0.5)
    assert one(docket, 1.0).subject == A
    assert take(docket, 2.0) == []
    docket.passed(A, 3.0)
    assert one(docket, 3.0).subject == other


def test_at_most_so_many_and_those_that_wait_longest_first(docket: Docket) -> None:
    for i in range(5):
        docket.heard(Subject(f"n-{i}", "mac1-x"), MIB, float(i))
    assert [s.subject.node for s in take(docket, 9.0, 2)] == ["n-0", "n-1"]
    assert take(docket, 9.0, 0) == []


def test_one_failure_is_no_verdict_and_the_further_try_asks_for_more(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    one(docket, 0.0)
    assert docket.failed(A, "no answer", 1.0) is False
    assert docket.proven(A) is None
    assert take(docket, 1.0) == []
    assert one(docket, 1.0 + RETRY_S) == Summons(A, SUSPICION_BLOCKS, of_everything=True)
    docket.passed(A, 10.0)
    assert docket.proven(A) is True
    assert docket.reason(A) is None


def test_two_failures_are_a_verdict_and_an_answer_lifts_it(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    failed_twice(docket, 0.0)
    assert (docket.proven(A), docket.reason(A)) == (False, "second")
    # From then on once a minute, each try alone.
    assert take(docket, RETRY_S + AGAIN_S - 1) == []
    assert one(docket, RETRY_S + AGAIN_S).blocks == SUSPICION_BLOCKS
    assert docket.failed(A, "third", 70.0) is False, "it is no news"
    assert docket.reason(A) == "third"
    assert take(docket, 70.0 + RETRY_S) == []
    one(docket, 70.0 + AGAIN_S)
    docket.passed(A, 140.0)
    assert (docket.proven(A), docket.reason(A)) == (True, None)


def test_a_proven_node_that_fails_twice_is_proven_no_more(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    one(docket, 0.0)
    docket.passed(A, 0.0)
    failed_twice(docket, EVERY_S)
    assert docket.proven(A) is False


def test_taking_all_back_ends_what_is_known_but_not_a_verdict_against_it(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    docket.heard(A, 0, 1.0)
    assert take(docket, 2.0) == []
    docket.heard(A, MIB, 3.0)
    failed_twice(docket, 3.0)
    docket.heard(A, 0, 20.0)
    docket.heard(A, MIB, 21.0)
    assert docket.proven(A) is False
    assert take(docket, 22.0) == [], "saying so again does not bring the next try forward"


def test_what_has_doubled_is_asked_for_again(docket: Docket) -> None:
    docket.heard(A, 2 * MIB, 0.0)
    one(docket, 0.0)
    docket.passed(A, 0.0)
    docket.heard(A, 3 * MIB, 5.0)
    assert take(docket, 5.0) == []
    docket.heard(A, 4 * MIB, 6.0)
    assert one(docket, 6.0).blocks == JOIN_BLOCKS
    docket.passed(A, 6.0)
    docket.heard(A, 4 * MIB, 7.0)
    assert take(docket, 7.0) == []


def test_suspicion_asks_for_many_of_everything_once_a_minute(docket: Docket) -> None:
    assert docket.suspect(A, 0.0) is False, "who advertises nothing is not asked"
    docket.heard(A, MIB, 0.0)
    one(docket, 0.0)
    docket.passed(A, 0.0)
    assert docket.suspect(A, 10.0) is True
    assert docket.suspect(A, 10.0 + AGAIN_S - 1) is False
    assert one(docket, 10.0) == Summons(A, SUSPICION_BLOCKS, of_everything=True)
    docket.passed(A, 11.0)
    assert take(docket, 12.0) == []
    assert docket.suspect(A, 10.0 + AGAIN_S) is True


def test_suspicion_while_it_is_asked_comes_right_after(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    one(docket, 0.0)
    docket.suspect(A, 1.0)
    docket.passed(A, 2.0)
    assert one(docket, 2.0).blocks == SUSPICION_BLOCKS


def test_who_could_not_be_asked_is_not_judged(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    for at in (0.0, RETRY_S, 2 * RETRY_S):
        assert one(docket, at).blocks == JOIN_BLOCKS
        docket.unjudged(A, at)
    assert docket.proven(A) is None


def test_another_process_of_the_same_node_is_asked_anew(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    docket.heard(B, MIB, 0.0)
    take(docket, 0.0)
    docket.passed(A, 0.0)
    docket.passed(B, 0.0)
    docket.joined(A.node, 5.0)
    assert one(docket, 5.0) == Summons(A, JOIN_BLOCKS, of_everything=False)
    assert docket.proven(A) is True, "until it is found to lack something"


def test_a_node_that_is_forgotten_leaves_nothing(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    docket.heard(B, MIB, 0.0)
    docket.forget(A.node)
    assert [subject for subject, _ in docket.verdicts()] == [B]
    # What comes back late about it changes nothing.
    docket.passed(A, 1.0)
    docket.unjudged(A, 1.0)
    assert docket.failed(A, "late", 1.0) is False
    assert docket.proven(A) is None


def test_who_takes_all_back_between_two_tries_is_judged_all_the_same(docket: Docket) -> None:
    """Else a liar is never found out: it says nothing for a moment whenever it is asked."""
    docket.heard(A, MIB, 0.0)
    one(docket, 0.0)
    docket.heard(A, 0, 0.1)
    docket.heard(A, MIB, 0.2)
    assert docket.failed(A, "nothing shown", 0.3) is False
    docket.heard(A, 0, 1.0)
    docket.heard(A, MIB, 1.1)
    assert one(docket, 0.3 + RETRY_S).blocks == SUSPICION_BLOCKS
    assert docket.failed(A, "nothing shown", 6.0) is True
    assert docket.proven(A) is False


def test_registering_again_between_two_tries_does_not_help_either(docket: Docket) -> None:
    docket.heard(A, MIB, 0.0)
    one(docket, 0.0)
    docket.failed(A, "nothing shown", 0.0)
    docket.joined(A.node, 1.0)
    assert one(docket, 1.0).blocks == SUSPICION_BLOCKS
    assert docket.failed(A, "nothing shown", 1.0) is True
