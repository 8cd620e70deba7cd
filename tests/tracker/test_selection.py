"""Route selection against a search of every route, and the parts of the cost one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.tracker.selection import (
    ANSWER_TOKENS,
    FULL_MS,
    HOP_MS,
    LAYER_MS,
    NEVER_MS,
    Candidate,
    GroupKey,
    Link,
    Links,
    Query,
    RouteGraph,
    best_reusing,
    partition,
    price,
    widest_kv,
)
from tests.tracker.cluster_values import NO_LINKS, candidate, links_of

N = 6


def nodes_of(graph: RouteGraph) -> list[str] | None:
    best = graph.best()
    return None if best is None else [c.node for c in best.hops]


def every_route(group: Sequence[Candidate], links: Links, query: Query) -> Iterator[tuple[Candidate, ...]]:
    """All chains that cover the layers once, with open links, agreeing layouts and a closed ring."""

    def open_link(a: Candidate, b: Candidate) -> bool:
        link = links(a.node, b.node)
        return (a.node, b.node) not in query.avoid_links and (link is None or link.out is None)

    def extend(route: tuple[Candidate, ...]) -> Iterator[tuple[Candidate, ...]]:
        if route[-1].shard.last == N:
            if len(route) == 1 or open_link(route[-1], route[0]):
                yield route
            return
        for c in group:
            fits = c.shard.first == route[-1].shard.last and c.shard.layout_in == route[-1].shard.layout_out
            if fits and c.barred is None and open_link(route[-1], c):
                yield from extend((*route, c))

    for head in group:
        if head.shard.first == 0 and head.barred is None:
            yield from extend((head,))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Candidate], Links, Query]:
    # Few distinct values: ties are the interesting part.
    few = st.sampled_from([1.0, 2.0, 2.5, 4.0])
    group = []
    for i in range(draw(st.integers(1, 8))):
        first = draw(st.integers(0, N - 1))
        last = draw(st.integers(first + 1, N))
        c = candidate(
            f"n{i}",
            first,
            last,
            N,
            decode_ms=draw(few),
            sessions=draw(st.integers(0, 2)),
            kv_reserved=draw(st.sampled_from([0, 5000, 9990])),
            kv_capacity=draw(st.sampled_from([50, 10_000])),
            barred=draw(st.sampled_from([None, None, None, "loading"])),
        )
        if first > 0 and draw(st.integers(0, 9)) == 0:
            c = replace(c, shard=candidate(c.node, first, last, N, layout_in="other").shard)
        group.append(c)
    names = [c.node for c in group]
    known = {}
    for pair in itertools.permutations(names, 2):
        if draw(st.booleans()):
            known[pair] = Link(
                rtt_ms=draw(st.one_of(st.none(), few)),
                ok=draw(st.sampled_from([None, True, True, False])),
                out=draw(st.sampled_from([None, None, None, None, "reported"])),
            )
    return draw(st.permutations(group)), links_of(known), Query(kv_tokens=draw(st.sampled_from([0, 40, 100])))


@given(clusters())
def test_best_is_the_cheapest_of_all_routes_and_first_among_equals(case: tuple[list[Candidate], Links, Query]) -> None:
    group, links, query = case
    best = RouteGraph(group, links, query).best()
    routes = list(every_route(group, links, query))
    if best is None:
        assert not routes
        return
    costs = {tuple(c.node for c in r): price(r, links, query).total_ms for r in routes}
    cheapest = min(costs.values())
    assert best.cost.total_ms == pytest.approx(cheapest)
    near = [names for names, cost in costs.items() if cost == pytest.approx(cheapest, abs=1e-6)]
    assert tuple(c.node for c in best.hops) in near
    # All figures are sums of quarters here, which floats hold exactly, unless KV is partly filled.
    if all(c.kv_reserved == 0 for c in group):
        assert tuple(c.node for c in best.hops) == min(near)


@given(clusters())
def test_ranked_lists_every_route_in_order_and_begins_with_the_best(
    case: tuple[list[Candidate], Links, Query],
) -> None:
    group, links, query = case
    graph = RouteGraph(group, links, query)
    ranked = graph.ranked(10_000)
    assert {tuple(c.node for c in r.hops) for r in ranked} == {
        tuple(c.node for c in r) for r in every_route(group, links, query)
    }
    costs = [r.cost.total_ms for r in ranked]
    assert costs == sorted(costs)
    best = graph.best()
    assert (best is None) == (not ranked)
    if best is not None:
        assert best.cost.total_ms == pytest.approx(ranked[0].cost.total_ms)
        assert len(graph.ranked(1)) == 1


@given(clusters())
def test_order_of_the_candidates_changes_nothing(case: tuple[list[Candidate], Links, Query]) -> None:
    group, links, query = case
    assert RouteGraph(group, links, query).best() == RouteGraph(group[::-1], links, query).best()


@given(clusters())
def test_every_route_covers_each_layer_once_with_usable_shards(case: tuple[list[Candidate], Links, Query]) -> None:
    group, links, query = case
    for route in RouteGraph(group, links, query).ranked(50):
        assert [layer for c in route.hops for layer in range(c.shard.first, c.shard.last)] == list(range(N))
        assert all(c.barred is None for c in route.hops)
        assert len({c.node for c in route.hops}) == len(route.hops)


@pytest.mark.parametrize(
    ("ranges", "route"),
    [
        ([(0, 10), (10, 20), (20, 30)], ["n0", "n1", "n2"]),
        ([(0, 15), (10, 30)], None),
        ([(0, 10), (11, 30)], None),
        ([(0, 30)], ["n0"]),
        ([(0, 10), (0, 10)], None),
        ([(10, 20), (20, 30)], None),
        ([(0, 15), (10, 30), (0, 10)], ["n2", "n1"]),
    ],
)
def test_only_chains_that_cover_each_layer_once(ranges: list[tuple[int, int]], route: list[str] | None) -> None:
    group = [candidate(f"n{i}", first, last) for i, (first, last) in enumerate(ranges)]
    assert nodes_of(RouteGraph(group, NO_LINKS, Query())) == route


def test_content_engine_class_and_depth_never_mix() -> None:
    a = candidate("a", 0, 15)
    others = [
        candidate("b", 15, 30, content_id="other"),
        candidate("c", 15, 30, engine_class="other"),
        candidate("d", 15, 31, 31),
    ]
    groups = partition([a, *others])
    assert len(groups) == 4
    assert all(RouteGraph(group, NO_LINKS, Query()).best() is None for group in groups.values())
    assert groups[GroupKey("c" * 8, a.engine_class, 30)] == [a]


def test_the_return_edge_decides_between_equal_ways_out() -> None:
    group = [candidate("a", 0, 15), candidate("b", 15, 30), candidate("c", 15, 30)]
    links = links_of(
        {
            ("a", "b"): Link(rtt_ms=2.0),
            ("a", "c"): Link(rtt_ms=4.0),
            # Back from b is slow, so c is better although the way there is longer.
            ("b", "a"): Link(rtt_ms=40.0),
            ("c", "a"): Link(rtt_ms=4.0),
        }
    )
    best = RouteGraph(group, links, Query()).best()
    assert best is not None
    assert [c.node for c in best.hops] == ["a", "c"]
    assert best.cost.hop_ms == 2.0
    assert best.cost.return_ms == 2.0


def test_equal_routes_with_different_heads_are_decided_by_id_whichever_looked_better_at_first() -> None:
    group = [candidate("z", 0, 15, decode_ms=1.0), candidate("a", 0, 15, decode_ms=4.0), candidate("t", 15, 30)]
    links = links_of(
        {
            ("z", "t"): Link(rtt_ms=0.0),
            ("a", "t"): Link(rtt_ms=0.0),
            ("t", "a"): Link(rtt_ms=0.0),
            # Only this makes z as dear as a, and the search learns it last.
            ("t", "z"): Link(rtt_ms=6.0),
        }
    )
    assert nodes_of(RouteGraph(group, links, Query())) == ["a", "t"]


def test_each_part_of_the_cost() -> None:
    group = [
        candidate("a", 0, 10, decode_ms=4.0, sessions=1, kv_reserved=5000),
        candidate("b", 10, 30, times=None),
    ]
    cost = price(group, links_of({("b", "a"): Link(rtt_ms=3.0)}), Query(kv_tokens=10))
    assert cost.compute_ms == 4.0 * (1 + 1 + 0.5) + 20 * LAYER_MS
    # Not measured from a to b, but from b to a: used for both directions.
    assert cost.hop_ms == 1.5
    assert cost.return_ms == 1.5
    assert cost.penalty_ms == 0
    assert cost.estimate_ms == cost.compute_ms + 3.0
    assert price(group, NO_LINKS, Query()).hop_ms == HOP_MS
    assert price([candidate("w", 0, 30)], NO_LINKS, Query()).return_ms == 0


def test_full_nodes_come_last_but_come() -> None:
    full = candidate("a", 0, 30, decode_ms=1.0, kv_reserved=9_990)
    slow = candidate("b", 0, 30, decode_ms=900.0)
    tiny = candidate("c", 0, 30, decode_ms=1.0, kv_capacity=50)
    query = Query(kv_tokens=100)
    assert nodes_of(RouteGraph([full, slow, tiny], NO_LINKS, query)) == ["b"]
    assert nodes_of(RouteGraph([full, tiny], NO_LINKS, query)) == ["a"]
    assert nodes_of(RouteGraph([tiny], NO_LINKS, query)) == ["c"]
    assert full.kv_penalty_ms(100) == FULL_MS
    assert tiny.kv_penalty_ms(100) == NEVER_MS
    best = RouteGraph([full], NO_LINKS, query).best()
    assert best is not None
    assert best.cost.estimate_ms < FULL_MS < best.cost.total_ms


def test_links_that_are_out_or_avoided_carry_nothing_and_failed_probes_come_last() -> None:
    group = [candidate("a", 0, 15), candidate("b", 15, 30), candidate("c", 15, 30, decode_ms=99.0)]
    out = links_of({("a", "b"): Link(out="reported: seam_lost")})
    assert nodes_of(RouteGraph(group, out, Query())) == ["a", "c"]
    assert nodes_of(RouteGraph(group, NO_LINKS, Query(avoid_links=frozenset({("a", "b")})))) == ["a", "c"]
    # The return edge counts as any other.
    assert nodes_of(RouteGraph(group, NO_LINKS, Query(avoid_links=frozenset({("b", "a")})))) == ["a", "c"]
    failed = links_of({("a", "b"): Link(rtt_ms=1.0, ok=False)})
    assert nodes_of(RouteGraph(group, failed, Query())) == ["a", "c"]
    assert nodes_of(RouteGraph(group[:2], failed, Query())) == ["a", "b"]
    graph = RouteGraph(group, out, Query())
    assert [(b.source, b.to) for b in graph.blocked] == [("a", "b")]


def test_a_burst_spreads_over_equal_nodes() -> None:
    nodes = {name: candidate(name, 0, 30) for name in "abc"}
    taken = []
    for _ in range(9):
        best = RouteGraph(list(nodes.values()), NO_LINKS, Query(kv_tokens=100)).best()
        assert best is not None
        name = best.hops[0].node
        taken.append(name)
        c = nodes[name]
        nodes[name] = replace(c, sessions=c.sessions + 1, kv_reserved=c.kv_reserved + 100)
    assert taken == list("abc") * 3


def test_widest_kv_is_the_longest_session_that_some_route_holds() -> None:
    group = [
        candidate("a", 0, 15, kv_capacity=500),
        candidate("b", 0, 15, kv_capacity=900, decode_ms=99.0),
        candidate("c", 15, 30, kv_capacity=700),
    ]
    assert widest_kv(RouteGraph(group, NO_LINKS, Query())) == 700
    assert widest_kv(RouteGraph(group[:1], NO_LINKS, Query())) == 0


def test_a_large_cluster_is_searched_exactly() -> None:
    # 60 Nodes over 30 layers in three thirds, all links measured differently: the best route is known by hand.
    thirds = [(0, 10), (10, 20), (20, 30)]
    group = [candidate(f"n{i:02}", *thirds[i % 3], decode_ms=5.0 + (i * 7) % 11) for i in range(60)]
    numbered = list(enumerate(group))
    rtt = {(a.node, b.node): Link(rtt_ms=2.0 + (i * 31 + j * 17) % 13) for i, a in numbered for j, b in numbered}
    best = RouteGraph(group, links_of(rtt), Query()).best()
    by_third = [[c for c in group if c.shard.first == first] for first, _ in thirds]
    brute = min(
        price((h, m, t), links_of(rtt), Query()).total_ms for h in by_third[0] for m in by_third[1] for t in by_third[2]
    )
    assert best is not None
    assert best.cost.total_ms == pytest.approx(brute)


def reusing(group: Sequence[Candidate], reusable: dict[str, int]) -> tuple[list[str], float]:
    route = best_reusing(RouteGraph(group, NO_LINKS, Query(kv_tokens=100, reusable=reusable)))
    assert route is not None
    return [c.node for c in route.hops], route.cost.saved_ms


def test_of_equal_routes_the_one_that_kept_the_prompt_is_taken() -> None:
    halves = [candidate(n, 0, 15) for n in "ab"] + [candidate(n, 15, 30) for n in "cd"]
    assert reusing(halves, {}) == (["a", "c"], 0.0)
    assert reusing(halves, {"b": 96, "d": 96}) == (["b", "d"], 96 / ANSWER_TOKENS)
    # All Nodes or none, and as much as the worst has.
    assert reusing(halves, {"b": 96}) == (["a", "c"], 0.0)
    assert reusing(halves, {"b": 96, "d": 96, "a": 320, "c": 64}) == (["a", "d"], 96 / ANSWER_TOKENS)
    assert reusing(halves, {"b": 96, "d": 96, "c": 320}) == (["b", "c"], 96 / ANSWER_TOKENS)


def test_a_kept_prompt_is_worth_the_prefill_that_it_saves_and_no_more() -> None:
    cold, hot = candidate("a", 0, 30), candidate("b", 0, 30, sessions=1)
    for tokens, taken in ((9 * ANSWER_TOKENS, "a"), (11 * ANSWER_TOKENS, "b")):  # 1 ms a row against 10 ms a token
        assert reusing([cold, hot], {"b": tokens})[0] == [taken]
    full = candidate("b", 0, 30, kv_reserved=9_950)
    assert reusing([cold, full], {"b": 9_000})[0] == ["a"]
    assert reusing([cold, replace(hot, barred="out")], {"b": 9_000})[0] == ["a"]


def test_nodes_that_are_not_there_may_be_named() -> None:
    assert reusing([candidate("a", 0, 30)], {"gone": 500, "a": 0}) == (["a"], 0.0)
