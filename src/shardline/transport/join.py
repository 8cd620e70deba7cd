"""How a Node or Gateway joins a cluster with keys: the line that was pasted, and the two connections it is worth.

Owns the order of trust: first the authority's certificate, over a connection that proves nothing, against the pin of
the line; then a connection that proves it is the Tracker; only then the token. Shown by tests/transport/test_join.py.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.options import JOINED
from shardline.settings import Settings
from shardline.transport.addresses import make_url, split_url
from shardline.transport.authority import key_pem, new_key, party_of, pin_of, pinned_certificate, signing_request
from shardline.transport.credentials import identity_key
from shardline.transport.http_client import HttpClient
from shardline.transport.membership import (
    Kept,
    Membership,
    held,
    joined_folders,
    keep_in,
    kept_in,
    kept_membership,
)
from shardline.transport.tls import ClusterTls
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.joining import JoinAnswer, JoinClaim, JoinRequest, Part
from shardline.wire.tickets import node_id_of, public_bytes, sign

IDENTITY = "identity.key"
_SECRETS = re.compile(r"([A-Za-z0-9_-]{22})\.([A-Za-z0-9_-]{43})")

log = structlog.get_logger(__name__)


class JoinLine(NamedTuple):
    """What stands in a line for joining. Without token and pin it names a cluster that was joined before."""

    tracker: str
    """URL, without a path."""
    token: str | None
    pin: str | None

    def __repr__(self) -> str:
        """Without the token, so that no log shows it."""
        return f"JoinLine({self.tracker!r})"


def join_line(text: str) -> JoinLine:
    """The line `https://HOST:PORT/#TOKEN.PIN` in parts; raises `setting_invalid`, and never shows the token."""
    url, hash_sign, secrets = text.strip().partition("#")
    match = _SECRETS.fullmatch(secrets)
    if hash_sign and match is None:
        raise _no_line("what stands behind # is not a token of 22 and a pin of 43 characters: was it copied whole?")
    try:
        parts = split_url(url)
    except ShardlineError:
        raise _no_line("it does not begin with https://HOST:PORT/") from None
    if parts.scheme != "https" or parts.target != "/" or parts.party is not None:
        raise _no_line("it does not begin with https://HOST:PORT/")
    token, pin = match.groups() if match is not None else (None, None)
    return JoinLine(make_url(parts.scheme, parts.host, parts.port), token, pin)


def _no_line(why: str) -> ShardlineError:
    advice = "Copy the whole line in its quotes; shardline invite, on the machine of the Tracker, prints another."
    return ShardlineError("setting_invalid", f"--join: {why}", advice=advice, param="join")


class Joined(NamedTuple):
    """A Node or Gateway of a cluster with keys, before it has said anything there."""

    membership: Membership
    key: Ed25519PrivateKey
    """Of its identity."""


@asynccontextmanager
async def joined(
    line: JoinLine,
    *,
    state_dir: Path,
    settings: Settings,
    identity_path: Path | None = None,
    part: Part = "node",
) -> AsyncIterator[Joined]:
    """The membership of this process: the one that is kept from before, else a new one for the line's token.

    While inside, no other process can have the same. Raises `join_refused`, `join_mismatch` (nothing was sent),
    `tracker_unreachable`, `setting_invalid`.
    """
    folder, lock = _folder_of(line, state_dir, part)
    try:
        try:
            entered = await _entered(line, folder, settings, identity_path, part)
        except BaseException:
            if kept_in(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)  # nothing came of it
            raise
        yield entered
    finally:
        lock.close()


def _folder_of(line: JoinLine, state_dir: Path, part: Part) -> tuple[Path, BinaryIO]:
    """Where what this line led to is kept, and the lock on it."""
    if line.token is None:
        folders = joined_folders(state_dir, line.tracker, part)
        if not folders:
            why = f"no {part.title()} has joined {line.tracker} from here before, so the line needs its token"
            raise ShardlineError("join_refused", why)
    else:
        name = hashlib.sha256(f"{line.token}.{line.pin}".encode()).hexdigest()[:24]
        folders = [state_dir / JOINED / name]
    for folder in folders:
        lock = held(folder)
        if lock is not None:
            return folder, lock
    why = f"the {part.title()} that joined with this line runs already: each needs a line of its own"
    raise ShardlineError("identity_in_use", why, advice="Print another, on the Tracker's machine: shardline invite")


async def _entered(line: JoinLine, folder: Path, settings: Settings, identity_path: Path | None, part: Part) -> Joined:
    kept = kept_in(folder)
    key = identity_key(identity_path or folder / IDENTITY)
    if kept is None or kept.node != _party(key, part):
        if line.token is None or line.pin is None:
            raise ShardlineError("join_refused", "this identity has not joined from here, so the line needs its token")
        answer, private = await _ask_first(line, key, settings, part)
        kept = Kept(
            tracker=line.tracker,
            node=answer.node,
            authority=answer.authority,
            certificate=answer.certificate,
            key=private.decode(),
            credential=answer.credential,
        )
        keep_in(folder, kept)
        log.info("cluster_joined", tracker=line.tracker, node=answer.node, models=answer.models)
    membership = kept_membership(folder, kept)

    async def revive() -> None:
        now = kept_in(folder) or kept
        answer, private = await _ask_again(line, now, key, settings, part)
        membership.replaced(answer.certificate, private)

    membership.revive = revive
    await membership.keep_valid(time.time())
    return Joined(membership, key)


def _party(key: Ed25519PrivateKey, part: Part) -> str:
    return party_of(part, node_id_of(public_bytes(key)))


async def _ask_first(
    line: JoinLine, key: Ed25519PrivateKey, settings: Settings, part: Part
) -> tuple[JoinAnswer, bytes]:
    """With a token: learn the authority by its pin, then join."""
    assert line.pin is not None
    pin = line.pin
    authority = pinned_certificate(await _unproved_authority(line.tracker, settings, part), pin)
    return await _join(line.tracker, authority, pin, key, settings, part, token=line.token)


async def _ask_again(
    line: JoinLine, kept: Kept, key: Ed25519PrivateKey, settings: Settings, part: Part
) -> tuple[JoinAnswer, bytes]:
    """With the certificate that has lapsed; the authority is known from before."""
    authority = kept.authority.encode()
    pin = pin_of(x509.load_pem_x509_certificate(authority))
    return await _join(line.tracker, authority, pin, key, settings, part, certificate=kept.certificate)


async def _unproved_authority(tracker: str, settings: Settings, part: Part) -> str:
    """What whoever answers says its authority is."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.minimum_version = ssl.TLSVersion.TLSv1_3
    anyone.check_hostname = False
    anyone.verify_mode = ssl.CERT_NONE
    client = HttpClient(settings, tls=anyone, part=f"the {part.title()}")
    try:
        return (await TrackerClient(client, tracker, unproved=True).authority()).certificate
    finally:
        await client.aclose()


async def _join(
    tracker: str,
    authority: bytes,
    pin: str,
    key: Ed25519PrivateKey,
    settings: Settings,
    part: Part,
    *,
    token: str | None = None,
    certificate: str | None = None,
) -> tuple[JoinAnswer, bytes]:
    """Ask the proved Tracker; the answer, and the private key (PEM) of the certificate in it."""
    private = new_key()
    claim = JoinClaim(pin=pin, csr=signing_request(private), time=time.time(), part=part)
    request = JoinRequest(
        public_key=public_bytes(key).hex(), proof=sign(key, "join", claim), token=token, certificate=certificate
    )
    client = HttpClient(settings, tls=ClusterTls(authority), part=f"the {part.title()}")
    try:
        answer = await TrackerClient(client, tracker).join(request)
    finally:
        await client.aclose()
    if answer.node != _party(key, part):
        raise ShardlineError("join_mismatch", f"the Tracker answered for another {part.title()}")
    # The authority that is kept is the one of the line, whoever answered; its other fields are those of the Tracker.
    pinned_certificate(answer.authority, pin)
    return answer, key_pem(private)
