"""Placement: which layers a Node that asks should take.

A plain function over frozen values: the first gap that the Node can fill, else a copy of the thinnest and slowest
range, always within its memory, its legal cuts, and what the Nodes on its machine leave of the machine's memory. Equal
input gives an equal plan. It moves nobody: a Node is placed once, when it starts. Owns also the short claims that keep
two Nodes that ask at the same moment from taking the same layers. docs/tracker.md explains it. Shown
by tests/tracker/test_placement.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp2, log2

from shardline.errors import ShardlineError
from shardline.tracker.bounds import LAYER_LIMIT
from shardline.tracker.coverage import Span, is_same_engine, layer_copies, missing_ranges
from shardline.tracker.selection import LAYER_MS
from shardline.wire.messages import NodeInfo, PlacementAnswer, PlacementRequest

CLAIM_TTL_S = 60.0
CLAIM_LIMIT = 10_000
_BYTES_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Holding:
    """Layers that somebody serves, loads, or was just given; and the memory that this takes of a machine."""

    node: str
    content_id: str
    engine_class: str
    first: int
    last: int
    n_layers: int
    host: str | None = None
    kv_bytes: int = 0
    """Hot KV State at its full capacity, beside the weights."""
    rss_bytes: int = 0
    """Measured: what the Node takes already."""
    memory_bytes: int = 0
    """Of the machine, as this Node tells it."""
    layer_ms: float | None = None
    """Measured: one decode row through one of its layers, on average."""
    counts: bool = True
    """False: it takes memory, but somebody else may be given the same layers as if nobody had them."""


def holding_of(node: str, request: PlacementRequest, answer: PlacementAnswer) -> Holding:
    """What `node` will hold when it has done as it was told: to place one Node after the other, before any runs."""
    return Holding(
        node=node,
        content_id=request.content_id,
        engine_class=request.engine_class,
        first=answer.first,
        last=answer.last,
        n_layers=request.n_layers,
        host=request.host,
        kv_bytes=request.kv_reserve_bytes,
        memory_bytes=request.host_memory_bytes or 0,
    )


def holdings_of(info: NodeInfo, counts: Callable[[str], bool] = lambda content_id: True) -> list[Holding]:
    """The Shards of a Node that serve, or will. `counts(content_id)`: whether it is believed to have what it serves."""
    return [
        Holding(
            node=info.id,
            content_id=shard.content_id,
            engine_class=info.engine.engine_class,
            first=shard.first,
            last=shard.last,
            n_layers=shard.n_layers,
            host=info.host,
            kv_bytes=info.kv.capacity_tokens * shard.kv_bytes_per_token,
            rss_bytes=info.rss_bytes,
            memory_bytes=info.memory_bytes,
            layer_ms=None if shard.times is None else shard.times.decode_ms / (shard.last - shard.first),
            counts=counts(shard.content_id),
        )
        for shard in info.shards
        if shard.state in ("loading", "testing", "ready")
    ]


class Claims:
    """Answered placements whose Nodes have not registered yet; each holds its layers for `CLAIM_TTL_S`."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[float, Holding]] = {}
        self._numbers = itertools.count()

    def add(self, request: PlacementRequest, answer: PlacementAnswer, now: float) -> None:
        """Remember an answer; the next one for the same Node takes its place."""
        self._prune(now)
        node = request.node or f"unnamed-{next(self._numbers)}"
        self._claims.pop(node, None)
        if len(self._claims) >= CLAIM_LIMIT:
            del self._claims[next(iter(self._claims))]
        self._claims[node] = (now, holding_of(node, request, answer))

    def redeem(self, info: NodeInfo) -> None:
        """A Node has registered: what it holds counts from now on, and its claim no more."""
        if self._claims.pop(info.id, None) is not None:
            return
        for shard in info.shards:
            for node, (_, claim) in self._claims.items():
                same = (claim.content_id, claim.first, claim.last) == (shard.content_id, shard.first, shard.last)
                if same and node.startswith("unnamed-"):
                    del self._claims[node]
                    break

    def holdings(self, now: float) -> list[Holding]:
        self._prune(now)
        return [holding for _, holding in self._claims.values()]

    def _prune(self, now: float) -> None:
        # In the order of their times: every change puts a claim at the end.
        for node, (at, _) in list(self._claims.items()):
            if now - at < CLAIM_TTL_S:
                break
            del self._claims[node]


