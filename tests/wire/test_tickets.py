"""Signed statements: only the right key, for the right use, unchanged."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.wire.messages import Beats, Nonce
from shardline.wire.tickets import SignatureRefused, node_id_of, peek, public_bytes, sign, verify

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PAYLOAD = Nonce(nonce="abc", url="http://127.0.0.1:1")


def test_a_statement_comes_back() -> None:
    statement = sign(KEY, "node", PAYLOAD)
    assert verify(public_bytes(KEY), "node", statement, Nonce) == PAYLOAD
    assert peek(statement, Nonce) == PAYLOAD


def test_node_ids_are_digests_of_keys() -> None:
    assert node_id_of(public_bytes(KEY)) == "n-139e3940e64b5491"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s[:-4] + "AAAA",
        lambda s: "A" + s[1:],
        lambda s: s.replace(".", ""),
        lambda s: "",
        lambda s: ".",
        lambda s: "é.é",
        lambda s: s + "=",
        lambda s: s.partition(".")[0],
    ],
)
def test_a_changed_statement_is_refused(spoil: object) -> None:
    assert callable(spoil)
    with pytest.raises(SignatureRefused):
        verify(public_bytes(KEY), "node", spoil(sign(KEY, "node", PAYLOAD)), Nonce)


def test_another_key_another_use_another_kind() -> None:
    statement = sign(KEY, "node", PAYLOAD)
    other = Ed25519PrivateKey.generate()
    with pytest.raises(SignatureRefused):
        verify(public_bytes(other), "node", statement, Nonce)
    with pytest.raises(SignatureRefused):
        verify(public_bytes(KEY), "ticket", statement, Nonce)
    with pytest.raises(SignatureRefused):
        verify(public_bytes(KEY), "node", statement, Beats)
