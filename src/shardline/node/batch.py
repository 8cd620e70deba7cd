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
    """Handing a step to the next hop until it is acknowledged."""


@dataclass(frozen=True, slots=True)
class Choice:
    lane: Lane
    slots: tuple[int, ...]


def decode_cap(sessions_by_route: dict[str, int], hops_by_route: dict[str, int], measured: Measured) -> int:
    """How many rows a decode batch may have: ceil(sessions / hops) a route while computing is the dear part.

    With every session of a ring of h hops in one batch, the other h - 1 Nodes idle; cut into h groups they all work.
    When the hop costs more than the row, larger batches win and nothing is cut.
    """
    total = sum(sessions_by_route.values())
    if measured.decode_ms <= measured.hop_ms:
        return max(1, total)
    return max(1, sum(ceil(n / max(1, hops_by_route[route])) for route, n in sessions_by_route.items()))


def choose(
    decode: Sequence[Waiting],
    prefill: Sequence[Waiting],
    *,
    last_lane: Lane,
    sessions_by_route: dict[str, int],
    hops_by_route: dict[str, int],
    measured: Measured,
) -> Choice | None:
    """The next engine call, or None when nothing waits. One prefill chunk a call; oldest first in both lanes."""
    if prefill and (not decode or last_lane == "decode"):
        oldest = min(prefill, key=lambda w: (w.order, w.slot))
        return Choice("prefill", (oldest.slot,))
    if decode:
        cap = decode_cap(sessions_by_route, hops_by_route, measured)
        if len(decode) > 1:
            decode = sorted(decode, key=lambda w: (w.order, w.slot))
        return Choice("decode", tuple(w.slot for w in decode[:cap]))
    return None
