"""One-time tokens for joining: given out, used once, forgotten; and how often a stranger may guess.

Owns which tokens are good, used, too old or unknown, and the bound on wrong ones. Digests are kept, never tokens.
Pure: times are arguments, Unix seconds. Shown by tests/tracker/test_invitations.py.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from shardline.errors import ShardlineError
from shardline.transport.addresses import network_of
from shardline.wire.joining import Part

TOKEN_BYTES = 16
KEPT = 256
"""Tokens that are remembered, used and old ones included, so that each refusal can say what is wrong."""
GUESSES = 10
GUESS_WINDOW_S = 60.0
ADDRESSES = 1_000


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one token."""

    digest: str
    until: float
    used: bool = False
    part: Part = "node"


class Invitations:
    """The tokens of one Tracker, by digest, the oldest first; at most `KEPT`, of which the oldest makes room."""

    def __init__(self, kept: Iterable[Token], ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._tokens = OrderedDict((token.digest, token) for token in kept)

    @property
    def kept(self) -> list[Token]:
        return list(self._tokens.values())

    def make(self, now: float, part: Part = "node") -> str:
        """A fresh token for one `part`: 22 characters of base64url."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        while len(self._tokens) >= KEPT:
            self._tokens.popitem(last=False)
        digest = _digest(token)
        self._tokens[digest] = Token(digest=digest, until=now + self._ttl_s, part=part)
        return token

    def check(self, token: str, now: float, part: Part = "node") -> None:
        """Raise `join_refused`, with the reason, unless the token is good."""
        known = self._tokens.get(_digest(token))
        if known is None:
            raise ShardlineError("join_refused", "this token is unknown here", reason="unknown")
        if known.used:
            raise ShardlineError("join_refused", "this token was used before: it works once", reason="used")
        if now >= known.until:
            hours = self._ttl_s / 3600
            raise ShardlineError(
                "join_refused", f"this token has expired: it works for {hours:g} hours", reason="expired"
            )

        if known.part != part:
            # What a Node may do is less than what a Gateway may: its line makes no Gateway.
            raise ShardlineError(
                "join_refused",
                f"this token lets in a {known.part.title()}, not a {part.title()}",
                advice=f"Use it with shardline {known.part} --join, or ask for another: shardline invite"
                + (" --gateway" if part == "gateway" else ""),
                reason="part",
            )

    def use(self, token: str) -> None:
        """It has let somebody in."""
        digest = _digest(token)
        self._tokens[digest] = msgspec.structs.replace(self._tokens[digest], used=True)


class Guesses:
    """How many wrong tokens came from each network lately."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def check(self, address: str, now: float) -> None:
        """Raise `queue_full` for an address that has guessed too often."""
        network = network_of(address)
        since, count = self._wrong.get(network, (now, 0))
        left = since + GUESS_WINDOW_S - now
        if left <= 0:
            self._wrong.pop(network, None)
        elif count >= GUESSES:
            raise ShardlineError(
                "queue_full", f"{count} wrong tokens came from {address}: no more for now", retry_after=round(left) + 1
            )

    def wrong(self, address: str, now: float) -> None:
        network = network_of(address)
        since, count = self._wrong.pop(network, (now, 0))
        while len(self._wrong) >= ADDRESSES:
            self._wrong.popitem(last=False)
        self._wrong[network] = (since, count + 1)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
