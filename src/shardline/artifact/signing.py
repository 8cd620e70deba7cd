"""Signatures over the files of a bundle: OpenSSF Model Signing 1.0, key mode, ECDSA P-256 with SHA-256.

Owns the statement (in-toto, in a DSSE envelope, in a Sigstore bundle 0.3), keys and their names. A signature covers a
set of paths with their SHA-256; what it means to trust a key is bundle.py's. No other mode or curve. The public tool
checks what is made here: tests/artifact/test_public_tools.py; refusals: tests/artifact/test_signing.py.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as _generate
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from shardline.errors import ShardlineError
from shardline.wire.canonical import words_of
from shardline.wire.manifest import Sha256, check_path

SIGNATURE_BYTES_LIMIT = 4 << 20
KEY_BYTES_LIMIT = 16 << 10
PAYLOAD_TYPE = "application/vnd.in-toto+json"


class _Digest(msgspec.Struct):
    sha256: Sha256


class _Subject(msgspec.Struct):
    name: str
    digest: _Digest


class _Resource(msgspec.Struct):
    name: str
    digest: Sha256
    algorithm: Literal["sha256"]


class _Serialization(msgspec.Struct):
    method: Literal["files"]
    hash_type: Literal["sha256"]


class _Predicate(msgspec.Struct):
    serialization: _Serialization
    resources: list[_Resource]


class _Statement(msgspec.Struct):
    kind: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(name="_type")
    predicate_kind: Literal["https://model_signing/signature/v1.0"] = msgspec.field(name="predicateType")
    subject: list[_Subject]
    predicate: _Predicate


class _Signature(msgspec.Struct):
    sig: str


class _Envelope(msgspec.Struct, rename="camel"):
    payload: str
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: list[_Signature]


class _Hint(msgspec.Struct):
    hint: str = ""


class _Material(msgspec.Struct, rename="camel"):
    public_key: _Hint


class _Bundle(msgspec.Struct, rename="camel"):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: _Envelope


@dataclass(frozen=True, slots=True)
class Signed:
    """What a signature that holds says."""

    digests: Mapping[str, str]
    """SHA-256 in hex by path, of every file that was signed."""
    key_id: str
    """`key_id` of the key that signed."""


def new_key() -> EllipticCurvePrivateKey:
    return _generate(SECP256R1())


def private_pem(key: EllipticCurvePrivateKey) -> bytes:
    """PKCS #8, not encrypted: protect the file."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def public_pem(key: EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def key_id(key: EllipticCurvePublicKey) -> str:
    """SHA-256 of the key's SubjectPublicKeyInfo (DER) in hex: its name in listings and logs."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def read_private_key(pem: bytes) -> EllipticCurvePrivateKey:
    """A P-256 key from PEM without a password; raises `invalid_value`."""
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _bad_key("it is no private key in PEM, or it has a password") from None
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        raise _bad_key("it is not an ECDSA key on the curve P-256")
    return key


def read_public_key(pem: bytes) -> EllipticCurvePublicKey:
    """A P-256 key from PEM; raises `invalid_value`."""
    try:
        key = load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _bad_key("it is no public key in PEM") from None
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise _bad_key("it is not an ECDSA key on the curve P-256")
    return key


def sign(key: EllipticCurvePrivateKey, name: str, digests: Mapping[str, str]) -> bytes:
    """The signature file over `digests` (path -> SHA-256 in hex) of the folder called `name`."""
    resources = [{"name": path, "digest": digests[path], "algorithm": "sha256"} for path in sorted(digests)]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": _root_digest(digests[path] for path in sorted(digests))}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": resources,
        },
    }
    payload = msgspec.json.encode(statement)
    signature = key.sign(pre_authentication(payload), ECDSA(SHA256()))
    document = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": _hint(key.public_key())}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def verify(raw: bytes, keys: Iterable[EllipticCurvePublicKey]) -> Signed:
    """What the signature file `raw` says, if one of `keys` made it; the statement is parsed only then.

    Errors: `artifact_invalid` where it is no such file or its parts contradict one another; `artifact_untrusted`.
    """
    envelope = _decode(raw, _Bundle, "it").dsse_envelope
    if len(envelope.signatures) != 1:
        raise _bad(f"it has {len(envelope.signatures)} signatures, expected one")
    payload = _unbase64(envelope.payload)
    signature = _unbase64(envelope.signatures[0].sig)
    signer = next((key for key in keys if _holds(key, signature, payload)), None)
    if signer is None:
        raise ShardlineError("artifact_untrusted", "the signature was made by none of the keys that are trusted")
    return Signed(_digests(_decode(payload, _Statement, "its statement")), key_id(signer))


def pre_authentication(payload: bytes) -> bytes:
    """The bytes that are signed (PAE of DSSE 1)."""
    return b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _holds(key: EllipticCurvePublicKey, signature: bytes, payload: bytes) -> bool:
    try:
        key.verify(signature, pre_authentication(payload), ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def _digests(statement: _Statement) -> dict[str, str]:
    digests: dict[str, str] = {}
    for resource in statement.predicate.resources:
        check_path(resource.name)
        if resource.name in digests:
            raise _bad(f"it names {resource.name!r:.100} twice")
        digests[resource.name] = resource.digest
    if len(statement.subject) != 1:
        raise _bad(f"it has {len(statement.subject)} subjects, expected one")
    # The dict keeps the order of the statement, which the digest over all goes by.
    if statement.subject[0].digest.sha256 != _root_digest(digests.values()):
        raise _bad("its digest over all files is not that of the digests it lists")
    return digests


def _root_digest(digests: Iterable[str]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


def _hint(key: EllipticCurvePublicKey) -> str:
    return hashlib.sha256(public_pem(key)).hexdigest()


def _decode(raw: bytes, kind: type[Any], what: str) -> Any:
    if len(raw) > SIGNATURE_BYTES_LIMIT:
        raise _bad(f"{what} has {len(raw)} bytes, the limit is {SIGNATURE_BYTES_LIMIT}")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _bad(f"{what} is not as Model Signing 1.0 has it: {words_of(error)}") from None


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad("it has a part that is not base64") from None


def _bad(message: str) -> ShardlineError:
    return ShardlineError("artifact_invalid", f"invalid signature file: {message}")


def _bad_key(message: str) -> ShardlineError:
    return ShardlineError(
        "invalid_value", f"the key cannot be used: {message}", advice="Make one: shardline artifact keygen"
    )
