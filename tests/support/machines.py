"""A cluster over several machines (namespaces.py), started as people start one: by typed commands and printed lines.

Every machine has a state folder of its own. What is typed runs in a shell there, with `shardline` in its PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.cluster import Stream, until
from tests.support.namespaces import Host, Network

Json = dict[str, Any]
READY = re.compile('^{.*"phase": "ready".*"role": "node"}$', re.MULTILINE)
"""What a Node says where one pipe takes that and its log."""
_LINE = re.compile(r"^\s+(shardline node --join '[^']+')$", re.MULTILINE)
_GATEWAY = re.compile(r"^Gateway: http://127\.0\.0\.1:(\d+)$", re.MULTILINE)


class Typed:
    """A command that runs on a machine, and what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(4096):
            self.text += data.decode()
            self._changed.set()
        self._changed.set()

    async def until(self, pattern: re.Pattern[str], *, count: int = 1, within_s: float = 60.0) -> list[str]:
        """Wait until it has printed what fits `pattern` so often; all that fits."""
        async with asyncio.timeout(within_s):
            while len(found := pattern.findall(self.text)) < count:
                if self._reader.done():
                    raise AssertionError(f"it ended before it printed {pattern.pattern}:\n{self.text}")
                self._changed.clear()
                await self._changed.wait()
        return found

    async def whole(self, within_s: float = 60.0) -> str:
        async with asyncio.timeout(within_s):
            await self.process.wait()
            await self._reader
        return self.text

    async def end(self) -> None:
        if self.process.returncode is None:
            # The shell has replaced itself by the command; `ip netns exec` by the shell.
            self.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(15):
                    await self.process.wait()
            except TimeoutError:
                os.killpg(self.process.pid, signal.SIGKILL)
                await self.process.wait()
        await self._reader


class Machines:
    """`hosts[0]` runs Tracker and Gateway."""

    def __init__(self, net: Network, folder: Path, script: Json) -> None:
        self.net = net
        self.hosts = net.hosts
        self.folder = folder
        self.model = "scripted"
        self.script = folder / "script.json"
        self.script.write_text(json.dumps({"model": self.model, "n_layers": 6, **script}))
        self.nodes: dict[str, Host] = {}
        """Node id -> its machine."""
        self.http = httpx.AsyncClient(timeout=60, trust_env=False)
        self._running: list[Typed] = []
        self._lines = 0
        self._url = ""
        self.served: Typed

    async def type(self, host: Host, command: str) -> Typed:
        """Run `command` in a shell of `host`."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder / host.namespace),
            "XDG_STATE_HOME": str(self.folder / host.namespace / "state"),
        }
        process = await asyncio.create_subprocess_exec(
            *host.prefix,
            "sh",
            "-c",
            f"exec {command}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            cwd=self.folder,
            start_new_session=True,
        )
        typed = Typed(process)
        self._running.append(typed)
        return typed

    async def serve(self, flags: str = "") -> None:
        self.served = await self.type(self.hosts[0], f"shardline serve --listen 0.0.0.0 {flags}")
        await self.served.until(_LINE)
        (port,) = await self.served.until(_GATEWAY)
        self._url = self.net.door(self.hosts[0], int(port)).url

    async def printed_line(self) -> str:
        """The line that nobody has used yet, as it was printed last."""
        found = await self.served.until(_LINE, count=self._lines + 1)
        self._lines = len(found)
        return found[-1]

    async def node(self, host: Host, layers: str, flags: str = "--engine scripted --inline", line: str = "") -> Typed:
        """Paste the printed line on `host`, with the model behind it."""
        line = line or await self.printed_line()
        typed = await self.type(host, f"{line} --model {shlex.quote(str(self.script))} --layers {layers} {flags}")
        await typed.until(READY)
        for listed in await self.listed():
            if host.address in listed["url"]:
                self.nodes[listed["id"]] = host
        return typed

    def node_of(self, host: Host) -> str:
        return next(node for node, its in self.nodes.items() if its is host)

    async def listed(self) -> list[Json]:
        """`shardline nodes --json` on the Tracker's machine."""
        typed = await self.type(self.hosts[0], "shardline nodes --json")
        return list(json.loads(await typed.whole())["nodes"])

    async def until_free(self, within_s: float = 6.0) -> float:
        """Wait until the Tracker has heard from every Node that lives that no KV is held; seconds that it took."""
        started = time.monotonic()

        async def free() -> bool:
            kvs = [node["kv"] for node in await self.listed() if node["last_seen_s"] < 1.5]
            return bool(kvs) and all(
                (kv["used_tokens"], kv["reserved_tokens"], kv["sessions"]) == (0, 0, 0) for kv in kvs
            )

        await until(free, within_s)
        return time.monotonic() - started

    def body(self, content: str = "hello", **more: Any) -> Json:
        return {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0, **more}

    async def ask(self, content: str = "hello", **more: Any) -> httpx.Response:
        return await self.http.post(f"{self._url}/v1/chat/completions", json=self.body(content, **more))

    @asynccontextmanager
    async def streamed(self, content: str = "hello", **more: Any) -> AsyncIterator[Stream]:
        async with self.http.stream(
            "POST", f"{self._url}/v1/chat/completions", json=self.body(content, stream=True, **more)
        ) as response:
            yield Stream(response)

    async def record(self, session_id: str) -> Json:
        """The account of one session."""
        return dict((await self.http.get(f"{self._url}/v1/route-sessions/{session_id}")).json())

    async def stop(self) -> None:
        await self.http.aclose()
        for typed in reversed(self._running):
            await typed.end()


@asynccontextmanager
async def machines(folder: Path, count: int, script: Json) -> AsyncIterator[Machines]:
    with Network(count) as net:
        cluster = Machines(net, folder, script)
        try:
            yield cluster
        finally:
            await cluster.stop()
