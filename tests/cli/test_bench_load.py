"""The clients of a measurement: what counts as a token, at any split of the bytes, and what is told of failures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardline.cli.bench_load import Streamed, decode_rate, run_streams
from shardline.cli.bench_systems import engines_apart
from shardline.errors import ShardlineError

HEAD = b"HTTP/1.1 200 OK\r\nshardline-route-session: rs-7\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


def event(text: str, **more: object) -> bytes:
    body = {"choices": [{"index": 0, "text": text}], **more}
    return chunk(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


USAGE = chunk(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n')
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@contextmanager
def answering(*answers: list[bytes]) -> Iterator[str]:
    """A server that gives each connection its pieces, and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for pieces in answers:
                connection, _ = listener.accept()
                with connection:
                    request = b""
                    while b"\r\n\r\n" not in request:
                        request += connection.recv(65536)
                    for piece in pieces:
                        connection.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def split(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_pieces_of_text_are_counted_and_the_rest_is_not(size: int) -> None:
    whole = HEAD + chunk(b": 12 tokens/s\n\n") + event("") + event("a") + event('"text":""') + event("c") + USAGE + DONE
    with answering(split(whole, size), split(whole, size)) as url:
        first, second = run_streams(url, "m", [[1, 2, 3], [4, 5, 6]], 4, 10)
    for streamed in (first, second):
        assert (len(streamed.arrivals_s), streamed.tokens, streamed.session) == (3, 4, "rs-7")
        assert 0 < streamed.first_s <= streamed.arrivals_s[-1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error":{"code":"capacity"}}\n', "503"),
        (HEAD + event("a") + chunk(b'data: {"error":{"code":"node_lost"}}\n\n') + DONE, "node_lost"),
        (HEAD + event("a") + DONE, "without"),
        (b"", "without"),
    ],
)
def test_a_stream_that_fails_is_no_figure(answer: bytes, words: str) -> None:
    with answering([answer]) as url, pytest.raises(ShardlineError, match=words):
        run_streams(url, "m", [[1]], 4, 10)


def test_a_rate_counts_only_what_all_streams_shared() -> None:
    early = Streamed((0.0, 1.0, 2.0, 3.0), 4, "a")
    late = Streamed((1.0, 2.0, 3.0, 4.0), 4, "b")
    assert decode_rate([early]) == pytest.approx(1.0)
    assert decode_rate([early, late]) == pytest.approx(2.0)
    two_a_piece = Streamed((0.0, 1.0, 2.0), 5, "c")
    assert decode_rate([two_a_piece]) == pytest.approx(2.0)
    with pytest.raises(ShardlineError, match="overlap"):
        decode_rate([early, Streamed((5.0, 6.0), 2, "d")])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_engines_have_cores_of_their_own_for_a_while() -> None:
    everywhere = os.sched_getaffinity(0)
    first = {min(everywhere)}
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen([*sleeping, "shardline.model.worker"]) as engine, subprocess.Popen(sleeping) as other:
        try:
            with engines_apart(1):
                assert os.sched_getaffinity(engine.pid) == first
                assert os.sched_getaffinity(other.pid) == os.sched_getaffinity(0) == everywhere - first
            assert all(os.sched_getaffinity(pid) == everywhere for pid in (0, engine.pid, other.pid))
        finally:
            engine.kill()
            other.kill()
