"""Where the time of a decode step goes: stamps at each stage of a route of real processes, and the gaps between them.

`python -m bench.trace MODEL.gguf`. Every process of the cluster loads this module at its start (through a
`sitecustomize` in front of its path), notes the time at the stages below in a file of its own, and is otherwise as
always. A stamp costs about half a microsecond.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import mmap
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

STAMPS = 1 << 20
_NODE = {
    "the worker's answer is there": ("shardline.model.worker_process", "WorkerProcess._readable", "start"),
    "the host takes the result": ("shardline.node.host", "ShardHost._batch_done", "start"),
    "the push begins": ("shardline.node.outbox", "Outbox._post", "start"),
    "the push is written": ("shardline.node.outbox", "Outbox._post", "end"),
    "a step's bytes are there": ("shardline.node.app", "StepsLane.admits", "start"),
    "the step is read": ("shardline.node.app", "StepsLane.take", "start"),
    "the host takes the step": ("shardline.node.host", "ShardHost.accept", "start"),
    "the batch begins": ("shardline.model.worker_process", "WorkerProcess.submit", "start"),
    "the batch is written": ("shardline.model.worker_process", "WorkerProcess.submit", "end"),
}
_WORKER = {
    "the worker has the batch": ("shardline.model.channel", "FrameReader.feed", "start"),
    "the generator begins": ("shardline.model.generation", "Generator.run", "start"),
    "llama_decode begins": ("shardline.model.llama_backend", "LlamaBackend._decode", "start"),
    "the engine is done": ("shardline.model.llama_backend", "LlamaBackend._decode", "end"),
    "the generator is done": ("shardline.model.generation", "Generator.run", "end"),
}
STAGES = [*_NODE, *_WORKER]


def install(folder: str) -> None:
    """Patch the stages of this process, if it is a Node or a worker."""
    line = " ".join(sys.orig_argv)
    stages = _WORKER if "shardline.model.worker" in line else _NODE if " node " in f"{line} " else {}
    if not stages:
        return
    path = Path(folder) / f"{os.getpid()}.stamps"
    path.write_bytes(bytes(16 * STAMPS))
    with path.open("r+b") as file:
        cells = memoryview(mmap.mmap(file.fileno(), 16 * STAMPS)).cast("Q")
    count = 0

    def stamp(number: int) -> None:
        nonlocal count
        if count < STAMPS:
            cells[2 * count] = number
            cells[2 * count + 1] = time.monotonic_ns()
            count += 1

    for name, (module, qualified, when) in stages.items():
        owner_name, _, method = qualified.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        setattr(owner, method, _stamped(getattr(owner, method), functools.partial(stamp, 1 + STAGES.index(name)), when))


def _stamped(method: Callable[..., Any], stamp: Callable[[], None], when: str) -> Callable[..., Any]:
    if when == "start":

        @functools.wraps(method)
        def noted(*args: Any, **kwargs: Any) -> Any:
            stamp()
            return method(*args, **kwargs)

    else:

        @functools.wraps(method)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            stamp()
            return result

    return noted


class Stamp(NamedTuple):
    at_ns: int
    pid: int
    stage: str


def stamps_of(folder: Path, since_ns: int, until_ns: int) -> list[Stamp]:
    """All stamps of a stretch of time, in order."""
    found = []
    for path in folder.glob("*.stamps"):
        cells = memoryview(path.read_bytes()).cast("Q")
        for i in range(STAMPS):
            if not cells[2 * i]:
                break
            if since_ns <= cells[2 * i + 1] <= until_ns:
                found.append(Stamp(cells[2 * i + 1], int(path.stem), STAGES[cells[2 * i] - 1]))
    return sorted(found)


def gaps(stamps: list[Stamp]) -> list[tuple[str, str, int, float]]:
    """From each stage to the next one in time: (from, to, how often, median microseconds), the usual ones only, in the
    order of the ring. Whoever stamps is named by its place: Node or worker, 1 … n in order of first appearance."""
    names = _names(stamps)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    first: dict[tuple[str, str], int] = {}
    for place, (before, after) in enumerate(pairwise(stamps)):
        key = f"{names[before.pid]}: {before.stage}", f"{names[after.pid]}: {after.stage}"
        found[key].append((after.at_ns - before.at_ns) / 1e3)
        first.setdefault(key, place)
    most = max(len(values) for values in found.values())
    usual = sorted((key for key, values in found.items() if len(values) > most / 2), key=first.__getitem__)
    return [(*key, len(found[key]), sorted(found[key])[len(found[key]) // 2]) for key in usual]


def _names(stamps: list[Stamp]) -> dict[int, str]:
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}
    for stamp in stamps:
        if stamp.pid not in names:
            role = "worker" if stamp.stage in _WORKER else "Node"
            counts[role] += 1
            names[stamp.pid] = f"{role} {counts[role]}"
    return names


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.trace", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardline-trace-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(f"import bench.trace\nbench.trace.install({name!r})\n")
        root = str(Path(__file__).resolve().parents[1])
        os.environ["PYTHONPATH"] = os.pathsep.join([name, root, *filter(None, [os.environ.get("PYTHONPATH")])])
        from shardline.cli.bench_run import prompts_of
        from shardline.cli.bench_systems import route

        with route(folder, given.model, given.nodes, "llama", threads=1, kv_tokens=2048) as running:
            running.run(prompts_of(1, 32, 2000, seed="0"), given.tokens)
            since = time.monotonic_ns()
            measured = running.run(prompts_of(1, 32, 2000, seed="1"), given.tokens)
            until = time.monotonic_ns()
        # The prefill is left out: it is the first part.
        stamps = stamps_of(folder, since + int(1.2e9 * measured.first_s), until - int(2e7))
    total = engine = 0.0
    for before, after, count, us in gaps(stamps):
        print(f"{us:9.1f} us  {count:5d}  {before}  ->  {after}")
        total += us
        engine += us if before.endswith("llama_decode begins") else 0.0
    print(f"{total:9.1f} us  in all, {engine:.1f} of it in the engines, {total - engine:.1f} between them;", end=" ")
    print(f"{1e6 / (measured.decode or 1):.1f} us a token at the client")


if __name__ == "__main__":
    main()
