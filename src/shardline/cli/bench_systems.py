"""What a measurement compares: the unsplit model in a plain process, routes of Nodes, llama.cpp's own RPC.

Owns starting and ending them, and asking each for the same work. All stand ready side by side, so that they can take
turns; whoever is not asked sleeps. Refuses to judge figures. Shown by tests/cli/test_bench_run.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from shardline.cli.bench_load import decode_rate, run_streams
from shardline.cli.cluster import Cluster, first_model_of, planned
from shardline.cli.cluster_parts import GlobalFlags
from shardline.cli.config import resolve
from shardline.cli.invocation import credential_of
from shardline.cli.supervisor import Child, Supervisor
from shardline.errors import ShardlineError
from shardline.formats.memory import WeightBytes
from shardline.model.worker_process import worker_environment

ANSWER_S = 900.0
_ENGINES = ("shardline.model.worker", "shardline.model.llama_unsplit")
Prompts = Sequence[Sequence[int]]
Ranges = list[tuple[int, int]]


class Measured(NamedTuple):
    """One run. `decode` is None where only one token was asked for."""

    first_s: float
    """Until every stream has its first token."""
    decode: float | None
    """Tokens per second of all streams together, behind the first."""


class System(Protocol):
    def run(self, prompts: Prompts, tokens: int) -> Measured: ...


class Unsplit:
    """llama.cpp in a process of its own (`shardline.model.llama_unsplit`). `passive`: idle threads sleep at once."""

    def __init__(self, model: Path, *, threads: int, sequences: int, kv_tokens: int, passive: bool) -> None:
        own = dict(os.environ)
        command = [sys.executable, "-m", "shardline.model.llama_unsplit", str(model), "--threads", str(threads)]
        command += ["--sequences", str(sequences), "--kv-tokens", str(kv_tokens)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=worker_environment(own, threads) if passive else own,
        )
        self.facts = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, prompts: Prompts, tokens: int) -> Measured:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": [list(ids) for ids in prompts], "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        rate = len(prompts) * found["steps"] / found["decode_s"] if found["steps"] else None
        return Measured(found["first_s"], rate)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ShardlineError(
                "engine_unavailable",
                "the unsplit model did not run",
                advice=f"This says why: {sys.executable} -m shardline.model.llama_unsplit MODEL --threads 1 "
                "--sequences 1 --kv-tokens 4096",
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Of one Node with its engine worker, in bytes."""

    layers: str
    resident: int
    """What the system counts for both processes; pages of the model file that they read are in it."""
    weights: int
    kv: int
    """Of the whole KV buffer, full or not."""

    @property
    def beside(self) -> int:
        """What is neither weights nor KV."""
        return self.resident - self.weights - self.kv


class Route:
    """A running cluster on this machine."""

    def __init__(self, cluster: Cluster, tracker_credential: str) -> None:
        self._cluster = cluster
        self._credential = tracker_credential
        self._last_session = ""
        self._model = first_model_of(cluster)

    def run(self, prompts: Prompts, tokens: int) -> Measured:
        streams = run_streams(self._cluster.gateway_url, self._model, prompts, tokens, ANSWER_S)
        self._last_session = streams[0].session
        return Measured(max(s.first_s for s in streams), decode_rate(streams) if tokens > 1 else None)

    def record(self) -> dict[str, Any]:
        """Telemetry of the last run's first stream, when it is over."""
        found: dict[str, Any] = self._cluster.endpoint.get(f"/v1/route-sessions/{self._last_session}")
        return found

    def seams(self) -> list[tuple[str, float, float]]:
        """Of the last run's first stream, for each Seam: between which layers, bytes a token in decode and prefill."""
        view = self.record()
        layers = {hop["node"]: "{}:{}".format(*hop["layers"]) for hop in view["route"]["hops"]}
        return [
            (f"{layers[s['from']]} → {layers[s['to']]}", _per_row(s["decode"]), _per_row(s["prefill"]))
            for s in view["seams"]
        ]

    def memory(self, weights: WeightBytes) -> list[NodeMemory]:
        """Of each Node, from head to tail."""
        from shardline.cli.client import Endpoint

        listed = Endpoint("Tracker", self._cluster.tracker_url, self._credential).get("/v1/nodes")["nodes"]
        found = []
        for node in sorted(listed, key=lambda n: n["shards"][0]["first"]):
            shard, kv = node["shards"][0], node["kv"]
            first, last = shard["first"], shard["last"]
            kv_bytes = kv["capacity_tokens"] * shard["kv_bytes_per_token"]
            found.append(NodeMemory(f"{first}:{last}", node["rss_bytes"], weights.of_shard(first, last), kv_bytes))
        return found


