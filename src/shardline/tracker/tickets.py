"""Tickets: the Tracker's signed permission to open one session on each hop of a route it gave.

Owns the signing, the epoch, and the book of routes given, which decides whose word about a failure counts. What a
Node checks in a ticket is the Node's business. Shown by tests/tracker/test_tickets.py.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import CATALOGUE, SERVER, ShardlineError
from shardline.tracker.coverage import Choice
from shardline.tracker.selection import Links, rtt_ms
from shardline.wire.messages import Hop, Outcome, Route, RouteAnswer, RouteRequest, Ticket, TicketPeer
from shardline.wire.tickets import public_bytes, sign

ROUTE_LIMIT = 10_000
ROUTE_GRACE_S = 60.0
"""How much longer than a session can last a route is remembered: its outcome may be late."""
_NOBODY_AT_FAULT = frozenset({"kv_exhausted", "capacity", "queue_overflow", "gateway_lost"})
"""What a sound Node answers when it is full, or when its Gateway fell silent."""


class TicketOffice:
    """Issues routes with their tickets, signed with `key`. `epoch` is new with every start."""

    def __init__(self, key: Ed25519PrivateKey, ttl_s: float) -> None:
        self._key = key
        self._ttl_s = ttl_s
        self.epoch = secrets.token_hex(8)
        self.public_key = public_bytes(key)

    def issue(self, choice: Choice, request: RouteRequest, links: Links, unix_time: float) -> RouteAnswer:
        """The route as the Gateway gets it, and one ticket a hop, valid until `unix_time` + `ttl_s`."""
        hops = choice.route.hops
        head = hops[0].shard
        if head.text_digest is None and not head.composite:
            raise ShardlineError("text_unavailable", f"head Node {hops[0].node} has no text bundle", node=hops[0].node)
        chunk = min(c.shard.prefill_chunk for c in hops)
        route = Route(
            id="r-" + secrets.token_hex(12),
            model=choice.model,
            content_id=choice.key.content_id,
            engine_class=choice.key.engine_class,
            n_layers=choice.key.n_layers,
            hops=[
                Hop(
                    index=i,
                    node=c.node,
                    url=c.url,
                    first=c.shard.first,
                    last=c.shard.last,
                    engine_class=c.engine_class,
                    content_id=c.shard.content_id,
                    rtt_ms=None if len(hops) == 1 else rtt_ms(c.node, hops[(i + 1) % len(hops)].node, links),
                )
                for i, c in enumerate(hops)
            ],
            prefill_chunk=chunk,
            context_length=min(c.shard.context_length for c in hops),
            vocab_size=head.vocab_size,
            text_digest=head.text_digest or "",
            estimate_ms_per_token=choice.route.cost.estimate_ms,
        )
        peers = [TicketPeer(node=c.node, url=c.url) for c in hops]
        tickets = [
            Ticket(
                id=secrets.token_hex(16),
                route=route.id,
                gateway=request.gateway,
                node=c.node,
                hop=i,
                hops=len(hops),
                content_id=c.shard.content_id,
                first=c.shard.first,
                last=c.shard.last,
                kv_tokens=request.kv_tokens,
                prefill_chunk=chunk,
                previous=None if i == 0 else peers[i - 1],
                next=peers[(i + 1) % len(peers)],
                layout_in=c.shard.layout_in,
                layout_out=c.shard.layout_out,
                not_after=unix_time + self._ttl_s,
            )
            for i, c in enumerate(hops)
        ]
        return RouteAnswer(route=route, tickets=[sign(self._key, "ticket", ticket) for ticket in tickets])


@dataclass(frozen=True, slots=True)
class GivenRoute:
    """What is remembered of a route: enough to tell whether a report about it can be true."""

    nodes: tuple[str, ...]
    at: float

    def has_link(self, source: str, to: str) -> bool:
        ring = zip(self.nodes, (*self.nodes[1:], self.nodes[0]), strict=True)
        return source != to and (source, to) in ring


class RouteBook:
    """Routes that this Tracker gave lately, by id; at most `ROUTE_LIMIT`, the oldest makes room."""

    def __init__(self, session_s: float) -> None:
        self._ttl_s = session_s + ROUTE_GRACE_S
        self._routes: OrderedDict[str, GivenRoute] = OrderedDict()

    def add(self, route: Route, now: float) -> None:
        while self._routes and now - next(iter(self._routes.values())).at >= self._ttl_s:
            self._routes.popitem(last=False)
        if len(self._routes) >= ROUTE_LIMIT:
            self._routes.popitem(last=False)
        self._routes[route.id] = GivenRoute(tuple(hop.node for hop in route.hops), now)

    def close(self, route_id: str, outcome: Outcome, now: float) -> GivenRoute:
        """The route that `outcome` ends, once; `session_not_found` for one that was never given, or has ended."""
        route = self._routes.get(route_id)
        if route is None or now - route.at >= self._ttl_s:
            raise ShardlineError("session_not_found", f"route {route_id!r:.80} was not given here, or has ended")
        if outcome.node is not None and outcome.node not in route.nodes:
            raise ShardlineError("invalid_value", "the Node is not one of this route", param="node")
        if outcome.link is not None and not route.has_link(*outcome.link):
            raise ShardlineError("invalid_value", "the link is not one of this route", param="link")
        return self._routes.pop(route_id)


def blames(outcome: Outcome) -> bool:
    """Whether what `outcome` names is at fault: not when the client was, and not when a sound Node was full."""
    if outcome.status != "failed" or outcome.code in _NOBODY_AT_FAULT:
        return False
    fault = CATALOGUE.get(outcome.code or "")
    return fault is None or fault.type == SERVER
