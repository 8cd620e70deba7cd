"""The Tracker's numbers for Prometheus, in a registry of their own.

Owns names and labels; no label has more values than the code has words for. Shown by tests/tracker/test_app.py.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

STATES = ("ready", "out", "leaving", "left", "expired")
PROOFS = {True: "yes", False: "no", None: "not_judged"}
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)


class TrackerMetrics:
    """One set a Tracker. Counters count as things happen; gauges are set when somebody looks."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self.registrations = Counter(
            "shardline_tracker_registrations", "Registrations by result.", ["result"], registry=self.collectors
        )
        self.heartbeats = Counter(
            "shardline_tracker_heartbeats", "Heartbeats by result.", ["result"], registry=self.collectors
        )
        self.routes = Counter(
            "shardline_tracker_routes", "Route requests by result.", ["result"], registry=self.collectors
        )
        self.outcomes = Counter(
            "shardline_tracker_outcomes", "Reported ends of sessions by status.", ["status"], registry=self.collectors
        )
        self.expired = Counter("shardline_tracker_nodes_expired", "Nodes that fell silent.", registry=self.collectors)
        self.selection = Histogram(
            "shardline_tracker_selection_seconds",
            "Time to choose a route and sign its tickets.",
            buckets=_SECONDS,
            registry=self.collectors,
        )
        self.advertisements = Counter(
            "shardline_tracker_advertisements", "Advertised pieces by result.", ["result"], registry=self.collectors
        )
        self.challenges = Counter(
            "shardline_tracker_challenges",
            "Nodes asked to show blocks, by result.",
            ["result"],
            registry=self.collectors,
        )
        self._artifacts = Gauge("shardline_tracker_artifacts", "Model Artifacts offered.", registry=self.collectors)
        self._proofs = Gauge(
            "shardline_tracker_possession",
            "Holdings of an artifact on a Node, by whether they are proven.",
            ["proven"],
            registry=self.collectors,
        )
        self._nodes = Gauge("shardline_tracker_nodes", "Nodes by state.", ["state"], registry=self.collectors)
        self._models = Gauge("shardline_tracker_models_ready", "Models with a whole route.", registry=self.collectors)

    def render(
        self, states: Iterable[str], models_ready: int, offers: int = 0, proven: Iterable[bool | None] = ()
    ) -> bytes:
        """The text that Prometheus reads. `proven`: each verdict on a Node and an artifact."""
        proofs = Tally(proven)
        for verdict, word in PROOFS.items():
            self._proofs.labels(word).set(proofs[verdict])
        self._artifacts.set(offers)
        tally = Tally(states)
        for state in STATES:
            self._nodes.labels(state).set(tally[state])
        self._models.set(models_ready)
        return generate_latest(self.collectors)
