"""The catalogue of the artifact plane: what is offered, who says that it has which pieces, who is a source for whom.

Owns the advertisements and what they are worth: copies of each layer, the list for people, the sources for a Node that
fetches. Whether a Node has what it says is challenges.py's verdict; who lives, registry.py's. No I/O; the clock is an
argument (monotonic seconds). Shown by tests/tracker/test_artifacts.py.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap

from shardline.errors import ShardlineError
from shardline.tracker.challenges import Docket, Subject
from shardline.tracker.coverage import Span, known_as, layer_copies
from shardline.tracker.offers import Held, Offer
from shardline.tracker.registry import NodeRecord, Registry
from shardline.tracker.selection import Candidate
from shardline.transport.addresses import host_port, split_url
from shardline.wire.artifacts import (
    ADVERTISE_PAUSE_S,
    SOURCES_LIMIT,
    Advertisement,
    ArtifactInfo,
    ArtifactList,
    Fetching,
    Seeder,
    Source,
    SourceList,
)

ACCUSED_LIMIT = 16
"""Nodes that one advertisement is believed about."""
PACE_S = ADVERTISE_PAUSE_S / 2
"""Advertisements of one artifact by one Node are taken at this pace: twice as often as any is due, …"""
BURST = 8
"""… but for so many at once: a Node that restarts, a network that held some back."""


@dataclass(frozen=True, slots=True)
class Advertised:
    """What one Node says of one artifact."""

    until: float
    held: Held
    held_bytes: int
    servable: tuple[tuple[int, int], ...]
    bittorrent_port: int | None
    fetching: Fetching | None


class Catalogue:
    """All that one Tracker knows of Model Artifacts. Every method is one event."""

    def __init__(self, offers: Iterable[Offer], registry: Registry, docket: Docket) -> None:
        self.offers = {offer.content_id: offer for offer in offers}
        self._registry = registry
        self._docket = docket
        self._advertised: dict[Subject, Advertised] = {}
        self._sequences: dict[Subject, int] = {}
        self._paced: dict[Subject, float] = {}
        """When its next advertisement would come, had they come at the pace."""

    # What Nodes say.

    def take(self, said: Advertisement, lasts_s: float, now: float) -> None:
        """Take an advertisement that is verified (`admission.open_advertisement`).

        `not_found` for what is not offered here, `invalid_value` for one that is not newer, or not of this artifact;
        `queue_full` where they come too fast.
        """
        offer = self.offer(said.content_id)
        subject = Subject(said.node, said.content_id)
        known = self._sequences.get(subject, -1)
        if said.sequence <= known:
            raise ShardlineError(
                "invalid_value",
                f"advertisement {said.sequence} is not newer than {known}",
                param="sequence",
                known=known,
            )
        self._check_pace(subject, now)
        if said.fetching is not None and said.fetching.last > offer.n_layers:
            raise ShardlineError("invalid_value", f"the model has {offer.n_layers} layers", param="fetching")
        held = offer.held(said.files)
        self._sequences[subject] = said.sequence
        self._advertised[subject] = Advertised(
            until=now + lasts_s,
            held=held,
            held_bytes=offer.bytes_of(held),
            servable=tuple(offer.servable(held)),
            bittorrent_port=said.bittorrent_port,
            fetching=said.fetching,
        )
        self._docket.heard(subject, self._advertised[subject].held_bytes, now)
        for node in said.accused[:ACCUSED_LIMIT]:
            if node != said.node:
                self._docket.suspect(Subject(node, said.content_id), now)

    def _check_pace(self, subject: Subject, now: float) -> None:
        due = max(now, self._paced.get(subject, now))
        if due - now >= BURST * PACE_S:
            raise ShardlineError(
                "queue_full", f"advertisements of {subject.content_id} come too fast from this Node", retry_after=1
            )
        self._paced[subject] = due + PACE_S

    def suspect(self, node: str, now: float) -> None:
        """What a Node computes is wrong: perhaps because of what it computes with."""
        for content_id in self.offers:
            self._docket.suspect(Subject(node, content_id), now)

    def excuse(self, paused_s: float) -> None:
        """The Tracker itself stood still: nobody could advertise."""
        for subject, said in self._advertised.items():
            self._advertised[subject] = replace(said, until=said.until + paused_s)

    def sweep(self, now: float) -> None:
        """Forget what has ended, and whom the registry has forgotten."""
        for subject, said in list(self._advertised.items()):
            if now >= said.until:
                del self._advertised[subject]
                self._docket.heard(subject, 0, now)
        for node in {subject.node for subject in self._sequences} - self._registry.nodes.keys():
            self._docket.forget(node)
            for content_id in self.offers:
                self._advertised.pop(Subject(node, content_id), None)
                self._sequences.pop(Subject(node, content_id), None)
                self._paced.pop(Subject(node, content_id), None)

    # What follows.

    def offer(self, content_id: str) -> Offer:
        """The artifact that is offered under this id; `not_found`."""
        found = self.offers.get(content_id)
        if found is None:
            raise ShardlineError(
                "not_found",
                f"the artifact {content_id!r:.80} is not offered here",
                advice="Ask GET /v1/artifacts which are. The Tracker offers those of its --artifact.",
            )
        return found

    def advertised(self, subject: Subject) -> Advertised | None:
        return self._advertised.get(subject)

    def counts(self, node: str, content_id: str) -> bool:
        """Whether what this Node has of the artifact counts: it was not found to lack what it advertises."""
        return self._docket.proven(Subject(node, content_id)) is not False

    def sources(self, content_id: str, asker: str, address: str) -> SourceList:
        """Whom the Node `asker`, which calls from `address`, should ask for pieces: same machine, same network, others.

        Of those equally near each asker begins with another one.
        """
        self.offer(content_id)
        own = self._registry.nodes.get(asker)
        host = None if own is None else own.info.host
        ranked = []
        for subject, record, said in self._givers(content_id):
            if subject.node == asker:
                continue
            theirs = split_url(record.url).host
            same_host = theirs == address or host == record.info.host
            turn = hashlib.sha256(f"{asker} {subject.node}".encode()).digest()
            source = Source(
                node=subject.node, url=record.url, same_host=same_host, bittorrent=_bittorrent(record.url, said)
            )
            ranked.append(((not same_host, not _same_network(theirs, address), turn), source))
        ranked.sort(key=lambda entry: entry[0])
        return SourceList(sources=[source for _, source in ranked[:SOURCES_LIMIT]])

    def artifacts(self) -> ArtifactList:
        """`GET /v1/artifacts`."""
        candidates = self._registry.candidates()
        offered = [self._offered(offer, candidates) for offer in self.offers.values()]
        others: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            if candidate.shard.content_id not in self.offers:
                others.setdefault(candidate.shard.content_id, []).append(candidate)
        served = [_served_only(content_id, group) for content_id, group in others.items()]
        return ArtifactList(artifacts=[*sorted(offered, key=_order), *sorted(served, key=_order)])

    def held_by(self, node: str) -> list[dict[str, object]]:
        """What `GET /v1/nodes` says of the artifacts of one Node."""
        found: list[dict[str, object]] = []
        for content_id in self.offers:
            subject = Subject(node, content_id)
            said, proven = self._advertised.get(subject), self._docket.proven(subject)
            if said is not None or proven is False:
                held_bytes = 0 if said is None else said.held_bytes
                reason = self._docket.reason(subject)
                found.append({"content_id": content_id, "held_bytes": held_bytes, "proven": proven, "reason": reason})
        return found

    def _offered(self, offer: Offer, candidates: Sequence[Candidate]) -> ArtifactInfo:
        manifest = offer.bundle.manifest
        runs = [run for _, _, said in self._givers(offer.content_id) for run in said.servable]
        ours = [c for c in candidates if c.shard.content_id == offer.content_id]
        return ArtifactInfo(
            content_id=offer.content_id,
            name=offer.name,
            offered=True,
            n_layers=offer.n_layers,
            total_bytes=manifest.total_bytes,
            manifest_digest=offer.bundle.manifest_digest,
            publisher=offer.bundle.signed_by,
            architecture=manifest.model.architecture,
            quantisation=offer.quantisation,
            coverage=layer_copies(starmap(Span, runs), offer.n_layers),
            served=_served(ours, offer.n_layers),
            seeders=self._seeders(offer.content_id),
        )

    def _seeders(self, content_id: str) -> list[Seeder]:
        found = []
        for node, record in self._registry.nodes.items():
            subject = Subject(node, content_id)
            said, proven = self._advertised.get(subject), self._docket.proven(subject)
            if not record.beats or (said is None and proven is not False):
                continue
            found.append(
                Seeder(
                    node=node,
                    url=record.info.url,
                    host=record.info.host,
                    held_bytes=0 if said is None else said.held_bytes,
                    servable=[] if said is None else list(said.servable),
                    bittorrent=None if said is None else _bittorrent(record.url, said),
                    fetching=None if said is None else said.fetching,
                    proven=proven,
                    reason=self._docket.reason(subject),
                )
            )
        return sorted(found, key=lambda seeder: seeder.node)

    def _givers(self, content_id: str) -> Iterator[tuple[Subject, NodeRecord, Advertised]]:
        """Whoever can be asked for pieces now."""
        for node, record in self._registry.nodes.items():
            subject = Subject(node, content_id)
            said = self._advertised.get(subject)
            if said is None or not said.held_bytes or not self.counts(node, content_id):
                continue
            if record.beats and not record.leaving and record.fault is None:
                yield subject, record, said


def _served_only(content_id: str, group: Sequence[Candidate]) -> ArtifactInfo:
    n_layers = max(c.shard.n_layers for c in group)
    return ArtifactInfo(
        content_id=content_id,
        name=known_as(group),
        offered=False,
        n_layers=n_layers,
        coverage=[0] * n_layers,
        served=_served(group, n_layers),
    )


def _served(group: Iterable[Candidate], n_layers: int) -> list[int]:
    usable = [c.shard for c in group if c.barred is None and c.shard.n_layers == n_layers]
    return layer_copies([Span(shard.first, shard.last) for shard in usable], n_layers)


def _order(info: ArtifactInfo) -> tuple[str, str]:
    return info.name, info.content_id


def _bittorrent(url: str, said: Advertised) -> str | None:
    return None if said.bittorrent_port is None else host_port(split_url(url).host, said.bittorrent_port)


def _same_network(one: str, other: str) -> bool:
    """Whether two addresses are as near as a glance at them can tell."""
    try:
        first, second = ipaddress.ip_address(one.partition("%")[0]), ipaddress.ip_address(other.partition("%")[0])
    except ValueError:
        return False
    if first.version != second.version:
        return False
    prefix = 24 if first.version == 4 else 64
    return second in ipaddress.ip_network((first, prefix), strict=False)
