"""Sources over real sockets, hostile ones among them: what is held is right, and the liar is named."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shardline.artifact.bundle import Bundle
from shardline.artifact.fetch import Fetch, FetchProgress
from shardline.artifact.shelf import Shelf
from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport import piece_client
from shardline.transport.http_client import HttpClient
from shardline.transport.pace import Pace
from shardline.transport.piece_client import NodePieces, PieceFile, WebSeed
from shardline.transport.piece_server import PieceServer, piece_app
from tests.support.certificates import authority, party
from tests.support.stores import FileSource, content_of, filled, size_of
from tests.transport.loopback import Peer, Wire, client_of, scripted, serving

KEY = "cluster-credential"
NODE_A, NODE_B = "n-aaaaaaaaaaaaaaaa", "n-bbbbbbbbbbbbbbbb"
LENGTH = 1 << 18
ASKED = re.compile(rb"range: bytes=([0-9]+)-([0-9]+)", re.I)


def files_of(bundle: Bundle) -> list[PieceFile]:
    manifest = bundle.manifest
    return [
        PieceFile(entry.pieces_root, entry.size, manifest.piece_length, manifest.torrent_path(entry))
        for entry in manifest.files
    ]


def fetch_of(artifact: StoredArtifact, connections: int = 2) -> Fetch:
    return Fetch(artifact, {0: range(artifact.files[0].count)}, connections=connections, stall_s=1.0)


async def run(fetch: Fetch) -> FetchProgress:
    async with asyncio.timeout(30):
        return await fetch.run()


def part(start: int, end: int, size: int, body: bytes, extra: str = "") -> bytes:
    head = f"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes {start}-{end - 1}/{size}\r\n{extra}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def asked(request: bytes) -> tuple[int, int]:
    found = ASKED.search(request)
    assert found is not None
    return int(found[1]), int(found[2]) + 1


@asynccontextmanager
async def seed(answer: Callable[[Wire, int, int], Awaitable[None] | None]) -> AsyncIterator[Peer]:
    """A web seed that answers each Range request as it likes."""

    async def script(wire: Wire) -> None:
        while True:
            made = answer(wire, *asked(await wire.request()))
            if made is not None:
                await made
            await wire.writer.drain()

    async with scripted(script) as peer:
        yield peer


async def test_from_two_nodes_that_have_a_part_each(
    tmp_path: Path, artifact: StoredArtifact, bundle: Bundle, model: Path
) -> None:
    """Bytes moved are exactly the file's."""
    count = artifact.files[0].count
    shares = [range(0, count // 2), range(count // 2, count)]
    stores = [Store(tmp_path / f"of-{i}", reserve_bytes=0) for i in range(2)]
    async with client_of(credential=KEY) as client:
        fetch, servers = fetch_of(artifact), []
        for store, share in zip(stores, shares, strict=True):
            shelf = Shelf()
            held = store.add(bundle)
            filled(held, model, {0: share})
            shelf.put(held)
            servers.append(PieceServer(shelf, Settings()))
        async with serving(piece_app(servers[0], KEY)) as first, serving(piece_app(servers[1], KEY)) as second:
            for server in (first, second):
                fetch.add(NodePieces(client, server.url, artifact.content_id, files_of(bundle), Pace(0)))
            told = await run(fetch)
    assert content_of(artifact.files[0].data_path) == content_of(model)
    assert sum(server.sent_bytes for server in servers) == told.fetched_bytes == size_of(model)
    assert all(server.sent_bytes > 0 for server in servers)


async def test_between_nodes_of_a_cluster_with_keys(
    tmp_path: Path, artifact: StoredArtifact, bundle: Bundle, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both show their certificates; at the same address another Node is not asked for a byte."""
    own, shelf = authority(tmp_path), Shelf()
    held = Store(tmp_path / "held", reserve_bytes=0).add(bundle)
    filled(held, model)
    shelf.put(held)
    server_app = PieceServer(shelf, Settings())
    client = HttpClient(Settings(), credential=KEY, tls=party(own, NODE_A))
    async with serving(piece_app(server_app, KEY), tls=party(own, NODE_B).server()) as server:
        for name in ("n-cccccccccccccccc", NODE_B):
            fetch = fetch_of(artifact)
            url = f"https://{name}@127.0.0.1:{server.port}"
            fetch.add(NodePieces(client, url, artifact.content_id, files_of(bundle), Pace(0)))
            if name != NODE_B:
                monkeypatch.setattr("shardline.artifact.sources._BACKOFF_S", (0.01, 0.01))
                with pytest.raises(ShardlineError, match="another party of the cluster answers there"):
                    await run(fetch)
                assert server_app.sent_bytes == 0
                continue
            told = await run(fetch)
    await client.aclose()
    assert content_of(artifact.files[0].data_path) == content_of(model)
    assert told.fetched_bytes == server_app.sent_bytes == size_of(model)


async def test_a_node_that_fetches_gives_what_it_has(
    tmp_path: Path, artifact: StoredArtifact, bundle: Bundle, model: Path
) -> None:
    """A chain: the second Node has nothing at first, and is asked again."""
    origin, between = (Store(tmp_path / name, reserve_bytes=0).add(bundle) for name in ("origin", "between"))
    filled(origin, model)
    shelf = Shelf()
    shelf.put(between)
    async with client_of(credential=KEY) as client, serving(piece_app(PieceServer(shelf, Settings()), KEY)) as server:
        last = Fetch(artifact, {0: range(artifact.files[0].count)}, connections=2)
        last.add(NodePieces(client, server.url, artifact.content_id, files_of(bundle), Pace(0)))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(last))
            middle = fetch_of(between)
            middle.add(FileSource(model, delay_s=0.05))
            group.create_task(run(middle))
        assert task.result().state == "done"
    assert content_of(artifact.files[0].data_path) == content_of(model)


async def test_a_node_that_refuses_is_given_up_at_once(
    tmp_path: Path, artifact: StoredArtifact, bundle: Bundle, model: Path
) -> None:
    shelf = Shelf()
    async with (
        client_of(credential="wrong") as client,
        serving(piece_app(PieceServer(shelf, Settings()), KEY)) as server,
    ):
        fetch = fetch_of(artifact)
        fetch.add(NodePieces(client, server.url, artifact.content_id, files_of(bundle), Pace(0)))
        with pytest.raises(ShardlineError, match="credential is missing or wrong"):
            await run(fetch)


def right(raw: bytes) -> Callable[[Wire, int, int], None]:
    return lambda wire, start, end: wire.send(part(start, end, len(raw), raw[start:end]))


HOSTILE: dict[str, tuple[Callable[[bytes, int, int], bytes], str]] = {
    "wrong byte": (lambda raw, s, e: part(s, e, len(raw), bytes([raw[s] ^ 1]) + raw[s + 1 : e]), "is not what"),
    "200": (lambda raw, s, e: b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (e - s) + raw[s:e], "200 instead"),
    "whole file": (lambda raw, s, e: b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw, "limit"),
    "short": (lambda raw, s, e: part(s, e, len(raw), raw[s : e - 1]), "sent"),
    "long": (lambda raw, s, e: part(s, e, len(raw), raw[s:e] + b"x"), "limit"),
    "endless": (
        lambda raw, s, e: (
            b"HTTP/1.1 206 P\r\ncontent-range: bytes %d-%d/%d\r\n" % (s, e - 1, len(raw))
            + b"transfer-encoding: chunked\r\n\r\n"
            + b"100000\r\n"
            + bytes(1 << 20)
            + b"\r\n100000\r\n"
            + bytes(1 << 20)
            + b"\r\n"
        ),
        "longer than",
    ),
    "another range": (lambda raw, s, e: part(s + 1, e + 1, len(raw), raw[s:e]), "another range"),
    "another size": (lambda raw, s, e: part(s, e, len(raw) + 1, raw[s:e]), "another range"),
    "no range": (lambda raw, s, e: b"HTTP/1.1 206 P\r\ncontent-length: %d\r\n\r\n" % (e - s) + raw[s:e], "another"),
    "gzip": (lambda raw, s, e: part(s, e, len(raw), raw[s:e], "content-encoding: gzip\r\n"), "encodes"),
    "404": (lambda raw, s, e: b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno", "answered 404"),
    "503": (lambda raw, s, e: b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno", "answered 503"),
    "login page": (lambda raw, s, e: b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n<!DOCTYPE html>", "200 instead"),
    "other host": (
        lambda raw, s, e: b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.2:9/x\r\ncontent-length: 0\r\n\r\n",
        "another server",
    ),
    "file url": (
        lambda raw, s, e: b"HTTP/1.1 302 Found\r\nlocation: file:///etc/passwd\r\ncontent-length: 0\r\n\r\n",
        "no URL",
    ),
    "broken url": (
        lambda raw, s, e: b"HTTP/1.1 302 Found\r\nlocation: http://[\r\ncontent-length: 0\r\n\r\n",
        "no URL",
    ),
    "loop": (
        lambda raw, s, e: b"HTTP/1.1 302 Found\r\nlocation: /again\r\ncontent-length: 0\r\n\r\n",
        "redirects more than",
    ),
    "noise": (lambda raw, s, e: b"\x00\xff not http at all\r\n\r\n", "does not speak HTTP"),
    "no end": (lambda raw, s, e: b"HTTP/1.1 206 P\r\n\r\n" + raw[s:e], "no marked end"),
    "headers": (
        lambda raw, s, e: b"HTTP/1.1 206 P\r\nx: " + b"a" * 70000,
        "head is longer",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_web_seed_is_named_and_does_no_harm(
    artifact: StoredArtifact, bundle: Bundle, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.artifact.sources._BACKOFF_S", (0.01, 0.01))
    make, words = HOSTILE[kind]
    raw = content_of(model)
    async with client_of() as client, seed(lambda wire, s, e: wire.send(make(raw, s, e))) as peer:
        fetch = fetch_of(artifact, connections=1)
        fetch.add(WebSeed(client, peer.url + "/", files_of(bundle), Pace(0), loopback_ok=True))
        with pytest.raises(ShardlineError) as caught:
            await run(fetch)
        assert caught.value.code == "artifact_unavailable"
        assert re.search(words, caught.value.message), caught.value.message
        assert f"127.0.0.1:{peer.port}" in caught.value.message
        held = artifact.files[0].held()
        assert all(artifact.files[0].is_whole(piece) for piece in held)
        # A good one beside it, and the fetch comes to its end.
        fetch = fetch_of(artifact, connections=1)
        fetch.add(WebSeed(client, peer.url + "/", files_of(bundle), Pace(0), loopback_ok=True))
        fetch.add(FileSource(model))
        await run(fetch)
    assert content_of(artifact.files[0].data_path) == raw


@pytest.mark.parametrize(
    "headers",
    [
        "",
        'etag: "abc-gzip"\r\n',
        'etag: W/"abc"\r\n',
        'etag: "' + "0" * 64 + '"\r\n',
        "content-md5: Q2hlY2sgSW50ZWdyaXR5IQ==\r\nrepr-digest: sha-256=:AAAA:\r\n",
    ],
    ids=["none", "of a proxy", "weak", "of another file", "digests"],
)
async def test_what_a_server_says_of_its_files_is_not_looked_at(
    artifact: StoredArtifact, bundle: Bundle, model: Path, headers: str
) -> None:
    """The hashes are the manifest's."""
    raw = content_of(model)
    async with (
        client_of() as client,
        seed(lambda wire, s, e: wire.send(part(s, e, len(raw), raw[s:e], headers))) as peer,
    ):
        fetch = fetch_of(artifact)
        fetch.add(WebSeed(client, peer.url + "/", files_of(bundle), Pace(0), loopback_ok=True))
        told = await run(fetch)
    assert content_of(artifact.files[0].data_path) == raw
    assert [(source.state, source.reason) for source in told.sources] == [("active", None)]


async def test_a_silent_source_is_given_up(
    artifact: StoredArtifact, bundle: Bundle, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_client, "GRACE_S", 0.05)
    monkeypatch.setattr(piece_client, "SLOWEST_BYTES_PER_S", 1 << 40)
    monkeypatch.setattr("shardline.artifact.sources._BACKOFF_S", (0.01, 0.01))
    async with client_of() as client, seed(lambda wire, s, e: None) as peer:
        fetch = fetch_of(artifact, connections=1)
        fetch.add(WebSeed(client, peer.url + "/", files_of(bundle), Pace(0), loopback_ok=True))
        with pytest.raises(ShardlineError, match="no answer within the limit pieces"):
            await run(fetch)


async def test_a_redirect_within_the_server_is_followed(artifact: StoredArtifact, bundle: Bundle, model: Path) -> None:
    raw, paths = content_of(model), []

    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            paths.append(request.split()[1])
            if paths[-1].startswith(b"/models/"):
                wire.send(b"HTTP/1.1 307 Moved\r\nlocation: /blobs/1?sig=a%2Fb\r\ncontent-length: 0\r\n\r\n")
            else:
                start, end = asked(request)
                wire.send(part(start, end, len(raw), raw[start:end]))
            await wire.writer.drain()

    async with client_of() as client, scripted(script) as peer:
        fetch = fetch_of(artifact)
        fetch.add(WebSeed(client, peer.url + "/models/", files_of(bundle), Pace(0), loopback_ok=True))
        await run(fetch)
    assert content_of(artifact.files[0].data_path) == raw
    assert paths.count(b"/blobs/1?sig=a%2Fb") > paths.count(paths[0])


async def test_a_web_seed_gets_no_credential_and_may_not_be_this_machine(
    artifact: StoredArtifact, bundle: Bundle, model: Path
) -> None:
    requests: list[bytes] = []
    raw = content_of(model)

    async def script(wire: Wire) -> None:
        while True:
            requests.append(await wire.request())
            start, end = asked(requests[-1])
            wire.send(part(start, end, len(raw), raw[start:end]))
            await wire.writer.drain()

    async with client_of(credential=KEY) as client, scripted(script) as peer:
        fetch = fetch_of(artifact)
        fetch.add(WebSeed(client, peer.url + "/", files_of(bundle), Pace(0)))
        with pytest.raises(ShardlineError, match="loopback address"):
            await run(fetch)
        assert requests == []
        fetch = fetch_of(artifact)
        fetch.add(WebSeed(client, peer.url + "/", files_of(bundle), Pace(0), loopback_ok=True))
        await run(fetch)
    assert requests
    assert not any(KEY.encode() in request for request in requests)
    assert all(b"user-agent: shardline" in request for request in requests)


@pytest.fixture
def nginx(tmp_path: Path, model: Path) -> Iterator[str]:
    """A plain web server of the folder of the model."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("nginx is not installed")
    port = 0
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    # Where root runs it, it would else become somebody who may not read the folder.
    user = "" if os.geteuid() else "user root;\n"
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"{user}daemon off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; server {{ listen 127.0.0.1:{port}; root {model.parent}; }} }}\n"
    )
    child = subprocess.Popen([program, "-c", str(config), "-p", str(tmp_path)], stderr=subprocess.PIPE)
    yield f"http://127.0.0.1:{port}/"
    child.terminate()
    child.communicate(timeout=10)


async def test_from_nginx(artifact: StoredArtifact, bundle: Bundle, model: Path, nginx: str) -> None:
    async with client_of() as client:
        fetch = fetch_of(artifact)
        fetch.add(WebSeed(client, nginx, files_of(bundle), Pace(0), loopback_ok=True))
        await run(fetch)
    assert content_of(artifact.files[0].data_path) == content_of(model)
