"""How the Tracker knows this Node: registration, heartbeats, probes of peers, the goodbye.

Owns the Node's view of the Tracker (its ticket key, its epoch). Sessions do not depend on it: while the Tracker is
away, steps flow on. Shown by tests/gateway/test_session.py and tests/tracker/.
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
from shardline.transport.failures import HttpFailure, OwnLack
from shardline.transport.http_client import HttpClient
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
_FINAL = frozenset(
    {
        "registration_refused",
        "protocol_mismatch",
        "identity_in_use",
        "address_refused",
        "layers_invalid",
        "unauthorized",
        "forbidden",
    }
)
"""Refusals that trying again does not cure."""
_PROBE_S = 1.0
_RETRY_S = 0.5
_REPEAT_S = 30.0
"""The same trouble with the Tracker is logged again after so long."""


class Presence:
    """`run()` keeps the Node known until it is cancelled; raises a refusal of the Tracker that is final."""

    def __init__(
        self,
        *,
        identity: Identity,
        tracker: TrackerClient,
        client: HttpClient,
        info: Callable[[], NodeInfo],
        settings: Settings,
    ) -> None:
        self._identity = identity
        self._tracker = tracker
        self._client = client
        self._info = info
        self._settings = settings
        self._answer: RegisterAnswer | None = None
        self._count = 0
        self._peers: list[Peer] = []
        self._probes: list[PeerProbe] = []
        self._complained = ("", "", 0.0)
        self._changed = asyncio.Event()
        self._beating = asyncio.Lock()
        self.registered = asyncio.Event()

    @property
    def node_id(self) -> str:
        return self._identity.node_id

    @property
    def ticket_key(self) -> bytes | None:
        """The Tracker's ticket key (32 bytes), once it is known."""
        return None if self._answer is None else bytes.fromhex(self._answer.ticket_key)

    def changed(self) -> None:
        """Something that routes depend on has changed: tell the Tracker now."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            try:
                await self._register()
                await self._beat_until_forgotten()
            except ShardlineError as error:
                if error.code in _FINAL and self._answer is None:
                    raise
                self._complain("tracker_refused", error.message)
            await asyncio.sleep(_RETRY_S)

    def _complain(self, event: str, reason: str) -> None:
        """Once for each new trouble, not twice a second for as long as it lasts."""
        now = time.monotonic()
        if (event, reason) != self._complained[:2] or now - self._complained[2] > _REPEAT_S:
            self._complained = (event, reason, now)
            log.warning(event, reason=reason)

    async def _register(self) -> None:
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
        self.registered.set()
        log.info("node_registered", waiting=self._answer.waiting)

    async def _beat_until_forgotten(self) -> None:
        """Heartbeats until the Tracker says that it does not know us; one that is not answered is not the end."""
        while True:
            try:
                async with asyncio.timeout(self._settings.tracker_heartbeat_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self._beat()
            except ShardlineError as error:
                if error.code not in ("tracker_unreachable", "resources_exhausted"):
                    raise
                self._complain(error.code, error.message)
            await self._probe_peers()

    async def _beat(self, *, leaving: bool = False) -> None:
        """One heartbeat. One at a time: their counts must arrive in order."""
        async with self._beating:
            await self._send_beat(leaving=leaving)

    async def _send_beat(self, *, leaving: bool) -> None:
        if self._answer is None:
            return
        self._count += 1
        beat = Heartbeat(
            node=self._identity.node_id,
            epoch=self._answer.epoch,
            count=self._count,
            info=self._info(),
            peers=self._probes,
            leaving=leaving,
        )
        statement = sign(self._identity.key, "heartbeat", beat)
        answer = await self._tracker.heartbeat(self._identity.node_id, Signed(statement=statement))
        self._peers = answer.peers[:8]

    async def tell_now(self) -> None:
        """One heartbeat at once, so that what is true here is true at the Tracker when this returns."""
        try:
            await self._beat()
        except ShardlineError as error:
            self._complain("tracker_unreachable", str(error))

    async def leaving(self) -> None:
        """Tell the Tracker that no new session may come; it may be away."""
        try:
            await self._beat(leaving=True)
        except ShardlineError as error:
            self._complain("tracker_unreachable", str(error))

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
