"""The door of an HTTPS listener: accepts, and lets only so many strangers be in the middle of a handshake.

Owns sockets from their acceptance until TLS is up; then they are the protocol's (guard.py). A loop's own server has no
bound on handshakes: whoever opens connections and says nothing takes all files of the process. Shown by
tests/transport/test_handshakes.py.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial

import structlog

from shardline.transport.addresses import network_of
from shardline.transport.crowd import PATIENCE_S
from shardline.transport.failures import lack
from shardline.transport.tls import SHUTDOWN_S

HANDSHAKES = 128
"""At the same time, of one listener; fewer where connections are few: together with them they fit into the files."""
_AT_ONCE = 64
_LACK_PAUSE_S = 0.5
_REPEAT_S = 30.0

log = structlog.get_logger(__name__)


class TlsListener:
    """Connections of `sock`, each given to a `protocol` of its own once its handshake is done, within `handshake_s`.

    When `limit` handshakes run, the oldest of the network that has most of them makes way for a newcomer.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        *,
        limit: int,
        handshake_s: float,
    ) -> None:
        self._sock = sock
        self._protocol = protocol
        self._tls = tls
        self._limit = limit
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._running: dict[asyncio.Task[None], tuple[str, float]] = {}
        """Handshake -> (network, since), the oldest first."""
        self._pausing: asyncio.TimerHandle | None = None
        self._told = 0.0
        self._closed = False

    def __len__(self) -> int:
        """Handshakes that run."""
        return len(self._running)

    def start(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    async def close(self) -> None:
        """Accept no more, and end what has not shaken hands. The caller closes the socket, after this."""
        if self._closed:
            return
        self._closed = True
        if self._pausing is None:
            self._loop.remove_reader(self._sock.fileno())
        else:
            self._pausing.cancel()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=SHUTDOWN_S)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._running) >= self._limit and not self._make_way():
                self._pause(PATIENCE_S)
                return
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("connection_not_accepted", reason=lack(error) or str(error))
                self._pause(_LACK_PAUSE_S)
                return
            task = self._loop.create_task(self._shake(sock))
            self._running[task] = (network_of(str(address[0])), self._loop.time())
            task.add_done_callback(partial(self._over, sock))

    def _over(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            sock.close()  # here: a task that was cancelled before its first step has closed nothing

    async def _shake(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                self._protocol,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:
            # No TLS, no certificate of ours, too slow, or gone: strangers may do all that, as often as they like.
            sock.close()

    def _make_way(self) -> bool:
        """End one handshake; False while the one to be ended has not had its time."""
        counts: dict[str, int] = {}
        for network, _ in self._running.values():
            counts[network] = counts.get(network, 0) + 1
        largest = max(counts, key=counts.__getitem__)
        task, since = next((t, since) for t, (network, since) in self._running.items() if network == largest)
        now = self._loop.time()
        if now - since < PATIENCE_S:
            return False
        if now - self._told > _REPEAT_S or not self._told:
            self._told = now
            log.warning("handshakes_crowded", running=len(self._running), most_from=largest, of_those=counts[largest])
        del self._running[task]
        task.cancel()
        return True

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._pausing = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pausing = None
        self.start()
