"""The registry: every Node the Tracker knows, whether it lives, and what was reported about it and its links.

Owns expiry, who is out of new routes and what brings it back, the account of sessions given since a Node last told,
and the peers a Node is asked to probe. Who may register is admission.py's question. No I/O; the clock is an argument
(monotonic seconds). Nothing here is judged by the clock alone: only `sweep` expires, so that a Tracker that stood
still does not hold its own pause against the Nodes. Shown by tests/tracker/test_registry.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.coverage import Span, is_same_engine, missing_ranges
from shardline.tracker.selection import Candidate, Link
from shardline.wire.messages import Heartbeat, NodeInfo, Peer, Registration, ShardInfo

NODE_LIMIT = 10_000
FORGET_S = 600.0
"""How long a Node that left or expired stays in the list: people see what is gone, and its model stays known."""
PEER_LIMIT = 8
LINK_LIMIT = 256
"""Measured links that are kept for one Node; the one measured longest ago makes room."""
RTT_SAMPLES = 5
"""The round trip of a link is the median of this many last probes."""
OPENING_S = 0.25
"""What happened this shortly before a heartbeat is not in the heartbeat's figures yet."""


_UNKNOWN = Link()


@dataclass(frozen=True, slots=True)
class Fault:
    """What takes a Node out of new routes until it was dialled back once more."""

    at: float
    reason: str
    lives: bool = False
    """The Node was heard since what was reported: it will be dialled back."""


@dataclass(frozen=True, slots=True)
class Given:
    """One session that a route promised to a Node."""

    at: float
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """The way from the Node that holds this to one peer."""

    link: Link = _UNKNOWN
    """As routing sees it."""
    samples: tuple[float, ...] = ()
    """Round trips of the last probes that succeeded, in ms."""
    measured_at: float | None = None
    clear_from: int = 0
    """Number of the first heartbeat whose probes were certainly made after the report that took the link out."""


@dataclass(slots=True)
class NodeRecord:
    """One Node. Only the registry writes here."""

    info: NodeInfo
    public_key: bytes
    url: str
    """As it was dialled back: an address, never a name."""
    epoch: str
    seen_at: float
    deadline: float
    count: int = -1
    gone_at: float | None = None
    """When it was heard to leave, or found to be silent."""
    leaving: bool = False
    """It has said so; what follows is no loss."""
    expelled: bool = False
    """The operator has thrown it out."""
    served: bool = False
    """A Shard of it was ready at some time."""
    fault: Fault | None = None
    given: dict[str, Given] = field(default_factory=dict)
    """Route id -> session, of those that the Node's own figures do not hold yet."""
    told: dict[str, Given] = field(default_factory=dict)
    """Of those that they hold."""
    ended: dict[str, Given] = field(default_factory=dict)
    """Of those that they hold still, though the session is over; `at` is when that was heard."""
    links: dict[str, LinkRecord] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    """Peers that this Node was asked to probe: it is believed about no others."""

    @property
    def beats(self) -> bool:
        return self.gone_at is None

    @property
    def state(self) -> str:
        if self.expelled:
            return "expelled"
        if not self.beats:
            return "left" if self.leaving else "expired"
        if self.leaving:
            return "leaving"
        return "ready" if self.fault is None and self.info.health.alive else "out"

    @property
    def reason(self) -> str | None:
        """Why this Node takes no new sessions; None when it does."""
        if self.expelled:
            return f"the operator has thrown it out; back in: shardline expel --undo {self.info.id}"
        if not self.beats:
            return "it has left" if self.leaving else "it is silent"
        if self.leaving:
            return "it is leaving"
        if self.fault is not None:
            return f"{self.fault.reason}; it returns with a heartbeat that is dialled back"
        if not self.info.health.alive:
            return f"its engine is down: {self.info.health.last_error or 'no reason given'}"
        return None

    def bars(self, shard: ShardInfo) -> str | None:
        """Why no route may use `shard` of this Node; None when one may."""
        if self.reason is not None:
            return self.reason
        if shard.state != "ready":
            return f"{shard.state}: {shard.reason}" if shard.reason else shard.state
        if shard.first == 0 and shard.text_digest is None and not shard.composite:
            return "it is a head without a text bundle"
        return None

    def account(self, now: float, session_s: float) -> None:
        """A heartbeat has come: its figures hold what was given, and no longer what had ended, but for the last."""
        heard = now - OPENING_S
        self.told |= {route: g for route, g in self.given.items() if g.at <= heard}
        self.told = {route: g for route, g in self.told.items() if g.at > now - session_s}
        self.given = {route: g for route, g in self.given.items() if g.at > heard}
        self.ended = {route: g for route, g in self.ended.items() if g.at > heard}

    def returns(self, shard: ShardInfo) -> bool:
        """Whether `shard`, which is barred, comes back by itself, as far as is known."""
        lives = self.beats and not self.leaving and (self.fault is None or self.fault.lives)
        return lives and (shard.state in ("loading", "testing") or (shard.state == "ready" and self.reason is not None))


