"""Hop overhead: what passes between the result of one engine and the start of the next, two Nodes on loopback.

Nodes are real processes with the scripted engine inside; it costs next to nothing, so that the rest is Shardline's.
Each Node notes when its engine starts and ends (CLOCK_MONOTONIC, one clock for all processes of a machine).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.figures import quantile
from bench.running import Running
from shardline.cli import cluster as parts
from shardline.cli.config import resolve
from shardline.cli.supervisor import PROGRAM, Part, Supervisor

START_S = 30.0
WARM_UP = 50
"""Steps at the start of each generation that are not counted: connections open, code is loaded."""


class Noted:
    """A backend that notes when each decode call began and ended."""

    def __init__(self, backend: Any, notes: list[tuple[int, int]]) -> None:
        self._backend = backend
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, entries: Sequence[Any]) -> Any:
        started = time.monotonic_ns()
        result = self._backend.run(entries)
        if len(entries) == 1 and entries[0].rows == 1:
            self._notes.append((started, time.monotonic_ns()))
        return result


def node_main(arguments: list[str]) -> None:
    """`shardline … node …` in this process, with a backend that notes; the notes go to the file at the end."""
    from shardline.cli.main import main
    from shardline.model import scripted

    target, notes = Path(arguments[0]), []  # type: tuple[Path, list[tuple[int, int]]]
    load = scripted.load_inline
    scripted.load_inline = lambda spec: Noted(load(spec), notes)  # type: ignore[assignment,return-value]
    try:
        main(arguments[1:])
    finally:
        target.write_text(json.dumps(notes))


def measure(folder: Path, steps: int, rounds: int) -> dict[str, float]:
    """Microseconds: p50 and p99 of a hop, and what a whole decode step of the route takes at the client."""
    folder.mkdir(exist_ok=True)
    program = (sys.executable, "-m", "bench.hops", str(folder))
    periods, _ = _drive(folder / "inline", ("--inline",), program, steps, rounds)
    hops = _between(*(json.loads((folder / f"node-{i}.notes").read_text()) for i in (1, 2)))
    secure, _ = _drive(folder / "https", ("--inline",), program, steps, rounds, keys=True)
    secure_hops = _between(*(json.loads((folder / f"node-{i}.notes").read_text()) for i in (1, 2)))
    whole, compute_us = _drive(folder / "workers", (), PROGRAM, steps, rounds)
    return {
        "https_hop_p50_us": quantile(secure_hops, 0.5),
        "https_hop_p99_us": quantile(secure_hops, 0.99),
        "https_step_p50_us": quantile(secure, 0.5),
        "https_step_p99_us": quantile(secure, 0.99),
        "hop_p50_us": quantile(hops, 0.5),
        "hop_p99_us": quantile(hops, 0.99),
        "hops": float(len(hops)),
        "step_p50_us": quantile(periods, 0.5),
        "step_p99_us": quantile(periods, 0.99),
        "worker_hop_p50_us": (quantile(whole, 0.5) - compute_us) / 2,
        "worker_step_p50_us": quantile(whole, 0.5),
        "worker_step_p99_us": quantile(whole, 0.99),
    }


def _drive(
    folder: Path, flags: tuple[str, ...], program: Sequence[str], steps: int, rounds: int, *, keys: bool = False
) -> tuple[list[float], float]:
    """Microseconds between tokens at the client, and what both engines together compute in a step.

    `keys`: of a cluster with keys, whose Nodes join by lines and speak HTTPS.
    """
    folder.mkdir()
    script = folder / "script.json"
    script.write_text(json.dumps({"model": "bench", "n_layers": 2, "answer": ["a", "b"], "eos": False}))
    configuration = resolve(flags={"state_dir": str(folder)}, assignments=(), config=None, environ={})
    shared = parts.GlobalFlags(given=["--state-dir", str(folder)], added=["--set", "drain_s=1"])
    plan = parts.Plan(port=0, model=script, ranges=[(0, 1), (1, 2)], node_arguments=("--engine", "scripted", *flags))
    periods: list[float] = []
    computed: list[float] = []
    with Supervisor(folder / "logs", lambda child: None, program=program) as supervisor:
        if keys:
            client = Running(_start_joined(supervisor, replace(plan, listen="127.0.0.1"), shared))
        else:
            running = parts.Cluster(supervisor, plan, print)
            running.start(configuration, shared)
            client = Running(running.gateway_url)
        for _ in range(rounds):
            timed = client.generate("x", steps)
            periods += [1e6 * (b - a) for a, b in pairwise(timed.arrivals_s[WARM_UP:])]
            computed.append(1e3 * sum(hop["compute_ms"] or 0.0 for hop in timed.telemetry["route"]["hops"]))
    return periods, quantile(computed, 0.5)


def _start_joined(supervisor: Supervisor, plan: parts.Plan, flags: parts.GlobalFlags) -> str:
    """The same cluster with keys, on loopback; the URL of its Gateway."""
    tracker = supervisor.start(parts.tracker_part(plan, flags))
    supervisor.until_ready([tracker], within_s=START_S)
    gateway = supervisor.start(parts.gateway_part(plan, flags, str(tracker.url)))
    supervisor.until_ready([gateway], within_s=START_S)
    for number, (first, last) in enumerate(plan.ranges, 1):
        words = ("node", "--join", tracker.line, "--model", str(plan.model), "--layers", f"{first}:{last}")
        node = supervisor.start(Part(f"node-{number}", (*flags.all, *words, *plan.node_arguments)))
        supervisor.until_ready([node], within_s=START_S)
    return str(gateway.url)


def _between(head: list[tuple[int, int]], tail: list[tuple[int, int]]) -> list[float]:
    """Microseconds from each end to the next start on the other Node, in order of time."""
    events = sorted([(start, end, 0) for start, end in head] + [(start, end, 1) for start, end in tail])
    found = []
    for count, (before, after) in enumerate(pairwise(events)):
        if before[2] != after[2] and count > WARM_UP:
            found.append((after[0] - before[1]) / 1e3)
    # Between two generations there is no hop: such a gap is far longer than any.
    limit = 100 * quantile(found, 0.5)
    return [hop for hop in found if hop < limit]


if __name__ == "__main__":
    # A part as the supervisor starts it: a Node notes, everything else is as always.
    FOLDER, *REST = sys.argv[1:]
    if "node" in REST:
        LAYERS = REST[REST.index("--layers") + 1]
        node_main([str(Path(FOLDER) / f"node-{1 + (LAYERS == '1:2')}.notes"), "--supervised", *REST])
    else:
        from shardline.cli.main import main

        main(["--supervised", *REST])
