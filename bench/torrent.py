"""A fetch by BitTorrent, both sides a process of their own as Nodes are, each with its BitTorrent process.

    python -m bench.torrent seed FOLDER [tls]          serves until stdin ends
    python -m bench.torrent fetch FOLDER PORT [tls]    fetches once into an empty store, and says what it took

FOLDER is piece_party.py's. `measure` runs both. CPU is that of the fetching Node with its BitTorrent process.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import structlog
import uvloop

from bench.piece_party import FETCHER, SEEDER, Fetched, _opened, _tls
from shardline.artifact.adoption import adopt
from shardline.artifact.fetch import Fetch
from shardline.artifact.store import StoredArtifact
from shardline.node.swarm import Swarm
from shardline.settings import Settings
from shardline.transport.torrent_process import missing
from shardline.wire.artifacts import Source

_READY_S = 30.0
_FETCH_S = 600.0


def why_not() -> str | None:
    """Why it cannot be measured here; None: it can."""
    return missing()


def measure(folder: Path, *, tls: bool) -> Fetched:
    """One fetch of all pieces, between two Nodes on loopback. Raises CalledProcessError with the party's words."""
    way = ["tls"] if tls else []
    party = [sys.executable, "-m", "bench.torrent"]
    seeder = subprocess.Popen(
        [*party, "seed", str(folder), *way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert seeder.stdout is not None
        port = json.loads(seeder.stdout.readline())["port"]
        told = subprocess.run(
            [*party, "fetch", str(folder), str(port), *way],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_FETCH_S,
        )
    finally:
        seeder.communicate(timeout=_READY_S)
    return Fetched(**json.loads(told.stdout))


@asynccontextmanager
async def _swarm(folder: Path, artifact: StoredArtifact, named: Source, tls: str | None) -> AsyncIterator[Swarm]:
    async def sources(content_id: str) -> Sequence[Source]:
        return [named]

    keys = None if tls is None else _tls(folder, tls)
    swarm = Swarm(Settings(), "127.0.0.1", sources, environment=os.environ, tls=keys)
    swarm.put(artifact)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(swarm.run())
        async with asyncio.timeout(_READY_S):
            await swarm.settled.wait()
        yield swarm
        await swarm.take(artifact.content_id)
        running.cancel()


async def _seed(folder: Path, *, tls: bool) -> None:
    # Where the other takes connections is not known, and not needed: it calls.
    fetcher = Source(node=FETCHER, url="http://127.0.0.1:9", bittorrent="127.0.0.1:9")
    with _opened(folder, "seeder") as artifact:
        adopt(artifact, 0, folder / "model.gguf")
        async with _swarm(folder, artifact, fetcher, SEEDER if tls else None) as swarm:
            print(json.dumps({"port": swarm.port}), flush=True)
            await asyncio.to_thread(sys.stdin.read)


async def _fetch(folder: Path, port: str, *, tls: bool) -> Fetched:
    seeder = Source(node=SEEDER, url="http://127.0.0.1:9", bittorrent=f"127.0.0.1:{port}")
    with _opened(folder, "fetcher") as artifact:
        async with _swarm(folder, artifact, seeder, FETCHER if tls else None) as swarm:
            source = swarm.source(artifact.content_id)
            if source is None:
                raise SystemExit(swarm.off)
            await source.offer()  # connected, as Nodes are before they fetch
            everything = {number: range(file.count) for number, file in enumerate(artifact.files)}
            job = Fetch(artifact, everything, connections=Settings().fetch_connections)
            job.add(source)
            began, cpu = time.monotonic(), time.process_time()
            told = await job.run()
            seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        most = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, used.ru_maxrss)
        return Fetched(told.fetched_bytes, seconds, cpu_s + used.ru_utime + used.ru_stime, most / 1024)


def main(arguments: list[str]) -> None:
    what, folder, *rest = arguments
    tls = "tls" in rest
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if what == "seed":
            runner.run(_seed(Path(folder), tls=tls))
        else:
            print(json.dumps(asdict(runner.run(_fetch(Path(folder), rest[0], tls=tls)))))


if __name__ == "__main__":
    main(sys.argv[1:])
