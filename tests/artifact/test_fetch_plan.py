"""Which pieces are asked of whom: rare ones first, no piece twice, never over the end of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.artifact.fetch_plan import PLACED_BYTES, QUICK_S, RUN_BYTES, SLOW_S, FetchPlan, Row, Run
from shardline.artifact.sources import FAILURES_LIMIT, Rate, SourceAccount
from shardline.errors import ShardlineError
from shardline.wire.bitmap import Pieces
from tests.support.stores import FileSource

PIECE = 1 << 20


def account(offered: Pieces | None, run_pieces: int = 4) -> SourceAccount:
    return SourceAccount(FileSource(Path(__file__)), Rate(0.0), offered=offered, run_bytes=run_pieces * PIECE)


def taken(run: Run | None) -> tuple[int, int, int]:
    assert run is not None
    return run.file, run.first, run.end


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_each_piece_is_asked_for_once_and_runs_stay_in_their_file(counts: list[int], data: st.DataObject) -> None:
    row = Row(counts)
    wanted = Pieces.of(row.count, data.draw(st.sets(st.integers(0, row.count - 1))))
    plan = FetchPlan(row, wanted, PIECE)
    sources = [
        account(Pieces.of(row.count, data.draw(st.sets(st.integers(0, row.count - 1)))), data.draw(st.integers(0, 5)))
        for _ in range(3)
    ]
    asked: list[int] = []
    for source in sources:
        while (run := plan.take(source, sources, 0.0)) is not None:
            pieces = list(range(run.first, run.end))
            assert all(row.starts[run.file] <= piece < row.starts[run.file + 1] for piece in pieces)
            assert source.offered is not None
            assert all(piece in source.offered for piece in pieces)
            asked += pieces
    offered = sources[0].offered | sources[1].offered | sources[2].offered  # type: ignore[operator]
    assert sorted(asked) == list(wanted & offered)


def test_what_only_one_has_comes_first() -> None:
    row = Row([10])
    plan = FetchPlan(row, Pieces.all(10), PIECE)
    whole, part = account(Pieces.all(10)), account(Pieces.span(10, 0, 6))
    both = [whole, part]
    assert taken(plan.take(whole, both, 0.0)) == (0, 6, 10)
    assert taken(plan.take(part, both, 0.0)) == (0, 0, 4)
    part.state = "banned"
    assert taken(plan.take(whole, both, 0.0)) == (0, 4, 6)
    assert plan.take(whole, both, 0.0) is None


def test_what_did_not_come_is_asked_for_again() -> None:
    plan = FetchPlan(Row([4]), Pieces.all(4), PIECE)
    one = account(Pieces.all(4))
    run = plan.take(one, [one], 0.0)
    assert run is not None
    plan.brought(Pieces.of(4, [0, 2]))
    plan.ended(run)
    assert taken(plan.take(one, [one], 0.0)) == (0, 1, 2)
    assert taken(plan.take(one, [one], 0.0)) == (0, 3, 4)


def test_pieces_of_other_processes_are_left_to_them_for_a_while() -> None:
    plan = FetchPlan(Row([4]), Pieces.all(4), PIECE)
    one = account(Pieces.all(4))
    run = plan.take(one, [one], 0.0)
    assert run is not None
    plan.shorten(run, 1)
    assert (run.first, run.end) == (0, 1)
    assert plan.elsewhere is not None
    assert taken(plan.take(one, [one], 0.0)) == (0, 2, 4)
    assert plan.take(one, [one], 0.0) is None
    plan.look_again()
    assert taken(plan.take(one, [one], 0.0)) == (0, 1, 2)


def test_a_slow_run_is_asked_of_one_other_source() -> None:
    plan = FetchPlan(Row([4]), Pieces.all(4), PIECE)
    slow, quick, third = (account(Pieces.all(4)) for _ in range(3))
    everybody = [slow, quick, third]
    first = plan.take(slow, everybody, 0.0)
    assert first is not None
    assert plan.take(quick, everybody, SLOW_S / 2) is None
    assert plan.take(slow, everybody, SLOW_S * 2) is None
    second = plan.take(quick, everybody, SLOW_S * 2)
    assert taken(second) == (0, 0, 4)
    assert second is not None
    assert second.second
    assert plan.take(third, everybody, SLOW_S * 2) is None
    # The end of one does not free what the other still brings.
    plan.ended(first)
    assert plan.take(third, everybody, SLOW_S * 2) is None
    plan.ended(second)
    assert taken(plan.take(third, everybody, SLOW_S * 2)) == (0, 0, 4)


def test_runs_grow_and_shrink() -> None:
    one = account(Pieces.all(1))
    for _ in range(10):
        FetchPlan.paced(one, QUICK_S / 2)
    assert one.run_bytes == RUN_BYTES[1]
    many = account(Pieces.all(1))
    many.placing = True
    for _ in range(10):
        FetchPlan.paced(many, QUICK_S / 2)
    assert many.run_bytes == PLACED_BYTES
    for _ in range(30):
        FetchPlan.paced(one, SLOW_S * 2)
    assert one.run_bytes == 0
    plan = FetchPlan(Row([3]), Pieces.all(3), PIECE)
    assert taken(plan.take(account(Pieces.all(3), run_pieces=0), [], 0.0)) == (0, 0, 1)
    FetchPlan.paced(one, QUICK_S / 2)
    assert one.run_bytes == RUN_BYTES[0]


@pytest.mark.parametrize(
    ("code", "details", "pauses"),
    [
        ("source_failed", {}, FAILURES_LIMIT - 1),
        ("source_failed", {"final": True}, 0),
        ("unauthorized", {}, 0),
        ("not_found", {}, 0),
    ],
)
def test_when_a_source_is_given_up(code: str, details: dict[str, bool], pauses: int) -> None:
    one = account(None)
    given = []
    while one.state == "active":
        given.append(one.failed(ShardlineError(code, "why", **details)))
    assert given.pop() is None
    assert len(given) == pauses
    assert one.state == "given up"
    assert one.reason == "why"


def test_a_busy_source_has_not_failed() -> None:
    one = account(None)
    for _ in range(3 * FAILURES_LIMIT):
        assert one.failed(ShardlineError("queue_full", "busy")) is not None
    assert one.state == "active"


def test_rates_are_of_the_last_seconds() -> None:
    rate = Rate(0.0)
    for second in range(10):
        rate.add(float(second), 1000)
    assert rate.per_s(9.0) == pytest.approx(1000, rel=0.3)
    assert rate.per_s(100.0) == 0.0
