"""`make soak MINUTES=30`: mixed load on routes of 1, 2 and 3 Nodes of the llama.cpp engine, a third of the time each.

Fails when an answer is not that of the same request alone, when memory grows, when KV is not given back, or when a
file, a thread or a task is left.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import httpx

from shardline.cli.demo_model import demo_model
from tests.soak.footprint import GROWTH_BYTES, MIB, Samples, left, more, sample
from tests.soak.load import Load
from tests.support.cluster import Cluster, model_cluster
from tests.support.decoded_model import write_decoded
from tests.support.greedy import EIGHT_BITS, F16_CACHE

ROUTES = (1, 2, 3)
KV_TOKENS = 16_384
IDLE_S = 6.0
"""After it no process keeps a connection that nobody uses."""
SETTINGS = {"client_idle_s": 1.0, "server_idle_s": 4.0, "record_limit": 100, "queue_wait_s": 120.0}


def say(*words: object) -> None:
    print(*words, flush=True)


async def soak(nodes: int, minutes: float, model: Path, tie: float, folder: Path) -> list[str]:
    """What was wrong."""
    layers = [f"{30 * i // nodes}:{30 * (i + 1) // nodes}" for i in range(nodes)]
    say(f"== {nodes} Nodes for {minutes:g} minutes")
    async with model_cluster(
        folder,
        model,
        layers=layers,
        engine="llama",
        settings=SETTINGS,
        node_arguments=["--threads", "1", "--kv-tokens", str(KV_TOKENS)],
    ) as cluster:
        await cluster.http.aclose()
        # The servers here soon close what is idle: no connection is used twice, so none is found closed.
        limits = httpx.Limits(max_keepalive_connections=0)
        cluster.http = httpx.AsyncClient(timeout=300, trust_env=False, limits=limits)
        load, samples = Load(cluster, nodes, tie), Samples()
        await load.alone()
        await cluster.until_free()
        await asyncio.sleep(IDLE_S)
        before = await left(cluster)
        say(f"   alone: done after {time.monotonic() - samples.started:.0f} s")
        end = time.monotonic() + 60 * minutes
        samples.started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(end))
            tasks.create_task(sample(cluster, samples, 2.0, lambda: time.monotonic() > end))
        return report(load, samples) + await at_rest(cluster, before)


def report(load: Load, samples: Samples) -> list[str]:
    outcome = load.outcome
    say("   requests:", ", ".join(f"{name} {count}" for name, count in sorted(outcome.counts.items())))
    say(f"   tokens of whole answers: {outcome.tokens}, near-ties: {len(outcome.ties)}, refused: {outcome.refused}")
    for tie in outcome.ties[:10]:
        say("     ", tie)
    most = max(kv["sessions"] for kv in samples.kv)
    say(f"   at most {most} sessions, {max(kv['reserved_tokens'] for kv in samples.kv)} KV tokens reserved on a Node")
    wrong = list(outcome.wrong)
    for name in samples.memory:
        say("  ", samples.line(name))
        if samples.grown(name) > GROWTH_BYTES:
            wrong.append(f"{name} grew by {samples.grown(name) / MIB:.1f} MiB")
    if outcome.counts["compared"] == 0:
        wrong.append("nothing was compared")
    if any(kv["reserved_tokens"] + kv["cached_tokens"] > kv["capacity_tokens"] for kv in samples.kv):
        wrong.append("more KV tokens were promised than there are")
    return wrong


async def at_rest(cluster: Cluster, before: dict[str, tuple[int, int, int]]) -> list[str]:
    try:
        await cluster.until_free()
    except AssertionError:
        return [f"KV is not given back: {[await cluster.kv(i) for i in range(len(cluster.nodes))]}"]
    await asyncio.sleep(IDLE_S)
    after = await left(cluster)
    restarts = [(await cluster.node_info(i))["health"]["restarts"] for i in range(len(cluster.nodes))]
    kv = [(await cluster.kv(i))["cached_tokens"] for i in range(len(cluster.nodes))]
    say(f"   at rest: files, threads, tasks {after}; before {before}; kept KV tokens {kv}; restarts {restarts}")
    return more(before, after) + ([f"engines were restarted: {restarts}"] if any(restarts) else [])


async def main(minutes: float, *, exact: bool) -> int:
    wrong = []
    for nodes in ROUTES:
        with tempfile.TemporaryDirectory() as name:
            folder, model, tie = Path(name), demo_model(), EIGHT_BITS
            if exact:
                model, tie = write_decoded(model, folder / "decoded.gguf"), F16_CACHE
            wrong += await soak(nodes, minutes / len(ROUTES), model, tie, folder)
    for line in wrong[:40]:
        say("WRONG:", line)
    say(f"== {'as it should be' if not wrong else f'{len(wrong)} things are wrong'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--exact", action="store_true", help="weights of float32, and the narrow rule for answers")
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.minutes, exact=given.exact)))
