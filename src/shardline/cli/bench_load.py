"""Clients of a measurement: several streams at a time over plain sockets, each token timed as it arrives.

Owns as little work as possible for each token: what a client computes here is taken from the Nodes of this machine.
Refuses to know what is measured. Shown by tests/cli/test_bench_load.py.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardline.errors import ShardlineError
from shardline.transport.addresses import split_url

_RECEIVE_BYTES = 256 << 10
_TEXT = b'"text":"'
_NO_TEXT = b'"text":""'
_SESSION = b"shardline-route-session:"


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer as its client saw it; times in seconds from the request."""

    arrivals_s: tuple[float, ...]
    """Of each piece of text; one is mostly a token, and holds more where characters need several."""
    tokens: int
    session: str
    """Public id of its Route Session."""

    @property
    def first_s(self) -> float:
        return self.arrivals_s[0]


def decode_rate(streams: Sequence[Streamed]) -> float:
    """Tokens per second of all streams together, from when each has its first token until the first of them ends."""
    begin = max(stream.arrivals_s[0] for stream in streams)
    end = min(stream.arrivals_s[-1] for stream in streams)
    if end <= begin:
        raise ShardlineError("setting_invalid", "the streams did not overlap: ask for more tokens", param="tokens")
    tokens = 0.0
    for stream in streams:
        pieces = sum(begin < at <= end for at in stream.arrivals_s)
        tokens += pieces * (stream.tokens - 1) / (len(stream.arrivals_s) - 1)
    return tokens / (end - begin)


class _Client:
    """One request and the events of its answer."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        parts = split_url(url)
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        self.socket = socket.create_connection((parts.host, parts.port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = head.encode() + payload
        self._started = 0.0
        self._arrivals: list[float] = []
        self._unread = b""
        self._tokens = 0
        self._session = ""
        self._broken = b""

    def send(self) -> None:
        self._started = time.perf_counter()
        self.socket.sendall(self._request)
        self.socket.setblocking(False)

    def receive(self) -> bool:
        """Take what is there; False at the end of the answer."""
        data = self.socket.recv(_RECEIVE_BYTES)
        now = time.perf_counter() - self._started
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self._take(line, now)
            elif not self._arrivals:
                self._take_head(line)
        return bool(data)

    def _take(self, line: bytes, now: float) -> None:
        if _TEXT in line and _NO_TEXT not in line:
            self._arrivals.append(now)
        elif b'"usage":{' in line:
            self._tokens = int(json.loads(line[6:])["usage"]["completion_tokens"])
        elif b'"error"' in line:
            self._broken = line

    def _take_head(self, line: bytes) -> None:
        if line.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5", b'{"error"')):
            self._broken += line
        elif line.lower().startswith(_SESSION):
            self._session = line[len(_SESSION) :].strip().decode("ascii")

    def streamed(self) -> Streamed:
        if self._broken or not self._arrivals or not self._tokens:
            said = (self._broken or self._unread or b"it ended without text").decode(errors="replace").strip()
            raise ShardlineError("gateway_unreachable", f"a stream of the measurement failed: {said[:300]}")
        return Streamed(tuple(self._arrivals), self._tokens, self._session)


def run_streams(url: str, model: str, prompts: Sequence[Sequence[int]], tokens: int, limit_s: float) -> list[Streamed]:
    """Ask for exactly `tokens` tokens behind each of `prompts` (token ids), all at once, greedily."""
    clients = [_Client(url, _body(model, ids, tokens)) for ids in prompts]
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        try:
            for client in clients:
                selector.register(client.socket, selectors.EVENT_READ, client)
                client.send()
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ShardlineError("deadline", f"no end of the measurement within {limit_s:g} s", limit="answer")
                for key, _ in ready:
                    if not key.data.receive():
                        selector.unregister(key.fileobj)
        finally:
            for client in clients:
                client.socket.close()
    return [client.streamed() for client in clients]


def _body(model: str, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "cache_prompt": False,  # every prefill is a whole one, and nothing lies in the caches beside
        "stream": True,
        "stream_options": {"include_usage": True},
    }
