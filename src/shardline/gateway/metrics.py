"""Prometheus text of one Gateway, read from its own records at the moment of asking.

Owns metric names. Nothing is counted twice: a number stands in the record of its session, and is summed here when the
session ends. Shown by tests/cluster/.
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GatewayMetrics:
    """One registry a Gateway, so that two in one process do not clash."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._running = Gauge("shardline_gateway_sessions", "Route Sessions that run", registry=self._registry)
        self._ended = Counter(
            "shardline_gateway_sessions_ended",
            "Route Sessions by how they ended",
            ["status", "code"],
            registry=self._registry,
        )
        self._tokens = Counter("shardline_gateway_tokens", "Generated tokens", registry=self._registry)
        self._prompt = Counter("shardline_gateway_prompt_tokens", "Prompt tokens", registry=self._registry)
        self._cached = Counter(
            "shardline_gateway_cached_tokens", "Prompt tokens that were not computed again", registry=self._registry
        )
        self._first = Histogram(
            "gen_ai_server_time_to_first_token",
            "Seconds from the request to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tasks = Gauge("shardline_gateway_tasks", "Tasks on the event loop", registry=self._registry)

    def ended(
        self,
        *,
        status: str,
        code: str | None,
        tokens: int,
        prompt_tokens: int,
        cached_tokens: int,
        ttft_ms: float | None,
    ) -> None:
        self._ended.labels(status=status, code=code or "").inc()
        self._tokens.inc(tokens)
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)
        if ttft_ms is not None:
            self._first.observe(ttft_ms / 1e3)

    def text(self, running: int) -> bytes:
        self._running.set(running)
        self._tasks.set(len(asyncio.all_tasks()))
        return generate_latest(self._registry)
