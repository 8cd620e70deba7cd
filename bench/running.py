"""Clusters for measurements: real processes on loopback, and one request whose tokens are timed at the client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.cli.chat import first_model
from shardline.cli.client import Endpoint
from shardline.cli.cluster import Cluster, planned
from shardline.cli.cluster_parts import GlobalFlags, Plan
from shardline.cli.config import resolve
from shardline.cli.supervisor import Child, Supervisor


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation as its client saw it. Seconds from the request."""

    first_s: float
    arrivals_s: list[float]
    """When each chunk with text came."""
    tokens: int
    telemetry: dict[str, Any]

    @property
    def tokens_per_s(self) -> float:
        """Of decode alone: from the first token to the last."""
        return (self.tokens - 1) / (self.arrivals_s[-1] - self.arrivals_s[0])


class Running:
    """A cluster that answers."""

    def __init__(self, url: str) -> None:
        self._gateway = Endpoint("Gateway", url, "")
        deadline = time.monotonic() + 10
        while True:
            try:
                self.model = first_model(self._gateway)
                return
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def generate(self, prompt: str, tokens: int) -> Timed:
        """Greedy, exactly `tokens` tokens."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
            "stream": True,
            "stream_options": {"include_usage": True, "include_telemetry": True},
        }
        started = time.perf_counter()
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        telemetry: dict[str, Any] = {}
        for chunk in self._gateway.stream("/v1/completions", body):
            now = time.perf_counter() - started
            if any(choice.get("text") for choice in chunk.get("choices", [])):
                arrivals.append(now)
            usage = chunk.get("usage") or usage
            telemetry = chunk.get("telemetry") or telemetry
        if not arrivals:
            raise SystemExit("the model answered nothing: use another prompt")
        return Timed(arrivals[0], arrivals, int(usage["completion_tokens"]), telemetry)


@contextmanager
def cluster(folder: Path, model: Path, nodes: int, engine: str, threads: int) -> Iterator[Running]:
    """A Tracker, a Gateway and `nodes` Nodes, until the end of the block."""
    plan: Plan = planned(model, nodes, None, engine, threads=threads, port=0)
    state = folder / f"{engine}-{nodes}"
    configuration = resolve(flags={"state_dir": str(state)}, assignments=(), config=None, environ={})
    with Supervisor(state / "logs", _quiet) as supervisor:
        parts = Cluster(supervisor, plan, print)
        parts.start(configuration, GlobalFlags(given=["--state-dir", str(state)], added=["--set", "drain_s=1"]))
        yield Running(parts.gateway_url)


def _quiet(child: Child) -> None:
    """Starts are not shown: the report says what runs."""
