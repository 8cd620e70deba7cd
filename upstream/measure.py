"""What a boundary costs, by each way: one run on this machine, small enough to be repeated.

Owns the systems and their order: the unsplit model, Shard files, the layer window and llama.cpp's RPC take turns in
each round, so that a busy moment hits all. Every machine of a route stands behind a proxy with a delay. Numbers only;
words are in page.py. Shown by `make upstream`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.delay import Far
from shardline.cli.bench_run import prompts_of
from shardline.cli.bench_systems import Measured, Prompts, Route, rpc_servers
from shardline.cli.cluster import planned
from shardline.cli.cluster_parts import GlobalFlags
from shardline.cli.config import resolve
from shardline.cli.demo_model import demo_model
from shardline.cli.invocation import credential_of
from shardline.cli.supervisor import Supervisor
from tests.support.delay_proxy import DelayProxy
from upstream.counting import Counting
from upstream.source import Source

DELAYS_MS = (0, 5, 25)
"""One way, in front of every process that computes."""
STREAMS = (1, 4)
ROUNDS = 2
PROMPT = 32
TOKENS = {0: 32, 5: 24, 25: 12}
VOCABULARY = 20_000
KV_TOKENS = 2048
PARTS = ("rates", "ends")
SYSTEMS = ("unsplit, 1 Node", "Shard files, 2 Nodes", "layer window, 2 Nodes", "RPC, 2 servers")


class Rpc:
    """A client of llama.cpp in a process of its own, with two servers behind proxies."""

    def __init__(self, source: Source, model: Path, ports: list[int]) -> None:
        servers = ",".join(f"127.0.0.1:{port}" for port in ports)
        command = [sys.executable, "-m", "upstream.rpc_client", str(model), "--servers", servers]
        command += ["--library", str(source.bin / "libllama.so"), "--sequences", str(max(STREAMS))]
        command += ["--kv-tokens", str(KV_TOKENS)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
        self.facts = self._answer()

    def ask(self, prompts: Prompts, tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": [list(ids) for ids in prompts], "tokens": tokens}) + "\n")
        self.process.stdin.flush()

    def run(self, prompts: Prompts, tokens: int) -> Measured:
        self.ask(prompts, tokens)
        found = self._answer()
        return Measured(found["first_s"], len(prompts) * found["steps"] / found["decode_s"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the RPC client ended: {self.process.wait()}")
        return dict(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class FarRoute(Route):
    """A route whose Nodes stand behind proxies."""

    def __init__(self, cluster: Far, credential: str, supervisor: Supervisor) -> None:
        super().__init__(cluster, credential)
        self.cluster = cluster
        self.supervisor = supervisor


@contextmanager
def far_route(folder: Path, model: Path, engine: str, nodes: int, library: Path) -> Iterator[FarRoute]:
    plan = planned(model, nodes, None, engine, threads=1, kv_tokens=KV_TOKENS, port=0)
    state = folder / f"{engine}-{nodes}"
    configuration = resolve(flags={"state_dir": str(state)}, assignments=(), config=None, environ={})
    with ExitStack() as stack, Supervisor(state / "logs", lambda child: None) as supervisor:
        cluster = Far(supervisor, plan, stack)
        credential = credential_of(configuration, starts=True)
        added = ["--set", "drain_s=1", "--set", f"llama_window_library={library}"]
        cluster.start_far(GlobalFlags(given=["--state-dir", str(state)], added=added))
        yield FarRoute(cluster, credential, supervisor)


def measured(source: Source, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Figures as JSON: `rates` of all systems, and `ends`, everything else. SystemExit where a signal ended it."""
    figures: dict[str, Any] = {}
    for part in parts:
        with tempfile.TemporaryDirectory() as name:
            found = _PARTS[part](source, Path(name))
        if found is None:
            raise SystemExit("make upstream: the measurement was stopped before its end")
        figures |= found
    return figures


def _measured_rates(source: Source, folder: Path) -> dict[str, Any] | None:
    model, library = demo_model(), source.bin / "libllama.so"
    with ExitStack() as stack:
        routes = {
            name: stack.enter_context(far_route(folder, model, engine, nodes, library))
            for name, engine, nodes in zip(SYSTEMS, ("llama", "llama", "llama-window"), (1, 2, 2), strict=False)
        }
        servers = stack.enter_context(rpc_servers(source.bin / "ggml-rpc-server", 2, 1))
        ports = [int(address.rpartition(":")[2]) for address in servers]
        proxies = [stack.enter_context(DelayProxy("127.0.0.1", port)) for port in ports]
        rpc = Rpc(source, model, [proxy.port for proxy in proxies])
        stack.callback(rpc.close)
        return {"rates": _rates(routes, rpc, proxies)}
    return None


def _measured_ends(source: Source, folder: Path) -> dict[str, Any] | None:
    model, library = demo_model(), source.bin / "libllama.so"
    with ExitStack() as stack:
        servers = stack.enter_context(rpc_servers(source.bin / "ggml-rpc-server", 2, 1))
        rpc_bytes = _rpc_bytes(source, model, [int(address.rpartition(":")[2]) for address in servers])
        seams: dict[str, Any] = {}
        death: dict[str, Any] = {"rpc": _rpc_death(source, model)}
        for name, engine in zip(SYSTEMS[1:], ("llama", "llama-window"), strict=False):
            with far_route(folder, model, engine, 2, library) as route:
                seams[name] = _seam(route)
                death[name] = _node_death(route)
        in_process = _in_process(folder, model, library)
        return {"in_process": in_process, "seams": seams, "rpc_bytes": rpc_bytes, "death": death}
    return None


