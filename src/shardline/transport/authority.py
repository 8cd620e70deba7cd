"""The cluster's certificate authority, and the certificates that it signs: who is who on the Node plane.

Owns keys (ECDSA P-256), the names that stand in certificates, and the pin by which a line for joining names the
authority. It knows no connection (tls.py) and nothing of who may join (tracker/enrolment.py). Clocks are arguments:
Unix seconds. Shown by tests/transport/test_authority.py.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as _generate
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shardline.errors import ShardlineError
from shardline.transport.credentials import made_secret
from shardline.wire.joining import Part

TRACKER = "tracker"
OPERATOR = "operator"
"""A command on the machine of the Tracker."""
AUTHORITY_FILE = "authority.pem"
"""Name in the state folder of the Tracker: key and certificate, one file, so that there is never one of them alone."""
AUTHORITY_S = 10 * 365 * 86400.0
CLOCK_SKEW_S = 300.0
"""A certificate is valid a little before it was made: clocks of two machines differ."""
PEM_LIMIT = 16 << 10
ANY_TORRENT = "*"
_URI = "shardline:"
GATEWAY_URI = f"{_URI}gateway:"


def uri_of(party: str) -> str:
    """How `party` stands in a certificate: `tracker`, `operator`, `gateway-…`, or the id of a Node."""
    if party in (TRACKER, OPERATOR):
        return _URI + party
    if party.startswith("gateway-"):
        return GATEWAY_URI + party.removeprefix("gateway-")
    return f"{_URI}node:{party}"


def name_of(uri: str) -> str:
    """The party of which `uri_of` makes `uri`."""
    if uri.startswith(GATEWAY_URI):
        return f"gateway-{uri.removeprefix(GATEWAY_URI)}"
    return uri.removeprefix(_URI).removeprefix("node:")


def party_of(part: Part, node_id: str) -> str:
    """Who the holder of an identity is: a Node by its id, a Gateway by the same digits."""
    return node_id if part == "node" else f"gateway-{node_id.removeprefix('n-')}"


def part_of(party: str) -> Part:
    return "gateway" if party.startswith("gateway-") else "node"


def new_key() -> EllipticCurvePrivateKey:
    return _generate(SECP256R1())


def key_pem(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def signing_request(key: EllipticCurvePrivateKey) -> str:
    """A request for a certificate of this key, base64 of DER: it names nobody, the authority does."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
    return base64.b64encode(request.public_bytes(Encoding.DER)).decode()


def requested_key(request: str) -> EllipticCurvePublicKey:
    """The public key of a signing request, whose sender has the private one; raises `invalid_value`."""
    try:
        found = x509.load_der_x509_csr(base64.b64decode(request, validate=True))
        key = found.public_key()
        # Its kind first: checking the signature of a key that a stranger chose can take long.
        valid = (
            isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1) and found.is_signature_valid
        )
    except (ValueError, TypeError, binascii.Error, UnsupportedAlgorithm):
        raise ShardlineError("invalid_value", "csr is no signing request in base64 of DER", param="csr") from None
    if not isinstance(key, EllipticCurvePublicKey) or not valid:
        raise ShardlineError("invalid_value", "csr is not signed by a P-256 key of its own", param="csr")
    return key


def pin_of(certificate: x509.Certificate) -> str:
    """base64url of the SHA-256 of its public key (SubjectPublicKeyInfo): 43 characters."""
    info = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.urlsafe_b64encode(hashlib.sha256(info).digest()).rstrip(b"=").decode()


def pinned_certificate(pem: str, pin: str) -> bytes:
    """The one certificate in `pem`, if its key is what `pin` says; raises `join_mismatch`."""
    try:
        certificate = x509.load_pem_x509_certificate(pem[:PEM_LIMIT].encode())
        same = hmac.compare_digest(pin_of(certificate).encode(), pin.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        same = False
    if not same:
        raise ShardlineError("join_mismatch", "the Tracker that answers is not the one that the line is from")
    return certificate.public_bytes(Encoding.PEM)


def lifetime(pem: bytes) -> tuple[float, float]:
    """(from, to) of the first certificate in `pem`, as Unix seconds; the skew that the authority allows is left out."""
    certificate = x509.load_pem_x509_certificate(pem)
    start = certificate.not_valid_before_utc.timestamp() + CLOCK_SKEW_S
    return start, certificate.not_valid_after_utc.timestamp()


class Authority:
    """Signs certificates of one cluster."""

    def __init__(self, key: EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.certificate_pem = certificate.public_bytes(Encoding.PEM)
        self.pin = pin_of(certificate)

    @classmethod
    def made(cls, path: Path, now: float) -> Authority:
        """The authority in `path`, made where there is none. Raises `setting_invalid` for a file that others may read,
        that cannot be read, or that holds no authority."""
        raw = made_secret(path, lambda: _new_authority(now))
        try:
            key = load_pem_private_key(raw, password=None)
            certificate = x509.load_pem_x509_certificate(raw)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise _refused(path, "it holds no key and certificate in PEM") from None
        if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise _refused(path, "its certificate is not that of its key")
        if certificate.not_valid_after_utc.timestamp() < now:
            raise _refused(path, "its certificate has expired: take it away, and let all Nodes join anew")
        return cls(key, certificate)

    def issue(
        self, key: EllipticCurvePublicKey, party: str, addresses: Iterable[str], *, now: float, seconds: float
    ) -> bytes:
        """A certificate (PEM) for the holder of `key`, as `party`, for `seconds`; `addresses`: where it was seen."""
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri_of(party))]
        names += [_address(host) for host in dict.fromkeys(addresses)]
        # BitTorrent asks for the name of the torrent here. No browser or client of HTTPS takes it for a host's.
        names.append(x509.DNSName(ANY_TORRENT))
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _certificate(_name(party), self._certificate.subject, key, now, seconds)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, SHA256())
        )
        return certificate.public_bytes(Encoding.PEM)

    def expired_at(self, pem: str, party: str) -> float | None:
        """When a certificate that this authority made for `party` ends, in Unix seconds; None for any other."""
        try:
            certificate = x509.load_pem_x509_certificate(pem[:PEM_LIMIT].encode())
            certificate.verify_directly_issued_by(self._certificate)
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound):
            return None
        if uri_of(party) not in names.get_values_for_type(x509.UniformResourceIdentifier):
            return None
        return certificate.not_valid_after_utc.timestamp()


def _new_authority(now: float) -> bytes:
    key = new_key()
    name = _name("cluster authority")
    certificate = (
        _certificate(name, name, key.public_key(), now, AUTHORITY_S)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    return key_pem(key) + certificate.public_bytes(Encoding.PEM)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePublicKey, now: float, seconds: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(now - CLOCK_SKEW_S, UTC))
        .not_valid_after(datetime.fromtimestamp(math.ceil(now + seconds), UTC))  # whole seconds are all it can say
    )


def _name(party: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"shardline {party}"[:64])])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _address(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return x509.DNSName(host)


def _refused(path: Path, why: str) -> ShardlineError:
    return ShardlineError("setting_invalid", f"authority of the cluster {path}: {why}")
