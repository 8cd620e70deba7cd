"""A process that fetches a file of one's own disk piece by piece, to be killed: STORE CONTENT_ID FILE DELAY_S ASKED.

It commits at every turn, and writes each range that it asks for to the file ASKED.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from shardline.artifact import fetch as fetching
from shardline.artifact import fetch_plan
from shardline.artifact.fetch import Fetch
from shardline.artifact.store import Store
from tests.support.stores import ANYBODY, FileSource


class Recorded(FileSource):
    """Keeps an account that outlives its process."""

    def __init__(self, path: Path, asked: Path, delay_s: float) -> None:
        super().__init__(path, delay_s=delay_s)
        self._file = asked.open("a")

    async def read(self, number: int, start: int, into: memoryview) -> None:
        self._file.write(f"{start} {start + len(into)}\n")
        self._file.flush()
        await super().read(number, start, into)


async def main(store: str, content_id: str, path: str, delay_s: str, asked: str) -> None:
    fetching.COMMIT_S = 0.01
    fetch_plan.RUN_BYTES = (1 << 18, 1 << 18)
    fetching.RUN_BYTES = fetch_plan.RUN_BYTES
    with Store(Path(store), reserve_bytes=0).open(content_id, ANYBODY) as artifact:
        fetch = Fetch(artifact, {0: range(artifact.files[0].count)}, connections=2)
        fetch.add(Recorded(Path(path), Path(asked), float(delay_s)))
        print("begun", flush=True)
        await fetch.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
