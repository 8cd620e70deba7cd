"""Which Model Artifact a Node without one takes: what its operator named, else what the cluster lacks most.

Owns that choice, over what the Tracker offers and, where it offers nothing, what is in the store. Pure. Shown by
tests/node/test_artifact_choice.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardline.errors import ShardlineError
from shardline.wire.artifacts import ArtifactInfo


class Chosen(NamedTuple):
    """An artifact, and why this one."""

    content_id: str
    name: str
    reason: str


def chosen_offer(offers: Sequence[ArtifactInfo], asked: str | None) -> Chosen | None:
    """What to take of the artifacts that a Tracker gives; None where it gives none that fits.

    `asked`: a content_id or a name. Without it: the only one; else the one with layers that nobody serves, most of them
    first; else the one that is served the fewest times. `invalid_value` where two have the name that was asked for.
    """
    offered = [offer for offer in offers if offer.offered]
    if asked is not None:
        return _asked([(offer.content_id, offer.name) for offer in offered], asked)
    if not offered:
        return None
    if len(offered) == 1:
        return Chosen(offered[0].content_id, offered[0].name, "the only one that the Tracker offers")
    taken = min(offered, key=lambda offer: (-_unserved(offer), min(offer.served, default=0), offer.content_id))
    unserved = _unserved(taken)
    if unserved:
        reason = f"{unserved} of its {taken.n_layers} layers are served by nobody"
    else:
        reason = f"it is served {min(taken.served, default=0)} times, the fewest of {len(offered)}"
    return Chosen(taken.content_id, taken.name, reason)


def chosen_stored(stored: Iterable[tuple[str, str]], asked: str | None) -> Chosen | None:
    """The same of (content_id, name) in the store: only what was named, or the only one that is there."""
    found = list(stored)
    if asked is not None:
        return _asked(found, asked)
    return Chosen(*found[0], "the only one in the store") if len(found) == 1 else None


def _unserved(offer: ArtifactInfo) -> int:
    return sum(1 for count in offer.served if count == 0)


def _asked(found: Sequence[tuple[str, str]], asked: str) -> Chosen | None:
    fitting = {content_id: name for content_id, name in found if asked in (content_id, name)}
    if len(fitting) > 1:
        why = f"{len(fitting)} artifacts are called {asked!r:.200}: {', '.join(sorted(fitting))}"
        raise ShardlineError("invalid_value", why, param="artifact", advice="Name one of them by its content_id.")
    return next((Chosen(content_id, name, "it was asked for") for content_id, name in fitting.items()), None)
