"""Prometheus text of one Gateway, read from its own records at the moment of asking.

Owns metric names: those of OpenTelemetry's conventions for generative AI where there is one (dots become underscores,
the unit is appended), `shardline_gateway_*` for the rest. Nothing is counted twice: a number stands in the record of
its session, and is summed here when the session ends. Shown by tests/gateway/test_metrics.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shardline.telemetry.records import Record

_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_S = tuple(0.01 * 2**n for n in range(16))
"""The bounds that the conventions name; the first and the last list go on for machines that are slower."""
MODELS = 64
"""Names that the label of the model may take; those of further ones count as `other`."""
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSession:
    """What is counted of one Route Session. Times in seconds."""

    status: str
    """`completed`, `cancelled` or `failed`."""
    code: str | None
    """Of the error, of one that failed."""
    model: str
    """As it is served."""
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    lasted_s: float
    first_token_s: float | None
    """From the request to the first token."""
    decode_s: float | None
    """From the first token to the last."""


def ended_session(record: Record) -> EndedSession:
    """Of a record whose session is over."""
    first_ms, decode_ms = record.ttft_ms, record.timings()["predicted_ms"]
    computed = record.tokens > 0 or record.phase == "completed"  # of an embedding there are no tokens
    return EndedSession(
        status=record.phase,
        code=None if record.failure is None else str(record.failure["code"]),
        model=record.model,
        tokens=record.tokens,
        prompt_tokens=record.prompt_tokens if computed else 0,
        cached_tokens=record.cached if computed else 0,
        lasted_s=record.phases()[-1][1] / 1e3,
        first_token_s=None if first_ms is None else first_ms / 1e3,
        decode_s=None if decode_ms is None else decode_ms / 1e3,
    )


class GatewayMetrics:
    """One registry a Gateway, so that two in one process do not clash."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first = self._seconds(
            "gen_ai_server_time_to_first_token_seconds", "From the request to its first token.", _FIRST_S
        )
        self._each = self._seconds(
            "gen_ai_server_time_per_output_token_seconds",
            "Of each token behind the first, averaged a session.",
            _TOKEN_S,
        )
        self._lasted = self._seconds(
            "gen_ai_server_request_duration_seconds", "From the request to its end.", _REQUEST_S, "error_type"
        )
        self._running = Gauge("shardline_gateway_sessions", "Route Sessions that run.", registry=self._registry)
        self._waiting = Gauge("shardline_gateway_waiting", "Requests that wait for a route.", registry=self._registry)
        self._ended = Counter(
            "shardline_gateway_sessions_ended",
            "Route Sessions by how they ended.",
            ["status", "code"],
            registry=self._registry,
        )
        self._tokens = Counter("shardline_gateway_tokens", "Generated tokens.", registry=self._registry)
        self._prompt = Counter("shardline_gateway_prompt_tokens", "Prompt tokens.", registry=self._registry)
        self._cached = Counter(
            "shardline_gateway_cached_tokens", "Prompt tokens that were not computed again.", registry=self._registry
        )
        self._tasks = Gauge("shardline_gateway_tasks", "Tasks on the event loop.", registry=self._registry)
        self._models: set[str] = set()

    def _seconds(self, name: str, what: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, what, ["gen_ai_request_model", *labels], buckets=bounds, registry=self._registry)

    def ended(self, session: EndedSession) -> None:
        model = self._label(session.model)
        self._ended.labels(status=session.status, code=session.code or "").inc()
        self._tokens.inc(session.tokens)
        self._prompt.inc(session.prompt_tokens)
        self._cached.inc(session.cached_tokens)
        error = session.code or ("" if session.status == "completed" else session.status)
        self._lasted.labels(model, error).observe(session.lasted_s)
        if session.first_token_s is not None:
            self._first.labels(model).observe(session.first_token_s)
        if session.decode_s is not None and session.tokens > 1:
            self._each.labels(model).observe(session.decode_s / (session.tokens - 1))

    def _label(self, model: str) -> str:
        if model not in self._models and len(self._models) >= MODELS:
            return OTHER
        self._models.add(model)
        return model

    def text(self, running: int, waiting: int = 0) -> bytes:
        self._running.set(running)
        self._waiting.set(waiting)
        self._tasks.set(len(asyncio.all_tasks()))
        return generate_latest(self._registry)
