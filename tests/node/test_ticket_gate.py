"""Which ticket and which session key open a session, and that each does so once."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.model.backend import ShardDescription
from shardline.node import tickets as tickets_module
from shardline.node.tickets import TicketGate
from shardline.wire.messages import EngineInfo, OpenSession, Sampling, Ticket, TicketPeer
from shardline.wire.steps import TOKENS_ONLY
from shardline.wire.tickets import public_bytes, sign

TRACKER = Ed25519PrivateKey.generate()
NOW = 1_700_000_000.0
SHARD = ShardDescription(
    model_name="m",
    content_id="c",
    first=0,
    last=6,
    n_layers=6,
    engine=EngineInfo(backend="scripted", engine_class="e", build="", dtype="", quantisation="", device="", threads=1),
    layout_in=TOKENS_ONLY,
    layout_out=TOKENS_ONLY,
    kv_bytes_per_token=1,
    weight_bytes=1,
    context_length=100,
    vocab_size=10,
    rollback=True,
)


def a_ticket(**changes: Any) -> str:
    me = TicketPeer(node="n-me", url="http://127.0.0.1:1")
    values: dict[str, Any] = dict(id=secrets.token_hex(8), route="r", gateway="g", node="n-me", hop=0, hops=1)
    values |= dict(content_id="c", first=0, last=6, kv_tokens=20, prefill_chunk=16, previous=None, next=me)
    values |= dict(layout_in=TOKENS_ONLY.digest, layout_out=TOKENS_ONLY.digest, not_after=NOW + 30)
    return sign(TRACKER, "ticket", Ticket(**{**values, **changes}))


def opening(ticket: str, key: str) -> OpenSession:
    layout = TOKENS_ONLY.digest
    return OpenSession(ticket=ticket, key=key, prompt_tokens=8, max_tokens=8, layout_in=layout, layout_out=layout)


def admit(gate: TicketGate, request: OpenSession, now: float = NOW) -> str:
    """`ok`, or the code of the refusal."""
    try:
        gate.admit(request, ticket_key=public_bytes(TRACKER), shard=SHARD, now=now)
    except ShardlineError as error:
        return error.code
    return "ok"


def test_a_session_key_opens_one_session_whatever_ticket_comes_with_it() -> None:
    gate = TicketGate("n-me")
    key, spare = secrets.token_hex(16), a_ticket()
    assert admit(gate, opening(a_ticket(), key)) == "ok"
    assert admit(gate, opening(spare, key)) == "session_exists"
    # Refused for its request, the ticket is still good; and long after the tickets have expired the key is not.
    assert admit(gate, opening(spare, secrets.token_hex(16))) == "ok"
    later = NOW + 3600
    assert admit(gate, opening(a_ticket(not_after=later), key), later) == "session_exists"


def test_a_key_that_was_refused_with_its_ticket_is_not_used_up() -> None:
    gate = TicketGate("n-me")
    key = secrets.token_hex(16)
    assert admit(gate, opening(a_ticket(node="n-other"), key)) == "ticket_invalid"
    used = a_ticket()
    assert admit(gate, opening(used, secrets.token_hex(16))) == "ok"
    assert admit(gate, opening(used, key)) == "ticket_used"
    assert admit(gate, opening(a_ticket(), key)) == "ok"


def test_keys_are_remembered_up_to_a_bound_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "KEYS_KEPT", 3)
    gate = TicketGate("n-me")
    keys = [secrets.token_hex(16) for _ in range(4)]
    assert [admit(gate, opening(a_ticket(), key)) for key in keys] == ["ok"] * 4
    assert [admit(gate, opening(a_ticket(), key)) for key in keys[1:]] == ["session_exists"] * 3
    assert admit(gate, opening(a_ticket(), keys[0])) == "ok"


def test_tickets_expire_and_are_used_once() -> None:
    gate = TicketGate("n-me")
    ticket = a_ticket()
    assert admit(gate, opening(ticket, secrets.token_hex(16)), NOW + 31) == "ticket_invalid"
    assert admit(gate, opening(ticket, secrets.token_hex(16)), NOW + 29) == "ok"
    assert admit(gate, opening(ticket, secrets.token_hex(16)), NOW + 29) == "ticket_used"


@pytest.mark.parametrize(("vocab_size", "answer"), [(10, "invalid_value"), (0, "ok"), (400, "ok")])
def test_token_ids_are_checked_where_the_vocabulary_is_known(vocab_size: int, answer: str) -> None:
    """A Shard in the middle may not know it."""
    request = msgspec.structs.replace(
        opening(a_ticket(), secrets.token_hex(16)), sampling=Sampling(logit_bias={300: 1.0}, stop_ids=[301])
    )
    gate = TicketGate("n-me")
    try:
        gate.admit(request, ticket_key=public_bytes(TRACKER), shard=replace(SHARD, vocab_size=vocab_size), now=NOW)
        code = "ok"
    except ShardlineError as error:
        code = error.code
    assert code == answer
