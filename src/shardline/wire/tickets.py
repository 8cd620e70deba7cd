"""Signed statements: `base64url(json) "." base64url(Ed25519 signature)`, for tickets, registrations and heartbeats.

The signature covers a domain word and the JSON bytes as they were sent, so that nothing signed for one use passes
for another, and nothing is re-serialised before it is verified. Ed25519: RFC 8032. Pure: no clock, no I/O.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

T = TypeVar("T")


class SignatureRefused(Exception):
    """The statement is not one that this key signed for this use. The message says why, without its content."""


def node_id_of(public_key: bytes) -> str:
    """A Node's id is the digest of its Ed25519 public key (32 bytes): nobody can claim another's."""
    return "n-" + hashlib.sha256(public_key).hexdigest()[:16]


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    if "=" in text:
        raise ValueError("padding is not part of a statement")
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def sign(key: Ed25519PrivateKey, domain: str, payload: msgspec.Struct) -> str:
    raw = msgspec.json.encode(payload)
    return f"{_b64(raw)}.{_b64(key.sign(domain.encode() + bytes(1) + raw))}"


def peek(statement: str, kind: type[T]) -> T:
    """The payload before verification: only to find which key must have signed it."""
    try:
        return msgspec.json.decode(_unb64(statement.partition(".")[0]), type=kind)
    except (msgspec.MsgspecError, binascii.Error, ValueError, RecursionError):
        raise SignatureRefused("statement is not readable") from None


def verify(public_key: bytes, domain: str, statement: str, kind: type[T]) -> T:
    """The payload, if `public_key` (32 bytes) signed it for `domain`; raises `SignatureRefused`."""
    head, _, tail = statement.partition(".")
    try:
        raw, signature = _unb64(head), _unb64(tail)
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, domain.encode() + bytes(1) + raw)
        return msgspec.json.decode(raw, type=kind)
    except (InvalidSignature, binascii.Error, ValueError, RecursionError):
        raise SignatureRefused("signature does not fit") from None
    except msgspec.MsgspecError as error:
        raise SignatureRefused(f"signed statement is malformed: {error}") from None
