from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.enrolment import GATEWAY_GONE_S, GATEWAYS, INVITATIONS_FILE, Enrolment
from shardline.tracker.invitations import GUESSES, KEPT
from shardline.transport.authority import Authority, new_key, requested_key, signing_request, uri_of
from shardline.wire.joining import JoinClaim, JoinRequest, Part
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

    def request(
        self, *, pin: str = "", csr: str = "", skew_s: float = 0.0, part: Part = "node", **more: str | None
    ) -> JoinRequest:
        claim = JoinClaim(
            pin=pin or self.authority.pin,
            csr=csr or signing_request(new_key()),
            time=self.now + skew_s,
            part=part,
        )
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


def test_a_line_lets_in_what_it_is_for(desk: Desk) -> None:
    """A Node may do less than a Gateway: its token makes no Gateway, nor does the certificate that it led to."""
    for mine, other in (("node", "gateway"), ("gateway", "node")):
        line = desk.enrolment.invite(mine).line  # type: ignore[arg-type]
        token = line.partition("#")[2].partition(".")[0]
        assert desk.refused(desk.request(token=token, part=other)).details["reason"] == "part"  # type: ignore[arg-type]
        answer = desk.enrolment.join(desk.request(token=token, part=mine), "10.0.0.2", [])  # type: ignore[arg-type]
        assert answer.node.startswith({"node": "n-", "gateway": "gateway-"}[mine])
        refused = desk.refused(desk.request(certificate=answer.certificate, part=other))  # type: ignore[arg-type]
        assert refused.code == "join_refused"
        renewed = desk.enrolment.join(desk.request(certificate=answer.certificate, part=mine), "10.0.0.2", [])  # type: ignore[arg-type]
        assert renewed.node == answer.node and renewed.certificate != answer.certificate
    assert len(desk.lines) == 1, "a Gateway that joined leaves the line for a Node as it was"


def test_what_is_kept_of_many_lines_can_be_read_again(desk: Desk) -> None:
    for _ in range(KEPT + 10):
        token = desk.token()
    desk.enrolment = desk.opened()
    desk.enrolment.join(desk.request(token=token), "10.0.0.2", [])


def test_one_network_guesses_as_one(desk: Desk) -> None:
    for i in range(GUESSES):
        desk.refused(desk.request(token="A" * 22), f"2001:db8:1:2::{i:x}")
    assert desk.refused(desk.request(token="A" * 22), "2001:db8:1:2:ffff::1").code == "queue_full"
    assert desk.refused(desk.request(token="A" * 22), "2001:db8:1:3::1").code == "join_refused"


def test_who_is_expelled_gets_nothing_more(desk: Desk) -> None:
    answer = desk.enrolment.join(desk.request(token=desk.token()), "10.0.0.2", [])
    own = frozenset({f"shardline:node:{desk.node}"})
    desk.enrolment.check_not_expelled(own)
    assert desk.enrolment.expel(desk.node).expelled == [desk.node]
    assert desk.enrolment.told() == [desk.node]
    with pytest.raises(ShardlineError, match="expelled"):
        desk.enrolment.renew(desk.node, signing_request(new_key()), "10.0.0.2")
    fresh = desk.token()
    for _ in range(2):  # and once more after a restart
        for request in (desk.request(certificate=answer.certificate), desk.request(token=fresh)):
            assert desk.refused(request).details["reason"] == "expelled"
        with pytest.raises(ShardlineError) as caught:
            desk.enrolment.check_not_expelled(own)
        assert caught.value.code == "join_refused"
        assert desk.node in caught.value.message
        assert caught.value.advice.endswith(f"shardline expel --undo {desk.node}")
        desk.enrolment.check_not_expelled(frozenset({"shardline:node:n-0123456789abcdef"}))
        desk.enrolment = desk.opened()
    desk.now += 2 * DAY_S
    assert desk.enrolment.told() == [], "its certificate has ended"
    fresh = desk.token()
    assert desk.refused(desk.request(token=fresh)).details["reason"] == "expelled"
    assert desk.enrolment.expel(desk.node, undo=True).expelled == []
    desk.enrolment.check_not_expelled(own)
    desk.enrolment.join(desk.request(token=fresh), "10.0.0.2", [])


def test_gateways_are_listed_while_they_call_and_while_they_are_out(desk: Desk) -> None:
    one, other = "gateway-" + "1" * 16, "gateway-" + "2" * 16
    for party in (one, other, desk.node, "operator"):
        desk.enrolment.heard(frozenset({uri_of(party)}), "10.0.0.5")
    desk.now += 2
    assert [(g.id, g.state, g.address, g.last_seen_s) for g in desk.enrolment.gateways()] == [
        (one, "calls", "10.0.0.5", 2.0),
        (other, "calls", "10.0.0.5", 2.0),
    ]
    desk.enrolment.expel(one)
    desk.now += GATEWAY_GONE_S
    assert [(g.id, g.state) for g in desk.enrolment.gateways()] == [(one, "expelled")]
    desk.enrolment = desk.opened()
    assert [(g.id, g.address, g.last_seen_s) for g in desk.enrolment.gateways()] == [(one, None, None)]
    desk.enrolment.expel(one, undo=True)
    assert desk.enrolment.gateways() == []


def test_the_gateways_that_are_noted_have_an_end(desk: Desk) -> None:
    for number in range(GATEWAYS + 3):
        desk.enrolment.heard(frozenset({uri_of(f"gateway-{number:016x}")}), "10.0.0.5")
    assert [g.id for g in desk.enrolment.gateways()] == [f"gateway-{n:016x}" for n in range(3, GATEWAYS + 3)]


@pytest.mark.parametrize("party", ["", "tracker", "operator", "n-1", "n-0123456789ABCDEF", "../x", "gateway-x"])
def test_who_cannot_be_named(desk: Desk, party: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        desk.enrolment.expel(party)
    assert caught.value.code == "invalid_value"


def test_no_message_shows_its_secrets(desk: Desk) -> None:
    token = desk.token()
    request = desk.request(token=token)
    answer = desk.enrolment.join(request, "10.0.0.2", [])
    shown = f"{request!r} {answer!r} {desk.enrolment.invite()!r}"
    assert token not in shown and "credential-" not in shown and "#" not in shown
