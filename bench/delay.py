"""A route of two Nodes that are far from one another: a proxy between any party and a Node adds one-way delay.

Each Node advertises its proxy, so that what goes to a Node is late by half the round trip. Rates with the delay are
held against those of the same route without it, in turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.figures import median
from shardline.cli.bench_figures import markdown
from shardline.cli.bench_run import prompts_of
from shardline.cli.bench_systems import Route, free_port
from shardline.cli.cluster import Cluster, planned
from shardline.cli.cluster_parts import GATEWAY_WAVE, NODE_WAVE, TRACKER_WAVE, GlobalFlags, Plan
from shardline.cli.config import resolve
from shardline.cli.invocation import credential_of
from shardline.cli.supervisor import Part, Supervisor
from tests.support.delay_proxy import DelayProxy

START_S = 60.0
PROMPT_TOKENS = 32


class Far(Cluster):
    """A cluster each of whose Nodes is reached through a proxy."""

    def __init__(self, supervisor: Supervisor, plan: Plan, stack: ExitStack) -> None:
        super().__init__(supervisor, plan, print)
        self._stack = stack
        self.proxies: list[DelayProxy] = []

    def start_far(self, flags: GlobalFlags) -> None:
        """All parts; the Nodes last, as they are told of their proxies."""
        supervisor, plan = self._supervisor, self._plan
        tracker = supervisor.start(Part("tracker", (*flags.all, "tracker", "--port", "0"), TRACKER_WAVE))
        supervisor.until_ready([tracker], within_s=START_S)
        self.tracker_url = str(tracker.url)
        words = (*flags.all, "gateway", "--tracker", self.tracker_url, "--port", "0")
        gateway = supervisor.start(Part("gateway", words, GATEWAY_WAVE))
        nodes = []
        for number, (first, last) in enumerate(plan.ranges, 1):
            port = free_port()
            proxy = self._stack.enter_context(DelayProxy("127.0.0.1", port))
            self.proxies.append(proxy)
            arguments = (*flags.all, "node", "--model", str(plan.model), "--tracker", self.tracker_url)
            arguments += ("--layers", f"{first}:{last}", "--port", str(port), "--advertise", proxy.address)
            nodes.append(supervisor.start(Part(f"node-{number}", (*arguments, *plan.node_arguments), NODE_WAVE)))
        supervisor.until_ready([gateway, *nodes], within_s=START_S)
        self.gateway_url = str(gateway.url)

    def delay(self, round_trip_s: float) -> None:
        for proxy in self.proxies:
            proxy.set(delay_s=round_trip_s / 2)


@contextmanager
def far_route(folder: Path, model: Path, engine: str) -> Iterator[tuple[Route, Far]]:
    """Two Nodes with one thread each."""
    plan = planned(model, 2, None, engine, threads=1, kv_tokens=2048, port=0)
    configuration = resolve(flags={"state_dir": str(folder)}, assignments=(), config=None, environ={})
    with ExitStack() as stack, Supervisor(folder / "logs", lambda child: None) as supervisor:
        cluster = Far(supervisor, plan, stack)
        credential = credential_of(configuration, starts=True)
        cluster.start_far(GlobalFlags(given=["--state-dir", str(folder)], added=["--set", "drain_s=1"]))
        yield Route(cluster, credential), cluster


@dataclass(frozen=True, slots=True)
class Delayed:
    """Tokens per second, medians over the rounds."""

    near_one: float
    far_one: float
    near_many: float
    far_many: float
    round_trip_s: float

    @property
    def expected_one(self) -> float:
        """1 / (round trip + what a step takes without it)."""
        return 1 / (self.round_trip_s + 1 / self.near_one)

    def lines(self, streams: int) -> list[tuple[str, ...]]:
        one = f"{self.far_one:.1f}", f"{self.expected_one:.1f}", f"{self.far_one / self.expected_one:.3f}"
        many = f"{self.far_many:.1f}", f"{self.near_many:.1f}", f"{self.far_many / self.near_many:.3f}"
        more = f"{self.far_many:.1f}", f"{self.far_one:.1f}", f"{self.far_many / self.far_one:.2f}"
        return [
            ("1 stream, against 1 / (round trip + compute)", *one),
            (f"{streams} streams, against the same without delay", *many),
            (f"{streams} streams, against 1 stream", *more),
        ]


def measure(
    folder: Path, model: Path, engine: str, *, rounds: int, tokens: int, streams: int = 8, round_trip_s: float = 0.025
) -> Delayed:
    """One stream and several, near and far, in turns."""
    found: dict[tuple[int, bool], list[float]] = {}
    with far_route(folder, model, engine) as (route, cluster):
        vocab = 200 if engine == "scripted" else 20_000
        for number in range(rounds + 1):
            for count in (1, streams):
                for is_far in (False, True):
                    cluster.delay(round_trip_s if is_far else 0.0)
                    prompts = prompts_of(count, PROMPT_TOKENS, vocab, seed=f"{number} {count} {is_far}")
                    rate = route.run(prompts, tokens).decode
                    if number and rate is not None:
                        found.setdefault((count, is_far), []).append(rate)
    rates = {key: median(values) for key, values in found.items()}
    return Delayed(rates[1, False], rates[1, True], rates[streams, False], rates[streams, True], round_trip_s)


def scripted_model(folder: Path, step_ms: float = 5.0) -> Path:
    """A script whose every engine call takes `step_ms`, on each of two Nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "script.json"
    script = {"model": "five", "n_layers": 2, "answer": ["a", "b"], "eos": False, "decode_ms": step_ms}
    path.write_text(json.dumps(script), encoding="utf-8")
    return path


def report(delayed: Delayed, streams: int = 8) -> str:
    return markdown(("case", "tokens/s", "of", "ratio"), delayed.lines(streams))
