"""The Tracker without its HTTP: a statement or a request comes in, an answer or a `ShardlineError` goes out.

Joins the pure rules (admission, registry, selection, placement, tickets) with the two things they lack: clocks, and
the dial-back. Owns the order of the checks. Shown by tests/tracker/test_state.py.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.settings import PROTOCOL, Settings
from shardline.tracker import admission
from shardline.tracker.artifacts import Catalogue
from shardline.tracker.bounds import check_bounds
from shardline.tracker.challenges import Docket, Subject
from shardline.tracker.coverage import RETRY_AFTER_S, choose, models
from shardline.tracker.enrolment import Enrolment
from shardline.tracker.examination import Ask, Examiner
from shardline.tracker.explain import Explanation, explain
from shardline.tracker.metrics import TrackerMetrics
from shardline.tracker.offers import Offer
from shardline.tracker.placement import Claims, holdings_of, place
from shardline.tracker.registry import NodeRecord, Registry
from shardline.tracker.selection import Query
from shardline.tracker.tickets import RouteBook, TicketOffice, blames
from shardline.transport.addresses import make_url, resolve_checked, split_url
from shardline.transport.failures import HttpFailure, OwnLack, TimedOut
from shardline.transport.http_client import HttpClient
from shardline.wire.artifacts import ArtifactList, SourceList
from shardline.wire.messages import (
    Heartbeat,
    HeartbeatAnswer,
    ModelInfo,
    ModelList,
    NodeInfo,
    NodeProof,
    Outcome,
    PlacementAnswer,
    PlacementRequest,
    RegisterAnswer,
    RouteAnswer,
    RouteRequest,
    TrackerNonce,
)
from shardline.wire.tickets import node_id_of

PROOF_BYTES = 64 << 10
_WRONG_ROWS = frozenset({"seam_invalid", "numerical_error"})
"""What a Node may send that computes with wrong bytes."""

Dial = Callable[[str, str], Awaitable[NodeProof]]
"""(URL made of an address, nonce) -> what answers there. Follows no redirect, sends no credential."""
Resolve = Callable[[str, int], Awaitable[tuple[str, int]]]
"""(host, port) -> the one address to dial; refuses addresses that nobody may make us call."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Clock:
    """Monotonic seconds for what lasts, Unix seconds for what is signed."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


def dial_with(client: HttpClient, settings: Settings) -> Dial:
    """The real dial-back: `GET /v1/node?nonce=…`, and nothing else."""

    async def dial(url: str, nonce: str) -> NodeProof:
        return await client.json(
            "GET",
            f"{url}/v1/node?nonce={nonce}",
            NodeProof,
            timeout_s=settings.dial_back_s,
            limit="dial_back",
            max_body=PROOF_BYTES,
            authorize=False,
        )

    return dial


class TrackerState:
    """All that one Tracker knows and does. `loopback`: it listens on loopback, so its Nodes may do so, too.

    `enrolment`: of a cluster with keys, whose Nodes speak HTTPS and get their next certificates with heartbeats.
    `offers`: Model Artifacts for Nodes; `ask`: how Nodes are asked to prove that they have pieces (None: never).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        dial: Dial,
        loopback: bool,
        key: Ed25519PrivateKey | None = None,
        resolve: Resolve | None = None,
        clock: Clock | None = None,
        enrolment: Enrolment | None = None,
        offers: Sequence[Offer] = (),
        ask: Ask | None = None,
    ) -> None:
        self._enrolment = enrolment
        self.settings = settings
        self.loopback = loopback
        self.clock = clock or Clock()
        self.metrics = TrackerMetrics()
        self.office = TicketOffice(key or Ed25519PrivateKey.generate(), settings.ticket_ttl_s)
        self.registry = Registry(settings, self.office.epoch)
        self.docket = Docket(settings.possession_every_s)
        self.catalogue = Catalogue(offers, self.registry, self.docket)
        self._ask = ask
        self.claims = Claims()
        self.book = RouteBook(settings.session_s)
        self._nonces = admission.NonceBook()
        self._dial = dial
        self._resolve = resolve or self._resolve_checked
        self._swept_at = self.clock.monotonic()

    async def _resolve_checked(self, host: str, port: int) -> tuple[str, int]:
        return await resolve_checked(host, port, self.loopback, timeout_s=self.settings.dial_back_s)

    # Membership.

    def nonce(self) -> TrackerNonce:
        return TrackerNonce(nonce=self._nonces.give(self.clock.monotonic()), protocol=PROTOCOL)

    async def register(self, statement: str) -> RegisterAnswer:
        """Take a Node in: everything that can be refused unseen is, before anybody is dialled."""
        registration, public_key = admission.open_registration(statement)
        info = registration.info
        admission.check_fresh(registration, self._nonces, self.clock.monotonic(), self.clock.unix())
        admission.check_url(info.url, loopback_ok=self.loopback, keys=self._enrolment is not None)
        admission.check_info(info)
        await self._settle_identity(info)
        dialled_url = await self._prove(info.url, info.url, public_key)
        if self._enrolment is not None:
            self._enrolment.check_party(info.id)
        now = self.clock.monotonic()
        record = self.registry.register(registration, public_key, dialled_url, now)
        self.docket.joined(info.id, now)
        self.claims.redeem(info)
        log.info("node_registered", node=info.id, url=info.url, shards=len(info.shards))
        return RegisterAnswer(
            node=info.id,
            ticket_key=self.office.public_key.hex(),
            epoch=record.epoch,
            heartbeat_s=self.settings.tracker_heartbeat_s,
            waiting=self.registry.waiting(info.id),
        )

    async def _settle_identity(self, info: NodeInfo) -> None:
        """Refuse a second Node of one identity while the first is there; one that was killed is not in the way."""
        try:
            self.registry.check_identity(info.id, info.url)
        except ShardlineError:
            first = self.registry.nodes[info.id]
            try:
                await self._prove(first.url, first.info.url, first.public_key)
            except ShardlineError:
                self.registry.expire(info.id, first, self.clock.monotonic())
                return
            raise

    async def _prove(self, at: str, url: str, public_key: bytes) -> str:
        """Dial the Node that goes by `url` at the URL `at`; raises unless the owner of the key answers for `url`.

        Returns the URL that was dialled, its host an address: what others are told, so that no name is resolved
        again to something else.
        """
        parts = split_url(at)
        nonce = secrets.token_hex(16)
        try:
            async with asyncio.timeout(self.settings.dial_back_s):
                host, port = await self._resolve(parts.host, parts.port)
                # Others know it by its certificate, so the URL that they get says whose that must be.
                party = None if self._enrolment is None else node_id_of(public_key)
                dialled = make_url(parts.scheme, host, port, party=party)
                proof = await self._answer_from(dialled, url, nonce)
        except TimeoutError:
            raise self._not_answered_in_time(url) from None
        admission.check_proof(proof, public_key, nonce, url)
        return dialled

    async def _answer_from(self, dialled: str, url: str, nonce: str) -> NodeProof:
        try:
            return await self._dial(dialled, nonce)
        except OwnLack as failure:
            raise failure.error() from None
        except TimedOut:
            raise self._not_answered_in_time(url) from None
        except (HttpFailure, ShardlineError) as error:
            raise admission.refused(
                f"{url} was called back and did not answer as a Node does: {str(error)[:300]}"
            ) from None

    def _not_answered_in_time(self, url: str) -> ShardlineError:
        limit_s = self.settings.dial_back_s
        return admission.refused(
            f"{url} was called back and did not answer within the limit dial_back ({limit_s:g} s)", limit="dial_back"
        )

    async def heartbeat(self, node_id: str, statement: str) -> HeartbeatAnswer:
        """Take a heartbeat; a Node that was reported is dialled, and is back if it answers."""
        record = self.registry.registered(node_id)
        beat = admission.open_heartbeat(statement, record.public_key, node_id)
        record = self.registry.heartbeat(beat, self.clock.monotonic())
        fault = record.fault
        if fault is not None and not record.leaving:
            try:
                await self._prove(record.url, record.info.url, record.public_key)
            except ShardlineError as error:
                log.warning("node_still_out", node=node_id, reason=error.message)
            else:
                self.registry.dialled_back(node_id, fault)
            self.registry.registered(node_id, record.epoch)
        return HeartbeatAnswer(
            peers=self.registry.peers(node_id),
            certificate=self._renewed(record, beat),
            expelled=[] if self._enrolment is None else self._enrolment.told(),
        )

    def _renewed(self, record: NodeRecord, beat: Heartbeat) -> str | None:
        """The next certificate of a Node that asks for one and is not on its way out."""
        if beat.csr is None or self._enrolment is None or record.leaving:
            return None
        return self._enrolment.renew(beat.node, beat.csr, split_url(record.url).host)

    def leave(self, node_id: str, statement: str) -> None:
        """A goodbye: a heartbeat with `leaving`, after which nothing more comes."""
        record = self.registry.registered(node_id)
        beat = admission.open_heartbeat(statement, record.public_key, node_id)
        if not beat.leaving:
            raise ShardlineError("invalid_value", "a goodbye says so: leaving is true", param="leaving")
        now = self.clock.monotonic()
        self.registry.heartbeat(beat, now)
        self.registry.leave(node_id, now)
        log.info("node_left", node=node_id)

    def drop(self, node_id: str, *, undo: bool = False) -> None:
        """No new session goes to this Node from now on. The caller sees to it that it does not come back."""
        self.registry.expel(node_id, self.clock.monotonic(), undo=undo)

    def nodes(self) -> dict[str, Any]:
        """`GET /v1/nodes`."""
        now = self.clock.monotonic()
        return {"nodes": [self._node(node_id, now) for node_id in sorted(self.registry.nodes)]}

    def _node(self, node_id: str, now: float) -> dict[str, Any]:
        record: NodeRecord = self.registry.nodes[node_id]
        links = sorted(record.links.items())
        return {
            **msgspec.to_builtins(record.info),
            "dialled_url": record.url,
            "state": record.state,
            "reason": record.reason,
            "last_seen_s": round(now - record.seen_at, 3),
            "artifacts": self.catalogue.held_by(node_id),
            "peers": [
                {"peer": peer, "rtt_ms": known.link.rtt_ms, "ok": known.link.ok, "out": known.link.out}
                for peer, known in links
            ],
        }

    # Who has which pieces.

    def advertise(self, node_id: str, statement: str) -> None:
        """Which pieces of an artifact a Node gives to others."""
        record = self.registry.registered(node_id)
        unix_time = self.clock.unix()
        said, lasts_s = admission.open_advertisement(statement, record.public_key, node_id, unix_time)
        self.catalogue.take(said, lasts_s, self.clock.monotonic())

    def artifacts(self) -> ArtifactList:
        return self.catalogue.artifacts()

    def sources(self, content_id: str, asker: str, address: str) -> SourceList:
        return self.catalogue.sources(content_id, asker, address)

    def _proven(self, node_id: str, content_id: str) -> bool | None:
        return self.docket.proven(Subject(node_id, content_id))

    async def examine(self) -> None:
        """Make Nodes prove that they have what they advertise, until cancelled; done at once if nothing is offered."""
        if self._ask is None or not self.catalogue.offers:
            return
        await Examiner(
            self.catalogue,
            self.docket,
            self.registry,
            ask=self._ask,
            now=self.clock.monotonic,
            metrics=self.metrics,
        ).run()

    def sweep(self, interval_s: float) -> None:
        """Expire silent Nodes; to be called every `interval_s`.

        A call that comes late gives every Node the time that the Tracker lost, and judges nobody: what the Nodes
        sent meanwhile waits on the sockets and is read before the next call.
        """
        now = self.clock.monotonic()
        late = now - self._swept_at - interval_s
        self._swept_at = now
        if late > self.settings.late_timer_s:
            log.warning("tracker_paused", seconds=round(late, 3))
            self.registry.excuse(late)
            self.catalogue.excuse(late)
            return
        for node_id in self.registry.sweep(now):
            self.metrics.expired.inc()
            log.warning("node_expired", node=node_id)
        self.catalogue.sweep(now)

    async def watch(self) -> None:
        """Sweep until cancelled."""
        interval_s = min(0.5, self.settings.tracker_expiry_s / 8)
        self._swept_at = self.clock.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            self.sweep(interval_s)

    # What is served, and by whom.

    def models(self) -> ModelList:
        return ModelList(models=models(self.registry.candidates(), self.registry.link))

    def place(self, request: PlacementRequest) -> PlacementAnswer:
        """The layers for a Node that starts; they are held for it until it registers, or a minute."""
        check_bounds(request)
        now = self.clock.monotonic()
        held = [
            holding
            for record in self.registry.beating()
            if not record.leaving
            for holding in holdings_of(record.info, partial(self.catalogue.counts, record.info.id))
        ]
        answer = place(request, [*held, *self.claims.holdings(now)])
        self.claims.add(request, answer, now)
        return answer

    def route(self, request: RouteRequest) -> RouteAnswer:
        """The cheapest route and its tickets; the sessions count on its Nodes at once, so that bursts spread."""
        _check_route_request(request)
        now = self.clock.monotonic()
        query = Query(
            request.kv_tokens,
            frozenset(request.avoid_nodes),
            frozenset(request.avoid_links),
            request.reusable_tokens or {},
        )
        with self.metrics.selection.time():
            choice = choose(self.registry.candidates(), self.registry.link, query, request.model)
            answer = self.office.issue(choice, request, self.registry.link, self.clock.unix())
        self.registry.give(answer.route.id, [hop.node for hop in answer.route.hops], request.kv_tokens, now)
        self.book.add(answer.route, now)
        return answer

    def outcome(self, route_id: str, outcome: Outcome) -> None:
        """How a session ended. Only for routes that were given here, once each: nobody can blame at will."""
        check_bounds(outcome)
        now = self.clock.monotonic()
        route = self.book.close(route_id, outcome, now)
        self.metrics.outcomes.labels(outcome.status).inc()
        self.registry.end(route_id, route.nodes, now)
        if not blames(outcome):
            return
        reason = f"reported: {outcome.code or 'failed'}"
        if outcome.node is not None:
            self.registry.report_node(outcome.node, reason, now, lives=outcome.code != "node_lost")
            if outcome.code in _WRONG_ROWS:
                self.catalogue.suspect(outcome.node, now)
        if outcome.link is not None:
            self.registry.report_link(*outcome.link, reason)
        log.warning("fault_reported", route=route_id, code=outcome.code, node=outcome.node, link=outcome.link)

    def explain(self, model: str, kv_tokens: int) -> Explanation:
        return explain(self.registry.candidates(), self.registry.link, Query(kv_tokens), model, self._proven)

    def check_ready(self) -> list[str]:
        """The names of models that can be used now; `model_unavailable` with what is missing while there is none."""
        known = self.models().models
        ready = [m.model for m in known if m.ready]
        if ready:
            return ready
        lacks = [{"model": m.model, "content_id": m.content_id, "missing": m.missing} for m in known[:16]]
        named = "; ".join(f"{m.model} {_lack_of(m)}" for m in known[:3])
        raise ShardlineError(
            "model_unavailable", named or "no Node serves a model yet", models=lacks, retry_after=RETRY_AFTER_S
        )

    def render_metrics(self) -> bytes:
        states = [record.state for record in self.registry.nodes.values()]
        return self.metrics.render(
            states,
            sum(m.ready for m in self.models().models),
            len(self.catalogue.offers),
            [proven for _, proven in self.docket.verdicts()],
        )


def _lack_of(model: ModelInfo) -> str:
    if model.composite:
        return "has no Node that passes requests on to its server"
    return "lacks layers " + ", ".join(f"{first}:{last}" for first, last in model.missing)


def _check_route_request(request: RouteRequest) -> None:
    check_bounds(request)
    if request.kv_tokens < 1:
        raise ShardlineError("invalid_value", "kv_tokens is at least 1", param="kv_tokens")
    if not request.gateway:
        raise ShardlineError("invalid_value", "gateway names the Gateway that asks", param="gateway")
