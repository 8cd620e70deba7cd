"""Route selection: which Inference Route costs least for one request.

Owns the cost of a route, what may join (`partition`, `joins`) and the search. It does not know what keeps a Shard
from being used (`Candidate.barred` says so), it measures nothing and counts nothing: the registry does. Pure, and
deterministic for equal input. The formula stands at `RouteCost`; docs/tracker.md explains it.
Shown by tests/tracker/test_selection.py (against a search of all routes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from shardline.wire.messages import ShardInfo

LAYER_MS = 2.0
"""One layer and one token, where a Shard has not measured itself."""
HOP_MS = 5.0
"""One way between two Nodes that have not measured their link in either direction."""
FULL_MS = 1e4
"""Penalty: free KV does not hold the request now, or the last probe of a link failed."""
NEVER_MS = 1e6
"""Penalty: the whole KV capacity does not hold the request."""
PREFILL_MS = 0.25
"""One layer and one row of a prompt, where a Shard has not measured itself."""
ANSWER_TOKENS = 128
"""Over so many tokens of an answer the time is spread that a reused prompt saves: a short answer for a chat."""
REUSE_TRIES = 8
"""Lengths of a reused prompt that are compared for one request, the longest first."""
RANKED_STEPS = 20_000
"""How many partial routes `RouteGraph.ranked` looks at before it gives up listing."""


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of the way from one Node to another. `ok` is how the last probe ended; `rtt_ms` is measured."""

    rtt_ms: float | None = None
    ok: bool | None = None
    """None: never probed."""
    out: str | None = None
    """Why no route may use it; None: it may."""


Links = Callable[[str, str], Link | None]
"""What is known of the way (from, to), by Node id."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One Shard on one Node, with what its cost needs."""

    node: str
    url: str
    engine_class: str
    shard: ShardInfo
    kv_capacity: int
    kv_reserved: int
    """Tokens, with those of routes that were given since the Node last told."""
    sessions: int
    """Likewise."""
    barred: str | None = None
    """Why no route may use it; None: it may."""
    returning: bool = False
    """It is barred for as long as its engine needs to start, or until its next heartbeat; nobody need do anything."""

    @property
    def load(self) -> float:
        """Factor on the step time; see `RouteCost`."""
        filled = self.kv_reserved / self.kv_capacity if self.kv_capacity else 0.0
        return 1.0 + self.sessions + filled

    @property
    def decode_ms(self) -> float:
        """Time of one decode row on the idle Shard: measured, else by the number of layers."""
        times = self.shard.times
        return LAYER_MS * (self.shard.last - self.shard.first) if times is None else times.decode_ms

    @property
    def prefill_ms(self) -> float:
        """Time of one row of a prompt on the idle Shard: measured, else by the number of layers."""
        times = self.shard.times
        return PREFILL_MS * (self.shard.last - self.shard.first) if times is None else times.prefill_ms_per_row

    def kv_penalty_ms(self, kv_tokens: int) -> float:
        if kv_tokens > self.kv_capacity:
            return NEVER_MS
        return FULL_MS if kv_tokens > self.kv_capacity - self.kv_reserved else 0.0


@dataclass(frozen=True, slots=True)
class Query:
    """What one request wants of its route."""

    kv_tokens: int = 0
    avoid_nodes: frozenset[str] = frozenset()
    avoid_links: frozenset[tuple[str, str]] = frozenset()
    reusable: Mapping[str, int] = field(default_factory=dict)
    """Node id -> tokens of the prompt that it has kept, as the Gateway believes."""


