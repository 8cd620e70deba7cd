"""How the Tracker knows this Node: registration, heartbeats, probes of peers, the goodbye.

Owns the Node's view of the Tracker (its ticket key, its epoch). Sessions do not depend on it: while the Tracker is
away, steps flow on. Shown by tests/node/test_presence.py.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog

from shardline.errors import ShardlineError
from shardline.node.info import Identity
from shardline.settings import Settings
from shardline.transport.authority import uri_of
from shardline.transport.failures import HttpFailure, OwnLack
from shardline.transport.http_client import HttpClient
from shardline.transport.membership import Membership
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import (
    Heartbeat,
    NodeInfo,
    NodeProof,
    Nonce,
    Peer,
    PeerProbe,
    RegisterAnswer,
    Registration,
    Signed,
)
from shardline.wire.tickets import SignatureRefused, node_id_of, public_bytes, sign, verify

log = structlog.get_logger(__name__)
_FINAL_AT_FIRST = frozenset(
    {
        "registration_refused",
        "join_refused",
        "protocol_mismatch",
        "identity_in_use",
        "address_refused",
        "layers_invalid",
        "unauthorized",
        "forbidden",
    }
)
"""Refusals of a first registration that trying again does not cure: its operator must correct something."""
_FINAL_LATER = frozenset({"identity_in_use", "join_refused"})
"""Of a Node that was taken in before: another process has its name now, or its certificate has ended and it gets no
other. All else may pass (a clock that is being set, a
call back that came while this machine was busy, a Tracker that is being exchanged)."""
_LATE_CALLS = 3
"""Calls back in succession that came through to nobody before a first registration is given up: one may meet a machine
that is busy loading."""
_PROBE_S = 1.0
_RETRY_S = 0.5
_REPEAT_S = 30.0
"""The same trouble with the Tracker is logged again after so long."""


class Presence:
    """`run()` keeps the Node known, until it is cancelled or the Tracker wants it no more."""

    def __init__(
        self,
        *,
        identity: Identity,
        tracker: TrackerClient,
        client: HttpClient,
        info: Callable[[], NodeInfo],
        settings: Settings,
        membership: Membership | None = None,
    ) -> None:
        self._membership = membership
        self._identity = identity
        self._tracker = tracker
        self._client = client
        self._info = info
        self._settings = settings
        self._answer: RegisterAnswer | None = None
        self._count = 0
        self._registrations = 0
        self._peers: list[Peer] = []
        self._probes: list[PeerProbe] = []
        self._complained = ("", "", 0.0)
        self._leaving = False
        self._changed = asyncio.Event()
        self._beating = asyncio.Lock()
        self.registered = asyncio.Event()
        self.expelled: frozenset[str] = frozenset()
        """Parties, as their certificates name them, that the Tracker has told to be out of the cluster."""

    @property
    def node_id(self) -> str:
        return self._identity.node_id

    @property
    def ticket_key(self) -> bytes | None:
        """The Tracker's ticket key (32 bytes), once it is known."""
        return None if self._answer is None else bytes.fromhex(self._answer.ticket_key)

    @property
    def epoch(self) -> str | None:
        """Another one after each registration, None before the first: what the Tracker was told until then may be
        forgotten there."""
        return None if self._answer is None else f"{self._answer.epoch}/{self._registrations}"

    def changed(self) -> None:
        """Something that routes depend on has changed: tell the Tracker now."""
        self._changed.set()

    async def run(self) -> ShardlineError:
        """Register, beat, and register again whenever the Tracker does not know this Node; returns the refusal that
        is final. From then on this Node takes no ticket."""
        late_calls = 0
        while True:
            try:
                await self._register()
                late_calls = 0
                await self._beat_until_forgotten()
            except ShardlineError as error:
                late_calls += error.details.get("limit") == "dial_back"
                may_pass = 0 < late_calls < _LATE_CALLS
                if not may_pass and error.code in (_FINAL_AT_FIRST if self._answer is None else _FINAL_LATER):
                    self._answer = None
                    return error
                self._complain("tracker_refused", error.message)
            await asyncio.sleep(_RETRY_S)

    def _complain(self, event: str, reason: str) -> None:
        """Once for each new trouble, not twice a second for as long as it lasts."""
        now = time.monotonic()
        if (event, reason) != self._complained[:2] or now - self._complained[2] > _REPEAT_S:
            self._complained = (event, reason, now)
            log.warning(event, reason=reason)

    async def _register(self) -> None:
        await self._keep_valid()
        nonce = await self._tracker.nonce()
        registration = Registration(
            public_key=public_bytes(self._identity.key).hex(),
            nonce=nonce.nonce,
            time=time.time(),
            info=self._info(),
        )
        statement = sign(self._identity.key, "register", registration)
        self._answer = await self._tracker.register(Signed(statement=statement))
        self._count = 0
        self._registrations += 1
        self.registered.set()
        log.info("node_registered", waiting=self._answer.waiting)

    async def _beat_until_forgotten(self) -> None:
        """Heartbeats until the Tracker says that it does not know us; one that is not answered is not the end."""
        while True:
            await self._probe_until_due()
            try:
                await self._beat()
            except ShardlineError as error:
                if error.code != "tracker_unreachable":
                    raise
                self._complain("tracker_unreachable", error.message)

    async def _probe_until_due(self) -> None:
        """The pause between two heartbeats, in which the peers are probed. News end both: they are told at once."""
        async with asyncio.TaskGroup() as tasks:
            probing = tasks.create_task(self._probe_peers())
            try:
                async with asyncio.timeout(self._settings.tracker_heartbeat_s):
                    await self._changed.wait()
                probing.cancel()
            except TimeoutError:
                pass
        self._changed.clear()

    async def _beat(self) -> None:
        """One heartbeat. One at a time: their counts must arrive in order."""
        async with self._beating:
            if self._answer is not None:
                await self._keep_valid()
                answer = await self._tracker.heartbeat(self.node_id, self._statement(self._answer))
                self._peers = answer.peers[:8]
                self.expelled = frozenset(map(uri_of, answer.expelled))
                if answer.certificate is not None and self._membership is not None:
                    self._membership.renewed(answer.certificate)

    async def _keep_valid(self) -> None:
        if self._membership is not None:
            await self._membership.keep_valid(time.time())

    def _statement(self, known: RegisterAnswer) -> Signed:
        """The next heartbeat, signed. Probes are told once: told again, they would pass for newer than they are."""
        self._count += 1
        probes, self._probes = self._probes, []
        beat = Heartbeat(
            node=self.node_id,
            epoch=known.epoch,
            count=self._count,
            info=self._info(),
            peers=probes,
            leaving=self._leaving,
            csr=None if self._membership is None else self._membership.renewal(time.time()),
        )
        return Signed(statement=sign(self._identity.key, "heartbeat", beat))

    async def tell_now(self) -> None:
        """One heartbeat at once, so that what is true here is true at the Tracker when this returns."""
        try:
            await self._beat()
        except ShardlineError as error:
            self._complain("tracker_unreachable", error.message)

    async def leaving(self) -> None:
        """Tell the Tracker that no new session may come; it may be away."""
        self._leaving = True
        await self.tell_now()

    async def goodbye(self) -> None:
        """The last word, when no session runs any more and `run` has ended; the Tracker may be away."""
        self._leaving = True
        try:
            async with self._beating:
                if self._answer is not None:
                    await self._tracker.leave(self.node_id, self._statement(self._answer))
        except ShardlineError as error:
            self._complain("tracker_unreachable", error.message)

    async def _probe_peers(self) -> None:
        """Time all peers side by side: a silent one must not hold up the next heartbeat."""
        async with asyncio.TaskGroup() as tasks:
            probes = [tasks.create_task(self._probe(peer)) for peer in self._peers]
        self._probes = [found for probe in probes if (found := probe.result()) is not None]

    async def _probe(self, peer: Peer) -> PeerProbe | None:
        """Time one small request to a Node that the Tracker named; it must prove that it is that Node. None: this Node
        could not ask."""
        nonce = secrets.token_hex(16)
        started = time.perf_counter()
        try:
            proof = await self._client.json(
                "GET",
                f"{peer.url}/v1/node?nonce={nonce}",
                NodeProof,
                timeout_s=_PROBE_S,
                limit="probe",
                max_body=64 << 10,
                authorize=False,
            )
            rtt_ms = (time.perf_counter() - started) * 1e3
            ok = _is_from(proof, peer, nonce)
        except OwnLack:
            return None
        except (HttpFailure, ShardlineError):
            return PeerProbe(peer=peer.node, rtt_ms=None, ok=False)
        return PeerProbe(peer=peer.node, rtt_ms=round(rtt_ms, 3) if ok else None, ok=ok)


def _is_from(proof: NodeProof, peer: Peer, nonce: str) -> bool:
    """The nonce came back, signed by the key that the Node's id is made of."""
    try:
        key = bytes.fromhex(peer.public_key)
        said = verify(key, "node", proof.proof, Nonce)
    except (SignatureRefused, ValueError):
        return False
    return node_id_of(key) == proof.id == peer.node and said.nonce == nonce
