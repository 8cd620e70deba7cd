"""Whole clusters of real processes for tests: Tracker, Gateway, Nodes, and proxies between them where asked for.

Everything is started by the command line, on free ports, in a state folder of its own, and is gone at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.step_proxy import StepProxy

START_S = 60.0
Json = dict[str, Any]


class Process:
    """One started part. `facts` collects what it announced."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.facts: Json = {}
        self.phases: list[str] = []
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return str(self.facts["url"])

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            with contextlib.suppress(ValueError, KeyError, AttributeError):
                said = json.loads(line)
                self.phases.append(said.pop("phase"))
                self.facts.update(said)
            self._changed.set()
        self._changed.set()

    async def until(self, phase: str, within_s: float = START_S) -> None:
        async with asyncio.timeout(within_s):
            while phase not in self.phases:
                if self._reader.done():
                    raise AssertionError(
                        f"{self.name} ended before {phase}: {self.facts}\n{self.log.read_text()[-3000:]}"
                    )
                self._changed.clear()
                await self._changed.wait()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def end(self) -> int:
        """SIGTERM (and SIGCONT, should it be stopped), then wait; killed when it takes too long."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.terminate()
            try:
                async with asyncio.timeout(15):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        await self._reader
        assert self.process.returncode is not None
        return self.process.returncode


class Cluster:
    """A running cluster. `nodes[i]` are the Nodes in the order in which they were asked for."""

    def __init__(self, folder: Path, settings: Json, environment: dict[str, str] | None = None) -> None:
        """`environment`: added to what the processes inherit."""
        self.folder = folder
        self.settings = settings
        self.environment = environment or {}
        self.processes: list[Process] = []
        self.nodes: list[Process] = []
        self.proxies: dict[int, StepProxy] = {}
        self.tracker: Process
        self.gateway: Process
        self.http = httpx.AsyncClient(timeout=60, trust_env=False)
        self.model = ""

    # ---- starting --------------------------------------------------------------------------------------------

    async def launch(self, name: str, *arguments: str) -> Process:
        log = self.folder / f"{name}.log"
        flags = ["--state-dir", str(self.folder / "state"), "--log-format", "json"]
        for key, value in self.settings.items():
            flags += ["--set", f"{key}={value}"]
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith("SHARDLINE_") and not k.lower().endswith("_proxy")
        } | self.environment
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "shardline",
                "--supervised",
                *flags,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=self.folder,
            )
        part = Process(name, process, log)
        self.processes.append(part)
        return part

    async def start_tracker(self, port: int = 0) -> Process:
        self.tracker = await self.launch("tracker", "tracker", "--port", str(port))
        await self.tracker.until("ready")
        return self.tracker

    async def start_gateway(self, *arguments: str) -> Process:
        name = f"gateway{sum(p.name.startswith('gateway') for p in self.processes) or ''}"
        gateway = await self.launch(name, "gateway", "--tracker", self.tracker.url, "--port", "0", *arguments)
        await gateway.until("ready")
        self.gateway = gateway
        return gateway

    async def start_node(self, model: str, *arguments: str, proxied: bool = False) -> Process:
        number = len(self.nodes)
        extra: list[str] = []
        if proxied:
            proxy = self.proxies[number] = StepProxy()
            await proxy.__aenter__()
            port = _free_port()
            proxy.target = ("127.0.0.1", port)
            extra = ["--port", str(port), "--advertise", proxy.url]
        node = await self.launch(
            f"node{number}", "node", "--tracker", self.tracker.url, "--model", model, *arguments, *extra
        )
        self.nodes.append(node)
        return node

    # ---- asking ----------------------------------------------------------------------------------------------

    def credential(self) -> str:
        return (self.folder / "state" / "credential").read_text().strip()

    async def control(self, method: str, url: str, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.credential()}", "shardline-protocol": "1", **more.pop("headers", {})}
        return await self.http.request(method, url, headers=headers, **more)

    def node_port(self, number: int) -> int:
        """The Node's own port, behind its proxy where it has one."""
        proxy = self.proxies.get(number)
        if proxy is not None:
            assert proxy.target is not None
            return proxy.target[1]
        return int(self.nodes[number].url.rsplit(":", 1)[1])

    async def node_info(self, number: int) -> Json:
        answer = await self.control("GET", f"http://127.0.0.1:{self.node_port(number)}/v1/node")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def kv(self, number: int) -> Json:
        return dict((await self.node_info(number))["kv"])

    async def session(self, session_id: str) -> Json:
        answer = await self.http.get(f"{self.gateway.url}/v1/route-sessions/{session_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def body(self, content: str = "hello", **more: Any) -> Json:
        return {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0, **more}

    async def ask(self, content: str = "hello", **more: Any) -> httpx.Response:
        return await self.http.post(f"{self.gateway.url}/v1/chat/completions", json=self.body(content, **more))

    async def text(self, content: str = "hello", **more: Any) -> str:
        answer = await self.ask(content, **more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    @asynccontextmanager
    async def streamed(self, content: str = "hello", **more: Any) -> AsyncIterator[Stream]:
        async with self.http.stream(
            "POST", f"{self.gateway.url}/v1/chat/completions", json=self.body(content, stream=True, **more)
        ) as response:
            yield Stream(response)

    async def until_free(self, numbers: Sequence[int] | None = None, within_s: float = 5.0) -> float:
        """Wait until no KV token is used or reserved on the Nodes; how long it took, in seconds."""
        started = time.monotonic()
        for number in range(len(self.nodes)) if numbers is None else numbers:
            await until(lambda number=number: self._is_free(number), within_s)  # type: ignore[misc]
        return time.monotonic() - started

    async def _is_free(self, number: int) -> bool:
        kv = await self.kv(number)
        return (kv["used_tokens"], kv["reserved_tokens"], kv["sessions"]) == (0, 0, 0)

    # ---- ending ----------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        await self.http.aclose()
        async with asyncio.TaskGroup() as tasks:
            for process in self.processes:
                tasks.create_task(process.end())
        for proxy in self.proxies.values():
            await proxy.__aexit__()


class Stream:
    """A streamed completion, event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.text = ""
        self.chunks: list[Json] = []
        self.comments: list[str] = []
        self.error: Json | None = None
        self.error_at: float | None = None
        self.done = False
        self.finish_reason: str | None = None
        self._lines = response.aiter_lines()

    @property
    def session_id(self) -> str:
        return self.response.headers["shardline-route-session"].split(",")[0]

    async def next(self) -> Json | None:
        """The next data event, or None at the end of the stream."""
        async for line in self._lines:
            if line.startswith(":"):
                self.comments.append(line)
            elif line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                return self._take(json.loads(line[6:]))
        return None

    def _take(self, event: Json) -> Json:
        if "error" in event:
            self.error = event["error"]
            self.error_at = time.monotonic()
            return event
        self.chunks.append(event)
        for choice in event.get("choices", ()):
            self.text += _text_of(choice)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return event

    async def read_tokens(self, count: int) -> None:
        """Read on until `count` chunks with text have come."""
        while sum(bool(c["choices"] and _text_of(c["choices"][0])) for c in self.chunks) < count:
            if await self.next() is None:
                raise AssertionError(f"the stream ended early: {self.text!r}, error {self.error}")

    async def read_all(self) -> None:
        while await self.next() is not None:
            pass


def _text_of(choice: Json) -> str:
    """What a chunk adds: chat has it in `delta`, completions in `text`."""
    return str(choice.get("delta", {}).get("content") or choice.get("text") or "")


async def until(condition: Callable[[], Any], within_s: float = 5.0) -> None:
    """Poll an async condition until it holds."""
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s")
        await asyncio.sleep(0.02)


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def worker_pid(info: Json) -> int:
    """The engine worker's pid, as the operating system sees it."""
    pid = info["health"]["pid"]
    assert psutil.Process(pid).ppid() == info["pid"]
    return int(pid)


DEFAULT_SCRIPT: Json = {
    "model": "scripted",
    "n_layers": 6,
    "answer": [" alpha", " beta", " gamma", " delta", " epsilon", " zeta", " eta", " theta"],
}


@asynccontextmanager
async def scripted_cluster(
    folder: Path,
    *,
    layers: Sequence[str] = ("0:2", "2:4", "4:6"),
    script: Json | None = None,
    settings: Json | None = None,
    proxied: Sequence[int] = (),
    inline: bool = True,
    node_arguments: Sequence[str] = (),
    gateway_arguments: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster on the scripted engine, with one Node for each range of `layers`, ready to be asked."""
    cluster = Cluster(folder, settings or {}, environment)
    written = {**DEFAULT_SCRIPT, **(script or {})}
    path = folder / "script.json"
    path.write_text(json.dumps(written))
    cluster.model = written["model"]
    try:
        await cluster.start_tracker()
        gateway = asyncio.create_task(cluster.start_gateway(*gateway_arguments))
        for number, span in enumerate(layers):
            flags = ["--engine", "scripted", "--layers", span, *(["--inline"] if inline else []), *node_arguments]
            await cluster.start_node(str(path), *flags, proxied=number in proxied)
        await gateway
        for node in cluster.nodes:
            await node.until("ready")
        yield cluster
    finally:
        await cluster.stop()


@asynccontextmanager
async def model_cluster(
    folder: Path,
    model: Path,
    *,
    layers: Sequence[str],
    engine: str = "torch",
    settings: Json | None = None,
    proxied: Sequence[int] = (),
    node_arguments: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster on an engine that computes, with one Node and one engine worker for each range of `layers`."""
    cluster = Cluster(folder, settings or {}, environment)
    try:
        await cluster.start_tracker()
        gateway = asyncio.create_task(cluster.start_gateway())
        for number, span in enumerate(layers):
            flags = ["--engine", engine, "--layers", span, *node_arguments]
            await cluster.start_node(str(model), *flags, proxied=number in proxied)
            # Few at a time: importing and loading is bound by two cores, and each has its limit.
            if number >= (at_once := 1 if engine == "torch" else 4) - 1:
                await cluster.nodes[number + 1 - at_once].until("ready", 120)
        await gateway
        for node in cluster.nodes:
            await node.until("ready", 300)
        models = (await cluster.http.get(f"{cluster.gateway.url}/v1/models")).json()["data"]
        cluster.model = models[0]["id"]
        yield cluster
    finally:
        await cluster.stop()
