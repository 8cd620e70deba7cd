"""A TCP proxy in a process of its own: one-way delay, jitter, stalls and cuts between any two parties.

It knows no protocol, so TLS passes as it is. Bytes that arrive are sent on `delay_s` (and up to `jitter_s`, drawn for
each piece) later, in order, with no bound on the rate; connecting costs nothing. `select` is used because its timeouts
have microseconds: epoll rounds to milliseconds. Shown by tests/transport/test_delay_proxy.py.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

HELD = 64 << 20
"""Bytes that one direction holds before it stops reading."""
_PIECE = 1 << 20
_RESET = struct.pack("ii", 1, 0)


class DelayProxy:
    """`with DelayProxy(host, port) as proxy`: `proxy.host`, `proxy.port` lead there, with what is set."""

    def __init__(
        self,
        target_host: str,
        target_port: int,
        *,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        host: str = "127.0.0.1",
        port: int = 0,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """`prefix`: words in front of the command, as `ip netns exec NAME`."""
        self.host = host
        self.port = port
        self._prefix = prefix
        self._first: dict[str, Any] = {
            "host": host,
            "port": port,
            "target": [target_host, target_port],
            "delay_s": delay_s,
            "jitter_s": jitter_s,
        }
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """As `--advertise` takes it."""
        return f"{self.host}:{self.port}"

    def __enter__(self) -> DelayProxy:
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._say(self._first)["port"])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.communicate(timeout=5)
        process.kill()
        process.wait()

    def _say(self, order: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise AssertionError("the proxy has ended")
        return dict(json.loads(answer))

    def set(self, *, delay_s: float | None = None, jitter_s: float | None = None) -> None:
        """For bytes that arrive from now on."""
        self._say({k: v for k, v in (("delay_s", delay_s), ("jitter_s", jitter_s)) if v is not None})

    def target(self, host: str, port: int) -> None:
        """Where new connections go."""
        self._say({"target": [host, port]})

    def stall(self) -> None:
        """Nothing passes any more, in either direction; connections stay open, as with a cable that was pulled."""
        self._say({"stalled": True})

    def release(self) -> None:
        """What was held passes now."""
        self._say({"stalled": False})

    def cut(self) -> None:
        """Reset all connections that are open."""
        self._say({"cut": True})

    def refuse(self, refuses: bool = True) -> None:
        """Close new connections at once."""
        self._say({"refuses": refuses})

    @property
    def accepted(self) -> int:
        """Connections that have come so far."""
        return int(self._say({})["accepted"])


class _Flow:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.pieces: collections.deque[tuple[float, bytes]] = collections.deque()
        """(due, bytes); empty bytes are the end of this side."""
        self.held = 0
        self.last_due = 0.0
        self.ended = False
        self.blocked = False
        """The sink takes no more at the moment."""


class _Proxy:
    """The loop of the process: one thread, one `select`."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.delay_s = float(first["delay_s"])
        self.jitter_s = float(first["jitter_s"])
        self.target = tuple(first["target"])
        self.stalled = False
        self.refuses = False
        self.accepted = 0
        self.flows: dict[socket.socket, _Flow] = {}
        """By source."""
        self.listener = socket.create_server((first["host"], first["port"]), backlog=256)
        self.listener.setblocking(False)
        self._random = random.Random(0)
        self._orders = b""

    def run(self) -> None:
        while True:
            now = time.monotonic()
            due = self._send_due(now)
            reading = [flow.source for flow in self.flows.values() if not flow.ended and flow.held < HELD]
            writing = [flow.sink for flow in self.flows.values() if flow.blocked and not self.stalled]
            wait = None if due is None else max(0.0, due - time.monotonic())
            readable, writable, _ = select.select([0, self.listener, *reading], writing, [], wait)
            now = time.monotonic()
            for sock in readable:
                if sock == 0:
                    if not self._take_orders():
                        return
                elif sock is self.listener:
                    self._accept()
                else:
                    self._read(sock, now)
            for flow in self.flows.values():
                if flow.sink in writable:
                    flow.blocked = False

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        self.accepted += 1
        if self.refuses:
            client.close()
            return
        try:
            server = socket.create_connection(self.target, timeout=2)
        except OSError:
            client.close()
            return
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.flows[client] = _Flow(client, server)
        self.flows[server] = _Flow(server, client)

    def _read(self, source: socket.socket, now: float) -> None:
        flow = self.flows.get(source)
        if flow is None:
            return
        try:
            data = source.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            self._reset(flow)
            return
        due = now + self.delay_s + (self._random.uniform(0, self.jitter_s) if self.jitter_s else 0.0)
        flow.last_due = max(flow.last_due, due)
        flow.pieces.append((flow.last_due, data))
        flow.held += len(data)
        flow.ended = not data

    def _send_due(self, now: float) -> float | None:
        """Send what is due; when the next piece will be."""
        if self.stalled:
            return None
        earliest: float | None = None
        for flow in list(self.flows.values()):
            while flow.pieces and not flow.blocked and flow.pieces[0][0] <= now:
                if not self._send_first(flow):
                    break
            if flow.pieces and not flow.blocked:
                due = flow.pieces[0][0]
                earliest = due if earliest is None else min(earliest, due)
        return earliest

    def _send_first(self, flow: _Flow) -> bool:
        """Send the first piece; False where the flow takes no more now, or is gone."""
        due, data = flow.pieces.popleft()
        try:
            if not data:
                flow.sink.shutdown(socket.SHUT_WR)
                other = self.flows.get(flow.sink)
                if other is None or (other.ended and not other.pieces):
                    self._drop(flow)
                return False
            sent = flow.sink.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._reset(flow)
            return False
        flow.held -= sent
        if sent < len(data):
            flow.pieces.appendleft((due, data[sent:]))
            flow.blocked = True
            return False
        return True

    def _drop(self, flow: _Flow) -> None:
        for sock in (flow.source, flow.sink):
            self.flows.pop(sock, None)
            sock.close()

    def _reset(self, flow: _Flow) -> None:
        for sock in (flow.source, flow.sink):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._drop(flow)

    def _take_orders(self) -> bool:
        data = os.read(0, 65536)
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order.pop("cut", False):
                for flow in list(self.flows.values()):
                    self._reset(flow)
            if "target" in order:
                self.target = tuple(order.pop("target"))
            for name, value in order.items():
                setattr(self, name, value)
            self.say()
        return bool(data)

    def say(self) -> None:
        print(json.dumps({"port": self.listener.getsockname()[1], "accepted": self.accepted}), flush=True)


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    proxy = _Proxy(json.loads(line))
    proxy.say()
    proxy.run()


if __name__ == "__main__":
    main()
