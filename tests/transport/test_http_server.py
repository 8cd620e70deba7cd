from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.http_client import BeforeResponse, BrokenResponse, ConnectFailed, HttpClient, HttpFailure
from shardline.transport.http_server import bind, check_listener, read_body, send_json, serve
from tests.transport.loopback import client_of, serving, sockets, until

HAS_IPV6 = Path("/proc/net/if_inet6").exists() or sys.platform == "darwin"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"size": len(await read_body(receive, scope, 1 << 20)), "path": scope["path"]})


# Binding.


def test_port_0_is_known_before_serving() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert sock.getsockname()[1] > 0


def test_a_taken_port_is_named_with_its_holder() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ShardlineError) as caught:
            bind("127.0.0.1", port)
        assert caught.value.code == "address_in_use"
        assert f"port {port}" in caught.value.message and f"process {os.getpid()}" in caught.value.message
        with pytest.raises(ShardlineError):
            bind("0.0.0.0", port)
        with pytest.raises(ShardlineError):
            bind("localhost", port)


@pytest.mark.parametrize(
    ("arguments", "name"), [(["shardline", "--set", "a=b", "gateway"], "(shardline gateway)"), ([], "(python")]
)
def test_a_port_is_taken_from_another_process_too(arguments: list[str], name: str) -> None:
    """A part of Shardline is called by its command, whoever interprets it."""
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        port = int(holder.stdout.readline())
        with pytest.raises(ShardlineError) as caught:
            bind("127.0.0.1", port)
        assert f"process {holder.pid} {name}" in caught.value.message
        holder.stdin.close()


async def test_a_port_is_free_again_right_after_its_server_stopped() -> None:
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    for _ in range(2):
        server = await serve(echo, settings=Settings(), sock=sock, lifespan="off")
        async with client_of() as client:
            await client.request("GET", server.url, timeout_s=5, limit="x")
            await server.stop()
        sock = bind("127.0.0.1", port)
    sock.close()


@pytest.mark.parametrize(
    ("host", "port", "param"),
    [("203.0.113.7", 0, "host"), ("a..b", 0, "host"), ("127.0.0.1", 70_000, "port"), ("127.0.0.1", -1, "port")],
)
def test_addresses_that_cannot_be_bound(host: str, port: int, param: str) -> None:
    with pytest.raises(ShardlineError) as caught:
        bind(host, port)
    assert caught.value.code == "setting_invalid" and caught.value.param == param


@pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here")
async def test_everything_on_ipv6() -> None:
    server = await serve(echo, settings=Settings(), sock=bind("::1", 0), lifespan="off")
    try:
        assert server.url == f"http://[::1]:{server.port}"
        async with client_of() as client:
            response = await client.request("POST", server.url + "/x", body=b"abc", timeout_s=5, limit="x")
            assert response.body == b'{"size":3,"path":"/x"}'
    finally:
        await server.stop()


@pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here")
async def test_all_addresses_means_ipv4_too() -> None:
    server = await serve(echo, settings=Settings(), sock=bind("::", 0), lifespan="off")
    try:
        async with client_of() as client:
            for host in ("127.0.0.1", "[::1]"):
                await client.request("GET", f"http://{host}:{server.port}/", timeout_s=5, limit="x")
    finally:
        await server.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_listener(host, insecure_plain_http=False, credential=None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "node-1.lan", ""])
def test_a_listener_beyond_loopback_needs_both(host: str) -> None:
    check_listener(host, insecure_plain_http=True, credential="x" * 20)
    for plain, credential in ((False, "x" * 20), (True, None), (True, ""), (False, None)):
        with pytest.raises(ShardlineError) as caught:
            check_listener(host, insecure_plain_http=plain, credential=credential)
        assert caught.value.code == "insecure_listener"


# Serving and stopping.


async def test_answers_tell_nothing_of_the_software() -> None:
    async with serving(echo) as server, client_of() as client:
        response = await client.request("GET", server.url, timeout_s=5, limit="x")
        assert set(response.headers) == {"content-type", "content-length"}


async def test_forwarded_headers_are_not_believed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"client": scope["client"][0], "scheme": scope["scheme"]})

    async with serving(app) as server, client_of() as client:
        headers = {"x-forwarded-for": "10.9.9.9", "x-forwarded-proto": "https"}
        response = await client.request("GET", server.url, headers=headers, timeout_s=5, limit="x")
        assert response.body == b'{"client":"127.0.0.1","scheme":"http"}'


async def test_start_up_and_shut_down_of_the_application_run_around_it() -> None:
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                told.append(message["type"])
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        told.append("request")
        await send_json(send, {})

    server = await serve(app, settings=Settings())
    async with client_of() as client:
        await client.request("GET", server.url, timeout_s=5, limit="x")
    await server.stop()
    assert told == ["lifespan.startup", "request", "lifespan.shutdown"]


