from __future__ import annotations

import base64
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import dsa, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shardline.errors import ShardlineError
from shardline.transport.authority import (
    ANY_TORRENT,
    OPERATOR,
    TRACKER,
    Authority,
    lifetime,
    new_key,
    part_of,
    party_of,
    pin_of,
    pinned_certificate,
    requested_key,
    signing_request,
    uri_of,
)
from shardline.wire.joining import Part

NOW = 1_800_000_000.0
NODE = "n-0123456789abcdef"


def authority(folder: Path) -> Authority:
    return Authority.made(folder / "authority.pem", NOW)


def test_it_is_made_once_and_its_pin_stays(tmp_path: Path) -> None:
    first = authority(tmp_path)
    again = authority(tmp_path)
    assert again.pin == first.pin and len(first.pin) == 43
    assert (tmp_path / "authority.pem").stat().st_mode & 0o777 == 0o600
    assert authority(tmp_path / "other").pin != first.pin


def test_what_a_certificate_says(tmp_path: Path) -> None:
    own = authority(tmp_path)
    key = new_key()
    pem = own.issue(key.public_key(), NODE, ["10.0.0.2", "fe80::1%eth0", "node.lan"], now=NOW, seconds=86400)
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"shardline:node:{NODE}"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.2", "fe80::1"]
    assert names.get_values_for_type(x509.DNSName) == ["node.lan", ANY_TORRENT]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_after_utc == datetime.fromtimestamp(NOW + 86400, UTC)
    assert lifetime(pem) == (NOW, NOW + 86400)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(own.certificate_pem))


@pytest.mark.parametrize(
    ("party", "uri"),
    [
        (TRACKER, "shardline:tracker"),
        (OPERATOR, "shardline:operator"),
        ("gateway-ab", "shardline:gateway:ab"),
        (NODE, f"shardline:node:{NODE}"),
    ],
)
def test_names(party: str, uri: str) -> None:
    assert uri_of(party) == uri


def test_a_request_names_nobody_and_proves_its_key() -> None:
    key = new_key()
    request = signing_request(key)
    assert requested_key(request) == key.public_key()
    assert len(request) < 512 and request.isprintable()
    spoiled = bytearray(base64.b64decode(request))
    spoiled[-1] ^= 1
    other_curve = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    large = other_curve.sign(generate_private_key(SECP384R1()), SHA256()).public_bytes(Encoding.DER)
    for wrong in ("", "§", "AAAA", base64.b64encode(spoiled).decode(), base64.b64encode(large).decode()):
        with pytest.raises(ShardlineError) as caught:
            requested_key(wrong)
        assert (caught.value.code, caught.value.param) == ("invalid_value", "csr")


def test_a_pin_lets_one_authority_pass(tmp_path: Path) -> None:
    own, other = authority(tmp_path / "a"), authority(tmp_path / "b")
    assert pin_of(x509.load_pem_x509_certificate(own.certificate_pem)) == own.pin
    assert pinned_certificate(own.certificate_pem.decode(), own.pin) == own.certificate_pem
    for text, pin in ((other.certificate_pem.decode(), own.pin), ("", own.pin), ("x" * 99_999, own.pin)):
        with pytest.raises(ShardlineError) as caught:
            pinned_certificate(text, pin)
        assert caught.value.code == "join_mismatch"


def test_which_certificates_it_knows_as_its_own(tmp_path: Path) -> None:
    own, other = authority(tmp_path / "a"), authority(tmp_path / "b")
    key = new_key().public_key()
    mine = own.issue(key, NODE, [], now=NOW, seconds=10).decode()
    assert own.expired_at(mine, NODE) == NOW + 10
    assert own.expired_at(mine, "n-fedcba9876543210") is None
    assert other.expired_at(mine, NODE) is None
    assert own.expired_at("no certificate", NODE) is None
    assert own.expired_at(own.certificate_pem.decode(), NODE) is None


def test_files_that_hold_no_authority(tmp_path: Path) -> None:
    path = tmp_path / "authority.pem"
    own = authority(tmp_path)
    whole = path.read_bytes()
    other = Authority.made(tmp_path / "other.pem", NOW)
    key_only = whole.partition(b"-----BEGIN CERTIFICATE")[0]
    for content in (b"", b"junk", key_only, own.certificate_pem, key_only + other.certificate_pem):
        path.write_bytes(content)
        with pytest.raises(ShardlineError) as caught:
            authority(tmp_path)
        assert caught.value.code == "setting_invalid" and str(path) in caught.value.message
    path.write_bytes(whole)
    os.chmod(path, 0o644)
    with pytest.raises(ShardlineError, match="others may read it"):
        authority(tmp_path)
    os.chmod(path, 0o600)
    with pytest.raises(ShardlineError, match="has expired"):
        Authority.made(path, NOW + 11 * 365 * 86400)


def hostile_request(key: Any, *extensions: x509.ExtensionType, name: str = "tracker") -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    return base64.b64encode(builder.sign(key, SHA256()).public_bytes(Encoding.DER)).decode()


def test_what_a_request_asks_for_beside_its_key_is_not_given(tmp_path: Path) -> None:
    """Foreign names, an authority of its own: the certificate says what the authority knows."""
    own, key = authority(tmp_path), new_key()
    request = hostile_request(
        key,
        x509.BasicConstraints(ca=True, path_length=None),
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier("shardline:tracker"), x509.DNSName("node.lan")]),
    )
    pem = own.issue(requested_key(request), NODE, ["10.0.0.2"], now=NOW, seconds=60)
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"shardline:node:{NODE}"]
    assert names.get_values_for_type(x509.DNSName) == [ANY_TORRENT]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert own.expired_at(pem.decode(), "tracker") is None


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "dsa"])
def test_keys_of_other_kinds_are_refused(kind: str) -> None:
    keys: dict[str, Callable[[], Any]] = {
        "rsa": lambda: rsa.generate_private_key(65537, 1024),
        "dsa": lambda: dsa.generate_private_key(1024),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.sign(keys[kind](), None if kind == "ed25519" else SHA256())
    with pytest.raises(ShardlineError, match="P-256"):
        requested_key(base64.b64encode(request.public_bytes(Encoding.DER)).decode())


def test_parties_of_one_identity() -> None:
    for part in get_args(Part):
        assert part_of(party_of(part, NODE)) == part
    assert party_of("gateway", NODE) == "gateway-0123456789abcdef"
