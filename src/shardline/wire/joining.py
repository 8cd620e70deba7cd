"""Messages of joining a cluster with keys: JSON bodies, as typed structs, of the same contract as messages.py.

What a renewal needs rides on the heartbeat (messages.py). Pure. Shown by tests/wire/test_messages.py.
"""

from __future__ import annotations

import msgspec


class AuthorityAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/cluster/ca`: to be believed only if its key is what the pin says."""

    certificate: str


class JoinClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Signed by the Node (domain "join"): whoever asks holds the key that its id is made of."""

    pin: str
    """Of the authority that is asked."""
    csr: str
    time: float


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/join`, with a token, or with a certificate of this cluster that has lapsed lately."""

    public_key: str
    proof: str
    """Statement `JoinClaim`."""
    token: str | None = None
    certificate: str | None = None


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    certificate: str
    authority: str
    credential: str
    models: list[str] = []
    """Names of the models that are served, or wait for layers."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/invitations`, for the operator on the Tracker's machine."""

    line: str
    """What `node --join` takes: URL, one-time token, pin of the authority."""
    seconds: float
    """How long it works."""
