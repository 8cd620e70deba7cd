"""Who becomes a party of a cluster with keys: joins by token, renewals by heartbeat or certificate, expulsions.

Owns the order of the checks before the authority signs, and that used tokens and expelled parties stay so over
restarts. It keeps no list of members, only of those that are out; which Gateways call is noted while they do. Shown by
tests/tracker/test_enrolment.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.admission import CLOCK_SKEW_S
from shardline.tracker.bounds import STATEMENT_LIMIT
from shardline.tracker.invitations import Guesses, Invitations, Token
from shardline.transport.authority import GATEWAY_URI, Authority, name_of, party_of, requested_key, uri_of
from shardline.transport.credentials import keep_secret, kept_secret
from shardline.wire.joining import (
    AuthorityAnswer,
    Expulsion,
    GatewaySeen,
    Invitation,
    JoinAnswer,
    JoinClaim,
    JoinRequest,
    Part,
)
from shardline.wire.tickets import SignatureRefused, node_id_of, verify

INVITATIONS_FILE = "invitations.json"
EXPELLED_FILE = "expelled.json"
EXPELLED_LIMIT = 4_096
"""A cluster that has thrown out more is one to make anew."""
EXPELLED_TOLD = 256
"""Of those that are out, so many are told to Nodes, the latest."""
GATEWAYS = 1_024
"""Gateways that are noted; the one heard longest ago makes room."""
GATEWAY_GONE_S = 300.0
"""A Gateway that has not called for so long is not listed: it asks every few seconds."""
_PARTY = re.compile(r"(?:n|gateway)-[0-9a-f]{16}")

T = TypeVar("T")

log = structlog.get_logger(__name__)


class _Heard(NamedTuple):
    at: float
    """Unix seconds."""
    address: str


class Enrolment:
    """`url`: what lines for joining name. `announce` is told a fresh line whenever one was used up."""

    def __init__(
        self,
        authority: Authority,
        *,
        folder: Path,
        url: str,
        credential: str,
        settings: Settings,
        announce: Callable[[str], None],
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._authority = authority
        self._path = folder / INVITATIONS_FILE
        self._url = url
        self._credential = credential
        self._settings = settings
        self._announce = announce
        self._unix = unix
        self._guesses = Guesses()
        self._invitations = Invitations(_kept(self._path, list[Token]) or (), settings.invitation_s)
        self._out_path = folder / EXPELLED_FILE
        self._out = _kept(self._out_path, dict[str, float]) or {}
        self._out_uris = {uri_of(party): party for party in self._out}
        self._heard: dict[str, _Heard] = {}
        """Gateways by id, the one heard longest ago first."""

    def authority(self) -> AuthorityAnswer:
        return AuthorityAnswer(certificate=self._authority.certificate_pem.decode())

    def invite(self, part: Part = "node") -> Invitation:
        """A fresh line, on the disk before anybody sees it."""
        token = self._invitations.make(self._unix(), part)
        self._keep()
        line = f"{self._url}/#{token}.{self._authority.pin}"
        return Invitation(line=line, seconds=self._settings.invitation_s, part=part)

    def check_not_expelled(self, parties: frozenset[str]) -> None:
        """Raise `join_refused` for a caller whose certificate names one that is out; `parties`: as URIs."""
        for uri in parties & self._out_uris.keys():
            raise _expelled(self._out_uris[uri])

    def heard(self, parties: frozenset[str], address: str) -> None:
        """A caller that may call; of Gateways, which register nowhere, it is noted when that was."""
        for uri in parties:
            if uri.startswith(GATEWAY_URI):
                party = name_of(uri)
                self._heard.pop(party, None)
                self._heard[party] = _Heard(self._unix(), address)
        while len(self._heard) > GATEWAYS:
            del self._heard[next(iter(self._heard))]

    def gateways(self) -> list[GatewaySeen]:
        """Those that have called within `GATEWAY_GONE_S`, and those that are out."""
        now = self._unix()
        out = {party: self._heard.get(party) for party in self._out if party.startswith("gateway-")}
        calling = {party: heard for party, heard in self._heard.items() if now - heard.at <= GATEWAY_GONE_S}
        return [
            GatewaySeen(
                id=party,
                state="expelled" if party in out else "calls",
                address=None if heard is None else heard.address,
                last_seen_s=None if heard is None else round(max(0.0, now - heard.at), 3),
            )
            for party, heard in sorted({**calling, **out}.items())
        ]

    def check_party(self, party: str) -> None:
        """The same for an id: it may have been thrown out while its request was on the way."""
        if party in self._out:
            raise _expelled(party)

    def told(self) -> list[str]:
        """Who is out and may still have a certificate that has not ended."""
        since = self._unix() - self._settings.certificate_s - CLOCK_SKEW_S
        return [party for party, at in self._out.items() if at > since][-EXPELLED_TOLD:]

    def expel(self, party: str, *, undo: bool = False) -> Expulsion:
        """Throw out a Node or Gateway by its id, or take that back: on the disk when this returns."""
        if not _PARTY.fullmatch(party):
            raise ShardlineError("invalid_value", "who is expelled is named by its id: n-… or gateway-…", param="party")
        if undo:
            self._out.pop(party, None)
        elif len(self._out) >= EXPELLED_LIMIT:
            raise ShardlineError("queue_full", f"{EXPELLED_LIMIT} are out already: make a new authority")
        else:
            self._out.pop(party, None)
            self._out[party] = self._unix()
        self._out_uris = {uri_of(party): party for party in self._out}
        keep_secret(self._out_path, msgspec.json.encode(self._out))
        log.warning("party_readmitted" if undo else "party_expelled", party=party)
        return Expulsion(expelled=list(self._out), certificate_s=self._settings.certificate_s)

    def join(self, request: JoinRequest, address: str, models: list[str]) -> JoinAnswer:
        """Let the holder of a token in, as the Node or Gateway that its identity makes it, or give one that was let in
        its next certificate; `address` is where it calls from.

        Raises `join_refused`, `queue_full` (too many guesses), `invalid_value`.
        """
        now = self._unix()
        self._guesses.check(address, now)
        try:
            party, claim = self._proved(request, now)
            self.check_party(party)
            self._check_right(request, party, claim.part, now)
            key = requested_key(claim.csr)
        except ShardlineError:
            self._guesses.wrong(address, now)
            raise
        if request.token is not None:
            # Used before it is worth anything: a Tracker that is killed in between must not let two in.
            self._invitations.use(request.token)
            self._keep()
        certificate = self._authority.issue(key, party, [address], now=now, seconds=self._settings.certificate_s)
        log.info("party_joined", party=party, address=address, by="token" if request.token else "certificate")
        if request.token is not None and claim.part == "node":
            self._announce(self.invite().line)
        return JoinAnswer(
            node=party,
            certificate=certificate.decode(),
            authority=self._authority.certificate_pem.decode(),
            credential=self._credential,
            models=models,
        )

    def renew(self, node: str, csr: str, address: str) -> str:
        """The next certificate (PEM) of a Node whose heartbeat was taken; raises `invalid_value`, `join_refused`."""
        self.check_party(node)
        certificate = self._authority.issue(
            requested_key(csr), node, [address], now=self._unix(), seconds=self._settings.certificate_s
        )
        log.info("certificate_issued", node=node)
        return certificate.decode()

    def _proved(self, request: JoinRequest, now: float) -> tuple[str, JoinClaim]:
        """Who asks, proved by its identity key for this authority and this moment."""
        if len(request.proof) > STATEMENT_LIMIT:
            raise ShardlineError("invalid_value", "the proof is too long", param="proof")
        try:
            public_key = bytes.fromhex(request.public_key)
            claim = verify(public_key, "join", request.proof, JoinClaim)
        except (SignatureRefused, ValueError) as error:
            raise ShardlineError("join_refused", f"the proof of identity is not valid: {error}") from None
        if claim.pin != self._authority.pin:
            raise ShardlineError("join_refused", "the proof of identity is for another cluster")
        if abs(claim.time - now) > CLOCK_SKEW_S:
            why = (
                f"the clocks of the two machines differ by {claim.time - now:.0f} s, at most {CLOCK_SKEW_S:.0f} may be"
            )
            raise ShardlineError("join_refused", why, advice="Set the clock of one of them, then try again.")
        return party_of(claim.part, node_id_of(public_key)), claim

    def _check_right(self, request: JoinRequest, party: str, part: Part, now: float) -> None:
        if request.token is not None:
            self._invitations.check(request.token, now, part)
            return
        ended = None if request.certificate is None else self._authority.expired_at(request.certificate, party)
        if ended is None:
            raise ShardlineError("join_refused", "neither a token nor a certificate of this cluster came")
        if now - ended > self._settings.certificate_grace_s:
            days = (now - ended) / 86400
            raise ShardlineError("join_refused", f"the certificate ended {days:.1f} days ago: too long to be renewed")

    def _keep(self) -> None:
        keep_secret(self._path, msgspec.json.encode(self._invitations.kept))


def _expelled(party: str) -> ShardlineError:
    return ShardlineError(
        "join_refused",
        f"the operator of this cluster has expelled {party}",
        advice=f"The operator takes it back, on the machine of the Tracker: shardline expel --undo {party}",
        reason="expelled",
        party=party,
    )


def _kept(path: Path, kind: type[T]) -> T | None:
    raw = kept_secret(path)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError:
        raise ShardlineError("setting_invalid", f"{path} is damaged: take it away; what it says is lost") from None