@dataclass(frozen=True, slots=True)
class RouteCost:
    """Estimated time of one decoded token over a route, in ms, and the penalties that order routes.

        estimate = sum of compute(s) + sum of hop(s, next s) + hop(tail, head)
        compute(s) = decode_ms(s) x (1 + sessions(s) + reserved(s) / capacity(s))
        hop(a, b)  = rtt(a, b) / 2, or rtt(b, a) / 2, or HOP_MS; 0 where a is b

    The load factor is exact for an engine that runs the entries of a batch one after another, and too high for one
    that does not: sessions are spread rather than piled up. The return edge from tail to head belongs to every
    token, because the ring closes there.

    Penalties are not time, and no part of the estimate: FULL_MS for each Node without room for the request's KV now
    and for each link whose last probe failed, NEVER_MS for each Node that could not hold the request if it were
    empty. So such routes come last, but they do come: a Node that is full refuses with `kv_exhausted` itself, and
    the Gateway queues the request.

    `saved_ms` makes a route cheaper whose Nodes all kept the beginning of the prompt; see `best_reusing`.
    """

    compute_ms: float
    hop_ms: float
    return_ms: float
    penalty_ms: float
    saved_ms: float = 0.0

    @property
    def estimate_ms(self) -> float:
        return self.compute_ms + self.hop_ms + self.return_ms

    @property
    def total_ms(self) -> float:
        """What is compared."""
        return self.estimate_ms + self.penalty_ms - self.saved_ms


class GroupKey(NamedTuple):
    """What all Shards of a route have in common."""

    content_id: str
    engine_class: str
    n_layers: int


class PricedRoute(NamedTuple):
    """Candidates from head to tail, and their cost."""

    hops: tuple[Candidate, ...]
    cost: RouteCost


class Blocked(NamedTuple):
    """Two Shards that would follow one another, and why they do not."""

    source: str
    to: str
    reason: str


def partition(candidates: Iterable[Candidate]) -> dict[GroupKey, list[Candidate]]:
    """Candidates that may share a route, in a fixed order: by first layer, then Node."""
    groups: dict[GroupKey, list[Candidate]] = {}
    for c in candidates:
        groups.setdefault(GroupKey(c.shard.content_id, c.engine_class, c.shard.n_layers), []).append(c)
    for group in groups.values():
        group.sort(key=_order)
    return dict(sorted(groups.items()))


def _order(c: Candidate) -> tuple[int, str]:
    return c.shard.first, c.node


def avoiding(group: Sequence[Candidate], query: Query) -> list[Candidate]:
    """The same Shards, those of avoided Nodes barred."""
    if not query.avoid_nodes:
        return list(group)
    reason = "the request avoids this Node"
    return [c if c.barred or c.node not in query.avoid_nodes else replace(c, barred=reason) for c in group]


def joins(left: Candidate, right: Candidate) -> bool:
    """Whether the Seam layout behind `left` is the one in front of `right`."""
    return left.shard.layout_out == right.shard.layout_in


def link_reason(source: str, to: str, links: Links, query: Query) -> str | None:
    """Why no step may go from `source` to `to`, or None."""
    if (source, to) in query.avoid_links:
        return "the request avoids this link"
    link = links(source, to)
    return None if link is None else link.out


def rtt_ms(source: str, to: str, links: Links) -> float | None:
    """Measured round trip between two Nodes, from whichever side has measured it."""
    link = links(source, to)
    if link is None or link.rtt_ms is None:
        link = links(to, source)
    return None if link is None else link.rtt_ms


def hop_time_ms(source: str, to: str, links: Links) -> float:
    """One way; see `RouteCost`."""
    if source == to:
        return 0.0
    rtt = rtt_ms(source, to, links)
    return HOP_MS if rtt is None else rtt / 2


def link_penalty_ms(source: str, to: str, links: Links) -> float:
    link = links(source, to)
    return FULL_MS if link is not None and link.ok is False and source != to else 0.0


def price(hops: Sequence[Candidate], links: Links, query: Query) -> RouteCost:
    """The cost of one complete route, part by part."""
    edges = list(pairwise(hops))
    ring = [*edges, (hops[-1], hops[0])]
    return RouteCost(
        compute_ms=sum(c.decode_ms * c.load for c in hops),
        hop_ms=sum(hop_time_ms(a.node, b.node, links) for a, b in edges),
        return_ms=hop_time_ms(hops[-1].node, hops[0].node, links),
        penalty_ms=sum(c.kv_penalty_ms(query.kv_tokens) for c in hops)
        + sum(link_penalty_ms(a.node, b.node, links) for a, b in ring),
    )


