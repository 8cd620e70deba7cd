from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.enrolment import INVITATIONS_FILE, Enrolment
from shardline.tracker.invitations import GUESSES
from shardline.transport.authority import Authority, new_key, requested_key, signing_request
from shardline.wire.joining import JoinClaim, JoinRequest
from shardline.wire.tickets import node_id_of, public_bytes, sign

NOW = 1_800_000_000.0
DAY_S = 86400.0
URL = "https://10.0.0.1:7070"


class Desk:
    """An enrolment with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.now = NOW
        self.folder = folder
        self.lines: list[str] = []
        self.authority = Authority.made(folder / "authority.pem", NOW)
        self.key = Ed25519PrivateKey.generate()
        self.enrolment = self.opened()

    def opened(self) -> Enrolment:
        return Enrolment(
            self.authority,
            folder=self.folder,
            url=URL,
            credential="credential-" + "x" * 20,
            settings=Settings(),
            announce=self.lines.append,
            unix=lambda: self.now,
        )

    @property
    def node(self) -> str:
        return node_id_of(public_bytes(self.key))

    def token(self) -> str:
        line = self.enrolment.invite().line
        assert line.startswith(f"{URL}/#") and line.endswith(f".{self.authority.pin}")
        return line.partition("#")[2].partition(".")[0]

    def request(self, *, pin: str = "", csr: str = "", skew_s: float = 0.0, **more: str | None) -> JoinRequest:
        claim = JoinClaim(pin=pin or self.authority.pin, csr=csr or signing_request(new_key()), time=self.now + skew_s)
        return JoinRequest(public_key=public_bytes(self.key).hex(), proof=sign(self.key, "join", claim), **more)

    def refused(self, request: JoinRequest, address: str = "10.0.0.9") -> ShardlineError:
        with pytest.raises(ShardlineError) as caught:
            self.enrolment.join(request, address, [])
        return caught.value


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_token_makes_a_node(desk: Desk) -> None:
    token = desk.token()
    answer = desk.enrolment.join(desk.request(token=token), "10.0.0.2", ["m"])
    assert (answer.node, answer.models) == (desk.node, ["m"])
    assert desk.authority.expired_at(answer.certificate, desk.node) == NOW + DAY_S
    assert answer.authority == desk.authority.certificate_pem.decode()
    # The next machine has a line at once.
    assert len(desk.lines) == 1 and token not in desk.lines[0]
    assert desk.refused(desk.request(token=token)).details["reason"] == "used"


def test_a_failed_attempt_spends_no_token(desk: Desk) -> None:
    token = desk.token()
    desk.refused(desk.request(token=token, csr="AAAA"))
    desk.refused(desk.request(token=token, pin="x" * 43))
    desk.enrolment.join(desk.request(token=token), "10.0.0.2", [])


def test_used_and_open_tokens_are_known_after_a_restart(desk: Desk) -> None:
    used, fresh = desk.token(), desk.token()
    desk.enrolment.join(desk.request(token=used), "10.0.0.2", [])
    desk.enrolment = desk.opened()
    assert desk.refused(desk.request(token=used)).details["reason"] == "used"
    desk.enrolment.join(desk.request(token=fresh), "10.0.0.2", [])
    assert (desk.folder / INVITATIONS_FILE).stat().st_mode & 0o777 == 0o600
    assert fresh not in (desk.folder / INVITATIONS_FILE).read_text()


@pytest.mark.parametrize("spoiled", ["proof", "pin", "clock", "other key", "nothing"])
def test_who_cannot_prove_itself(desk: Desk, spoiled: str) -> None:
    token = desk.token()
    request = desk.request(token=token)
    if spoiled == "proof":
        request = JoinRequest(public_key=request.public_key, proof=request.proof[:-4] + "AAAA", token=token)
    elif spoiled == "pin":
        request = desk.request(token=token, pin="x" * 43)
    elif spoiled == "clock":
        request = desk.request(token=token, skew_s=-120)
    elif spoiled == "other key":
        other = public_bytes(Ed25519PrivateKey.generate()).hex()
        request = JoinRequest(public_key=other, proof=request.proof, token=token)
    else:
        request = desk.request()
    assert desk.refused(request).code == "join_refused"


def test_guesses_are_bounded(desk: Desk) -> None:
    token = desk.token()
    for _ in range(GUESSES):
        assert desk.refused(desk.request(token="A" * 22)).details["reason"] == "unknown"
    assert desk.refused(desk.request(token=token)).code == "queue_full"
    desk.enrolment.join(desk.request(token=token), "10.0.0.3", [])


def test_an_expired_token(desk: Desk) -> None:
    token = desk.token()
    desk.now += DAY_S + 1
    assert desk.refused(desk.request(token=token)).details["reason"] == "expired"


def test_a_lapsed_certificate_is_renewed_within_its_grace(desk: Desk) -> None:
    first = desk.enrolment.join(desk.request(token=desk.token()), "10.0.0.2", [])
    desk.now += 3 * DAY_S
    again = desk.enrolment.join(desk.request(certificate=first.certificate), "10.0.0.2", [])
    assert desk.authority.expired_at(again.certificate, desk.node) == desk.now + DAY_S
    assert len(desk.lines) == 1, "no line was used up"
    desk.now += 9 * DAY_S
    refusal = desk.refused(desk.request(certificate=again.certificate))
    assert refusal.code == "join_refused" and "too long" in refusal.message


def test_a_certificate_is_no_passport_for_another(desk: Desk) -> None:
    first = desk.enrolment.join(desk.request(token=desk.token()), "10.0.0.2", [])
    desk.key = Ed25519PrivateKey.generate()
    assert desk.refused(desk.request(certificate=first.certificate)).code == "join_refused"


def test_a_renewal_is_for_the_key_that_asks(desk: Desk) -> None:
    key = new_key()
    pem = desk.enrolment.renew("n-0123456789abcdef", signing_request(key), "10.0.0.2")
    assert desk.authority.expired_at(pem, "n-0123456789abcdef") == NOW + DAY_S
    assert requested_key(signing_request(key)) == key.public_key()
    with pytest.raises(ShardlineError):
        desk.enrolment.renew("n-0123456789abcdef", "AAAA", "10.0.0.2")


def test_files_that_cannot_be_read(desk: Desk) -> None:
    desk.token()
    path = desk.folder / INVITATIONS_FILE
    path.write_text("{")
    with pytest.raises(ShardlineError, match="damaged"):
        desk.opened()
    os.chmod(path, 0o644)
    with pytest.raises(ShardlineError, match="others may read it"):
        desk.opened()
