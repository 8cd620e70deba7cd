"""Which steps ride in the next engine call: a pure rule over what waits and what was measured.

The two lanes never share a call and take turns while both have work. A decode batch is cut so that the hops of a
route stay busy with different sessions, when computing costs more than a hop. Shown by tests/node/test_batch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

Lane = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """One step that could run now. `order` is its arrival, smaller is older."""

    slot: int
    order: float
    route: str
    hops: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Rolling medians of this Node, in ms; 0 until there is one."""

    decode_ms: float = 0.0
    """One decode row in the engine."""
    hop_ms: float = 0.0
    """Handing a step to the next hop until it is acknowledged: there and back."""


@dataclass(frozen=True, slots=True)
class Choice:
    lane: Lane
    slots: tuple[int, ...]


def decode_cap(sessions_by_route: dict[str, int], hops_by_route: dict[str, int], measured: Measured) -> int:
    """How many rows a decode batch may have: of each route, its sessions shared out among `_groups`."""
    return max(1, sum(ceil(n / _groups(n, hops_by_route[route], measured)) for route, n in sessions_by_route.items()))


def _groups(sessions: int, hops: int, measured: Measured) -> int:
    """Into how many batches the sessions of a route are cut, so that they go round one behind the other.

    With every session of a ring of h hops in one batch, the other h - 1 Nodes idle. Cut into g batches, a Node that
    computes c ms for all of them has work for c ms, and a batch is back after h * (c / g + d), with d ms on the way to
    the next hop: no Node waits where g = h * c / (c - h * d). That is h where hops cost nothing, and more where they
    are far. When a hop costs more than computing all rows, larger batches win and nothing is cut.
    """
    compute_ms = sessions * measured.decode_ms
    if compute_ms <= measured.hop_ms or hops < 2:
        return 1
    busy_ms = compute_ms - hops * measured.hop_ms / 2
    if busy_ms <= 0:
        return sessions
    return min(sessions, max(1, round(hops * compute_ms / busy_ms)))


def choose(
    decode: Sequence[Waiting],
    prefill: Sequence[Waiting],
    *,
    last_lane: Lane,
    cap: int,
) -> Choice | None:
    """The next engine call, or None when nothing waits. One prefill chunk a call; oldest first in both lanes. `cap`:
    `decode_cap`, of interest where several steps decode."""
    if prefill and (not decode or last_lane == "decode"):
        oldest = min(prefill, key=lambda w: (w.order, w.slot))
        return Choice("prefill", (oldest.slot,))
    if decode:
        if len(decode) > 1:
            decode = sorted(decode, key=lambda w: (w.order, w.slot))
        return Choice("decode", tuple(w.slot for w in decode[:cap]))
    return None