@dataclass(slots=True)
class RouteGraph:
    """The usable Shards of one group and the edges between them, priced once; then searched.

    A Shard's edges lead to Shards that start where it ends, so the order by first layer is topological and one pass
    from the tails back prices all routes. The return edge depends on the head: the pass runs once for each head, in
    the order of a lower bound (each tail with its cheapest return edge), and stops when that exceeds the best found.
    """

    group: Sequence[Candidate]
    links: Links
    query: Query
    shards: list[Candidate] = field(init=False)
    """The usable ones. Indexes below are into this list."""
    blocked: list[Blocked] = field(init=False)
    _own: list[float] = field(init=False)
    """Compute and KV penalty of each Shard."""
    _next: list[list[tuple[int, float]]] = field(init=False)
    _return: dict[int, dict[int, float]] = field(init=False)
    """Tail -> head -> time of the return edge; absent where it is barred."""

    def __post_init__(self) -> None:
        self.shards = sorted((c for c in self.group if c.barred is None), key=_order)
        self.blocked = []
        self._own = [c.decode_ms * c.load + c.kv_penalty_ms(self.query.kv_tokens) for c in self.shards]
        starts: dict[int, list[int]] = {}
        for i, c in enumerate(self.shards):
            starts.setdefault(c.shard.first, []).append(i)
        heads = starts.get(0, [])
        self._next, self._return = [], {}
        for i, c in enumerate(self.shards):
            if c.shard.last == c.shard.n_layers:
                # A Shard that is head and tail returns to itself only: no other head leads to it.
                ends = [i] if c.shard.first == 0 else heads
                self._return[i] = dict(self._edges(c, ends, layouts=False))
                self._next.append([])
            else:
                self._next.append(self._edges(c, starts.get(c.shard.last, []), layouts=True))

    def _edges(self, source: Candidate, to: Sequence[int], *, layouts: bool) -> list[tuple[int, float]]:
        edges = []
        for j in to:
            target = self.shards[j]
            reason = None
            if layouts and not joins(source, target):
                reason = f"Seam layouts differ: {source.shard.layout_out} and {target.shard.layout_in}"
            elif source.node != target.node:
                reason = link_reason(source.node, target.node, self.links, self.query)
            if reason is None:
                one_way = hop_time_ms(source.node, target.node, self.links)
                edges.append((j, one_way + link_penalty_ms(source.node, target.node, self.links)))
            else:
                self.blocked.append(Blocked(source.node, target.node, reason))
        return edges

    @property
    def heads(self) -> list[int]:
        return [i for i, c in enumerate(self.shards) if c.shard.first == 0]

    def _price_back(self, tails: Mapping[int, float]) -> tuple[list[float], list[int]]:
        """Cheapest way from each Shard through a tail, given each tail's return edge; and the Shard after it.

        Equal ways: the smaller Node id, because successors stand in that order and only a cheaper one replaces.
        """
        cost = [math.inf] * len(self.shards)
        after = [-1] * len(self.shards)
        for i in range(len(self.shards) - 1, -1, -1):
            best = tails.get(i, math.inf)
            for j, edge in self._next[i]:
                way = edge + cost[j]
                if way < best:
                    best = way
                    after[i] = j
            cost[i] = self._own[i] + best
        return cost, after

    def _lower_bound(self) -> list[float]:
        """For each Shard, what no way from it can undercut, whichever head the route has."""
        # Rounding is monotone and the passes add in the same order, so this holds for floats too, to the last bit.
        return self._price_back({t: min(edges.values(), default=math.inf) for t, edges in self._return.items()})[0]

    def best(self) -> PricedRoute | None:
        """The cheapest route; of equal ones that with the smallest Node ids, compared from the head on."""
        bound = self._lower_bound()
        best: tuple[float, tuple[str, ...], tuple[int, ...]] | None = None
        for head in sorted(self.heads, key=lambda i: (bound[i], self.shards[i].node)):
            if bound[head] == math.inf or (best is not None and bound[head] > best[0]):
                break
            cost, after = self._price_back({t: edges.get(head, math.inf) for t, edges in self._return.items()})
            if cost[head] == math.inf:
                continue
            path = [head]
            while after[path[-1]] >= 0:
                path.append(after[path[-1]])
            found = (cost[head], tuple(self.shards[i].node for i in path), tuple(path))
            best = found if best is None else min(best, found)
        return None if best is None else self._priced(best[2])

    def ranked(self, limit: int) -> list[PricedRoute]:
        """Complete routes, cheapest first, at most `limit`; the search gives up after `RANKED_STEPS` partial ones."""
        bound = self._lower_bound()
        heap: list[tuple[float, tuple[int, ...], float]] = [(bound[i], (i,), self._own[i]) for i in self.heads]
        heap.sort()
        found: list[tuple[int, ...]] = []
        for _ in range(RANKED_STEPS):
            if not heap or len(found) == limit:
                break
            _, path, spent = heappop(heap)
            if path[0] < 0:
                found.append(path[1:])
                continue
            for j, edge in self._next[path[-1]]:
                if bound[j] < math.inf:
                    heappush(heap, (spent + edge + bound[j], (*path, j), spent + edge + self._own[j]))
            back = self._return.get(path[-1], {}).get(path[0])
            if back is not None:
                heappush(heap, (spent + back, (-1, *path), spent + back))
        return sorted(map(self._priced, found), key=_rank)

    def _priced(self, path: Sequence[int]) -> PricedRoute:
        hops = tuple(self.shards[i] for i in path)
        return PricedRoute(hops, price(hops, self.links, self.query))


