"""A Node from nothing at a Tracker that gives garbage for a description: refused by name or asked again; never kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from shardline.artifact.bundle import MANIFEST_NAME, TORRENT_NAME, Bundle
from shardline.wire.artifacts import ArtifactInfo, ArtifactList
from shardline.wire.manifest import MANIFEST_BYTES_LIMIT
from tests.support.artifacts import big_gguf, signed_bundle
from tests.support.cluster import Cluster, Process, until

Answer = Callable[[str], Iterator[bytes]]
"""Path of a file in the bundle -> the answer, head included, in parts; as long as the caller takes them."""
ABSENT = b'{"error": {"code": "not_found", "message": "no bundle that is offered here has such a file"}}'
MEMORY = 400 << 20
"""Of a Node that holds nothing yet, libraries included."""


def whole(body: bytes, status: str = "200 OK", kind: str = "application/octet-stream") -> Iterator[bytes]:
    yield f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def endless() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    part = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    while True:
        yield part


def huge() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-length: 1099511627776\r\n\r\n"
    while True:
        yield bytes(0x10000)


class Garbage:
    """A Tracker that offers `bundle`, and answers for its files with `answer`."""

    def __init__(self, bundle: Bundle, answer: Answer) -> None:
        self.asked: list[str] = []
        self._answer = answer
        manifest = bundle.manifest
        layers = [0] * manifest.model.n_layers
        info = ArtifactInfo(
            content_id=manifest.content_id,
            name=manifest.name,
            offered=True,
            n_layers=len(layers),
            coverage=layers,
            served=layers,
        )
        self._offers = msgspec.json.encode(ArtifactList(artifacts=[info]))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split()[1].decode()
                name = path.partition("/bundle/")[2]
                self.asked.append(name or path)
                for part in self._answer(name) if name else whole(self._offers, kind="application/json"):
                    writer.write(part)
                    await writer.drain()
        writer.close()


@asynccontextmanager
async def node_at(tmp_path: Path, answer: Answer, bundle: Bundle) -> AsyncIterator[tuple[Process, Garbage]]:
    garbage = Garbage(bundle, answer)
    cluster = Cluster(tmp_path, {})
    server = await asyncio.start_server(garbage.serve, "127.0.0.1", 0)
    try:
        credential = tmp_path / "credential"
        credential.write_text("c" * 43)
        credential.chmod(0o600)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        flags = ("--credential-file", str(credential), "node", "--tracker", url, "--no-adopt")
        yield await cluster.launch("node", *flags), garbage
    finally:
        await cluster.stop()
        server.close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle")
    return signed_bundle(big_gguf(folder), folder / "a")


def left(tmp_path: Path) -> list[str]:
    """What lies in the store."""
    found = (tmp_path / "state" / "artifacts").rglob("*")
    return [path.name for path in found if path.is_file()]


@pytest.mark.parametrize("body", [endless, huge], ids=["endless", "huge"])
async def test_a_body_without_an_end(tmp_path: Path, bundle: Bundle, body: Callable[[], Iterator[bytes]]) -> None:
    """Cut off where a manifest must end; it is asked again, in little memory, and nothing of it is kept."""
    async with node_at(tmp_path, lambda name: body(), bundle) as (node, garbage):

        async def asked_again() -> bool:
            return garbage.asked.count(MANIFEST_NAME) >= 3

        await until(asked_again, 40)
        assert node.process.returncode is None and "waiting" in node.phases
        assert psutil.Process(node.pid).memory_info().rss < MEMORY
        assert left(tmp_path) == []


def others(bundle: Bundle, name: str, raw: bytes) -> Answer:
    """True answers, but for one file."""

    def answer(asked: str) -> Iterator[bytes]:
        path = bundle.folder / asked
        if asked == name:
            return whole(raw)
        return whole(path.read_bytes()) if path.exists() else whole(ABSENT, "404 Not Found", "application/json")

    return answer


@pytest.mark.parametrize(
    ("name", "raw", "codes"),
    [
        (MANIFEST_NAME, b"", ("artifact_invalid",)),
        (MANIFEST_NAME, b"<html>login</html>", ("artifact_invalid",)),
        (MANIFEST_NAME, b"[" * 100_000, ("artifact_invalid",)),
        (MANIFEST_NAME, b"x" * MANIFEST_BYTES_LIMIT, ("artifact_invalid",)),
        (TORRENT_NAME, b"de", ("artifact_invalid",)),
        (TORRENT_NAME, b"l" * 1_000_000, ("artifact_invalid",)),
    ],
    ids=["empty", "web page", "deep", "as large as may be", "another torrent", "deep torrent"],
)
async def test_garbage_ends_it_by_name(
    tmp_path: Path, bundle: Bundle, name: str, raw: bytes, codes: tuple[str, ...]
) -> None:
    async with node_at(tmp_path, others(bundle, name, raw), bundle) as (node, _):
        async with asyncio.timeout(40):
            await node.process.wait()
        await node.end()
        assert node.phases[-1] == "failed", node.log.read_text()[-2000:]
        assert node.facts["code"] in codes, node.facts
        assert left(tmp_path) == []


async def test_the_description_of_another_content(tmp_path: Path, bundle: Bundle) -> None:
    other = tmp_path / "other"
    other.mkdir()
    wrong = signed_bundle(big_gguf(other, tied=False), other / "a")
    async with node_at(tmp_path, others(wrong, "", b""), bundle) as (node, _):
        async with asyncio.timeout(40):
            await node.process.wait()
        await node.end()
        assert node.facts["code"] == "artifact_mismatch"
        assert bundle.manifest.content_id in str(node.facts["message"])
        assert left(tmp_path) == []
