"""The seam between the OpenAI surface and the generations behind it.

Owns the shape of one choice: what is asked, what happens, how it ends. Above it: HTTP, text, templates. Below it:
admission, routes, sessions, telemetry. Nothing above knows a Node's session, nothing below knows text. Pure.
Shown by tests/gateway/test_app_*.py, which drive the whole surface through an in-memory implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from shardline.errors import ShardlineError
from shardline.wire.composite import EndReason, Text, UpstreamCall, UpstreamUsage
from shardline.wire.messages import Embed, Embedded, ModelInfo, Sampling, Token
from shardline.wire.telemetry import TelemetryEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One choice: a prompt that fits, and how to go on from it. Every number was checked before."""

    model: str
    """As it is served; names its queue and its record."""
    content_id: str
    """Of the Model Artifact whose text bundle made the prompt: the route must be of the same."""
    prompt: list[int]
    """Token ids, at least one; with `max_tokens` they fit into the context. Empty where there is a `call`."""
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    """For the record only: stop strings are matched above this seam, which then calls `Generation.stop`."""
    key_id: str
    """The principal: sees and cancels its own sessions only."""
    reuse: bool = True
    """Whether it may begin with what Nodes kept of earlier prompts, and be kept in turn."""
    session: str | None = None
    """Id of an announced Route Session that this becomes; None: a new one."""
    name: str | None = None
    """What the client called the model, where errors name it; None: `model`."""
    call: UpstreamCall | None = None
    """Of a composite model: the request that its upstream gets, with the conversation instead of token ids."""
    place_tokens: int = 0
    """What a session on it reserves: one whole context, as nobody knows how much of it is used."""
    embed: Embed | None = None
    """The prompt becomes a vector, and `max_tokens` is 0. None: a text is generated."""

    @property
    def kv_tokens(self) -> int:
        """What each Node must have room for."""
        return self.place_tokens if self.call is not None else len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """One or more tokens, in order of generation; end-of-generation ids are not among them."""

    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class TextsEvent:
    """Of a composite model, instead of tokens: what its upstream has added, in order."""

    texts: list[Text]


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event. `stop`: an end-of-generation id; `length`: max_tokens are there; others: of a composite model."""

    reason: EndReason
    generated: int
    """Tokens that usage counts."""
    embedded: Embedded | None = None
    """The vector, where one was asked for."""
    usage: UpstreamUsage | None = None
    """Of a composite model, where its upstream tells it."""
    stop: str | None = None
    """Of a composite model: the stop string that ended it, where its upstream tells it."""


GenerationEvent = TokensEvent | TextsEvent | TelemetryEvent | FinishedEvent


class Generation(Protocol):
    """One running choice. Its owner reads it to the end, or calls `stop` or `cancel`: nothing else frees the KV.

    Reading may begin before the route is open (telemetry of the queue comes then), beside `wait_open`. A failure is
    raised as `ShardlineError` from both. After `stop` or `cancel` the iterator ends without a `FinishedEvent`; a
    session that its owner cancelled through the records raises `cancelled`.
    Events wait unread in a bounded place: at most `max_tokens` tokens and the latest telemetry.
    """

    @property
    def id(self) -> str:
        """Public id of the Route Session; known from the start."""

    async def wait_open(self) -> None:
        """Return when the route is open on all Nodes; raise `ShardlineError` when it will not be."""

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...

    async def stop(self, generated: int) -> None:
        """End as completed (a stop string came) with so many tokens: what is computed past it is discarded and not
        counted."""

    async def cancel(self, reason: str) -> None:
        """End as cancelled, in any phase; the KV is free everywhere soon after. Idempotent."""

    def telemetry(self) -> TelemetryEvent:
        """The account as it stands now."""

    def timings(self) -> dict[str, float | None]:
        """`prompt_ms` and `predicted_ms`, null while there is no span to measure."""


class Generations(Protocol):
    """What can be generated here."""

    def announce(self, model: str, key_id: str) -> str:
        """Begin the record of a Route Session before its prompt is known, and before any Node is asked; its id."""

    def withdraw(self, session: str, error: ShardlineError | None) -> None:
        """An announced session does not come to be: refused with `error`, or (None) left by its client."""

    def start(self, request: GenerationRequest) -> Generation:
        """Queue the choice. A refusal comes out of the Generation; raises `draining` where nothing runs any more."""

    async def models(self) -> list[ModelInfo]:
        """All models that the Tracker knows, whole or not; at most one second old."""


class SessionRecords(Protocol):
    """Route Sessions as their owner sees them; another key's session is `session_not_found`."""

    def list(self, key_id: str) -> list[dict[str, Any]]: ...

    def get(self, record_id: str, key_id: str) -> dict[str, Any]: ...

    async def cancel(self, record_id: str, key_id: str) -> None:
        """Have the session end as cancelled, and return when it has, or a limit has passed."""

    def subscribe(self, record_id: str, key_id: str, after: int = 0) -> AsyncIterator[tuple[int, bytes]]:
        """Numbered telemetry events above `after`, kept ones first; ends with the session."""