class Registry:
    """Nodes by id. Every method is one event; between two events nothing changes."""

    def __init__(self, settings: Settings, epoch: str) -> None:
        self.settings = settings
        self.epoch = epoch
        self.nodes: dict[str, NodeRecord] = {}
        self._registrations = 0

    # What routing reads.

    def candidates(self) -> list[Candidate]:
        """Every Shard of every Node that is known, those that no route may use with the reason."""
        found = []
        for node_id, record in self.nodes.items():
            kv = record.info.kv
            reserved = kv.reserved_tokens + sum(g.kv_tokens for g in record.given.values())
            reserved -= sum(g.kv_tokens for g in record.ended.values())
            for shard in record.info.shards:
                if shard.composite and record.leaving and not (record.beats or record.served):
                    continue  # a start that failed: its model never was, and has no layers that another Node could take
                found.append(
                    Candidate(
                        node=node_id,
                        url=record.url,
                        engine_class=record.info.engine.engine_class,
                        shard=shard,
                        kv_capacity=kv.capacity_tokens,
                        kv_reserved=max(0, reserved),
                        sessions=max(0, kv.sessions + len(record.given) - len(record.ended)),
                        barred=record.bars(shard),
                        returning=record.returns(shard),
                    )
                )
        return found

    def link(self, source: str, to: str) -> Link | None:
        record = self.nodes.get(source)
        known = None if record is None else record.links.get(to)
        return None if known is None else known.link

    def beating(self) -> Iterator[NodeRecord]:
        return (record for record in self.nodes.values() if record.beats)

    # Membership.

    def check_identity(self, node_id: str, url: str) -> None:
        """Raise `identity_in_use` while a Node of this id beats at another URL."""
        record = self.nodes.get(node_id)
        if record is not None and record.beats and record.info.url != url:
            raise ShardlineError(
                "identity_in_use",
                f"Node {node_id} already runs at {record.info.url} (process {record.info.pid}, host"
                f" {record.info.host}): two Nodes cannot share one identity",
                node=node_id,
                url=record.info.url,
            )

    def register(self, registration: Registration, public_key: bytes, dialled_url: str, now: float) -> NodeRecord:
        """Take a Node in whose registration was admitted and whose URL was dialled back."""
        info = registration.info
        self.check_identity(info.id, info.url)
        old = self.nodes.get(info.id)
        if old is None and len(self.nodes) >= NODE_LIMIT and not self._forget_one():
            raise ShardlineError("registration_refused", f"{NODE_LIMIT} Nodes are registered: no more are taken")
        self._registrations += 1
        record = NodeRecord(
            info=info,
            public_key=public_key,
            url=dialled_url,
            # Of this registration alone: heartbeats of an earlier one, or of a second process, do not fit.
            epoch=f"{self.epoch}-{self._registrations}",
            seen_at=now,
            deadline=now + self.settings.tracker_expiry_s,
        )
        if old is not None:
            # A report about a link outlives the process at its end; what it measured does not.
            record.links = {
                to: LinkRecord(Link(out=known.link.out)) for to, known in old.links.items() if known.link.out
            }
        self._heard(record, info)
        self.nodes[info.id] = record
        return record

    def _heard(self, record: NodeRecord, info: NodeInfo) -> None:
        record.info = info
        record.served = record.served or any(shard.state == "ready" for shard in info.shards)

    def _forget_one(self) -> bool:
        gone = [(r.gone_at, node_id) for node_id, r in self.nodes.items() if r.gone_at is not None]
        if gone:
            self._forget(min(gone)[1])
        return bool(gone)

    def registered(self, node_id: str, epoch: str | None = None) -> NodeRecord:
        """The Node of this id that beats; raises `unknown_node`, upon which it registers again."""
        record = self.nodes.get(node_id)
        if record is None or not record.beats or (epoch is not None and epoch != record.epoch):
            raise ShardlineError("unknown_node", f"Node {node_id!r:.80} is not registered here", node=node_id[:80])
        return record

    def heartbeat(self, beat: Heartbeat, now: float) -> NodeRecord:
        """Take what a Node says of itself and its links; `beat` is verified."""
        record = self.registered(beat.node, beat.epoch)
        if beat.info.url != record.info.url:
            raise ShardlineError("unknown_node", f"Node {beat.node} is registered with another URL", node=beat.node)
        if beat.count <= record.count:
            raise ShardlineError(
                "invalid_value", f"heartbeat {beat.count} is not newer than {record.count}", param="count"
            )
        record.count = beat.count
        self._heard(record, beat.info)
        record.seen_at = now
        record.deadline = now + self.settings.tracker_expiry_s
        record.leaving = record.leaving or beat.leaving
        record.account(now, self.settings.session_s)
        self._measure(record, beat, now)
        return record

    def _measure(self, record: NodeRecord, beat: Heartbeat, now: float) -> None:
        for probe in beat.peers:
            if probe.peer not in record.asked or probe.peer not in self.nodes:
                continue
            old = record.links.pop(probe.peer, LinkRecord())
            cleared = probe.ok and beat.count >= old.clear_from
            samples = old.samples
            if probe.rtt_ms is not None:
                samples = (*samples, probe.rtt_ms)[-RTT_SAMPLES:]
            link = Link(
                # One probe that met a busy moment must not move routes.
                rtt_ms=median(samples) if samples else None,
                ok=probe.ok,
                out=None if cleared else old.link.out,
            )
            # Put in at the end: the order of the dictionary is that of the measurements.
            record.links[probe.peer] = LinkRecord(link, samples, now, old.clear_from)
        while len(record.links) > LINK_LIMIT:
            spare = (peer for peer, known in record.links.items() if known.link.out is None)
            del record.links[next(spare, next(iter(record.links)))]

    def leave(self, node_id: str, now: float) -> None:
        """A Node has ended in good order. It is listed as such for a while, so that its model stays known."""
        record = self.registered(node_id)
        record.leaving = True
        record.gone_at = now

    def _forget(self, node_id: str) -> None:
        self.nodes.pop(node_id, None)
        for record in self.nodes.values():
            record.links.pop(node_id, None)

    def expire(self, node_id: str, record: NodeRecord, now: float) -> None:
        """A Node was found to be gone before its deadline; one that has registered since is another."""
        if self.nodes.get(node_id) is record:
            record.gone_at = now

    def expel(self, node_id: str, now: float, *, undo: bool = False) -> None:
        """The operator has thrown a Node out, or lets it come back: until then it counts as silent."""
        record = self.nodes.get(node_id)
        if record is not None:
            record.expelled = not undo
            record.gone_at = now if record.beats else record.gone_at

    def excuse(self, paused_s: float) -> None:
        """The Tracker itself stood still for `paused_s`: no Node could be heard, so every deadline moves by it."""
        for record in self.nodes.values():
            record.deadline += paused_s

    def sweep(self, now: float) -> list[str]:
        """Expire the Nodes whose deadline is over, and return the ids of those that fell silent without having said
        that they leave; forget what is gone for long."""
        expired = []
        for node_id, record in list(self.nodes.items()):
            if record.gone_at is not None:
                if now - record.gone_at >= FORGET_S:
                    self._forget(node_id)
            elif now >= record.deadline:
                record.gone_at = now
                if not record.leaving:
                    expired.append(node_id)
        return expired

    # Reports.

    def give(self, route: str, nodes: Sequence[str], kv_tokens: int, now: float) -> None:
        """Count a session that was promised to `nodes`, until they tell of it themselves."""
        for node_id in nodes:
            self.nodes[node_id].given[route] = Given(now, kv_tokens)

    def end(self, route: str, nodes: Sequence[str], now: float) -> None:
        """The session of `route` is over: it counts no more, also where the Node told of it and not yet of its end."""
        for node_id in nodes:
            record = self.nodes.get(node_id)
            if record is not None and record.given.pop(route, None) is None and (told := record.told.pop(route, None)):
                record.ended[route] = replace(told, at=now)

    def report_node(self, node_id: str, reason: str, now: float, *, lives: bool = False) -> None:
        """Take a Node out of new routes until `dialled_back`. `lives`: what failed is not the Node as a whole."""
        record = self.nodes.get(node_id)
        if record is not None and record.beats:
            record.fault = Fault(now, reason, lives)

    def dialled_back(self, node_id: str, fault: Fault) -> None:
        """The Node answered a dial that began after `fault`; one that was reported since stays."""
        record = self.nodes.get(node_id)
        if record is not None and record.fault is fault:
            record.fault = None

    def report_link(self, source: str, to: str, reason: str) -> None:
        """Take the way from `source` to `to` out until a probe over it, made after this, succeeds.

        The heartbeat after next is the first whose probes were certainly made later: the next one may be on its way.
        """
        record = self.nodes.get(source)
        if record is None or to not in self.nodes:
            return
        old = record.links.get(to, LinkRecord())
        record.links[to] = replace(old, link=replace(old.link, out=reason), clear_from=record.count + 2)

    # What a Node is told.

    def waiting(self, node_id: str) -> list[tuple[int, int]]:
        """Layer ranges of the model of this Node that are missing beside its own Shards."""
        info = self.nodes[node_id].info
        engine_class = info.engine.engine_class
        usable = [c for c in self.candidates() if c.barred is None]
        served = [c.shard for c in usable if is_same_engine(c.engine_class, engine_class)]
        for own in info.shards:
            spans = [Span(s.first, s.last) for s in (own, *served) if _same(s, own)]
            missing = missing_ranges(spans, own.n_layers)
            if missing:
                return list(missing)
        return []

    def peers(self, node_id: str) -> list[Peer]:
        """Up to 8 Nodes whose Shards follow on this Node's (behind a tail: the heads), to be probed.

        First the links that only a probe can bring back, then those never measured, then the oldest measurements.
        """
        record = self.nodes[node_id]
        engine_class = record.info.engine.engine_class
        following = set()
        for other_id, other in self.nodes.items():
            if other_id == node_id or other.info.engine.engine_class != engine_class:
                continue
            if any(
                _follows(own, theirs) and other.bars(theirs) is None
                for own in record.info.shards
                for theirs in other.info.shards
            ):
                following.add(other_id)
        chosen = sorted(following, key=lambda peer: _urgency(record, peer))[:PEER_LIMIT]
        record.asked = frozenset((*record.asked, *chosen)) & following
        found = [(peer, self.nodes[peer]) for peer in chosen]
        return [Peer(node=peer, url=other.url, public_key=other.public_key.hex()) for peer, other in found]


def _same(a: ShardInfo, b: ShardInfo) -> bool:
    return a.content_id == b.content_id and a.n_layers == b.n_layers


def _follows(own: ShardInfo, theirs: ShardInfo) -> bool:
    """Whether some route could lead from one to the other; a Shard of all layers is a route by itself."""
    whole = own.n_layers in (own.last - own.first, theirs.last - theirs.first)
    return _same(own, theirs) and theirs.first == own.last % own.n_layers and not whole


def _urgency(record: NodeRecord, peer: str) -> tuple[int, float, str]:
    known = record.links.get(peer, LinkRecord())
    if known.link.out is not None:
        return 0, known.measured_at or 0.0, peer
    if known.measured_at is None:
        return 1, 0.0, peer
    return 2, known.measured_at, peer
