"""Medians, ratios by pairs, and the report that is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.cli.bench_figures import Round, Row, markdown
from shardline.cli.bench_report import Machine, ModelFacts, as_json, as_markdown
from shardline.cli.bench_run import Figures, Wanted, prompts_of
from shardline.cli.bench_systems import NodeMemory
from shardline.formats.memory import WeightBytes

MIB = 1 << 20


def test_a_ratio_is_of_one_round_not_of_medians() -> None:
    row = Row("2 Nodes", 2, 1, 1, 1, rates=[Round(9, 10), Round(50, 100), Round(3, 3)])
    assert row.ratio == pytest.approx(0.9)
    assert (row.rate, row.unsplit_rate) == (9, 10)
    assert row.spread == (pytest.approx(0.5), pytest.approx(1.0))


def test_what_is_added_is_time_of_a_step() -> None:
    row = Row("3 Nodes", 3, 1, 1, 1, rates=[Round(80, 100)])
    assert row.added_ms == pytest.approx(2.5)
    assert row.added_ms_per_hop == pytest.approx(1.25)
    eight = Row("1 Node", 1, 8, 1, 1, rates=[Round(80, 100)])
    assert eight.added_ms == pytest.approx(20.0)
    assert eight.added_ms_per_hop is None


def test_a_markdown_table_is_aligned() -> None:
    assert markdown(("system", "ms"), [("1 Node", "12.50"), ("x", "9.1")]) == (
        "| system |    ms |\n| ------ | ----: |\n| 1 Node | 12.50 |\n| x      |   9.1 |"
    )


def test_prompts_never_repeat_and_stay_in_the_vocabulary() -> None:
    first, second = prompts_of(2, 50, 2000, seed="a"), prompts_of(2, 50, 2000, seed="b")
    assert len({tuple(ids) for ids in (*first, *second)}) == 4
    assert all(1000 <= token < 2000 for ids in (*first, *second) for token in ids)
    assert prompts_of(2, 50, 2000, seed="a") == first


def wanted() -> Wanted:
    return Wanted(
        model=Path("model.gguf"),
        nodes=(2,),
        streams=(1, 8),
        rounds=1,
        tokens=64,
        prompt_tokens=32,
        prefill_tokens=2048,
        threads=1,
        apart=False,
        busy=1,
        rpc_server=None,
        llama_bench=None,
        torch=False,
        weights=WeightBytes((1, 1), 1, 1, 0, 0),
    )


def test_equal_threads_where_streams_and_prefill_use_all() -> None:
    w = wanted()
    assert w.unsplit_threads(3, 1, prefill=False) == 1
    assert w.unsplit_threads(3, 8, prefill=False) == 3
    assert w.unsplit_threads(2, 1, prefill=True) == 2
    assert w.unsplit_threads(0, 1, prefill=True) == 1
    assert w.kv_tokens == 2304 and w.kv_tokens % 256 == 0


def test_the_report_says_what_was_measured_on_what() -> None:
    figures = Figures(
        facts={"build": "llama.cpp abc"},
        decode=[
            Row("2 Nodes", 2, 1, 1, 1, [Round(90, 100)], [Round(0.2, 0.1)]),
            Row("2 Nodes", 2, 8, 1, 2, [Round(300, 290)]),
        ],
        prefill=[Row("2 Nodes", 2, 1, 1, 2, [Round(500, 400)])],
        seams=[("0:1 → 1:2", 2596.0, 2317.4)],
        memory=[NodeMemory("0:1", 300 * MIB, 100 * MIB, 50 * MIB)],
    )
    machine = Machine("A CPU", 2, 8 << 30, "Linux", 0.5, 1.5)
    model = ModelFacts("Small", 135_000_000, "Q4_1", 94 * MIB)
    text = as_markdown(wanted(), figures, machine, model)
    for words in (
        "llama.cpp abc",
        "A CPU, 2 cores, 8.0 GiB, Linux; load average 0.5 at the start, 1.5 at the end; beside 1 process",
        "Small, 135 M parameters, Q4_1, 94.0 MiB",
        "| 2 Nodes |     90.0 |   100.0 | 0.900 (0.90–0.90) |            1.11 |    1.11 |            200 |     100 |",
        "| 2 Nodes |       8 | 2 x 1 / 2 |    300.0 |",
        "Prefill of 2,048 tokens",
        "| 0:1 → 1:2 |  2,596 |   2,317 |",
        "| 0:1                | 300.0 MiB | 100.0 MiB | 50.0 MiB |   150.0 MiB |",
    ):
        assert words in text, words
    found = as_json(wanted(), figures, machine, model)
    assert found["report"] == text
    assert found["decode"][0]["ratio"] == pytest.approx(0.9)
    assert found["machine"]["load_end"] == 1.5
