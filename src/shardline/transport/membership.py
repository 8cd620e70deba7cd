"""What makes a process a party of a cluster with keys: its certificate, where that is kept, and when it is renewed.

Owns the folder of a Node that has joined, and the certificates that the Tracker's own machine makes for itself. It
talks to nobody (join.py does), and decides about nobody (tracker/enrolment.py does). Shown by
tests/transport/test_membership.py and tests/transport/test_join.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from shardline.errors import ShardlineError
from shardline.options import JOINED
from shardline.settings import Settings
from shardline.transport.authority import Authority, key_pem, lifetime, new_key, part_of, signing_request
from shardline.transport.credentials import keep_secret, kept_secret
from shardline.transport.tls import ClusterTls
from shardline.wire.joining import Part

_FILE = "membership.json"
_LOCK = "lock"
_LEAST_PAUSE_S = 0.2
_RETRY_S = 30.0

log = structlog.get_logger(__name__)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a Node or Gateway that has joined. It holds secrets."""

    tracker: str
    """URL."""
    node: str
    """Id of the Node, or of the Gateway."""
    authority: str
    certificate: str
    key: str
    credential: str

    def __repr__(self) -> str:
        return f"Kept({self.node!r} of {self.tracker!r})"


def kept_in(folder: Path) -> Kept | None:
    """What was kept in `folder`; None where nothing was. Raises `setting_invalid` for what cannot be read."""
    path = folder / _FILE
    raw = kept_secret(path)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=Kept)
    except msgspec.MsgspecError:
        raise ShardlineError("setting_invalid", f"{path} is damaged: take it away, and join anew") from None


def joined_folders(state_dir: Path, tracker: str, part: Part | None = None) -> list[Path]:
    """Folders of what has joined the Tracker at this URL from here (as `part`), the latest first."""
    found = []
    for folder in (state_dir / JOINED).glob("*"):
        try:
            kept = kept_in(folder)
        except ShardlineError as error:
            log.warning("membership_unreadable", reason=error.message)
            continue
        if kept is not None and kept.tracker == tracker and part in (None, part_of(kept.node)):
            found.append((_start_of(kept), folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def _start_of(kept: Kept) -> float:
    try:
        return lifetime(kept.certificate.encode())[0]
    except ValueError:
        return 0.0


def held(folder: Path) -> BinaryIO | None:
    """The lock of a folder, so that no two processes are the same Node; None where another one has it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


class Membership:
    """The certificate that this process has now, its key, and the contexts that use them."""

    def __init__(
        self,
        *,
        authority: bytes,
        certificate: bytes,
        key: bytes,
        credential: str = "",
        keep: Callable[[bytes, bytes], None] | None = None,
        party: str = "",
    ) -> None:
        self.party = party
        """As the cluster names it."""
        self.credential = credential
        self.tls = ClusterTls(authority, certificate, key)
        self._keep = keep
        self._life = lifetime(certificate)
        self._next: EllipticCurvePrivateKey | None = None
        self.revive: Callable[[], Awaitable[None]] | None = None
        """What asks the Tracker for a new certificate when this one has ended (join.py)."""

    @property
    def until(self) -> float:
        """When the certificate ends, in Unix seconds."""
        return self._life[1]

    async def keep_valid(self, now: float) -> None:
        """With a certificate that has ended, because the Tracker was away for long, nobody shakes hands any more: ask
        for a new one by proving who had it. Raises what joining raises."""
        if now >= self.until and self.revive is not None:
            await self.revive()

    async def renew(self) -> None:
        """A new certificate at half of the life of each, until cancelled: of a party that sends no heartbeats.

        Raises `join_refused` when the Tracker gives it none any more; all else may pass.
        """
        while True:
            start, end = self._life
            await asyncio.sleep(max(_LEAST_PAUSE_S, (start + end) / 2 - time.time()))
            try:
                if self.revive is not None:
                    await self.revive()
            except ShardlineError as error:
                if error.code == "join_refused":
                    raise
                log.warning("certificate_not_renewed", reason=error.message, until=round(end))
                await asyncio.sleep(min(_RETRY_S, (end - start) / 16))

    def replaced(self, certificate: str, key: bytes) -> None:
        """Take a certificate and its key (PEM) that came by another way than a heartbeat."""
        pem = certificate.encode()
        try:
            life = lifetime(pem)
        except ValueError:
            raise ShardlineError("internal", "what came for a certificate is none") from None
        self.tls.swap(pem, key)
        self._next, self._life = None, life
        if self._keep is not None:
            self._keep(pem, key)
        log.info("certificate_renewed", until=round(self.until))

    def renewal(self, now: float) -> str | None:
        """A signing request for the next certificate, once half of this one's life is over; a fresh key with it."""
        start, end = self._life
        if now < (start + end) / 2:
            return None
        self._next = self._next or new_key()
        return signing_request(self._next)

    def renewed(self, certificate: str) -> None:
        """Take the certificate that came for the last `renewal`. Raises `internal` for one of another key."""
        if self._next is not None:
            self.replaced(certificate, key_pem(self._next))


def kept_membership(folder: Path, kept: Kept) -> Membership:
    """The membership that is kept in `folder`; what is renewed is kept there, too."""

    def keep(certificate: bytes, key: bytes) -> None:
        keep_in(folder, msgspec.structs.replace(kept, certificate=certificate.decode(), key=key.decode()))

    return Membership(
        authority=kept.authority.encode(),
        certificate=kept.certificate.encode(),
        key=kept.key.encode(),
        credential=kept.credential,
        keep=keep,
        party=kept.node,
    )


def keep_in(folder: Path, kept: Kept) -> None:
    keep_secret(folder / _FILE, msgspec.json.encode(kept))


class OwnMembership:
    """A party on the machine of the Tracker: its user holds the authority, so it asks nobody."""

    def __init__(self, authority: Authority, party: str, settings: Settings, addresses: list[str]) -> None:
        self._authority = authority
        self.party = party
        self._seconds = settings.certificate_s
        self._addresses = addresses
        key = new_key()
        certificate = self._issue(key)
        self._life = lifetime(certificate)
        self.tls = ClusterTls(authority.certificate_pem, certificate, key_pem(key))

    def _issue(self, key: EllipticCurvePrivateKey) -> bytes:
        return self._authority.issue(
            key.public_key(), self.party, self._addresses, now=time.time(), seconds=self._seconds
        )

    async def renew(self) -> None:
        """A new certificate at half of the life of each, until cancelled."""
        while True:
            start, end = self._life
            await asyncio.sleep(max(_LEAST_PAUSE_S, (start + end) / 2 - time.time()))
            key = new_key()
            certificate = self._issue(key)
            self.tls.swap(certificate, key_pem(key))
            self._life = lifetime(certificate)
            log.info("certificate_renewed", party=self.party, until=round(self._life[1]))
