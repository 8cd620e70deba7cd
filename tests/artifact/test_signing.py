"""Signatures: those that hold, and every way in which one does not. The public tool: test_public_tools.py."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from shardline.artifact.signing import (
    SIGNATURE_BYTES_LIMIT,
    key_id,
    new_key,
    pre_authentication,
    private_pem,
    public_pem,
    read_private_key,
    read_public_key,
    sign,
    verify,
)
from shardline.errors import ShardlineError
from tests.support.artifacts import publisher

DIGESTS = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("b.txt", "a/b.txt", "manifest.json")}


def signed_statement(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A signature that holds, over a statement that was changed before."""
    document = json.loads(sign(publisher(), "model", DIGESTS))
    statement = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
    change(statement)
    payload = json.dumps(statement).encode()
    signature = publisher().sign(pre_authentication(payload), ec.ECDSA(SHA256()))
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    document["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    return json.dumps(document).encode()


def refusal(raw: bytes, *keys: ec.EllipticCurvePublicKey) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        verify(raw, keys or (publisher().public_key(),))
    return caught.value


def test_a_signature_says_what_was_signed_and_by_whom() -> None:
    other, key = new_key(), publisher()
    signed = verify(sign(key, "model", DIGESTS), (other.public_key(), key.public_key()))
    assert signed.digests == DIGESTS
    assert signed.key_id == key_id(key.public_key()) != key_id(other.public_key())


def test_keys_are_read_as_they_are_written() -> None:
    key = new_key()
    assert read_private_key(private_pem(key)).private_numbers() == key.private_numbers()
    assert key_id(read_public_key(public_pem(key.public_key()))) == key_id(key.public_key())


def test_another_key_is_not_trusted() -> None:
    assert refusal(sign(new_key(), "model", DIGESTS)).code == "artifact_untrusted"
    assert refusal(sign(publisher(), "model", DIGESTS), new_key().public_key()).code == "artifact_untrusted"


def test_no_key_trusts_nobody() -> None:
    with pytest.raises(ShardlineError) as caught:
        verify(sign(publisher(), "model", DIGESTS), ())
    assert caught.value.code == "artifact_untrusted"


@pytest.mark.parametrize("index", range(0, 400, 23))
def test_a_changed_payload_no_longer_holds(index: int) -> None:
    document = json.loads(sign(publisher(), "model", DIGESTS))
    payload = bytearray(base64.b64decode(document["dsseEnvelope"]["payload"]))
    payload[index % len(payload)] ^= 1
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    assert refusal(json.dumps(document).encode()).code == "artifact_untrusted"


def test_a_payload_is_not_looked_into_before_its_signature_holds() -> None:
    document = json.loads(sign(publisher(), "model", DIGESTS))
    document["dsseEnvelope"]["payload"] = base64.b64encode(b"[" * 100_000).decode()
    assert refusal(json.dumps(document).encode()).code == "artifact_untrusted"


def test_a_changed_signature_no_longer_holds() -> None:
    document = json.loads(sign(publisher(), "model", DIGESTS))
    for sig in (b"", b"\x30\x00", bytes(70), base64.b64decode(document["dsseEnvelope"]["signatures"][0]["sig"])[:-1]):
        document["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(sig).decode()
        assert refusal(json.dumps(document).encode()).code == "artifact_untrusted"


def envelope(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["dsseEnvelope"].update(fields)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(mediaType="application/json"),
        lambda document: document.pop("dsseEnvelope"),
        lambda document: document.update(verificationMaterial=3),
        envelope(payloadType="text/plain"),
        envelope(payload="%%"),
        envelope(payload=5),
        envelope(signatures=[]),
        envelope(signatures=[{"sig": "AA=="}, {"sig": "AA=="}]),
        envelope(signatures=[{"sig": "not base64"}]),
    ],
)
def test_files_of_another_form_are_invalid(change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(sign(publisher(), "model", DIGESTS))
    change(document)
    assert refusal(json.dumps(document).encode()).code == "artifact_invalid"


@pytest.mark.parametrize("raw", [b"", b"{}", b"\xff", b"[" * 100_000, bytes(SIGNATURE_BYTES_LIMIT + 1)], ids=range(5))
def test_what_is_no_signature_file_is_invalid(raw: bytes) -> None:
    assert refusal(raw).code == "artifact_invalid"


def resources(statement: dict[str, Any]) -> Any:
    return statement["predicate"]["resources"]


@pytest.mark.parametrize(
    "change",
    [
        lambda statement: statement.update(_type="https://in-toto.io/Statement/v0.1"),
        lambda statement: statement.update(predicateType="https://slsa.dev/provenance/v1"),
        lambda statement: statement.update(subject=[]),
        lambda statement: statement["subject"][0]["digest"].update(sha256="0" * 64),
        lambda statement: statement["predicate"]["serialization"].update(method="shards"),
        lambda statement: statement["predicate"]["serialization"].update(hash_type="blake3"),
        lambda statement: resources(statement)[0].update(algorithm="sha512"),
        lambda statement: resources(statement)[0].update(name="../x"),
        lambda statement: resources(statement)[0].update(digest="0" * 63),
        lambda statement: resources(statement).append(resources(statement)[0]),
        lambda statement: resources(statement).pop(),
        lambda statement: resources(statement).reverse(),
    ],
)
def test_statements_that_contradict_themselves_are_invalid(change: Callable[[dict[str, Any]], None]) -> None:
    assert refusal(signed_statement(change)).code == "artifact_invalid"


def _pem(key: Any, encryption: Any = None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        _pem(ed25519.Ed25519PrivateKey.generate()),
        _pem(ec.generate_private_key(ec.SECP384R1())),
        _pem(ec.generate_private_key(ec.SECP256R1()), BestAvailableEncryption(b"secret")),
        public_pem(publisher().public_key()),
    ],
    ids=["empty", "broken", "ed25519", "p384", "password", "public"],
)
def test_other_private_keys_are_refused(pem: bytes) -> None:
    with pytest.raises(ShardlineError, match="the key cannot be used") as caught:
        read_private_key(pem)
    assert "keygen" in caught.value.advice


def test_other_public_keys_are_refused() -> None:
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    for pem in (b"", private_pem(publisher()), other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)):
        with pytest.raises(ShardlineError, match="the key cannot be used"):
            read_public_key(pem)


def test_a_private_key_never_stands_in_a_signature(tmp_path: Path) -> None:
    secret = base64.b64encode(publisher().private_numbers().private_value.to_bytes(32, "big"))
    assert secret not in sign(publisher(), "model", DIGESTS)
