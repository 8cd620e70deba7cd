"""What a person sees of a generation."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

from shardline.cli.live import LineView, bar, block, failure_words, hop_line, labelled, number, route_line, wrapped
from shardline.errors import ShardlineError


def test_numbers_that_are_not_there_are_a_dash() -> None:
    assert number(None, " ms") == "–"
    assert number(0.0, " ms") == "0.0 ms"


def test_the_bar_stays_in_its_frame() -> None:
    assert [bar(done, 10, 4).count("█") for done in (0, 5, 10, 11)] == [0, 2, 4, 4]
    assert bar(0, 0, 4) == "████"


def test_the_account_in_decode(event: dict[str, Any]) -> None:
    rows = block(event)
    assert ("route", "n-0 0:15 → n-1 15:30") in rows
    assert ("decode", "17 tokens  12.5 tokens/s  first after 410 ms") in rows
    assert [line for label, line in rows if label == "hop"] == [
        "n-0  0:15  compute 12.3 ms  queue 0.1 ms  send 0.3 ms",
        "n-1  15:30  compute –  queue –  send –",
    ]


def test_one_is_not_many(event: dict[str, Any]) -> None:
    rows = dict(block({**event, "decode": {**event["decode"], "tokens": 1}, "prefill": {"done": 1, "total": 1}}))
    assert rows["decode"].startswith("1 token  ") and rows["prefill"].endswith("1/1 token")


def test_the_place_in_the_queue_and_a_silent_hop_are_told(event: dict[str, Any]) -> None:
    waiting = {**event, "route": None, "queue": {"position": 3}}
    assert route_line(waiting) == "place 3 in the queue"
    assert hop_line({**event["route"]["hops"][0], "health": "silent"}).endswith("  silent")


def test_a_composite_node_has_all_layers(event: dict[str, Any]) -> None:
    hop = {**event["route"]["hops"][0], "layers": None}
    assert route_line({**event, "route": {**event["route"], "n_layers": None, "hops": [hop]}}) == f"{hop['node']} all"
    assert hop_line(hop).startswith(f"{hop['node']}  all  ")


def test_a_failure_is_told_in_words_with_advice(event: dict[str, Any]) -> None:
    error = ShardlineError("node_lost", "Node n-1 (layers 15:30) fell silent in decode", node="n-1")
    for words in (failure_words(error), failure_words(error.body()), block({**event, "failure": error.body()})[-1][1]):
        assert "fell silent in decode (node_lost)" in words
        assert "What to do: A Node of the route is gone." in words


def test_lines_tell_each_new_thing_once_and_leave_the_answer_whole(event: dict[str, Any]) -> None:
    now = 0.0
    answer, account = io.StringIO(), io.StringIO()
    view = LineView(answer, account, lambda: now)
    queued = {**event, "phase": "queued", "route": None}
    prefill = copy.deepcopy(event) | {"phase": "prefill", "prefill": {"done": 10, "total": 41}}
    for shown in (queued, queued, prefill):
        view.event(shown)
    now = 0.1
    view.event(prefill | {"prefill": {"done": 20, "total": 41}})
    now = 0.7
    view.event(prefill | {"prefill": {"done": 30, "total": 41}})
    view.event(event)
    before = account.getvalue()
    view.text("Hello")
    view.event({**event, "phase": "completed"})
    assert account.getvalue() == before
    view.text(" there")
    view.close()
    assert answer.getvalue() == "Hello there\n"
    lines = account.getvalue().splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["queued", "prefill", "prefill", "prefill", "decode"]
    assert "10/41" in lines[2] and "30/41" in lines[3]
    assert [line.split()[0] for line in lines[5:]] == ["phase", "route", "prefill", "decode", "hop", "hop"]
    assert "completed" in lines[5]


@pytest.mark.parametrize("width", [20, 30, 40, 50, 80])
def test_no_line_is_cut_in_mid_word(event: dict[str, Any], width: int) -> None:
    event["failure"] = ShardlineError("node_lost", "Node n-1 (layers 15:30) fell silent in decode").body()
    for label, line in block(event):
        shown = labelled(label, line, width)
        assert set(shown.split()) == {label, *line.split()}
        rows = shown.splitlines()
        assert all(len(row) <= width or len(row.split()) == 1 or row.startswith("prefill") for row in rows), shown
        assert all(row.startswith(" " * 9) for row in rows[1:])


def test_a_line_is_broken_between_its_parts_first() -> None:
    assert wrapped("n-0  0:15  compute 12.3 ms  queue 0.1 ms", 24) == ["n-0  0:15", "compute 12.3 ms", "queue 0.1 ms"]
    assert wrapped("n-0 0:15 → n-1 15:30", 16) == ["n-0 0:15 →", "n-1 15:30"]
    assert wrapped("one two three", 8) == ["one two", "three"]
    assert labelled("hop", "n-0  0:15", None) == "hop      n-0  0:15"
