"""What a Node says on the open answer of `POST /v1/sessions`: one JSON object a line, as typed structs.

Owns the events of a session's stream; messages.py has them all under its own name, as part of one contract. Text and
ends of composite Nodes are in composite.py. Pure. Shown by tests/wire/test_messages.py.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shardline.wire.composite import Answered, Taken, Text
from shardline.wire.embedding import Embedded, Pooling


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened", tag_field="event", omit_defaults=True):
    node: str
    kv_reserved: int
    reusable_tokens: int | None = None
    """The cache of this session begins with so many tokens of its prompt: whole blocks, less than the prompt. The first
    step may begin there, or below it with the rollback flag. Null: the Node was not asked, or does not know of it."""
    unused: str | None = None
    """Why it cannot be more than 0: `off` (the operator said so), `engine` (it cannot go back exactly), `lost` (what
    was kept was lost just then)."""
    grammar: bool = False
    """From a tail that was given a grammar: its answer will keep to it."""
    pooling: Pooling | None = None
    """From a tail that was asked to embed: how it will."""


class HopTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the session's last step on this Node, in ms: waiting, engine, handing on. Null until there was one."""

    queue_ms: float | None = None
    compute_ms: float | None = None
    send_ms: float | None = None


class SeamCount(msgspec.Struct, frozen=True, kw_only=True):
    """What this Node sent over the Seam behind it for one session and one lane; body bytes, shared ones by row."""

    steps: int = 0
    rows: int = 0
    bytes: int = 0


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat", tag_field="event", omit_defaults=True):
    position: int = 0
    """End of what the engine has computed of this session, in tokens."""
    times: HopTimes | None = None
    prefill: SeamCount | None = None
    decode: SeamCount | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress", tag_field="event"):
    """From the tail, after each prefill chunk."""

    position: int
    times: HopTimes | None = None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    logprob: float


class Token(msgspec.Struct, frozen=True, kw_only=True, tag="token", tag_field="event", omit_defaults=True):
    id: int
    index: int
    """0 for the first generated token."""
    logprob: float | None = None
    top: list[TokenLogprob] | None = None
    times: HopTimes | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", tag_field="event"):
    """From the tail: it has ended by itself. Reason `stop`: end-of-generation or stop id (not sent as text)."""

    reason: Literal["stop", "length"]
    generated: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="event"):
    """This Node gave the session up. `error` is an error object of the catalogue."""

    error: dict[str, Any]


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed", tag_field="event"):
    kv_released: int


StreamEvent = Opened | Beat | Progress | Token | Embedded | Taken | Text | Answered | Finished | Failed | Closed
