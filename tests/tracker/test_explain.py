"""The explanation says what routing does, with the same figures."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given

from shardline.errors import ShardlineError
from shardline.tracker.coverage import choose
from shardline.tracker.explain import ROUTE_LIMIT, explain
from shardline.tracker.selection import HOP_MS, Candidate, Link, Links, Query
from tests.tracker.cluster_values import NO_LINKS, candidate, links_of
from tests.tracker.test_selection import clusters


def test_every_shard_and_route_with_its_cost_and_reason() -> None:
    group = [
        candidate("a", 0, 15, decode_ms=4.0, sessions=1),
        candidate("b", 15, 30, decode_ms=6.0),
        candidate("c", 15, 30, decode_ms=7.0),
        candidate("d", 15, 30, barred="loading"),
        candidate("e", 15, 30, decode_ms=1.0),
    ]
    links = links_of({("a", "b"): Link(rtt_ms=2.0), ("a", "e"): Link(out="reported: seam_lost")})
    found = explain(group, links, Query(kv_tokens=10), "tiny")
    assert found.taken == ["a", "b"]
    (lines,) = found.groups
    assert (lines.missing, lines.complete) == ([], True)
    assert [(s.node, s.usable, s.reason) for s in lines.shards if not s.usable] == [("d", False, "loading")]
    assert [(b.source, b.to) for b in lines.blocked] == [("a", "e")]
    best, other = lines.routes
    assert (best.nodes, best.taken, best.reason) == (["a", "b"], True, "the least cost")
    assert (best.compute_ms, best.hop_ms, best.return_ms, best.penalty_ms) == (14.0, 1.0, 1.0, 0.0)
    assert best.estimate_ms == 16.0
    assert [(e.source, e.to, e.measured) for e in best.edges] == [("a", "b", True), ("b", "a", True)]
    assert (other.nodes, other.taken) == (["a", "c"], False)
    assert other.reason.startswith(f"{1.0 + 2 * HOP_MS - 2.0:.3f} ms more")


def test_no_route_says_what_is_missing_and_why_each_shard_is_not_used() -> None:
    group = [candidate("a", 0, 15, barred="it is silent"), candidate("b", 15, 30)]
    found = explain(group, NO_LINKS, Query(), "tiny")
    assert found.taken is None
    assert found.groups[0].missing == [(0, 15)]
    assert found.groups[0].routes == []
    assert found.groups[0].shards[0].reason == "it is silent"


def test_other_contents_and_classes_of_the_name_are_shown_with_the_reason() -> None:
    group = [
        candidate("a", 0, 30, content_id="x"),
        candidate("b", 0, 30, content_id="y"),
        candidate("c", 0, 30, content_id="x", engine_class="slow", decode_ms=99.0),
    ]
    found = explain(group, NO_LINKS, Query(), "tiny")
    reasons = {(g.content_id, g.engine_class): g.routes[0].reason for g in found.groups}
    assert reasons[("x", group[0].engine_class)] == "the least cost"
    assert reasons[("x", "slow")] == "89.000 ms more for each token, penalties included"
    assert "name means content x" in reasons[("y", group[1].engine_class)]


def test_equal_routes_say_that_the_ids_decided() -> None:
    found = explain([candidate("b", 0, 30), candidate("a", 0, 30)], NO_LINKS, Query(), "tiny")
    assert [(r.nodes, r.taken) for r in found.groups[0].routes] == [(["a"], True), (["b"], False)]
    assert found.groups[0].routes[1].reason == "equal cost, and its Node ids come later"


def test_many_routes_are_cut_and_it_says_so() -> None:
    group = [candidate(f"n{i:02}", *((0, 15) if i % 2 else (15, 30))) for i in range(20)]
    (lines,) = explain(group, NO_LINKS, Query(), "tiny").groups
    assert len(lines.routes) == ROUTE_LIMIT < 100
    assert not lines.complete
    assert lines.routes[0].taken


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ShardlineError) as error:
        explain([candidate("a", 0, 30)], NO_LINKS, Query(), "other")
    assert error.value.code == "model_not_found"


@given(clusters())
def test_it_takes_what_routing_takes_and_is_strict_json(case: tuple[list[Candidate], Links, Query]) -> None:
    group, links, query = case
    found = explain(group, links, query, "tiny")
    try:
        taken = [c.node for c in choose(group, links, query, "tiny").route.hops]
    except ShardlineError:
        taken = None
    assert found.taken == taken
    assert sum(r.taken for g in found.groups for r in g.routes) == (taken is not None)
    assert msgspec.json.decode(msgspec.json.encode(found))["taken"] == taken
