"""Files into sockets: every byte, in its place between what is written otherwise, whatever the reader does."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from shardline.settings import Settings
from shardline.transport import file_send
from shardline.transport.bodies import send_body
from shardline.transport.boundary import ErrorBoundary
from shardline.transport.file_send import EXTENSION
from shardline.transport.http_client import HttpClient
from shardline.transport.tls import ClusterTls
from tests.support.certificates import authority, party
from tests.support.stores import content_of
from tests.transport.loopback import client_of, serving, sockets, until

SIZE = 6 << 20


class Files:
    """Gives one file in parts: what was read, and what the system sends, by turns."""

    def __init__(self, path: Path, parts: list[tuple[bool, int]]) -> None:
        self.path = path
        self.parts = parts
        self.ended: list[BaseException | None] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._give(send)
        except BaseException as error:
            self.ended.append(error)
            raise
        self.ended.append(None)

    async def _give(self, send: Send) -> None:
        total = sum(count for _, count in self.parts)
        headers = [(b"content-length", b"%d" % total)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self.path.open("rb", buffering=0) as file:
            at = 0
            for by_system, count in self.parts:
                part: dict[str, Any] = {"type": "http.response.body", "body": os.pread(file.fileno(), count, at)}
                if by_system:
                    part = {"type": EXTENSION, "file": file, "offset": at, "count": count}
                at += count
                await send({**part, "more_body": at < total})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(os.urandom(SIZE))
    return tmp_path / "file"


@pytest.mark.parametrize(
    "parts",
    [
        [(True, SIZE)],
        [(False, 3 << 20), (True, SIZE - (3 << 20))],
        [(True, 1), (False, 3 << 20), (True, 1 << 20), (True, 1 << 20), (False, 1)],
    ],
    ids=["whole", "behind", "between"],
)
async def test_every_byte_in_its_place(path: Path, parts: list[tuple[bool, int]]) -> None:
    """And the connection serves the next request."""
    content = content_of(path)[: sum(count for _, count in parts)]
    async with serving(ErrorBoundary(Files(path, parts))) as server, client_of() as client:
        for _ in range(3):
            found = await client.request("GET", server.url + "/", timeout_s=10, limit="test", max_body=SIZE)
            assert found.body == content
        assert client.connections == 1


async def test_a_slow_reader_holds_no_thread(path: Path) -> None:
    content, files = content_of(path), Files(path, [(True, SIZE)])
    async with serving(ErrorBoundary(files)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 12)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        # As many threads as there are can work meanwhile.
        for _ in range(50):
            await asyncio.to_thread(int)
        assert not files.ended
        found = await reader.readexactly(SIZE)
        assert found == content
        writer.close()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_reader_that_leaves(path: Path, reset: bool) -> None:
    files = Files(path, [(True, SIZE)])
    async with serving(ErrorBoundary(files)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 12)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        if reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
        await until(lambda: bool(files.ended))
        assert type(files.ended[0]).__name__ == "ClientLeft"
        await until(lambda: server.connections == 0)


async def test_a_server_that_stops_leaves_no_descriptor(path: Path) -> None:
    before = sockets()
    files = Files(path, [(True, SIZE)])
    async with serving(ErrorBoundary(files)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 12)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    assert isinstance(files.ended[0], asyncio.CancelledError) or type(files.ended[0]).__name__ == "ClientLeft"
    writer.close()
    await until(lambda: sockets() == before)
    open_files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert path not in [file.resolve() for file in open_files if file.exists()]


async def test_a_file_that_became_shorter_breaks_the_answer(path: Path) -> None:
    files = Files(path, [(True, SIZE)])
    os.truncate(path, SIZE // 2)
    async with serving(ErrorBoundary(files)) as server, client_of() as client:
        with pytest.raises(Exception, match="middle of the response"):
            await client.request("GET", server.url + "/", timeout_s=5, limit="test", max_body=SIZE)


async def test_it_is_not_offered_over_tls_nor_where_the_system_has_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        offers.append(EXTENSION in scope.get("extensions", ()))
        await send_body(send, 200, b"{}")

    own = authority(tmp_path)
    async with serving(app) as plain, serving(app, tls=party(own, "tracker").server(strangers=True)) as secure:
        async with client_of() as client:
            await client.json("GET", plain.url + "/", dict[str, int])
            monkeypatch.delattr(file_send.os, "sendfile")
            await client.json("GET", plain.url + "/", dict[str, int])
            monkeypatch.undo()
        keyed = HttpClient(Settings(), tls=ClusterTls(own.certificate_pem))
        await keyed.json("GET", f"https://tracker@127.0.0.1:{secure.port}/", dict[str, int])
        await keyed.aclose()
    assert offers == [True, False, False]