def _rates(routes: dict[str, FarRoute], rpc: Rpc, proxies: list[DelayProxy]) -> list[dict[str, Any]]:
    rows = []
    for delay in DELAYS_MS:
        for route in routes.values():
            route.cluster.delay(2 * delay / 1e3)
        for proxy in proxies:
            proxy.set(delay_s=delay / 1e3)
        for streams in STREAMS:
            found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
            for number in range(ROUNDS):
                for name in SYSTEMS:
                    prompts = prompts_of(streams, PROMPT, VOCABULARY, seed=f"{name} {delay} {number}")
                    rate = (routes.get(name) or rpc).run(prompts, TOKENS[delay]).decode
                    found[name].append(float(rate or 0.0))
            rows.append(
                {"delay_ms": delay, "streams": streams, "rates": {n: statistics.median(r) for n, r in found.items()}}
            )
            print(f"   {rows[-1]}", flush=True)
    for route in routes.values():
        route.cluster.delay(0.0)
    return rows


def _seam(route: FarRoute) -> dict[str, float]:
    route.run(prompts_of(1, PROMPT, VOCABULARY, seed="seam"), 32)
    return {f"{name}": round(decode, 1) for name, decode, _ in route.seams()}


def _rpc_bytes(source: Source, model: Path, ports: list[int]) -> dict[str, float]:
    """Bytes of a decode step, of both servers together."""
    with ExitStack() as stack:
        counters = [stack.enter_context(Counting(port)) for port in ports]
        rpc = Rpc(source, model, [counter.port for counter in counters])
        stack.callback(rpc.close)
        counts = []
        for tokens in (16, 48):
            for counter in counters:
                counter.reset()
            rpc.run(prompts_of(1, PROMPT, VOCABULARY, seed="bytes"), tokens)
            counts.append([sum(getattr(c, what) for c in counters) for what in ("there", "back")])
    there, back = ((b - a) / 32 for a, b in zip(*counts, strict=True))
    return {"there": round(there), "back": round(back)}


def _rpc_death(source: Source, model: Path) -> dict[str, Any]:
    """A server is killed while a client generates: how the client's process ends, and after how long."""
    with ExitStack() as stack:
        processes = []
        ports = []
        from shardline.cli.bench_systems import free_port

        for _ in range(2):
            port = free_port()
            command = [str(source.bin / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(_end, process)
            processes.append(process)
            ports.append(port)
        time.sleep(1.0)
        rpc = Rpc(source, model, ports)
        stack.callback(rpc.close)
        rpc.ask(prompts_of(1, PROMPT, VOCABULARY, seed="death"), 1000)
        time.sleep(1.0)
        processes[1].kill()
        killed = time.monotonic()
        code = rpc.process.wait(60)
        return {
            "after_s": round(time.monotonic() - killed, 2),
            "ends": signal.Signals(-code).name if code < 0 else code,
        }


def _node_death(route: FarRoute) -> dict[str, Any]:
    """The last Node is killed while a client reads a stream: what the client gets, and after how long."""
    import http.client
    from urllib.parse import urlsplit

    url = urlsplit(route.cluster.gateway_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    body = {"model": route._model, "prompt": prompts_of(1, PROMPT, VOCABULARY, seed="death")[0], "max_tokens": 900}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    killed = 0.0
    events = 0
    nodes = [child for child in route.supervisor.children if child.part.name == "node-2"]
    while line := answer.readline():
        if not line.startswith(b"data: "):
            continue
        events += 1
        if events == 10:
            killed = time.monotonic()
            threading.Thread(target=nodes[0].process.kill).start()
        if b'"error"' in line:
            code = json.loads(line[6:])["error"]["code"]
            connection.close()
            return {"after_s": round(time.monotonic() - killed, 2), "code": code}
    return {"after_s": None, "code": "no error"}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _in_process(folder: Path, model: Path, library: Path) -> dict[str, float]:
    """µs of a decode step through two parts of 15 layers in one process, by the way the rows come out: medians."""
    from shardline.model.backend import ShardSpec
    from shardline.model.llama_window import load
    from tests.support.llama_route import CONTENT_ID, LAYERS, SIZES, entry, through
    from tests.support.llama_route import Route as Chain

    chains: dict[str, list[Any]] = {"no cut": Chain(folder).shards}
    for name, tap in (("Shard files, sampler hook", "sampler"), ("Shard files, cb_eval in ctypes", "callback")):
        chains[name] = Chain(folder, (15,), tap=tap).shards
    options = {"content_id": CONTENT_ID, **SIZES, "library": str(library)}
    chains["layer window, layer input"] = [
        load(ShardSpec(str(model), a, b, threads=1, options=options)) for a, b in ((0, 15), (15, LAYERS))
    ]
    times: dict[str, list[float]] = {name: [] for name in chains}
    for shards in chains.values():
        for shard in shards:
            shard.open(0)
        through(shards, [entry(range(1000, 1000 + PROMPT), 0)])
    for step in range(100):
        for name, shards in chains.items():
            started = time.process_time()
            through(shards, [entry([1000 + step], PROMPT + step)])
            times[name].append(time.process_time() - started)
    for shards in chains.values():
        for shard in shards:
            shard.unload()
    return {name: round(1e6 * statistics.median(found[20:])) for name, found in times.items()}


_PARTS = {"rates": _measured_rates, "ends": _measured_ends}