async def test_an_application_that_does_not_start() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no")

    before = sockets()
    with pytest.raises(ShardlineError) as caught:
        await serve(app, settings=Settings())
    assert caught.value.code == "internal"
    await until(lambda: sockets() == before)


class Streams:
    """An application of open streams that end when it is told to drain."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.cancelled = 0
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"open\n", "more_body": True})
        self.open += 1
        try:
            await self.draining.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1
        await send({"type": "http.response.body", "body": b"drained\n"})

    async def drain(self) -> None:
        self.draining.set()


async def read_stream(client: HttpClient, url: str) -> list[bytes]:
    async with client.stream("GET", url, timeout_s=5, limit="open") as stream:
        return [line async for line in stream]


async def test_stop_lets_open_streams_end_and_refuses_new_ones() -> None:
    before = sockets()
    app = Streams()
    server = await serve(app, settings=Settings(), drain=app.drain, lifespan="off")
    async with client_of() as client, asyncio.TaskGroup() as group:
        readers = [group.create_task(read_stream(client, server.url)) for _ in range(5)]
        await until(lambda: app.open == 5)
        await server.stop()
        for reader in readers:
            assert await reader == [b"open", b"drained"]
        with pytest.raises(ConnectFailed):
            await client.request("GET", server.url, timeout_s=5, limit="x")
        await server.stop()
    assert app.cancelled == 0 and server.connections == 0
    await until(lambda: sockets() == before)


async def test_stop_cuts_streams_that_do_not_end() -> None:
    app = Streams()
    server = await serve(app, settings=Settings(), lifespan="off")
    async with client_of() as client, asyncio.TaskGroup() as group:
        readers = [group.create_task(failing(read_stream(client, server.url))) for _ in range(5)]
        await until(lambda: app.open == 5)
        await server.stop(limit_s=0.05)
        assert server.connections == 0 and app.cancelled == 5
        for reader in readers:
            assert isinstance(await reader, BrokenResponse)


async def failing(work: object) -> Exception:
    try:
        await work  # type: ignore[misc]
    except HttpFailure as failure:
        return failure
    raise AssertionError("it did not fail")


async def test_a_drain_that_hangs_or_fails_does_not_keep_the_server() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        raise RuntimeError("drain")

    app = Streams()
    server = await serve(app, settings=Settings(), drain=hang, lifespan="off")
    await server.stop(limit_s=0.03)
    server = await serve(app, settings=Settings(), drain=fail, lifespan="off")
    async with client_of() as client, asyncio.TaskGroup() as group:
        reader = group.create_task(failing(read_stream(client, server.url)))
        await until(lambda: app.open == 1)
        with pytest.raises(RuntimeError):
            await server.stop(limit_s=5)
        assert server.connections == 0
        await reader


async def test_idle_connections_do_not_hold_a_stop_up() -> None:
    server = await serve(echo, settings=Settings(), lifespan="off")
    async with client_of() as client:
        await client.request("GET", server.url, timeout_s=5, limit="x")
        await server.stop(limit_s=5)
        await until(lambda: client.connections == 0)


async def test_a_request_that_runs_is_answered_during_a_stop() -> None:
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await send_json(send, {})

    server = await serve(slow, settings=Settings(), lifespan="off")
    async with client_of() as client, asyncio.TaskGroup() as group:
        request = group.create_task(client.request("GET", server.url, timeout_s=5, limit="x"))
        await until(lambda: server.connections == 1)
        await asyncio.sleep(0.01)
        stop = group.create_task(server.stop())
        await asyncio.sleep(0.01)
        go.set()
        assert (await request).headers["connection"] == "close"
        await stop


# The client goes.


async def test_a_client_that_leaves_is_told_to_the_application() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive, scope, 10)
        seen.append("waiting")
        seen.append((await receive())["type"])

    async with serving(app) as server:
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        await until(lambda: seen == ["waiting"])
        writer.close()
        await until(lambda: seen == ["waiting", "http.disconnect"])


# TLS.


def certificate(path: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "node")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(
        cert.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


async def test_the_same_over_tls(tmp_path: Path) -> None:
    pem = certificate(tmp_path / "pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    trust = ssl.create_default_context(cafile=pem)
    before = sockets()
    async with serving(echo, tls=context) as server:
        assert server.url.startswith("https://")
        client = HttpClient(Settings(), tls=trust)
        for size in (0, 100_000, 5):
            response = await client.request("POST", server.url + "/x", body=bytes(size), timeout_s=5, limit="x")
            assert response.body == b'{"size":%d,"path":"/x"}' % size
        assert client.connections == 1
        await client.aclose()
        async with client_of() as stranger:
            with pytest.raises(ConnectFailed):
                await stranger.request("GET", server.url, timeout_s=5, limit="x")
            with pytest.raises(BeforeResponse):
                await stranger.request(
                    "GET", server.url.replace("https", "http"), timeout_s=5, limit="x", retry_once=True
                )
    await until(lambda: sockets() == before)


def test_a_listening_socket_is_not_shared() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
