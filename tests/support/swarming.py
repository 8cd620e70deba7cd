"""A Node that fetches everything by BitTorrent, to be killed: STORE CONTENT_ID HOST:PORT. A dot for each news."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from shardline.artifact import fetch as fetching
from shardline.artifact.fetch import Fetch
from shardline.artifact.store import Store
from shardline.node.swarm import Swarm
from shardline.settings import Settings
from shardline.wire.artifacts import Source
from tests.support.stores import ANYBODY
from tests.support.swarms import until


async def main(store: str, content_id: str, seeder: str) -> None:
    fetching.COMMIT_S = 0.02
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

    async def sources(content_id: str) -> Sequence[Source]:
        return [Source(node="n-one", url="http://127.0.0.1:9", bittorrent=seeder)]

    with Store(Path(store), reserve_bytes=0).open(content_id, ANYBODY) as artifact:
        swarm = Swarm(Settings(), "127.0.0.1", sources, environment=os.environ)
        swarm.put(artifact)
        async with asyncio.TaskGroup() as group:
            group.create_task(swarm.run())
            await until(lambda: swarm.port is not None)
            fetch = Fetch(
                artifact,
                {0: range(artifact.files[0].count)},
                connections=2,
                progress=lambda told: print(".", end="", flush=True),
            )
            source = swarm.source(content_id)
            if source is None:
                raise SystemExit(swarm.off)
            fetch.add(source)
            print("begun", flush=True)
            await fetch.run()
            print("done", flush=True)
            await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
