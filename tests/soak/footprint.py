"""What the processes of a cluster hold: memory, open files, threads, tasks; sampled over time, and judged at the end.

Owns the samples and what counts as flat. Refuses to know what load there is.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.support.cluster import Cluster, Process, worker_pid

MIB = 1 << 20
GROWTH_BYTES = 12 * MIB
"""Of one process, from the middle of its run to its end: what an allocator's rest may add. A leak of one KV token of
SmolLM2 a request would be more."""


@dataclass
class Samples:
    started: float = field(default_factory=time.monotonic)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By process: seconds since the start, resident bytes."""
    kv: list[dict[str, Any]] = field(default_factory=list)

    def grown(self, name: str) -> int:
        """Bytes, from the median of the third quarter to that of the last: warm-up is over by then."""
        values = [size for _, size in self.memory[name]]
        quarter = max(1, len(values) // 4)
        return int(statistics.median(values[-quarter:]) - statistics.median(values[-2 * quarter : -quarter] or values))

    def line(self, name: str) -> str:
        values = [size / MIB for _, size in self.memory[name]]
        shown = values[:: max(1, len(values) // 8)][:8]
        curve = " ".join(f"{value:.0f}" for value in [*shown, values[-1]])
        return f"{name:>9}: {curve} MiB, grown {self.grown(name) / MIB:+.1f} at the end"


async def processes(cluster: Cluster) -> dict[str, int]:
    """Name -> pid, engine workers included."""
    found = {part.name: part.pid for part in (cluster.tracker, cluster.gateway, *cluster.nodes)}
    for number in range(len(cluster.nodes)):
        found[f"worker{number}"] = worker_pid(await cluster.node_info(number))
    return found


async def sample(cluster: Cluster, samples: Samples, every_s: float, over: Callable[[], bool]) -> None:
    """Until `over`."""
    while not over():
        at = time.monotonic() - samples.started
        for name, pid in (await processes(cluster)).items():
            samples.memory.setdefault(name, []).append((at, psutil.Process(pid).memory_info().rss))
        samples.kv += [await cluster.kv(number) for number in range(len(cluster.nodes))]
        await asyncio.sleep(every_s)


async def _tasks(cluster: Cluster, part: Process) -> int:
    answer = await cluster.control("GET", f"{part.url}/metrics")
    found = re.search(r"^shardline_\w+_tasks ([0-9.]+)$", answer.text, re.MULTILINE)
    return int(float(found.group(1))) if found else 0


async def left(cluster: Cluster) -> dict[str, tuple[int, int, int]]:
    """Of each process: open files, threads, tasks."""
    parts = {part.name: part for part in (cluster.gateway, *cluster.nodes)}
    counted = {}
    for name, pid in (await processes(cluster)).items():
        process = psutil.Process(pid)
        tasks = await _tasks(cluster, parts[name]) if name in parts else 0
        counted[name] = (process.num_fds(), process.num_threads(), tasks)
    return counted


def more(before: dict[str, tuple[int, int, int]], after: dict[str, tuple[int, int, int]]) -> list[str]:
    """What there is more of than before, but for a connection or two that an idle process may keep."""
    slack = (2, 0, 2)
    return [
        f"{name}: {what} {before[name][i]} -> {after[name][i]}"
        for name in before
        for i, what in enumerate(("files", "threads", "tasks"))
        if after[name][i] > before[name][i] + slack[i]
    ]