def _rank(route: PricedRoute) -> tuple[float, tuple[str, ...]]:
    return route.cost.total_ms, tuple(c.node for c in route.hops)


def best_reusing(graph: RouteGraph) -> PricedRoute | None:
    """The cheapest route, where one whose Nodes all have the first n tokens of the prompt is cheaper by

        saved_ms = n x the largest prefill_ms(s) of its Shards / ANSWER_TOKENS

    which is what it does not prefill (chunks pass through the Nodes beside one another), for each token of an answer.
    All Nodes or none: a route reuses what its worst Node has, and nothing where one Node has nothing.
    """
    best = graph.best()
    reusable = graph.query.reusable
    lengths = {n for c in graph.shards if (n := reusable.get(c.node, 0)) > 0}
    for tokens in sorted(lengths, reverse=True)[:REUSE_TRIES]:
        holding = [c for c in graph.shards if reusable.get(c.node, 0) >= tokens]
        route = RouteGraph(holding, graph.links, graph.query).best()
        if route is not None:
            saved_ms = tokens * max(c.prefill_ms for c in route.hops) / ANSWER_TOKENS
            route = route._replace(cost=replace(route.cost, saved_ms=saved_ms))
            best = route if best is None else min(best, route, key=_rank)
    return best


def widest_kv(graph: RouteGraph) -> int:
    """KV tokens of the longest session that any route could ever hold: the largest smallest capacity."""
    capacities = sorted({c.kv_capacity for c in graph.shards})
    low, high = 0, len(capacities)
    # Invariant: a route of Nodes of at least capacities[low - 1] exists, none of at least capacities[high].
    while low < high:
        middle = (low + high) // 2
        wide = [c for c in graph.shards if c.kv_capacity >= capacities[middle]]
        if RouteGraph(wide, graph.links, Query()).best() is None:
            high = middle
        else:
            low = middle + 1
    return capacities[low - 1] if low else 0
