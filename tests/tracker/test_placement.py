"""Placement: gaps first, then the thinnest range; within memory, legal cuts and the machine; equal plans for equals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.tracker.coverage import Span, missing_ranges
from shardline.tracker.placement import (
    CLAIM_TTL_S,
    Claims,
    Holding,
    available_bytes,
    holding_of,
    holdings_of,
    place,
    range_bytes,
)
from shardline.wire.messages import KvInfo, PlacementAnswer, PlacementRequest
from tests.tracker.cluster_values import CLASS, SigningNode, shard

N = 12


def request(memory: int, n_layers: int = N, **changes: Any) -> PlacementRequest:
    """Layers of 10 bytes, embedding 5, output 7."""
    values: dict[str, Any] = dict(
        content_id="c",
        engine_class=CLASS,
        n_layers=n_layers,
        memory_bytes=memory,
        layer_bytes=[10] * n_layers,
        embedding_bytes=5,
        output_bytes=7,
    )
    return PlacementRequest(**{**values, **changes})


def holding(node: str, first: int, last: int, **changes: Any) -> Holding:
    values: dict[str, Any] = dict(content_id="c", engine_class=CLASS, n_layers=N)
    return Holding(node=node, first=first, last=last, **{**values, **changes})


def answer(request_: PlacementRequest, *holdings: Holding) -> tuple[int, int]:
    found = place(request_, holdings)
    return found.first, found.last


@pytest.mark.parametrize(
    ("memory", "held", "expected"),
    [
        # As far as memory goes, with the embedding in front.
        (1000, [], (0, 12)),
        (132, [], (0, 12)),
        (131, [], (0, 11)),
        (45, [], (0, 4)),
        # The first gap, and not past its end.
        (1000, [(4, 8)], (0, 4)),
        (1000, [(0, 4), (8, 12)], (4, 8)),
        # The head's embedding does not fit: the gap's other end, then.
        (10, [(4, 12)], (3, 4)),
        # It is the first gap that fits that counts.
        (12, [(1, 3), (5, 12)], (3, 4)),
        # No gap: the layers with fewest copies, which a route must be able to use.
        (1000, [(0, 6), (6, 12), (0, 6)], (0, 12)),
        (70, [(0, 6), (6, 12), (0, 6)], (6, 12)),
        (65, [(0, 6), (6, 12), (6, 12)], (0, 6)),
        # Too small for any whole piece: begin one where the others begin.
        (25, [(0, 6), (6, 12)], (0, 2)),
        # Room for more, but then no route could use it.
        (85, [(0, 6), (6, 12)], (0, 6)),
        # What somebody began is continued, although layers elsewhere are thinner.
        (25, [(0, 6), (0, 6), (6, 12), (0, 2)], (2, 4)),
    ],
)
def test_table(memory: int, held: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    assert answer(request(memory), *(holding(f"n{i}", *r) for i, r in enumerate(held))) == expected


def test_small_nodes_continue_what_one_of_them_began() -> None:
    held = [holding("a", 0, 6), holding("b", 6, 12)]
    taken = []
    for i in range(3):
        first, last = answer(request(25), *held)
        taken.append((first, last))
        held.append(holding(f"small-{i}", first, last))
    # Together they are another way through the first half.
    assert taken == [(0, 2), (2, 4), (4, 6)]


def test_a_range_that_cannot_be_served_is_never_the_answer() -> None:
    """Between legal cuts, but with too little in it for the engine."""
    cannot = [(0, 4), (4, 8), (4, 6)]
    free = request(45, legal_cuts=[4, 6, 8])
    assert answer(free, holding("a", 6, 12)) == (0, 4)
    assert answer(msgspec.structs.replace(free, illegal_parts=cannot), holding("a", 6, 12)) == (6, 8)
    assert answer(request(65, legal_cuts=[4, 6, 8], illegal_parts=cannot), holding("a", 6, 12)) == (0, 6)
    with pytest.raises(ShardlineError) as caught:
        place(request(19, legal_cuts=[4, 6, 8], illegal_parts=[*cannot, (6, 8)]), [])
    assert caught.value.details["needed_bytes"] == 47, "layers 8:12 are the smallest that can be"


def test_a_copy_goes_where_a_token_spends_most_time() -> None:
    fast, slow = holding("fast", 0, 6, layer_ms=1.0), holding("slow", 6, 12, layer_ms=4.0)
    assert answer(request(70), fast, slow) == (6, 12)
    assert answer(request(70), holding("slow", 0, 6, layer_ms=4.0), holding("fast", 6, 12, layer_ms=1.0)) == (0, 6)
    # Fewer slow layers cost less than many that are a little faster.
    held = [holding("a", 0, 8, layer_ms=3.0), holding("b", 8, 12, layer_ms=4.0)]
    assert answer(request(85), *held) == (0, 8)
    # Copies come first: what one Node alone has is lost with it.
    assert answer(request(70), fast, slow, holding("slow-2", 6, 12, layer_ms=4.0)) == (0, 6)
    # Unmeasured layers count as the measured ones do, and a measurement that differs a little moves nobody.
    assert answer(request(70), fast, holding("new", 6, 12)) == (0, 6)
    assert answer(request(70), fast, holding("like", 6, 12, layer_ms=1.05)) == (0, 6)
    assert answer(request(70), holding("at-once", 0, 6, layer_ms=0.0), slow) == (6, 12)


def test_who_cannot_show_its_layers_counts_only_for_memory() -> None:
    here = dict(host="here", host_memory_bytes=1000)
    liar = holding("liar", 0, 6, host="here", kv_bytes=20, counts=False)
    assert answer(request(70, **here), liar, holding("b", 6, 12)) == (0, 6)
    assert available_bytes(request(1000, **here), [liar]) == 1000 - 65 - 20


def test_a_plan_before_anybody_runs() -> None:
    """One Node after the other, without a Tracker; where all is covered, the next ones are copies."""
    held: list[Holding] = []
    for name, memory in (("a", 70), ("b", 50), ("c", 100), ("d", 70)):
        ask = request(memory, node=name)
        held.append(holding_of(name, ask, place(ask, held)))
    assert [(h.first, h.last) for h in held] == [(0, 6), (6, 11), (11, 12), (0, 6)]


def test_nothing_fits_says_how_much_would() -> None:
    with pytest.raises(ShardlineError) as error:
        place(request(9), [])
    assert error.value.code == "memory_insufficient"
    assert error.value.details == {"available_bytes": 9, "needed_bytes": 10}


def test_other_models_engines_and_own_claims_do_not_count() -> None:
    strangers = [
        holding("a", 0, 6, content_id="other"),
        holding("b", 0, 6, engine_class="torch/1/Q4/F32"),
        holding("c", 0, 6, n_layers=13),
        holding("me", 0, 6),
    ]
    assert answer(request(1000, node="me"), *strangers) == (0, 12)
    assert answer(request(1000), strangers[3]) == (6, 12)


def test_a_node_that_still_loads_counts_by_what_it_knows_of_its_engine() -> None:
    assert answer(request(1000), holding("a", 0, 6, engine_class="scripted/loading")) == (6, 12)
    assert answer(request(1000, engine_class="scripted"), holding("a", 0, 6)) == (6, 12)


def test_nodes_on_one_machine_share_its_memory() -> None:
    here = dict(host="here", host_memory_bytes=100)
    # The first one took layers of 65 bytes and holds KV of 5 more.
    first = holding("a", 0, 6, host="here", kv_bytes=5)
    assert available_bytes(request(100, **here), [first]) == 100 - 65 - 5
    assert answer(request(100, **here), first) == (6, 9)
    assert answer(request(100, **here), holding("a", 0, 6, host="elsewhere", kv_bytes=5)) == (6, 12)
    # What a Node takes already counts, if it is more than planned.
    assert available_bytes(request(100, **here), [holding("a", 0, 6, host="here", rss_bytes=90)]) == 10
    # Without the machine's own figure, the largest that one of its Nodes names.
    vague = request(40, host="here")
    assert available_bytes(vague, [holding("a", 0, 6, host="here", memory_bytes=80)]) == 15
    assert available_bytes(request(40), [first]) == 40


def test_bad_figures_are_refused() -> None:
    for bad in (
        request(10, n_layers=0),
        request(10, layer_bytes=[10] * 11),
        request(-1),
        request(10, layer_bytes=[-1] + [10] * 11),
        request(10, legal_cuts=[13]),
        request(10, n_layers=5000),
        request(1 << 70),
    ):
        with pytest.raises(ShardlineError) as error:
            place(bad, [])
        assert error.value.code == "invalid_value"


def test_claims_hold_layers_until_the_node_registers_or_a_minute_is_over() -> None:
    claims = Claims()
    ask = request(65, node="n-1")
    claims.add(ask, place(ask, claims.holdings(0.0)), 0.0)
    other = request(1000, node="n-2")
    assert answer(other, *claims.holdings(1.0)) == (6, 12)
    # Asking again is the same question, and gets the same answer.
    assert answer(ask, *claims.holdings(2.0)) == (0, 6)
    assert claims.holdings(CLAIM_TTL_S) == []
    unnamed = request(65)
    claims.add(unnamed, place(unnamed, []), 100.0)
    node = SigningNode("http://127.0.0.1:1", [shard(0, 6, N, content_id="c", state="loading")])
    claims.redeem(node.info())
    assert claims.holdings(101.0) == []


def test_holdings_of_a_node_are_what_serves_or_will() -> None:
    shards = [
        shard(0, 6, N, content_id="a", state="loading"),
        shard(0, 6, N, content_id="b", state="failed"),
        shard(0, 6, N, content_id="c", state="draining"),
        shard(0, 6, N, content_id="d"),
    ]
    info = SigningNode("http://127.0.0.1:1", shards, kv=KvInfo(capacity_tokens=10)).info()
    found = holdings_of(info)
    assert [h.content_id for h in found] == ["a", "d"]
    assert (found[0].kv_bytes, found[0].layer_ms) == (160, 10.0 / 6)
    assert [h.counts for h in holdings_of(info, lambda content_id: content_id != "a")] == [False, True]


@st.composite
def models(draw: st.DrawFn) -> PlacementRequest:
    n = draw(st.integers(1, 24))
    return request(
        0,
        n,
        layer_bytes=draw(st.lists(st.integers(1, 20), min_size=n, max_size=n)),
        embedding_bytes=draw(st.integers(0, 30)),
        output_bytes=draw(st.integers(0, 30)),
        kv_reserve_bytes=draw(st.integers(0, 5)),
        legal_cuts=draw(st.one_of(st.none(), st.lists(st.integers(0, n), max_size=n))),
    )


def grow(model: PlacementRequest, memories: list[int]) -> list[PlacementAnswer]:
    """Nodes that ask one after another, each with what those before it hold."""
    held: list[Holding] = []
    answers = []
    for i, memory in enumerate(memories):
        ask = msgspec.structs.replace(model, memory_bytes=memory)
        found = place(ask, held)
        assert place(ask, held[::-1]) == found
        answers.append(found)
        held.append(holding(f"n{i}", found.first, found.last, n_layers=model.n_layers))
    return answers


def sizes(model: PlacementRequest) -> tuple[list[int], list[int]]:
    """Legal cuts, and the most that any piece between two neighbours could need."""
    cuts = sorted({0, model.n_layers, *(model.legal_cuts if model.legal_cuts is not None else range(model.n_layers))})
    sums = [0]
    for size in model.layer_bytes:
        sums.append(sums[-1] + size)
    extra = model.embedding_bytes + model.output_bytes + model.kv_reserve_bytes
    return cuts, [sums[b] - sums[a] + extra for a, b in pairwise(cuts)]


@given(models(), st.data())
def test_within_memory_at_legal_cuts_and_whole_after_at_most_one_node_a_piece(
    model: PlacementRequest, data: st.DataObject
) -> None:
    cuts, pieces = sizes(model)
    least = max(pieces)
    memories = data.draw(st.lists(st.integers(least, 3 * least), min_size=len(pieces), max_size=len(pieces) + 4))
    answers = grow(model, memories)
    sums = [0]
    for size in model.layer_bytes:
        sums.append(sums[-1] + size)
    for found, memory in zip(answers, memories, strict=True):
        assert found.first in cuts
        assert found.last in cuts
        assert found.first < found.last
        assert range_bytes(model, sums, found.first, found.last) + model.kv_reserve_bytes <= memory
    assert missing_ranges([Span(a.first, a.last) for a in answers], model.n_layers) == ()


@given(st.integers(1, 30), st.data())
def test_any_number_of_nodes_that_hold_their_share_covers_the_model(n_layers: int, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, n_layers))
    share = -(-n_layers // nodes)
    answers = grow(request(0, n_layers), [10 * share + 12] * nodes)
    assert missing_ranges([Span(a.first, a.last) for a in answers], n_layers) == ()