def _per_row(count: Mapping[str, Any]) -> float:
    return count["bytes"] / count["rows"] if count.get("rows") else 0.0


@contextmanager
def route(
    folder: Path, model: Path, nodes: int, engine: str, *, threads: int, kv_tokens: int, ranges: Ranges | None = None
) -> Iterator[Route]:
    """A Tracker, a Gateway and `nodes` Nodes of `threads` threads each, until the end of the block. `ranges`: the
    layers of each, else the engine's most even cut."""
    plan = planned(model, nodes, ranges, engine, threads=threads, kv_tokens=kv_tokens, port=0)
    state = folder / f"{engine}-{nodes}"
    configuration = resolve(flags={"state_dir": str(state)}, assignments=(), config=None, environ={})
    with Supervisor(state / "logs", _unseen) as supervisor:
        cluster = Cluster(supervisor, plan, lambda words: None)
        cluster.start(configuration, GlobalFlags(given=["--state-dir", str(state)], added=["--set", "drain_s=1"]))
        yield Route(cluster, credential_of(configuration))
        return
    # Only a signal leads here. The parts have ended; so must the measurement, which would go on without them.
    raise KeyboardInterrupt


def _unseen(child: Child) -> None:
    """Starts are not shown: the report says what runs."""


class LlamaBench:
    """`llama-bench` of llama.cpp, alone or over RPC servers: an independent measure of the same work, where its
    binaries are given. It is started anew for each run."""

    def __init__(self, program: Path, model: Path, *, threads: int, servers: Sequence[str] = ()) -> None:
        self._command = [str(program), "-m", str(model), "-t", str(threads), "-fa", "1", "-r", "1", "-o", "json"]
        self._command += ["--rpc", ",".join(servers), "-ngl", "99"] if servers else ["-ngl", "0"]

    def run(self, prompts: Prompts, tokens: int) -> Measured:
        """One stream, or prefill alone where one token is asked for."""
        depth = len(prompts[0])
        work = ["-p", str(depth), "-n", "0"] if tokens == 1 else ["-p", "0", "-n", str(tokens), "-d", str(depth)]
        done = subprocess.run([*self._command, *work], capture_output=True, text=True, timeout=ANSWER_S)
        if done.returncode != 0:
            raise ShardlineError("engine_unavailable", f"llama-bench failed: {done.stderr.strip()[-300:]}")
        rate = float(json.loads(done.stdout)[-1]["avg_ts"])
        return Measured(depth / rate, None) if tokens == 1 else Measured(0.0, rate)


@contextmanager
def rpc_servers(program: Path, count: int, threads: int) -> Iterator[list[str]]:
    """`count` RPC servers of llama.cpp on loopback; their addresses."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(count):
            port = free_port()
            command = [str(program), "-H", "127.0.0.1", "-p", str(port), "-t", str(threads)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(_ended, process)
            addresses.append(f"127.0.0.1:{port}")
            _until_listening(process, port)
        yield addresses


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ShardlineError("engine_unavailable", "an RPC server of llama.cpp did not start") from None
            time.sleep(0.05)


def free_port() -> int:
    """Free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute without a pause, until the end of the block."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(_ended, process)
        yield


@contextmanager
def engines_apart(threads: int) -> Iterator[None]:
    """Until the end of the block, the engines below this process have the first `threads` cores, all else the others.
    Of one stream one engine computes at a time: so each has what it would have on a machine of its own."""
    everywhere = os.sched_getaffinity(0)
    cores = sorted(everywhere)
    try:
        _place(set(cores[:threads]), set(cores[threads:]))
        yield
    finally:
        _place(everywhere, everywhere)


def _place(engines: set[int], others: set[int]) -> None:
    """Every thread of every process; those that end meanwhile need no place."""
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            cores = engines if any(module in process.cmdline() for module in _ENGINES) else others
            for thread in process.threads():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread.id, cores)
