"""Why routing does what it does: every Shard and every complete route of a model, with its cost part by part.

Reads the same candidates and searches the same graph as routing. Owns the words; decides nothing. Pure.
Shown by tests/tracker/test_explain.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from shardline.errors import ShardlineError
from shardline.tracker.coverage import Choice, choose, known_as, matching, missing_of
from shardline.tracker.selection import (
    Candidate,
    GroupKey,
    Links,
    PricedRoute,
    Query,
    RouteGraph,
    hop_time_ms,
    partition,
    rtt_ms,
)

ROUTE_LIMIT = 64
"""Complete routes that are listed for one group."""
Proven = Callable[[str, str], bool | None]
"""(Node, content_id) -> whether it could show pieces of it; None: it was not judged."""


def _not_judged(node: str, content_id: str) -> None:
    return None


class ShardLine(msgspec.Struct, frozen=True, kw_only=True):
    """One Shard: what it would cost, and whether any route may use it."""

    node: str
    url: str
    layers: tuple[int, int]
    usable: bool
    reason: str | None
    decode_ms: float
    measured: bool
    """False: `decode_ms` is guessed from the number of layers."""
    load: float
    sessions: int
    kv_capacity: int
    kv_reserved: int
    compute_ms: float
    penalty_ms: float
    proven: bool | None = None
    """Whether its Node showed pieces of the artifact that were asked of it at random; null: it was not judged. False
    keeps it out of no route, but does not count for placement."""


class EdgeLine(msgspec.Struct, frozen=True, kw_only=True):
    """One hand-over of a route, the return from tail to head as the last."""

    source: str = msgspec.field(name="from")
    to: str
    ms: float
    measured: bool


class RouteLine(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[str]
    layers: list[tuple[int, int]]
    compute_ms: float
    hop_ms: float
    return_ms: float
    penalty_ms: float
    estimate_ms: float
    edges: list[EdgeLine]
    taken: bool
    reason: str


class BlockedLine(msgspec.Struct, frozen=True, kw_only=True):
    source: str = msgspec.field(name="from")
    to: str
    reason: str


class GroupLines(msgspec.Struct, frozen=True, kw_only=True):
    """Shards of one content and one engine class: only these may share a route."""

    model: str
    content_id: str
    engine_class: str
    n_layers: int
    composite: bool = False
    """Behind another server: nobody knows how many layers there are, and each Shard, told as layer 0, has all."""
    missing: list[tuple[int, int]]
    shards: list[ShardLine]
    blocked: list[BlockedLine]
    routes: list[RouteLine]
    complete: bool
    """Whether `routes` holds every route, not only the cheapest ones."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    kv_tokens: int
    taken: list[str] | None
    """Nodes of the route that a request would get now; null if it would get none."""
    groups: list[GroupLines]


def explain(
    candidates: Iterable[Candidate], links: Links, query: Query, model: str, proven: Proven = _not_judged
) -> Explanation:
    """What a request for `model` would meet now; raises `model_not_found`."""
    candidates = list(candidates)
    groups = matching(partition(candidates), model)
    try:
        choice = choose(candidates, links, query, model)
    except ShardlineError as error:
        if error.code != "model_unavailable":
            raise
        choice = None
    return Explanation(
        model=model,
        kv_tokens=query.kv_tokens,
        taken=None if choice is None else [c.node for c in choice.route.hops],
        groups=[_group(key, group, links, query, choice, proven) for key, group in groups.items()],
    )


def _group(
    key: GroupKey, group: Sequence[Candidate], links: Links, query: Query, choice: Choice | None, proven: Proven
) -> GroupLines:
    graph = RouteGraph(group, links, query)
    ranked = graph.ranked(ROUTE_LIMIT + 1)
    return GroupLines(
        model=known_as(group),
        content_id=key.content_id,
        engine_class=key.engine_class,
        n_layers=key.n_layers,
        composite=group[0].shard.composite,
        missing=[] if group[0].shard.composite else list(missing_of(graph)),
        shards=[_shard(c, query, proven) for c in group],
        blocked=[BlockedLine(source=b.source, to=b.to, reason=b.reason) for b in sorted(set(graph.blocked))],
        routes=[_route(key, route, links, choice) for route in ranked[:ROUTE_LIMIT]],
        complete=len(ranked) <= ROUTE_LIMIT,
    )


def _shard(c: Candidate, query: Query, proven: Proven) -> ShardLine:
    return ShardLine(
        node=c.node,
        url=c.url,
        layers=(c.shard.first, c.shard.last),
        usable=c.barred is None,
        reason=c.barred,
        decode_ms=_ms(c.decode_ms),
        measured=c.shard.times is not None,
        load=_ms(c.load),
        sessions=c.sessions,
        kv_capacity=c.kv_capacity,
        kv_reserved=c.kv_reserved,
        compute_ms=_ms(c.decode_ms * c.load),
        penalty_ms=c.kv_penalty_ms(query.kv_tokens),
        proven=proven(c.node, c.shard.content_id),
    )


def _route(key: GroupKey, route: PricedRoute, links: Links, choice: Choice | None) -> RouteLine:
    nodes = [c.node for c in route.hops]
    ring = zip(nodes, (*nodes[1:], nodes[0]), strict=True)
    cost = route.cost
    taken = choice is not None and choice.key == key and choice.route.hops == route.hops
    return RouteLine(
        nodes=nodes,
        layers=[(c.shard.first, c.shard.last) for c in route.hops],
        compute_ms=_ms(cost.compute_ms),
        hop_ms=_ms(cost.hop_ms),
        return_ms=_ms(cost.return_ms),
        penalty_ms=cost.penalty_ms,
        estimate_ms=_ms(cost.estimate_ms),
        edges=[
            EdgeLine(source=a, to=b, ms=_ms(hop_time_ms(a, b, links)), measured=rtt_ms(a, b, links) is not None)
            for a, b in ring
        ],
        taken=taken,
        reason="the least cost" if taken else _why_not(key, route, choice),
    )


def _why_not(key: GroupKey, route: PricedRoute, choice: Choice | None) -> str:
    if choice is None:
        return "no route is given now"
    if choice.key.content_id != key.content_id:
        return f"the name means content {choice.key.content_id} now: it has more usable Shards, or comes first"
    more = route.cost.total_ms - choice.route.cost.total_ms
    if abs(more) < 1e-9:
        return "equal cost, and its Node ids come later"
    return f"{more:.3f} ms more for each token, penalties included"


def _ms(value: float) -> float:
    return round(value, 4)
