"""What this process lacks is told as that, on the client's side and on the server's."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys

import psutil
import pytest

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.failures import OwnLack, lack
from shardline.transport.http_client import HttpClient
from shardline.transport.tracker_client import TrackerClient
from tests.support.own_lack import no_file_left
from tests.transport.loopback import Wire, answer, scripted


async def answering(wire: Wire) -> None:
    while True:
        await wire.request()
        wire.send(answer())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_without_a_file_for_a_socket_the_peer_is_not_blamed(host: str) -> None:
    async with scripted(answering) as peer:
        client = HttpClient(Settings(), part="the Gateway")
        try:
            url = f"http://{host}:{peer.port}"
            with no_file_left(), pytest.raises(OwnLack) as caught:
                await client.request("GET", url, timeout_s=5, limit="x")
            told = caught.value.error()
            assert told.code == "resources_exhausted" and told.fault.retryable and "retry_after" in told.details
            assert "the Gateway" in told.message and "ulimit -n" in told.message and host not in told.message
            with no_file_left(), pytest.raises(ShardlineError) as heard:
                await TrackerClient(client, url).models()
            assert heard.value.code == "resources_exhausted"
            assert (await client.request("GET", url, timeout_s=5, limit="x")).status == 200
        finally:
            await client.aclose()


async def test_idle_connections_are_given_up_for_a_new_one() -> None:
    async with scripted(answering) as first, scripted(answering) as second:
        client = HttpClient(Settings())
        try:
            await client.request("GET", first.url, timeout_s=5, limit="x")
            with no_file_left():
                with pytest.raises(OwnLack):
                    await client.request("GET", second.url, timeout_s=5, limit="x")
                async with asyncio.timeout(5):
                    while client.connections:
                        await asyncio.sleep(0.005)
        finally:
            await client.aclose()


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL], ids=errno.errorcode.get
)
def test_every_lack_of_our_own(number: int) -> None:
    assert lack(OSError(number, "")) is not None


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, ""),
        OSError(errno.EHOSTUNREACH, ""),
        OSError("Multiple exceptions: …"),
        socket.gaierror(socket.EAI_NONAME, "unknown"),
    ],
)
def test_what_is_the_peers_stays_the_peers(error: OSError) -> None:
    assert lack(error) is None


FLOODED = """
import asyncio, resource, sys
import uvloop
from shardline.settings import Settings
from shardline.transport.http_server import send_json, serve

async def app(scope, receive, send):
    await send_json(send, {})

async def main():
    server = await serve(app, settings=Settings(), lifespan="off", connections=4096)
    server._limits.connections = 4096  # as if something else had taken the files that connections leave free
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    print(server.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    times = resource.getrusage(resource.RUSAGE_SELF)
    print(times.ru_utime + times.ru_stime, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

uvloop.run(main())
"""


def test_a_listener_without_files_neither_spins_nor_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FLOODED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            port = int(server.stdout.readline())
            before = cpu_seconds(server.pid)
            flood = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(120)]
            # Beyond what it can hold, each is closed: a client learns at once that it is not served.
            flood[-1].settimeout(5)
            assert flood[-1].recv(1) == b""
            for sock in flood:
                sock.close()
            server.stdin.write("\n")
            server.stdin.flush()
            assert float(server.stdout.readline()) - before < 1.0
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
        finally:
            server.kill()


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
