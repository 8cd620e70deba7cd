"""Whether a request may open a session here: the ticket, checked against this Node and the clock.

Owns the memory of used tickets and session keys. Pure but for that memory: the Tracker's key, Shard and time are
arguments. Shown by tests/node/test_ticket_gate.py and tests/node/test_trust.py.
"""

from __future__ import annotations

from shardline.errors import ShardlineError
from shardline.model.backend import ShardDescription
from shardline.wire.messages import OpenSession, Sampling, Ticket
from shardline.wire.tickets import SignatureRefused, verify

_KEY_DIGITS = 32
KEYS_KEPT = 32_768
"""Session keys that a Node remembers, about 5 MB: far more than it opens while a late step of one may be on its way."""


class TicketGate:
    """Lets each valid ticket through once, and each session key."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._used: dict[str, float] = {}
        self._keys: dict[bytes, None] = {}
        """In the order in which they came; the oldest makes room."""

    def admit(
        self,
        request: OpenSession,
        *,
        ticket_key: bytes | None,
        shard: ShardDescription | None,
        now: float,
        composite: bool = False,
    ) -> Ticket:
        """The ticket of `request`, now used; `now` is Unix seconds. `composite`: requests are passed on here, and of
        those alone nobody knows the tokens of the prompt. Raises `ticket_invalid`, `ticket_used`,
        `session_exists`, or what else does not fit. A ticket that is refused for its request is not used up."""
        if ticket_key is None:
            raise ShardlineError("ticket_invalid", "this Node does not know a Tracker yet")
        try:
            ticket = verify(ticket_key, "ticket", request.ticket, Ticket)
        except SignatureRefused as refused:
            raise ShardlineError("ticket_invalid", f"ticket refused: {refused}") from None
        if ticket.node != self._node_id:
            raise ShardlineError("ticket_invalid", "the ticket is for another Node")
        if ticket.not_after < now:
            raise ShardlineError("ticket_invalid", f"the ticket has expired {now - ticket.not_after:.1f} s ago")
        if shard is None:
            raise ShardlineError("engine_lost", "the Shard is not loaded")
        self._check_shard(ticket, shard)
        if composite != (request.call is not None):
            what = "passes requests on" if composite else "computes layers"
            raise ShardlineError("invalid_value", f"this Node {what}: the opening is of the other kind", param="call")
        self._check_request(ticket, request, shard)
        for used in [used for used, until in self._used.items() if until < now]:
            del self._used[used]
        if ticket.id in self._used:
            raise ShardlineError("ticket_used", "this ticket has opened a session before")
        self._spend_key(bytes.fromhex(request.key))
        self._used[ticket.id] = ticket.not_after
        return ticket

    def _spend_key(self, key: bytes) -> None:
        """A key that came before would let steps that are still on their way into a session that they are not of."""
        if key in self._keys:
            raise ShardlineError("session_exists", "a session with this key was opened here before")
        while len(self._keys) >= KEYS_KEPT:
            del self._keys[next(iter(self._keys))]
        self._keys[key] = None

    @staticmethod
    def _check_shard(ticket: Ticket, shard: ShardDescription) -> None:
        if ticket.content_id != shard.content_id or (ticket.first, ticket.last) != (shard.first, shard.last):
            raise ShardlineError(
                "ticket_invalid",
                f"the ticket is for layers {ticket.first}:{ticket.last} of {ticket.content_id}, "
                f"this Node holds {shard.first}:{shard.last} of {shard.content_id}",
            )
        if (ticket.layout_in, ticket.layout_out) != (shard.layout_in.digest, shard.layout_out.digest):
            raise ShardlineError("ticket_invalid", "the Seam layouts of the ticket are not those of this Shard")

    @staticmethod
    def _check_request(ticket: Ticket, request: OpenSession, shard: ShardDescription) -> None:
        if (request.layout_in, request.layout_out) != (ticket.layout_in, ticket.layout_out):
            raise ShardlineError("invalid_value", "other Seam layouts than the ticket's", param="layout_in")
        key = request.key
        if len(key) != _KEY_DIGITS or any(c not in "0123456789abcdef" for c in key):
            raise ShardlineError("invalid_value", "a session key is 32 hex digits", param="key")
        if request.prompt_tokens < (request.call is None) or request.max_tokens < (request.embed is None):
            raise ShardlineError("invalid_value", "a session has a prompt and room for a token", param="max_tokens")
        if request.embed is not None and request.prefix is not None:
            why = "a session that embeds begins with no kept cache, and leaves none"
            raise ShardlineError("invalid_value", why, param="prefix")
        _check_sampling(request.sampling, shard.vocab_size)
        wanted = request.prompt_tokens + request.max_tokens
        if wanted > ticket.kv_tokens:
            raise ShardlineError("ticket_invalid", f"{wanted} tokens wanted, the ticket is for {ticket.kv_tokens}")
        if wanted > shard.context_length + 1:
            raise ShardlineError("context_length_exceeded", f"{wanted} tokens, the context has {shard.context_length}")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Numbers that an engine can hold: its channel has 64 bits, its vocabulary an end (0: a Shard in the middle may not
    know it, and does not sample)."""
    ids = [*sampling.logit_bias, *sampling.stop_ids]
    if any(not 0 <= i < (vocab_size or 1 << 31) for i in ids):
        raise ShardlineError(
            "invalid_value", f"a token id lies outside the vocabulary of {vocab_size}", param="sampling"
        )
    whole = [sampling.seed or 0, sampling.top_k, sampling.logprobs or 0, sampling.min_tokens]
    if any(not -(1 << 63) <= number < 1 << 63 for number in whole):
        raise ShardlineError("invalid_value", "a number of more than 64 bits", param="sampling")
