"""Generation Telemetry: the one event schema, for SSE, JSON records and final answers alike.

Every event is a whole snapshot of one Route Session: a reader who missed some needs only the next. Numbers are
finite or null; a rate over no time is null. Pure.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shardline.wire.messages import Phase, SeamCount

Output = Literal["text", "vector"]


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    position: int | None = None
    """Place in the queue, 1 is next; null when not queued."""
    waited_ms: float | None = None


class HopView(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    layers: tuple[int, int] | None
    """[first, last); null of a composite Node, which has all, and nobody knows how many."""
    engine_class: str
    content_id: str
    health: str
    """`ok`, `silent` (beats are missing) or `lost`."""
    rtt_ms: float | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None
    send_ms: float | None = None
    position: int | None = None
    """How many tokens of the session, the prompt's first, this hop had computed at its last sign of life; null before
    the first."""


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    content_id: str
    engine_class: str
    n_layers: int | None
    """Null of a composite Node."""
    hops: list[HopView]


class PrefillView(msgspec.Struct, frozen=True, kw_only=True):
    """Of a composite Node all of it is null, until its upstream has told its usage."""

    done: int | None
    total: int | None
    chunk: int | None = None
    cached: int | None = 0
    """Of `done`: tokens whose KV was there before (`usage.prompt_tokens_details.cached_tokens`)."""
    reuse: str | None = None
    """Why `cached` is 0, once the session is open; null before, and where it is not 0."""


class DecodeView(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int | None = 0
    """Null of a composite Node until its upstream has told its usage. At the end as many as usage counts: the id that
    ended the text is one of them, what was computed beyond a stop string is not."""
    tokens_per_s: float | None = None
    """Over the last 2 s; null until two tokens came. Of a composite Node null until the end, and then over the whole
    answer."""
    ttft_ms: float | None = None
    """From the arrival of the request to its first token."""


class SeamView(msgspec.Struct, frozen=True, kw_only=True):
    """Body bytes that crossed from one hop to the next; `to` of the last one is the head (token ids only). A route of
    one Node has no Seam: its tail is its head, and hands the token to itself without a connection."""

    source: str = msgspec.field(name="from")
    to: str
    prefill: SeamCount = SeamCount()
    decode: SeamCount = SeamCount()


class TelemetryEvent(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Public id of the Route Session."""
    seq: int
    time: float
    """Unix seconds at the Gateway."""
    phase: Phase
    model: str
    output: Output = "text"
    """What the prompt becomes."""
    queue: QueueView = QueueView()
    route: RouteView | None = None
    prefill: PrefillView
    decode: DecodeView = DecodeView()
    seams: list[SeamView] = []
    failure: dict[str, Any] | None = None
    """The error object of the catalogue, when `phase` is failed."""
