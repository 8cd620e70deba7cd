"""The proxy that other tests measure with must itself be exact."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.delay_proxy import DelayProxy


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=copy, args=(sock,), daemon=True).start()

    def copy(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            try:
                while data := sock.recv(1 << 16):
                    sock.sendall(data)
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def connected(proxy: DelayProxy) -> socket.socket:
    sock = socket.create_connection((proxy.host, proxy.port), timeout=5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def round_trip_s(sock: socket.socket) -> float:
    start = time.perf_counter()
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
    return time.perf_counter() - start


def test_no_byte_is_early_and_most_are_on_time(echo: int) -> None:
    with DelayProxy("127.0.0.1", echo, delay_s=0.0125) as proxy, connected(proxy) as sock:
        times = [round_trip_s(sock) for _ in range(40)]
        assert min(times) >= 0.025
        print(f"round trip through 2 x 12.5 ms: median {statistics.median(times) * 1e3:.3f} ms")
        proxy.set(delay_s=0.0)
        assert min(round_trip_s(sock) for _ in range(20)) < 0.0125


def test_jitter_keeps_the_order(echo: int) -> None:
    with DelayProxy("127.0.0.1", echo, jitter_s=0.01) as proxy, connected(proxy) as sock:
        sent = bytes(range(100))
        for byte in sent:
            sock.sendall(bytes([byte]))
        received = b""
        while len(received) < len(sent):
            received += sock.recv(100)
        assert received == sent


def test_many_bytes_pass_whole(echo: int) -> None:
    sent = bytes(8 << 20)
    with DelayProxy("127.0.0.1", echo, delay_s=0.005) as proxy, connected(proxy) as sock:
        writer = threading.Thread(target=lambda: (sock.sendall(sent), sock.shutdown(socket.SHUT_WR)))
        writer.start()
        received = 0
        while data := sock.recv(1 << 20):
            received += len(data)
        writer.join(5)
        assert received == len(sent)


def test_a_stall_holds_and_a_release_lets_go(echo: int) -> None:
    with DelayProxy("127.0.0.1", echo) as proxy, connected(proxy) as sock:
        assert round_trip_s(sock) > 0
        proxy.stall()
        sock.sendall(b"held")
        sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            sock.recv(4)
        sock.settimeout(5)
        proxy.release()
        assert sock.recv(4) == b"held"


def test_a_cut_resets_what_is_open_and_a_refusal_what_is_new(echo: int) -> None:
    with DelayProxy("127.0.0.1", echo) as proxy, connected(proxy) as sock:
        assert round_trip_s(sock) > 0
        proxy.cut()
        with pytest.raises(ConnectionError):
            while sock.recv(1):
                pass
            raise ConnectionAbortedError("closed without a reset")
        proxy.refuse()
        with connected(proxy) as other:
            assert other.recv(1) == b""
        proxy.refuse(False)
        with connected(proxy) as third:
            assert round_trip_s(third) > 0
        assert proxy.accepted == 3
