"""Who becomes a party of a cluster with keys: joins by token, joins of a Node whose certificate lapsed, renewals.

Owns the order of the checks before the authority signs, and that a used token stays used over restarts. It keeps no
list of members: who may go on is who the Tracker takes heartbeats from. Shown by tests/tracker/test_enrolment.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.admission import CLOCK_SKEW_S
from shardline.tracker.bounds import STATEMENT_LIMIT
from shardline.tracker.invitations import Guesses, Invitations, Token
from shardline.transport.authority import Authority, requested_key
from shardline.transport.credentials import keep_secret, kept_secret
from shardline.wire.joining import AuthorityAnswer, Invitation, JoinAnswer, JoinClaim, JoinRequest
from shardline.wire.tickets import SignatureRefused, node_id_of, verify

INVITATIONS_FILE = "invitations.json"

log = structlog.get_logger(__name__)


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
        self._invitations = Invitations(_kept_tokens(self._path), settings.invitation_s)

    def authority(self) -> AuthorityAnswer:
        return AuthorityAnswer(certificate=self._authority.certificate_pem.decode())

    def invite(self) -> Invitation:
        """A fresh line, on the disk before anybody sees it."""
        token = self._invitations.make(self._unix())
        self._keep()
        return Invitation(line=f"{self._url}/#{token}.{self._authority.pin}", seconds=self._settings.invitation_s)

    def join(self, request: JoinRequest, address: str, models: list[str]) -> JoinAnswer:
        """Let the holder of a token in, as the Node that its identity makes it; `address` is where it calls from.

        Raises `join_refused`, `queue_full` (too many guesses), `invalid_value`.
        """
        now = self._unix()
        self._guesses.check(address, now)
        try:
            node, claim = self._proved(request, now)
            key = requested_key(claim.csr)
            self._check_right(request, node, now)
        except ShardlineError:
            self._guesses.wrong(address, now)
            raise
        if request.token is not None:
            # Used before it is worth anything: a Tracker that is killed in between must not let two in.
            self._invitations.use(request.token)
            self._keep()
        certificate = self._authority.issue(key, node, [address], now=now, seconds=self._settings.certificate_s)
        log.info("node_joined", node=node, address=address, by="token" if request.token else "certificate")
        if request.token is not None:
            self._announce(self.invite().line)
        return JoinAnswer(
            node=node,
            certificate=certificate.decode(),
            authority=self._authority.certificate_pem.decode(),
            credential=self._credential,
            models=models,
        )

    def renew(self, node: str, csr: str, address: str) -> str:
        """The next certificate (PEM) of a Node whose heartbeat was taken; raises `invalid_value`."""
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
        return node_id_of(public_key), claim

    def _check_right(self, request: JoinRequest, node: str, now: float) -> None:
        if request.token is not None:
            self._invitations.check(request.token, now)
            return
        ended = None if request.certificate is None else self._authority.expired_at(request.certificate, node)
        if ended is None:
            raise ShardlineError("join_refused", "neither a token nor a certificate of this cluster came")
        if now - ended > self._settings.certificate_grace_s:
            days = (now - ended) / 86400
            raise ShardlineError("join_refused", f"the certificate ended {days:.1f} days ago: too long to be renewed")

    def _keep(self) -> None:
        keep_secret(self._path, msgspec.json.encode(self._invitations.kept))


def _kept_tokens(path: Path) -> list[Token]:
    raw = kept_secret(path)
    if raw is None:
        return []
    try:
        return msgspec.json.decode(raw, type=list[Token])
    except msgspec.MsgspecError:
        raise ShardlineError("setting_invalid", f"{path} is damaged: take it away; lines not used yet end") from None
