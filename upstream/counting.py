"""A TCP forwarder that counts: how many bytes go to a server and come back.

For runs without delay only. Shown by `make upstream`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

_PIECE = 1 << 20


class Counting:
    """`with Counting(port) as proxy`: `proxy.port` leads to `port` on this machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.there = self.back = 0
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Counting:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.close()

    def reset(self) -> None:
        self.there = self.back = 0

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for sock in (client, server):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [client, server]
                for source, sink, back in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._forward, args=(source, sink, back), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if back:
                    self.back += len(data)
                else:
                    self.there += len(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):  # a server takes the next connection when this one has ended
            sink.shutdown(socket.SHUT_WR)
