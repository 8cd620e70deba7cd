"""What is served: which layers are missing for a whole route, the list of models, and the choice of a route by name.

One reading of the registry for all three, so that the list never names a model that routing refuses. Owns the
meaning of "missing" (the fewest layers that would complete a route). Pure. Shown by tests/tracker/test_coverage.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from shardline.errors import COMPOSITE_GONE, ONE_ENGINE, RETURNING, ShardlineError
from shardline.tracker.selection import (
    Candidate,
    GroupKey,
    Links,
    PricedRoute,
    Query,
    RouteGraph,
    avoiding,
    best_reusing,
    partition,
    widest_kv,
)
from shardline.wire.messages import ModelInfo, Peer

Ranges = tuple[tuple[int, int], ...]
_ENGINES_TOLD = 3
RETRY_AFTER_S = 2
"""When to ask again for a model that is not whole: a Node that starts or returns needs about two heartbeats."""


class Span(NamedTuple):
    """A piece of a chain: layers [first, last), and whose they are (an index, or -1 where nobody's matters)."""

    first: int
    last: int
    owner: int = -1


def layer_copies(spans: Iterable[Span], n_layers: int) -> list[int]:
    """For each layer: how many of `spans` hold it."""
    changes = [0] * (n_layers + 1)
    for span in spans:
        changes[span.first] += 1
        changes[span.last] -= 1
    return list(accumulate(changes))[:n_layers]


class _Way(NamedTuple):
    """Compared from the left: missing layers, their ranges' number, the ranges."""

    layers: int
    pieces: int
    ranges: Ranges

    def lacking(self, layer: int) -> _Way:
        """This way, with one more layer missing at its end."""
        if self.ranges and self.ranges[-1][1] == layer:
            ranges = (*self.ranges[:-1], (self.ranges[-1][0], layer + 1))
        else:
            ranges = (*self.ranges, (layer, layer + 1))
        return _Way(self.layers + 1, len(ranges), ranges)


_START = _Way(0, 0, ())


def missing_ranges(
    spans: Iterable[Span],
    n_layers: int,
    *,
    follows: Callable[[Span, Span], bool] = lambda left, right: True,
    closes: Callable[[Span, Span], bool] = lambda tail, head: True,
) -> Ranges:
    """The fewest layers that, served by one new Shard a range, would make a whole route of `spans`; () if it is whole.

    `follows(left, right)` says whether one may hand on to the other, `closes(tail, head)` whether the ring closes.
    Of equally few layers: fewer ranges, then the first in order.
    """
    by_first: dict[int, list[Span]] = {}
    for span in sorted(set(spans)):
        by_first.setdefault(span.first, []).append(span)
    # The head is fixed, as the ring must close on it; None stands for a new head, which any tail reaches.
    best = _complete(None, by_first, n_layers, follows, closes)
    for head in by_first.get(0, []):
        best = min(best, _complete(head, by_first, n_layers, follows, closes))
        if best.layers == 0:
            break
    return best.ranges


def _complete(
    head: Span | None,
    by_first: dict[int, list[Span]],
    n_layers: int,
    follows: Callable[[Span, Span], bool],
    closes: Callable[[Span, Span], bool],
) -> _Way:
    """The way from layer 0 to the end that lacks least; `head` is its first span, or a new one."""
    # Ways that end at a boundary with a missing layer just before it, and ways that end with a span there.
    lacking: dict[int, _Way] = {} if head is not None else {1: _START.lacking(0)}
    arrived: dict[int, list[tuple[_Way, Span]]] = {} if head is None else {head.last: [(_START, head)]}
    for boundary in range(1, n_layers):
        new = lacking.get(boundary)
        here = arrived.get(boundary, [])
        ways = [way for way, _ in here]
        if new is not None:
            ways.append(new)
        if not ways:
            continue
        _keep(lacking, boundary + 1, min(ways).lacking(boundary))
        for span in by_first.get(boundary, []):
            fitting = [way for way, left in here if follows(left, span)]
            if new is not None:
                fitting.append(new)
            if fitting:
                arrived.setdefault(span.last, []).append((min(fitting), span))
    ends = [way for way, tail in arrived.get(n_layers, []) if head is None or tail is head or closes(tail, head)]
    if n_layers in lacking:
        ends.append(lacking[n_layers])
    # With a head that nothing follows there is still the way that lacks all the rest, so `ends` is never empty
    # unless the head alone is a whole route that may not close on itself, which no caller forbids.
    return min(ends)


def _keep(ways: dict[int, _Way], boundary: int, way: _Way) -> None:
    known = ways.get(boundary)
    ways[boundary] = way if known is None else min(known, way)


def missing_of(graph: RouteGraph) -> Ranges:
    """The layer ranges whose absence keeps a group from a whole route; () when it has one."""
    shards = graph.shards
    n_layers = graph.group[0].shard.n_layers
    if graph.blocked:
        barred = {(b.source, b.to) for b in graph.blocked}

        def reach(left: Span, right: Span) -> bool:
            return (shards[left.owner].node, shards[right.owner].node) not in barred

        spans = [Span(c.shard.first, c.shard.last, i) for i, c in enumerate(shards)]
        return missing_ranges(spans, n_layers, follows=reach, closes=reach)
    # All edges are open: Shards of one range are alike, which keeps this short for many Nodes.
    return missing_ranges([Span(c.shard.first, c.shard.last) for c in shards], n_layers)


def is_returning(group: Sequence[Candidate], links: Links) -> bool:
    """Whether a group that is not whole becomes so without anybody's doing: by Nodes that load, or start again."""
    if not any(c.returning for c in group):
        return False
    soon = [replace(c, barred=None) if c.returning else c for c in group]
    return RouteGraph(soon, links, Query()).best() is not None


def is_unloaded(key: GroupKey) -> bool:
    """Whether these are Nodes that have not loaded their engine: of their class they know the backend only."""
    return key.engine_class.endswith("/loading")


def is_same_engine(one: str, other: str) -> bool:
    """Whether two engine classes agree as far as both are known: before it has loaded, a Node knows its backend only,
    and a class begins with its backend's name."""
    short, long = sorted((one.removesuffix("/loading"), other.removesuffix("/loading")), key=len)
    return long.startswith(short) and not long[len(short) : len(short) + 1].isalnum()


class Choice(NamedTuple):
    """A route that was chosen, and under which name."""

    model: str
    key: GroupKey
    route: PricedRoute


def known_as(group: Sequence[Candidate]) -> str:
    """The name that most Shards of a group give their model; of equally many the first in order."""
    names = Counter(c.shard.model for c in group)
    return min(names, key=lambda name: (-names[name], name))


def matching(groups: dict[GroupKey, list[Candidate]], model: str) -> dict[GroupKey, list[Candidate]]:
    """The groups that serve `model` (a name, or a content_id); `model_not_found` when none does."""
    found = {
        key: group
        for key, group in groups.items()
        if key.content_id == model or any(c.shard.model == model for c in group)
    }
    if not found:
        raise ShardlineError("model_not_found", f"no Node serves a model {model!r:.200}", param="model")
    return found


def choose(candidates: Iterable[Candidate], links: Links, query: Query, model: str) -> Choice:
    """The route for a request, or `model_not_found`, or `model_unavailable` with the missing layer ranges.

    One name with several `content_id`s: the one with most usable Shards that has a whole route, then the first in
    order; load plays no part, so that a name does not change its meaning from request to request. Of one content,
    the engine class with the cheapest route, for a prompt of which Nodes have kept what `query` says.
    """
    groups = matching(partition(candidates), model)
    graphs = {key: RouteGraph(avoiding(group, query), links, query) for key, group in groups.items()}
    usable: Counter[str] = Counter()
    for key, graph in graphs.items():
        usable[key.content_id] += len(graph.shards)
    for content_id in sorted(usable, key=lambda content: (-usable[content], content)):
        routes = [
            (route.cost.total_ms, key, route)
            for key, graph in graphs.items()
            if key.content_id == content_id and (route := best_reusing(graph)) is not None
        ]
        if routes:
            _, key, route = min(routes, key=lambda item: item[:2])
            return Choice(known_as(groups[key]), key, route)
    returning = any(is_returning(group, links) for group in groups.values())
    raise _unavailable(model, graphs, RETURNING if returning else None)


def _unavailable(model: str, graphs: dict[GroupKey, RouteGraph], advice: str | None) -> ShardlineError:
    lacks = {key: missing_of(graph) for key, graph in graphs.items()}
    key = min(lacks, key=lambda k: (sum(last - first for first, last in lacks[k]), k))
    blocked = sorted(set(graphs[key].blocked))
    if all(c.shard.composite for c in graphs[key].group):
        return _no_server(model, key)
    ranges = ", ".join(f"{first}:{last}" for first, last in lacks[key])
    message = f"no whole route for model {model!r:.200}: layers {ranges} of {key.n_layers} are missing"
    others = [k for k in sorted(lacks) if k.content_id == key.content_id and k != key and not is_unloaded(k)]
    for other in others[:_ENGINES_TOLD]:
        ranges = ", ".join(f"{first}:{last}" for first, last in lacks[other])
        message += f"; of engine class {other.engine_class} {ranges} are missing, and no route mixes engine classes"
    if blocked:
        message += f"; {blocked[0].source} does not reach {blocked[0].to} ({blocked[0].reason})"
    return ShardlineError(
        "model_unavailable",
        message,
        param="model",
        advice=advice or (ONE_ENGINE if others else None),
        missing=[list(r) for r in lacks[key]],
        content_id=key.content_id,
        engine_class=key.engine_class,
        links=[{"from": b.source, "to": b.to, "reason": b.reason} for b in blocked[:16]],
        retry_after=RETRY_AFTER_S,
    )


def _no_server(model: str, key: GroupKey) -> ShardlineError:
    """Of a model behind another server, which has no layers that could be missing."""
    return ShardlineError(
        "model_unavailable",
        f"no Node passes requests for model {model!r:.200} on to its server",
        param="model",
        advice=COMPOSITE_GONE,
        missing=[],
        content_id=key.content_id,
        engine_class=key.engine_class,
        retry_after=RETRY_AFTER_S,
    )


def models(candidates: Iterable[Candidate], links: Links) -> list[ModelInfo]:
    """Every group of Shards as a model, whole or not, in a fixed order."""
    groups = partition(candidates)
    known = {key.content_id for key in groups if not is_unloaded(key)}
    # A Node that loads does not know its engine class yet: it is no second model beside those that do.
    groups = {key: group for key, group in groups.items() if not is_unloaded(key) or key.content_id not in known}
    found = [_model(key, group, links) for key, group in groups.items()]
    return sorted(found, key=lambda m: (m.model, m.content_id, m.engine_class, m.n_layers))


def _model(key: GroupKey, group: Sequence[Candidate], links: Links) -> ModelInfo:
    graph = RouteGraph(group, links, Query())
    route = graph.best()
    shards = route.hops if route is not None else group
    heads = [graph.shards[i] for i in graph.heads]
    text_digest = (route.hops[0] if route is not None else heads[0]).shard.text_digest if heads else None
    texts = [c for c in graph.shards if text_digest is not None and c.shard.text_digest == text_digest]
    return ModelInfo(
        model=known_as(group),
        content_id=key.content_id,
        engine_class=key.engine_class,
        n_layers=key.n_layers,
        # A Shard that still loads says 0.
        context_length=min((c.shard.context_length for c in shards if c.shard.context_length), default=0),
        vocab_size=shards[0].shard.vocab_size,
        text_digest=text_digest,
        text_nodes=[Peer(node=c.node, url=c.url) for c in texts],
        head_nodes=[Peer(node=c.node, url=c.url, layers=(c.shard.first, c.shard.last)) for c in heads],
        ready=route is not None,
        missing=[] if route is not None or shards[0].shard.composite else list(missing_of(graph)),
        returning=route is None and is_returning(group, links),
        kv_capacity_tokens=0 if route is None else widest_kv(graph),
        composite=shards[0].shard.composite,
    )
