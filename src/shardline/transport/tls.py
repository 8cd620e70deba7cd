"""TLS on the Node plane: contexts that speak to parties of one cluster only, and who is at the other end.

Owns what both sides demand (TLS 1.3, a certificate of the cluster's authority, the party that was meant) and how a
renewed certificate takes the place of the old one. Who gets a certificate is not its business. Shown by
tests/transport/test_tls.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.errors import ShardlineError
from shardline.transport.authority import GATEWAY_URI, OPERATOR, uri_of

_CLOCK_FAULTS = frozenset({9, 10})
"""What OpenSSL calls not yet valid, and expired."""
SHUTDOWN_S = 1.0
"""How long the end of a connection may wait for the other side's farewell."""


@dataclass(frozen=True, slots=True)
class Pems:
    """What a party believes and shows, for programs that make contexts of their own."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


class ClusterTls:
    """The two contexts of one party. Without `certificate` and `key` (PEM) it can only call, and shows nothing."""

    def __init__(self, authority: bytes, certificate: bytes = b"", key: bytes = b"") -> None:
        self.pems = Pems(authority, certificate, key)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Not the host name: which party answers is checked against the certificate after the handshake.
        self.client.check_hostname = False
        self.client.verify_mode = ssl.CERT_REQUIRED
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A resumed session would skip the client's certificate, and connections here live long anyway.
        self._server.num_tickets = 0
        for context in (self.client, self._server):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(cadata=authority.decode("ascii"))
        if certificate:
            self.swap(certificate, key)

    def server(self, *, strangers: bool = False) -> ssl.SSLContext:
        """The context of this party's listener. `strangers`: a caller may come without a certificate, and is then
        known as nobody; one that shows a certificate of another cluster is refused all the same."""
        self._server.verify_mode = ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED
        return self._server

    def swap(self, certificate: bytes, key: bytes) -> None:
        """From the next handshake on; connections that are open go on. Raises `internal` for a pair that is none."""
        try:
            with _readable(key + certificate) as path:
                for context in (self.client, self._server):
                    context.load_cert_chain(path)
            self.pems = Pems(self.pems.authority, certificate, key)
        except ssl.SSLError as error:
            raise ShardlineError("internal", f"the certificate is not usable: {error.reason}") from None
        except OSError as error:
            raise ShardlineError("internal", f"the certificate cannot be handed on: {error.strerror}") from None


@contextlib.contextmanager
def _readable(secret: bytes) -> Iterator[str]:
    """A path at which `secret` can be read while inside: the ssl module takes files only.

    In memory where the system has that, so that the key is never on a disk that is not meant for it, and no full disk
    is in the way; else a file for its owner alone.
    """
    path = ""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("shardline")
    else:
        descriptor, path = tempfile.mkstemp(prefix="shardline-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            yield path or f"/proc/self/fd/{descriptor}"
    finally:
        if path:
            os.unlink(path)


def public_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """The context of a listener for everybody, with the operator's own certificate chain and key (PEM files).

    Raises `setting_invalid` with the name of the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in (certificate, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ShardlineError("setting_invalid", f"{path} cannot be read: {error.strerror}") from None
    try:
        # A key behind a password would ask for it on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError):
        why = f"{certificate} and {key} are no certificate chain and its key in PEM, without a password"
        raise ShardlineError("setting_invalid", why) from None
    return context


def parties(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """The parties that a verified certificate (`getpeercert`) names, as URIs; none without a certificate."""
    names = (certificate or {}).get("subjectAltName", ())
    return frozenset(value for kind, value in names if kind == "URI")


def party_at(transport: asyncio.BaseTransport) -> frozenset[str]:
    """Who is at the other end of a connection whose handshake is done."""
    return parties(transport.get_extra_info("peercert"))


def valid_until(transport: asyncio.BaseTransport) -> float:
    """When the certificate at the other end of a connection ends, in Unix seconds; infinite where there is none."""
    ends = (transport.get_extra_info("peercert") or {}).get("notAfter")
    return math.inf if ends is None else float(ssl.cert_time_to_seconds(ends))


def is_party(found: frozenset[str], party: str) -> bool:
    return uri_of(party) in found


def may_route(found: frozenset[str]) -> bool:
    """Whether a caller may ask for routes and open sessions: Gateways may, and who owns the authority."""
    return uri_of(OPERATOR) in found or any(uri.startswith(GATEWAY_URI) for uri in found)


def reason(error: ssl.SSLError) -> str:
    """Why a handshake failed, in words: OpenSSL's own are about its source code."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _CLOCK_FAULTS:
            return (
                f"its certificate does not count at this machine's time ({error.verify_message}): look at both clocks"
            )
        return f"its certificate is not one of this cluster ({error.verify_message})"
    words = (error.reason or str(error)).replace("_", " ").lower()
    return f"no TLS connection ({words})"
