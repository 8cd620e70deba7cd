"""Messages of joining a cluster with keys: JSON bodies, as typed structs, of the same contract as messages.py.

What a renewal needs rides on the heartbeat (messages.py). Pure. Shown by tests/wire/test_messages.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Part = Literal["node", "gateway"]
"""What may join from another machine."""


class _Unshown:
    """A message that no log and no traceback may show."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


class AuthorityAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/cluster/ca`: to be believed only if its key is what the pin says."""

    certificate: str


class JoinClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Signed by who joins (domain "join"): whoever asks holds the key that its id is made of."""

    pin: str
    """Of the authority that is asked."""
    csr: str
    time: float
    part: Part = "node"


class JoinRequest(_Unshown, msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/join`, with a token, or with a certificate of this cluster, also one that has lapsed lately."""

    public_key: str
    proof: str
    """Statement `JoinClaim`."""
    token: str | None = None
    certificate: str | None = None


class JoinAnswer(_Unshown, msgspec.Struct, frozen=True, kw_only=True):
    node: str
    """Id of the Node, or of the Gateway."""
    certificate: str
    authority: str
    credential: str
    models: list[str] = []
    """Names of the models that are served, or wait for layers."""


class Invitation(_Unshown, msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/invitations`, for the operator on the Tracker's machine."""

    line: str
    """What `--join` takes: URL, one-time token, pin of the authority."""
    seconds: float
    """How long it works."""
    part: Part = "node"
    """Whom it lets in."""


class Expulsion(msgspec.Struct, frozen=True, kw_only=True):
    """`POST` and `DELETE /v1/parties/{party}/expulsion`, for the operator: who is out, from now on."""

    expelled: list[str]
    certificate_s: float
    """So long at most, a Node that does not reach the Tracker takes the certificate that the party has."""


class GatewaySeen(msgspec.Struct, frozen=True, kw_only=True):
    """Of the list `gateways` in `GET /v1/nodes` of a cluster with keys."""

    id: str
    """As its certificate names it, and `shardline expel` takes it."""
    state: Literal["calls", "expelled"]
    address: str | None
    """From where it called last; null since the Tracker began."""
    last_seen_s: float | None
