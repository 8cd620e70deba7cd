"""A cluster whose Nodes begin with nothing: a Tracker that offers an artifact, a seeder, and machines of their own.

Each Node has a state folder of its own, as on a machine of its own; all are real processes on loopback.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

from shardline.artifact.bundle import Bundle, TrustPolicy
from shardline.artifact.ranges import shard_ranges
from shardline.artifact.signing import public_pem
from shardline.artifact.store import Store, StoredArtifact
from shardline.wire.bitmap import Pieces
from tests.support.artifacts import publisher, signed_bundle
from tests.support.cluster import Cluster, Process, until

Json = dict[str, Any]


class Plane(Cluster):
    """`bundle` is signed by the tests' publisher; the model lies beside it. `named`: the file of a folder of GGUF files
    that stands for the model."""

    def __init__(self, folder: Path, model: Path, settings: Json | None = None, *, named: str | None = None) -> None:
        super().__init__(folder, {"store_reserve_bytes": 0, **(settings or {})})
        home = folder / "publisher"
        home.mkdir()
        if model.is_dir():
            shutil.copytree(model, home / model.name)
        else:
            shutil.copyfile(model, home / model.name)
        self.original = home / model.name / (named or "")
        self.artifact = home / "described.artifact"
        self.bundle: Bundle = signed_bundle(self.original, self.artifact)
        self.content_id = self.bundle.manifest.content_id
        self.key = folder / "publisher.pub"
        self.key.write_bytes(public_pem(publisher().public_key()))

    def home(self, name: str) -> Path:
        """State folder of a Node."""
        return self.folder / f"home-{name}"

    async def start(self, port: int = 0) -> None:
        """Tracker, and the Gateway."""
        await self.offer(port)
        await self.start_gateway()

    async def offer(self, port: int = 0) -> None:
        offered = ("--artifact", str(self.artifact), "--trust", str(self.key))
        self.tracker = await self.launch("tracker", "tracker", "--port", str(port), *offered)
        await self.tracker.until("ready")

    async def seed(self, *flags: str, name: str = "seeder", **settings: Any) -> Process:
        offered = ("--artifact", str(self.artifact), "--trust", str(self.key))
        words = [*self.own(name, settings), "artifact", "seed", "--tracker", self.tracker.url, *offered, *flags]
        seeder = await self.launch(name, *words)
        await seeder.until("ready")
        return seeder

    async def empty_node(self, name: str, *flags: str, **settings: Any) -> Process:
        """`shardline node` without a file, on a machine that has only the credential."""
        words = [*self.own(name, settings), "node", "--tracker", self.tracker.url, "--threads", "1", *flags]
        node = await self.launch(name, *words)
        self.nodes.append(node)
        return node

    def own(self, name: str, settings: Json) -> list[str]:
        """Global flags of a process with a machine of its own."""
        added = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        credential = str(self.folder / "state" / "credential")
        return ["--state-dir", str(self.home(name)), "--credential-file", credential, *added]

    async def until_served(self) -> None:
        async def served() -> bool:
            models = (await self.http.get(f"{self.gateway.url}/v1/models")).json()["data"]
            self.model = models[0]["id"] if models else ""
            return bool(models) and (await self.ask(max_tokens=1)).status_code == 200

        await until(served, 30)

    async def artifacts(self) -> Json:
        """What the Tracker says of the one that it offers."""
        answer = await self.control("GET", f"{self.tracker.url}/v1/artifacts")
        assert answer.status_code == 200, answer.text
        (found,) = (one for one in answer.json()["artifacts"] if one["offered"])
        return dict(found)

    @contextmanager
    def stored(self, name: str, folder: Path | None = None) -> Iterator[StoredArtifact]:
        """The store of a Node, looked into from outside."""
        policy = TrustPolicy(content_ids=frozenset({self.content_id}))
        store = Store(folder or self.home(name) / "artifacts", reserve_bytes=0)
        with closing(store), store.open(self.content_id, policy) as artifact:
            yield artifact


def events(process: Process, name: str) -> list[Json]:
    """What a process has logged under this name."""
    found = []
    for line in process.log.read_text().splitlines():
        if line.startswith("{") and json.loads(line).get("event") == name:
            found.append(json.loads(line))
    return found


def fetched(process: Process) -> tuple[int, dict[str, int]]:
    """Bytes that all fetches of a process brought, and from whom."""
    total, by_source = 0, dict[str, int]()
    for told in events(process, "pieces_fetched"):
        total += told["bytes"]
        for source, count in told["sources"].items():
            by_source[source] = by_source.get(source, 0) + count
    return total, by_source


def wanted_bytes(artifact: StoredArtifact, first: int, last: int) -> int:
    """Bytes of the pieces of a Shard."""
    wanted = artifact.wanted(first, last)
    return artifact.bytes_of({n: Pieces.of(artifact.files[n].count, pieces) for n, pieces in wanted.items()})


def range_bytes(artifact: StoredArtifact, first: int, last: int) -> int:
    """Bytes of the Shard's own ranges, headers included, not rounded to pieces."""
    return sum(found.end - found.start for found in shard_ranges(artifact.bundle.manifest, first, last))


@asynccontextmanager
async def plane(
    folder: Path, model: Path, settings: Json | None = None, *, named: str | None = None
) -> AsyncIterator[Plane]:
    """Tracker and Gateway run; seeders and Nodes are for the test to start."""
    cluster = Plane(folder, model, settings, named=named)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()
