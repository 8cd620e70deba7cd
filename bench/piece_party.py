"""Two sides of a fetch, each a process of its own as a Node is: one gives pieces of a model, one stores them.

    python -m bench.piece_party seed FOLDER         serves until stdin ends
    python -m bench.piece_party fetch FOLDER URL    fetches once into an empty store, and says what it took

FOLDER holds a bundle (`bundle/`), the model (`model.gguf`) and, where HTTPS is measured, `keys/`. Answers are JSON, one
a line.
"""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from shardline.artifact.adoption import adopt
from shardline.artifact.bundle import TrustPolicy, load_bundle
from shardline.artifact.fetch import Fetch
from shardline.artifact.shelf import Shelf
from shardline.artifact.store import Store, StoredArtifact
from shardline.settings import Settings
from shardline.transport.authority import Authority, key_pem, new_key
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import serve
from shardline.transport.pace import Pace
from shardline.transport.piece_client import NodePieces, PieceFile
from shardline.transport.piece_server import PREFIX, PieceServer, piece_app
from shardline.transport.tls import ClusterTls

CREDENTIAL = "bench"
SEEDER, FETCHER = "n-aaaaaaaaaaaaaaaa", "n-bbbbbbbbbbbbbbbb"
_ANYBODY = TrustPolicy(allow_unsigned=True)
_KEYS_S = 86400.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """One fetch."""

    nbytes: int
    seconds: float
    cpu_s: float
    memory_mib: float
    """The most that was resident."""


def write_keys(folder: Path) -> None:
    """An authority, and a certificate and key for either party."""
    folder.mkdir()
    now = time.time()
    authority = Authority.made(folder / "authority.pem", now)
    (folder / "trusted.pem").write_bytes(authority.certificate_pem)
    for party in (SEEDER, FETCHER):
        key = new_key()
        (folder / f"{party}.crt").write_bytes(
            authority.issue(key.public_key(), party, ["127.0.0.1"], now=now, seconds=_KEYS_S)
        )
        (folder / f"{party}.key").write_bytes(key_pem(key))


def _tls(folder: Path, party: str) -> ClusterTls:
    keys = folder / "keys"
    files = ("trusted.pem", f"{party}.crt", f"{party}.key")
    return ClusterTls(*((keys / name).read_bytes() for name in files))


def _opened(folder: Path, name: str) -> StoredArtifact:
    """An empty store with the artifact in it."""
    shutil.rmtree(folder / name, ignore_errors=True)
    store = Store(folder / name, reserve_bytes=0)
    return store.add(load_bundle(folder / "bundle", _ANYBODY))


async def _seed(folder: Path) -> None:
    settings, shelf = Settings(), Shelf()
    with _opened(folder, "seeder") as artifact:
        adopt(artifact, 0, folder / "model.gguf")
        shelf.put(artifact)
        app = piece_app(PieceServer(shelf, settings), CREDENTIAL)
        plain = await serve(app, settings=settings, lifespan="off")
        secure = await serve(app, settings=settings, lifespan="off", tls=_tls(folder, SEEDER).server())
        path = f"{PREFIX}{artifact.content_id}/{artifact.files[0].name}"
        named = secure.url.replace("://", f"://{SEEDER}@")
        print(json.dumps({"http": plain.url, "https": named, "path": path}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for server in (plain, secure):
            await server.stop(0)


async def _fetch(folder: Path, url: str) -> Fetched:
    with _opened(folder, "fetcher") as artifact:
        manifest = artifact.bundle.manifest
        files = [
            PieceFile(entry.pieces_root, entry.size, manifest.piece_length, manifest.torrent_path(entry))
            for entry in manifest.files
        ]
        settings = Settings()
        tls = _tls(folder, FETCHER) if url.startswith("https:") else None
        client = HttpClient(settings, credential=CREDENTIAL, tls=tls)
        everything = {number: range(file.count) for number, file in enumerate(artifact.files)}
        job = Fetch(artifact, everything, connections=settings.fetch_connections)
        job.add(NodePieces(client, url, artifact.content_id, files, Pace(0)))
        began, cpu = time.monotonic(), time.process_time()
        told = await job.run()
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        await client.aclose()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Fetched(told.fetched_bytes, seconds, cpu_s, most / 1024)


def main(arguments: list[str]) -> None:
    what, folder, *rest = arguments
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if what == "seed":
            runner.run(_seed(Path(folder)))
        else:
            print(json.dumps(asdict(runner.run(_fetch(Path(folder), rest[0])))))


if __name__ == "__main__":
    main(sys.argv[1:])
