"""Nodes and links that failed a moment ago: avoided by this Gateway until the Tracker has heard of them and decides.

Owns the names and until when. Pure: times are arguments. Shown by tests/gateway/test_generate.py.
"""

from __future__ import annotations

from typing import TypeVar

from shardline.wire.messages import Outcome

_Name = TypeVar("_Name", str, tuple[str, str])


class Avoided:
    """`now`: monotonic seconds, everywhere."""

    def __init__(self) -> None:
        self._nodes: dict[str, float] = {}
        self._links: dict[tuple[str, str], float] = {}

    def failed(self, outcome: Outcome, until: float) -> bool:
        """Whether `outcome` names something, which is avoided now."""
        if outcome.node is not None:
            self._nodes[outcome.node] = until
        if outcome.link is not None:
            self._links[outcome.link] = until
        return outcome.node is not None or outcome.link is not None

    def told(self, outcome: Outcome) -> None:
        """The Tracker knows now, and also when the Node is back: it decides from here on."""
        if outcome.node is not None:
            self._nodes.pop(outcome.node, None)
        if outcome.link is not None:
            self._links.pop(outcome.link, None)

    def nodes(self, now: float) -> list[str]:
        return _fresh(self._nodes, now)

    def links(self, now: float) -> list[tuple[str, str]]:
        return _fresh(self._links, now)


def _fresh(avoid: dict[_Name, float], now: float) -> list[_Name]:
    for name in [name for name, until in avoid.items() if until < now]:
        del avoid[name]
    return list(avoid)
