"""`make bench`: routes against unsplit llama.cpp, with delay between Nodes, hop overhead, the artifact plane, PyTorch.

All systems stand ready side by side and take turns, so that a busy moment of the machine hits all of them; figures are
medians over the rounds, ratios are of one round each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import artifacts, delay, hops
from bench.alone import Alone
from bench.figures import median, table
from bench.random_model import write_random_model
from bench.running import Running, cluster
from shardline.cli.cluster import physical_cores
from shardline.cli.demo_model import demo_model

ALONE = {"transformers alone": False, "the same, idle threads sleep": True}
PROMPT = "A shard is a piece of something larger. Here is what I know about shards, one sentence after the other:"
LONG = PROMPT + " It may be sharp, and it may be part of a whole." * 25


def measure_rates(folder: Path, model: Path, threads: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Decode tokens/s and seconds to the first token of each system, by round."""
    found: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        print(f"  starting: transformers alone, and routes of 1, 2, 3 Nodes ({threads} threads each) …", flush=True)
        alone = {name: Alone(model, threads, sleeping=sleeps) for name, sleeps in ALONE.items()}
        for process in alone.values():
            stack.callback(process.close)
        routes = {n: stack.enter_context(cluster(folder, model, n, "torch", threads)) for n in (1, 2, 3)}

        def measure_alone(process: Alone) -> dict[str, float]:
            figures = process.generate(PROMPT, tokens)
            return {**figures, "long_first_s": process.generate(LONG, 2)["first_s"]}

        def measure_route(route: Running) -> dict[str, float]:
            timed = route.generate(PROMPT, tokens)
            return {
                "first_s": timed.first_s,
                "tokens_per_s": timed.tokens_per_s,
                "long_first_s": route.generate(LONG, 2).first_s,
            }

        systems = [(name, lambda p=process: measure_alone(p)) for name, process in alone.items()]
        systems += [(f"{n} Node{'s' * (n > 1)}", lambda r=route: measure_route(r)) for n, route in routes.items()]
        for number in range(rounds + 1):
            order = systems[number % len(systems) :] + systems[: number % len(systems)]
            for name, measure in order:
                figures = measure()
                if number:  # The first round warms everything up.
                    found.setdefault(name, []).append(figures)
            print(f"  round {number} of {rounds}" + ("" if number else " (warm-up)"), flush=True)
    return found


def report_rates(found: dict[str, list[dict[str, float]]]) -> str:
    """Ratios are to the faster one of the two ways to run transformers alone, round by round."""
    rates = {name: median([r["tokens_per_s"] for r in rounds]) for name, rounds in found.items()}
    base = max(ALONE, key=lambda name: rates[name])
    rows = []
    for name in (*ALONE, *(n for n in found if n not in ALONE)):
        rounds = found[name]
        ratios = [r["tokens_per_s"] / b["tokens_per_s"] for r, b in zip(rounds, found[base], strict=True)]
        rows.append(
            (
                name,
                f"{rates[name]:.2f}",
                f"{median(ratios):.3f}",
                f"{1e3 * median([r['first_s'] for r in rounds]):.0f}",
                f"{1e3 * median([r['long_first_s'] for r in rounds]):.0f}",
            )
        )
    return table(("system", "tokens/s", "of alone", "first token ms", "long prompt ms"), rows)


SECTIONS = ("split", "large", "delay", "hops", "torch", "artifacts")


def report_split(model: Path, given: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """`shardline bench`, its report and its figures."""
    command = [sys.executable, "-m", "shardline", "bench", str(model), "--rounds", str(given.rounds), "--json", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    print(figures.pop("report"), flush=True)
    return figures


def report_delay(folder: Path, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Two Nodes with a round trip of 25 ms between them: a real model, and an engine that takes 5 ms a call."""
    found = {}
    script = delay.scripted_model(folder / "script")
    for name, path, engine in (("delay", model, "llama"), ("scripted", script, "scripted")):
        measured = delay.measure(folder / name, path, engine, rounds=given.rounds, tokens=given.tokens)
        what = path.name if engine == "llama" else "scripted engine, 5 ms a call"
        print(f"\n**2 Nodes, {1e3 * measured.round_trip_s:.0f} ms round trip between them** ({what})\n")
        print(delay.report(measured), flush=True)
        found[name] = asdict(measured)
    return found


def report_hops(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    hop = hops.measure(folder, given.steps, given.rounds)
    print(f"\nHop overhead: scripted engine, 2 Nodes on loopback, {given.rounds} x {given.steps} steps", flush=True)
    print(f"  hop, from a result to the next engine's start: p50 {hop['hop_p50_us']:.0f} us,", end=" ")
    print(f"p99 {hop['hop_p99_us']:.0f} us ({hop['hops']:.0f} hops)")
    print(f"  whole step at the client: p50 {hop['step_p50_us']:.0f} us, p99 {hop['step_p99_us']:.0f} us")
    print(f"  hop over HTTPS: p50 {hop['https_hop_p50_us']:.0f} us, p99 {hop['https_hop_p99_us']:.0f} us;", end=" ")
    print(f"step p50 {hop['https_step_p50_us']:.0f} us, p99 {hop['https_step_p99_us']:.0f} us")
    print(
        f"  with engines in worker processes, hand-over included: hop p50 {hop['worker_hop_p50_us']:.0f} us,", end=" "
    )
    print(f"step p50 {hop['worker_step_p50_us']:.0f} us, p99 {hop['worker_step_p99_us']:.0f} us", flush=True)
    return hop


def report_artifacts(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    print(f"\nModel Artifacts: {given.rounds} rounds, a file of about 400 MB, two processes on loopback", flush=True)
    found = artifacts.measure(folder, given.rounds)
    header_s = artifacts.header_seconds(given.rounds)
    print(artifacts.report(found, header_s))
    print(f"Load average {os.getloadavg()[0]:.1f} at the end", flush=True)
    return {"header_s": header_s, **{name: [asdict(taken) for taken in rounds] for name, rounds in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="decoded in each generation")
    parser.add_argument("--steps", type=int, default=1000, help="decode steps of each hop measurement")
    parser.add_argument("--threads", type=int, default=physical_cores(), help="of the PyTorch engine")
    parser.add_argument("--model", type=Path, help="GGUF file [default: the model of the demo]")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="repeatable [default: all]")
    parser.add_argument("--json", type=Path, help="write all figures there")
    given = parser.parse_args()
    sections = given.only or SECTIONS
    model = given.model or demo_model()
    figures: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} CPUs", "load": os.getloadavg()}
    print(f"Machine: {figures['machine']}, load average {figures['load'][0]:.1f} at the start\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as name:
        folder = Path(name)
        if "split" in sections:
            figures["split"] = report_split(model, given, "--tokens", str(given.tokens), "--streams", "1,8")
        if "large" in sections:
            print("\nA model of more than a billion parameters, random weights\n", flush=True)
            large = write_random_model(folder / "large.gguf")
            figures["large"] = report_split(large, given, "--tokens", "24", "--streams", "1,8", "--prefill", "512")
            large.unlink()
        if "delay" in sections:
            figures |= report_delay(folder, model, given)
        if "hops" in sections:
            figures["hops"] = report_hops(folder / "hops", given)
        if "artifacts" in sections:
            figures["artifacts"] = report_artifacts(folder / "artifacts", given)
        if "torch" in sections:
            print(
                f"\nPyTorch engine, tokens/s: {model.name}, {given.rounds} rounds of {given.tokens} tokens", flush=True
            )
            figures["rates"] = measure_rates(folder, model, given.threads, given.tokens, given.rounds)
            print(report_rates(figures["rates"]))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