def place(request: PlacementRequest, holdings: Iterable[Holding]) -> PlacementAnswer:
    """The layers for the Node that asks; `memory_insufficient` if not even one legal piece fits, `invalid_value`.

    What the Node that asks holds or was given itself does not count against it.
    """
    check_request(request)
    others = [h for h in holdings if request.node is None or h.node != request.node]
    same = [h for h in others if h.counts and _is_same_model(request, h)]
    held = [Span(h.first, h.last) for h in same]
    room = _Room(request, available_bytes(request, others))
    gaps = [Span(first, last) for first, last in missing_ranges(held, request.n_layers)]
    for gap in gaps:
        piece = _within_gap(room, gap.first, gap.last)
        if piece is not None:
            return PlacementAnswer(first=piece[0], last=piece[1], reason=f"layers {gap.first}:{gap.last} are missing")
    piece = _thinnest(room, held, gaps, _layer_times(same, request.n_layers))
    if piece is None:
        raise _too_small(room)
    fewest = min(layer_copies(held, request.n_layers)[piece[0] : piece[1]])
    return PlacementAnswer(first=piece[0], last=piece[1], reason=f"fewest copies ({fewest})")


def check_request(request: PlacementRequest) -> None:
    """Raise `invalid_value` for figures that no model has."""
    if not 1 <= request.n_layers <= LAYER_LIMIT or len(request.layer_bytes) != request.n_layers:
        raise ShardlineError(
            "invalid_value", f"layer_bytes has {len(request.layer_bytes)} values, n_layers is {request.n_layers}"
        )
    sizes = {
        "memory_bytes": request.memory_bytes,
        "embedding_bytes": request.embedding_bytes,
        "output_bytes": request.output_bytes,
        "kv_reserve_bytes": request.kv_reserve_bytes,
        "host_memory_bytes": request.host_memory_bytes or 0,
        "layer_bytes": max(request.layer_bytes),
    }
    for name, value in sizes.items():
        if not 0 <= value <= _BYTES_LIMIT or (name == "layer_bytes" and min(request.layer_bytes) < 0):
            raise ShardlineError("invalid_value", f"{name} is not a size in bytes", param=name)
    cuts = request.legal_cuts
    if cuts is not None and any(not 0 <= cut <= request.n_layers for cut in cuts):
        raise ShardlineError("invalid_value", "a legal cut lies outside the model", param="legal_cuts")


def _is_same_model(request: PlacementRequest, held: Holding) -> bool:
    same = (held.content_id, held.n_layers) == (request.content_id, request.n_layers)
    return same and is_same_engine(request.engine_class, held.engine_class)


