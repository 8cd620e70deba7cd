"""Composite Nodes in front of other people's server, as processes: llama-cpp-python's, and its death in mid-stream."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.api_cluster import until
from tests.support.cluster import Cluster, Process
from tests.support.relay import free_port

pytestmark = [pytest.mark.llama, pytest.mark.timeout(180)]
pytest.importorskip("llama_cpp")
for needed in ("fastapi", "pydantic_settings", "sse_starlette", "starlette_context"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"the extra `server` of llama-cpp-python is not installed: no {needed}", allow_module_level=True)

CONTEXT = 8192
TALK = {"max_tokens": 6000, "temperature": 1.0, "seed": 3, "logit_bias": {str(i): -100 for i in range(260)}}
"""Letters, and no end: no special tokens, and no bytes, of which that server holds back what is no character yet."""


class Server:
    """`python -m llama_cpp.server`, which may be ended and started again on its port."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port = free_port()
        self._model = model
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        flags = [
            "--model",
            str(self._model),
            "--model_alias",
            "tiny",
            "--n_ctx",
            str(CONTEXT),
            "--port",
            str(self.port),
        ]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "llama_cpp.server", *flags, "--n_threads", "1", stdout=log, stderr=log
            )

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def before(folder: Path) -> AsyncIterator[tuple[Cluster, Server]]:
    """A cluster of processes with one composite Node, started while its upstream still loads."""
    from tests.support.tiny_gguf import write_tiny_gguf
    from tests.support.tiny_models import BY_NAME

    server = Server(write_tiny_gguf(BY_NAME["llama"], folder / "tiny.gguf"), folder / "server.log")
    cluster = Cluster(folder, {})
    try:
        await server.start()
        await cluster.start_tracker()
        await cluster.start_gateway()
        node = await launch(cluster, server)
        await node.until("ready", 90)
        cluster.model = "tiny"
        yield cluster, server
    except AssertionError as failed:
        logs = [(folder / name).read_text()[-1500:] for name in ("server.log", "node0.log")]
        raise AssertionError(str(failed), *logs) from failed
    finally:
        await cluster.stop()
        await server.kill()


async def launch(cluster: Cluster, server: Server) -> Process:
    flags = ["--tracker", cluster.tracker.url, "--upstream", server.url, "--model", "tiny"]
    more = ["--context-length", str(CONTEXT), "--sessions", "1"]
    node = await cluster.launch("node0", "node", *flags, *more)
    cluster.nodes.append(node)
    return node


async def test_answers_death_and_return(tmp_path: Path) -> None:
    async with before(tmp_path) as (cluster, server):
        whole = await cluster.ask(max_tokens=8)
        assert whole.status_code == 200, whole.text
        assert whole.json()["choices"][0]["finish_reason"] in ("stop", "length")
        assert await cluster.text(max_tokens=8, seed=3) == await cluster.text(max_tokens=8, seed=3)
        async with cluster.streamed(max_tokens=8) as stream:
            await stream.read_all()
        assert stream.done and stream.error is None
        refused = await cluster.ask(top_k=3)
        assert refused.json()["error"]["param"] == "top_k"

        # Whoever leaves frees it: it has one place, and the next request is answered soon.
        async with cluster.streamed(**TALK) as stream:
            await stream.read_tokens(1)
        left = time.monotonic()
        assert (await cluster.ask(max_tokens=2)).status_code == 200
        assert time.monotonic() - left < 5
        await cluster.until_free()

        async with cluster.streamed(**TALK) as stream:
            await stream.read_tokens(2)
            killed = time.monotonic()
            await server.kill()
            await stream.read_all()
        assert stream.error is not None and stream.error_at is not None
        assert stream.error["code"] == "engine_lost" and stream.error_at - killed < 1
        await cluster.until_free()
        assert (await cluster.ask()).status_code == 503
        await server.start()

        async def answers() -> bool:
            return (await cluster.ask(max_tokens=2)).status_code == 200

        await until(answers, 60)


async def test_a_stopped_server_is_silent_and_no_more(tmp_path: Path) -> None:
    """It hangs: the connection stays, nothing comes, and the limit of a step ends the answer."""
    async with before(tmp_path) as (cluster, server):
        cluster.settings.update(step_s=1)
        await cluster.nodes[0].end()
        cluster.nodes.clear()
        node = await launch(cluster, server)
        await node.until("ready", 60)
        assert server._process is not None
        async with cluster.streamed(**TALK) as stream:
            await stream.read_tokens(1)
            server._process.send_signal(signal.SIGSTOP)
            await stream.read_all()
        assert stream.error is not None and stream.error["code"] in ("deadline", "engine_lost")
        server._process.send_signal(signal.SIGCONT)
        await cluster.until_free()
