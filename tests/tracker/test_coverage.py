"""What is missing, the list of models, and the choice by name: one reading for all three."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import COMPOSITE_GONE, RETURNING, ShardlineError
from shardline.tracker.coverage import (
    RETRY_AFTER_S,
    Span,
    choose,
    is_same_engine,
    missing_of,
    missing_ranges,
    models,
)
from shardline.tracker.selection import Candidate, Link, Links, Query, RouteGraph
from tests.tracker.cluster_values import NO_LINKS, candidate, links_of
from tests.tracker.test_selection import N, clusters

ranges = st.tuples(st.integers(0, N - 1), st.integers(1, N)).filter(lambda r: r[0] < r[1])


@pytest.mark.parametrize(
    ("held", "missing"),
    [
        ([], ((0, 30),)),
        ([(0, 10), (10, 20), (20, 30)], ()),
        ([(0, 10), (20, 30)], ((10, 20),)),
        ([(5, 10), (20, 25)], ((0, 5), (10, 20), (25, 30))),
        # Every layer is held, and still nothing joins: the fewest layers that would complete a route.
        ([(0, 15), (10, 30)], ((0, 10),)),
        ([(0, 20), (10, 30)], ((0, 10),)),
        ([(0, 10), (11, 30)], ((10, 11),)),
        ([(0, 10), (15, 20), (25, 30), (20, 30)], ((10, 15),)),
        # Of equally few layers the first in order.
        ([(0, 10), (10, 15), (20, 30)], ((15, 20),)),
        ([(0, 15), (20, 30), (15, 18), (17, 20)], ((15, 17),)),
    ],
)
def test_missing_ranges(held: list[tuple[int, int]], missing: tuple[tuple[int, int], ...]) -> None:
    assert missing_ranges([Span(*r) for r in held], 30) == missing


@given(st.lists(ranges, max_size=6))
def test_missing_is_the_least_that_completes_a_route(held: list[tuple[int, int]]) -> None:
    missing = missing_ranges([Span(*r) for r in held], N)
    assert missing_ranges([Span(*r) for r in (*held, *missing)], N) == ()
    lacking = sum(last - first for first, last in missing)
    # No set of fewer layers, cut into ranges in any way, completes one.
    for cuts in itertools.product([False, True], repeat=N):
        chosen = [Span(i, i + 1) for i, c in enumerate(cuts) if c]
        if len(chosen) < lacking:
            assert missing_ranges([*(Span(*r) for r in held), *chosen], N) != ()


@given(clusters())
def test_a_group_lacks_nothing_exactly_when_it_has_a_route(case: tuple[list[Candidate], Links, Query]) -> None:
    graph = RouteGraph(*case)
    assert (missing_of(graph) == ()) == (graph.best() is not None)


def test_nodes_of_several_engines_are_told_that_they_do_not_add_up() -> None:
    group = [candidate("a", 0, 15, engine_class="llama/1"), candidate("b", 15, 30, engine_class="torch-f32")]
    loading = candidate("c", 15, 30, engine_class="scripted/loading", barred="loading")
    with pytest.raises(ShardlineError) as refused:
        choose([*group, loading], NO_LINKS, Query(), "tiny")
    told = "layers 15:30 of 30 are missing; of engine class torch-f32 0:15 are missing, and no route mixes"
    assert told in refused.value.message and "scripted" not in refused.value.message
    assert "node --engine" in refused.value.advice


def test_unknown_model_and_model_that_is_not_whole() -> None:
    group = [candidate("a", 0, 10), candidate("b", 10, 20, barred="loading"), candidate("c", 20, 30)]
    with pytest.raises(ShardlineError) as unknown:
        choose(group, NO_LINKS, Query(), "other")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(ShardlineError) as partial:
        choose(group, NO_LINKS, Query(), "tiny")
    error = partial.value
    assert (error.code, error.fault.status) == ("model_unavailable", 503)
    assert error.details["missing"] == [[10, 20]]
    assert error.details["retry_after"] == RETRY_AFTER_S
    assert "10:20" in error.message


@pytest.mark.parametrize(
    ("others", "returning"),
    [
        ([candidate("b", 10, 30, barred="loading", returning=True)], True),
        ([candidate("b", 10, 30, barred="it is silent")], False),
        # One that returns and one that does not: the model stays as it is.
        ([candidate("b", 10, 20, barred="loading", returning=True), candidate("c", 20, 30, barred="out")], False),
        ([candidate("b", 10, 30, barred="out"), candidate("c", 10, 30, barred="loading", returning=True)], True),
    ],
)
def test_layers_that_come_back_by_themselves_are_told_apart(others: list[Candidate], returning: bool) -> None:
    group = [candidate("a", 0, 10), *others]
    (model,) = models(group, NO_LINKS)
    assert (model.ready, model.returning) == (False, returning)
    assert model.head_nodes[0].layers == (0, 10)
    with pytest.raises(ShardlineError) as error:
        choose(group, NO_LINKS, Query(), "tiny")
    assert (error.value.advice == RETURNING) == returning


def test_avoided_nodes_are_gone_for_this_request_only() -> None:
    group = [candidate("a", 0, 15), candidate("b", 15, 30)]
    with pytest.raises(ShardlineError) as error:
        choose(group, NO_LINKS, Query(avoid_nodes=frozenset({"b"})), "tiny")
    assert error.value.details["missing"] == [[15, 30]]
    assert [c.node for c in choose(group, NO_LINKS, Query(), "tiny").route.hops] == ["a", "b"]


def test_a_cut_link_names_the_layers_and_both_nodes() -> None:
    group = [candidate("a", 0, 15), candidate("b", 15, 30)]
    links = links_of({("a", "b"): Link(out="reported: seam_lost")})
    with pytest.raises(ShardlineError) as error:
        choose(group, links, Query(), "tiny")
    assert error.value.details["missing"] == [[0, 15]]
    assert error.value.details["links"] == [{"from": "a", "to": "b", "reason": "reported: seam_lost"}]
    assert "a does not reach b" in error.value.message


def test_a_model_is_named_by_name_or_content() -> None:
    group = [candidate("a", 0, 30, content_id="x"), candidate("b", 0, 30, content_id="y", decode_ms=1.0)]
    assert choose(group, NO_LINKS, Query(), "x").key.content_id == "x"
    assert choose(group, NO_LINKS, Query(), "y").key.content_id == "y"


def test_a_name_with_two_contents_means_one_of_them_whatever_the_load() -> None:
    small = [candidate("a", 0, 30, content_id="x", decode_ms=1.0)]
    large = [candidate("b", 0, 15, content_id="y"), candidate("c", 15, 30, content_id="y", sessions=50)]
    choice = choose([*small, *large], NO_LINKS, Query(), "tiny")
    assert (choice.key.content_id, len(choice.route.hops)) == ("y", 2)
    # It must be whole, however many Shards it has.
    broken = choose([*small, large[0], candidate("d", 0, 15, content_id="y")], NO_LINKS, Query(), "tiny")
    assert broken.key.content_id == "x"
    equal = [candidate("a", 0, 30, content_id="x", sessions=9), candidate("b", 0, 30, content_id="y")]
    assert choose(equal, NO_LINKS, Query(), "tiny").key.content_id == "x"


def test_engine_classes_of_one_content_compete_by_cost() -> None:
    group = [candidate("a", 0, 30, decode_ms=9.0), candidate("b", 0, 30, engine_class="fast", decode_ms=3.0)]
    assert choose(group, NO_LINKS, Query(), "tiny").key.engine_class == "fast"


def test_models_lists_whole_and_broken_ones_with_what_routing_would_say() -> None:
    group = [
        candidate("a", 0, 15, kv_capacity=500),
        candidate("b", 15, 30, kv_capacity=700, context_length=1024),
        candidate("c", 0, 10, model="half", content_id="h"),
        candidate("l", 10, 30, model="half", content_id="h", engine_class="scripted/loading", barred="loading"),
    ]
    half, tiny = models(group, NO_LINKS)
    assert (tiny.model, tiny.ready, tiny.missing, tiny.kv_capacity_tokens) == ("tiny", True, [], 500)
    assert (tiny.context_length, tiny.n_layers, tiny.text_digest) == (1024, 30, "t" * 64)
    assert [p.node for p in tiny.head_nodes] == ["a"]
    assert [p.node for p in tiny.text_nodes] == ["a", "b"]
    assert (half.model, half.ready, half.missing) == ("half", False, [(10, 30)])
    assert half.kv_capacity_tokens == 0
    for model in (half, tiny):
        ready = True
        try:
            choose(group, NO_LINKS, Query(), model.model)
        except ShardlineError as error:
            assert error.details["missing"] == [list(r) for r in model.missing]
            ready = False
        assert ready == model.ready


def test_a_model_that_only_loads_is_listed_once_and_lacks_everything() -> None:
    group = [candidate("l", 0, 30, engine_class="scripted/loading", barred="loading", context_length=0)]
    (model,) = models(group, NO_LINKS)
    assert (model.ready, model.missing, model.context_length) == (False, [(0, 30)], 0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("scripted", "scripted-1", True),
        ("torch/loading", "torch/2/Q4_1/F32", True),
        ("torch/2/Q4_1/F32", "torch/2/Q4_1/F32", True),
        ("torch/2/Q4_1/F32", "torch/2/Q8_0/F32", False),
        ("torch", "torchlike/2", False),
        ("torch/loading", "scripted/loading", False),
    ],
)
def test_engine_classes_agree_as_far_as_they_are_known(one: str, other: str, same: bool) -> None:
    assert is_same_engine(one, other) is same
    assert is_same_engine(other, one) is same


def test_a_composite_model_without_a_node_lacks_no_layers() -> None:
    gone = candidate("n-1", 0, 1, 1, composite=True, text_digest=None, barred="it has left")
    (model,) = models([gone], NO_LINKS)
    assert (model.ready, model.missing, model.composite) == (False, [], True)
    with pytest.raises(ShardlineError) as caught:
        choose([gone], NO_LINKS, Query(), "tiny")
    error = caught.value
    assert (error.code, error.details["missing"], error.advice) == ("model_unavailable", [], COMPOSITE_GONE)
    assert "layer" not in error.message + error.advice