class _Room:
    """What the Node that asks can hold: bytes of any range in constant time, and the cuts that may bound one."""

    def __init__(self, request: PlacementRequest, available: int) -> None:
        self.request = request
        self.available = available
        self.sums = [0, *itertools.accumulate(request.layer_bytes)]
        n = request.n_layers
        cuts = range(n + 1) if request.legal_cuts is None else sorted({0, n, *request.legal_cuts})
        self.cuts: Sequence[int] = list(cuts)
        self.illegal = frozenset(request.illegal_parts or ())

    def bytes_of(self, first: int, last: int) -> int:
        return range_bytes(self.request, self.sums, first, last) + self.request.kv_reserve_bytes

    def fits(self, first: int, last: int) -> bool:
        return first < last and (first, last) not in self.illegal and self.bytes_of(first, last) <= self.available

    def cuts_within(self, first: int, last: int) -> list[int]:
        return [cut for cut in self.cuts if first <= cut <= last]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The shortest legal range that starts at each cut."""
        for index, first in enumerate(self.cuts):
            last = next((cut for cut in self.cuts[index + 1 :] if (first, cut) not in self.illegal), None)
            if last is not None:
                yield first, last

    def longest(self, first: int, last: int) -> int | None:
        """The furthest legal end of a range that starts at `first`, ends at or before `last`, and fits."""
        return max((cut for cut in self.cuts_within(first + 1, last) if self.fits(first, cut)), default=None)


def range_bytes(request: PlacementRequest, sums: Sequence[int], first: int, last: int) -> int:
    """Weights of layers [first, last), with the embedding in front of the first and the output behind the last."""
    ends = (request.embedding_bytes if first == 0 else 0) + (request.output_bytes if last == request.n_layers else 0)
    return sums[last] - sums[first] + ends


def available_bytes(request: PlacementRequest, others: Iterable[Holding]) -> int:
    """What the Node may use: its own limit, and no more than the others on its machine leave of the machine.

    A Node counts with the weights and the KV of the layers it was given, or with what it takes already if that is
    more. Layers of another model, whose sizes are not known here, count with KV and resident memory.
    """
    if request.host is None:
        return request.memory_bytes
    sums = [0, *itertools.accumulate(request.layer_bytes)]
    machine = request.host_memory_bytes or request.memory_bytes
    planned: dict[str, int] = {}
    resident: dict[str, int] = {}
    for held in others:
        if held.host != request.host:
            continue
        if request.host_memory_bytes is None:
            machine = max(machine, held.memory_bytes)
        weights = 0
        if (held.content_id, held.n_layers) == (request.content_id, request.n_layers):
            weights = range_bytes(request, sums, held.first, held.last)
        planned[held.node] = planned.get(held.node, 0) + weights + held.kv_bytes
        resident[held.node] = held.rss_bytes
    taken = sum(max(planned[node], resident[node]) for node in planned)
    return max(0, min(request.memory_bytes, machine - taken))


def _within_gap(room: _Room, first: int, last: int) -> tuple[int, int] | None:
    """The piece of a gap to take: from its start as far as fits, else up to its end, else the longest in between."""
    # Layers of a gap are missing whatever the cuts of those who serve beside it: start at the first legal one.
    starts = room.cuts_within(first, last)
    found = [(start, end) for start in starts if (end := room.longest(start, last)) is not None]
    if not found:
        return None
    return min(found, key=lambda piece: (piece[0] != starts[0], piece[1] != starts[-1], piece[0] - piece[1], piece))


def _layer_times(same: Sequence[Holding], n_layers: int) -> list[int]:
    """What each layer costs a token on those who have it, on average, in microseconds and in steps of a factor of
    1.4: what two measurements of equal machines differ by must not move anybody. Unmeasured: as the measured ones."""
    measured = [h for h in same if h.layer_ms is not None]
    typical = sum(h.layer_ms or 0.0 for h in measured) / len(measured) if measured else LAYER_MS
    times = []
    for layer in range(n_layers):
        here = [h.layer_ms for h in measured if h.layer_ms is not None and h.first <= layer < h.last]
        times.append(_in_steps(sum(here) / len(here) if here else typical))
    return times


def _in_steps(layer_ms: float) -> int:
    return round(1e3 * exp2(round(2 * log2(max(layer_ms, 1e-3))) / 2))


def _thinnest(room: _Room, held: Sequence[Span], gaps: Sequence[Span], times: Sequence[int]) -> tuple[int, int] | None:
    """The range that holds the layer with fewest copies, and of those the most that cost a token the most time, and
    then the longest, of all that fit.

    A route can use a range from a boundary that routes reach to one from which they go on (gaps, which this Node
    cannot fill, taken as filled). Where no such range fits (the Node is smaller than every Shard here), it begins
    one: later Nodes continue at its end until they meet a boundary of the others.
    """
    copies = layer_copies(held, room.request.n_layers)
    steps = {(s.first, s.last) for s in (*held, *gaps)}
    reached = _reachable(steps, 0)
    leading_on = _reachable({(last, first) for first, last in steps}, room.request.n_layers)
    best: tuple[tuple[int, ...], tuple[int, int]] | None = None
    for first in room.cuts:
        if first not in reached:
            continue
        for last, thinness in _thinness(room, copies, times, first):
            # Usable at once; or a continuation of what another small Node began; or a new beginning.
            kind = 0 if last in leading_on else 1 if first not in leading_on else 2
            rank = ((kind, *thinness), (first, last))
            best = rank if best is None else min(best, rank)
    return None if best is None else best[1]


def _thinness(
    room: _Room, copies: Sequence[int], times: Sequence[int], first: int
) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Every legal end of a range from `first` that fits, with (fewest copies, - time in those layers, - length)."""
    ends = set(room.cuts_within(first + 1, len(copies)))
    fewest, spent = copies[first] if first < len(copies) else 0, 0
    for layer in range(first, len(copies)):
        if copies[layer] < fewest:
            fewest, spent = copies[layer], 0
        if copies[layer] == fewest:
            spent += times[layer]
        if layer + 1 in ends and room.fits(first, layer + 1):
            yield layer + 1, (fewest, -spent, first - layer - 1)


def _reachable(steps: set[tuple[int, int]], start: int) -> set[int]:
    """Boundaries that chains of steps lead to from `start`."""
    after: dict[int, list[int]] = {}
    for source, to in steps:
        after.setdefault(source, []).append(to)
    found = {start}
    todo = [start]
    while todo:
        for to in after.get(todo.pop(), []):
            if to not in found:
                found.add(to)
                todo.append(to)
    return found


def _too_small(room: _Room) -> ShardlineError:
    smallest = min(room.pieces(), key=lambda piece: (room.bytes_of(*piece), piece))
    need = room.bytes_of(*smallest)
    return ShardlineError(
        "memory_insufficient",
        f"{_mib(room.available)} are free for this Node, and the smallest piece of the model that can be served"
        f" (layers {smallest[0]}:{smallest[1]}) needs {_mib(need)}",
        advice="Raise --memory, or give the Node a machine with more of it.",
        available_bytes=room.available,
        needed_bytes=need,
    )


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
