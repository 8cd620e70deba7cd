"""Listening sockets and the HTTP server of every Shardline process.

Owns binding (before anything slow, never on a shared or another port), start and graceful stop. It does not know what
is served: that is the ASGI application. Shown by tests/transport/test_http_server.py.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import psutil
import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.lifespan.off import LifespanOff
from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.addresses import is_loopback, make_url, split_url
from shardline.transport.bodies import ClientLeft, decode_json, header, read_body, read_json, send_body, send_json
from shardline.transport.body_room import BodyRoom
from shardline.transport.boundary import ControlGate, ErrorBoundary, check_protocol, error_bytes, has_credential
from shardline.transport.direct import DirectLane
from shardline.transport.file_send import with_files
from shardline.transport.guard import CLIENT, CONNECTIONS, GuardedProtocol, GuardLimits, WholeRequest
from shardline.transport.handshakes import HANDSHAKES, TlsListener

__all__ = [
    "ClientLeft",
    "ControlGate",
    "ErrorBoundary",
    "HttpServer",
    "bind",
    "check_listener",
    "check_protocol",
    "check_tracker",
    "decode_json",
    "error_bytes",
    "has_credential",
    "header",
    "read_body",
    "read_json",
    "send_body",
    "send_json",
    "serve",
    "warn_of_plain_http",
]

Drain = Callable[[], Awaitable[None]]
BACKLOG = 1024
_CLOSE_S = 2.0
_PARTS = frozenset({"tracker", "gateway", "node", "artifact", "seed", "up", "serve", "demo"})
"""Commands of ours that listen, or start what does."""

log = structlog.get_logger(__name__)


def check_listener(host: str, *, insecure_plain_http: bool, credential: str | None) -> None:
    """Raise `insecure_listener` for a host beyond loopback, unless plain HTTP was asked for and has a credential."""
    if is_loopback(host):
        return
    if not insecure_plain_http:
        raise ShardlineError(
            "insecure_listener", f"{host} can be reached from other machines, and plain HTTP is not encrypted"
        )
    if not credential:
        raise ShardlineError(
            "insecure_listener", f"{host} can be reached from other machines, and there is no credential"
        )


def warn_of_plain_http(host: str) -> None:
    """Say it at every start of a process that talks unencrypted to other machines."""
    if not is_loopback(host):
        log.warning("plain_http_beyond_loopback", host=host, encrypted=False)


def check_tracker(url: str, *, insecure_plain_http: bool) -> None:
    """Raise `insecure_listener` for a Tracker of another machine by plain HTTP, unless that was asked for: the
    credential goes with every request."""
    parts = split_url(url)
    if parts.scheme == "http" and not is_loopback(parts.host) and not insecure_plain_http:
        why = f"the Tracker at {url} is on another machine, and plain HTTP shows the credential to all on the way"
        raise ShardlineError("insecure_listener", why, param="tracker")


def bind(host: str, port: int) -> socket.socket:
    """Take `host:port`, and listen; port 0 takes a free one. Call it before anything that takes long.

    Raises `address_in_use` with the port and, if it can be told, who holds it; `setting_invalid` for an address that
    this machine does not have. `::` listens on IPv4 as well.
    """
    if not 0 <= port < 65536:
        raise ShardlineError("setting_invalid", f"{port} is not a port", param="port")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ShardlineError("setting_invalid", f"cannot listen on {host!r}: {error}", param="host") from None
    # IPv4 first: "localhost" may resolve to an IPv6 address that the machine cannot bind.
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    reason: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            return _listen(family, kind, protocol, address, any_host=host == "::")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ShardlineError(
                    "address_in_use", f"port {port} on {host} is taken{_holder(port)}", port=port
                ) from None
            reason = error
    raise ShardlineError("setting_invalid", f"cannot listen on {host}, port {port}: {reason}", param="host")


def _listen(
    family: socket.AddressFamily, kind: int, protocol: int, address: tuple[Any, ...], *, any_host: bool
) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        # Past connections in TIME_WAIT must not keep a restarted process away; a listening one must, and does.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if any_host else 1)
        sock.bind(address)
        # Listening is what makes a second process fail at once, before it has loaded anything.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _holder(port: int) -> str:
    """Who listens on `port`, as far as this user may see."""
    try:
        for found in psutil.net_connections(kind="tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid:
                return f" by process {found.pid} ({_program(psutil.Process(found.pid))})"
    except (psutil.Error, OSError):
        pass
    return ""


def _program(process: psutil.Process) -> str:
    """What it is called: a part of Shardline by its command, not as the interpreter that runs it."""
    try:
        words = process.cmdline()
    except (psutil.Error, OSError):
        words = []
    # `python -m shardline … gateway …`, or the path of the script; flags and their values stand in between.
    if any(word == "shardline" or word.endswith("/shardline") for word in words[:4]):
        return " ".join(("shardline", *(word for word in words if word in _PARTS)))
    return str(process.name())


class HttpServer:
    """Serves one application on one listening socket, from `start` to `stop`.

    `drain` is called by `stop` after the listener is closed: the application ends what runs, streams included.
    `tls` makes it HTTPS. `lifespan="off"`: for an application that has no start-up. `direct` answers one path from
    within the socket's read.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        sock: socket.socket,
        settings: Settings,
        drain: Drain | None = None,
        connections: int = CONNECTIONS,
        tls: ssl.SSLContext | None = None,
        lifespan: Literal["on", "off"] = "on",
        direct: DirectLane | None = None,
    ) -> None:
        self.host, self.port = sock.getsockname()[:2]
        self.url = make_url("http" if tls is None else "https", self.host, self.port)
        self._app = app
        self._sock = sock
        self._settings = settings
        self._drain = drain
        self._tls = tls
        self._stopping = False
        self._stopped = asyncio.Event()
        self._state = ServerState()
        room = BodyRoom(settings.body_memory_bytes)
        self._limits = GuardLimits(settings.header_s, settings.header_bytes, connections, direct=direct, room=room)
        self._config = uvicorn.Config(
            self._serve_one,
            http=GuardedProtocol,
            ws="none",
            lifespan=lifespan,
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.server_idle_s,  # type: ignore[arg-type]
        )
        self._lifespan: LifespanOn | LifespanOff | None = None
        self._server: asyncio.Server | None = None
        self._door: TlsListener | None = None
        """In the place of the loop's own server, over HTTPS."""

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    async def start(self) -> None:
        """Run the application's start-up, then accept. Raises `internal` if the start-up fails."""
        self._config.load()
        lifespan = self._lifespan = self._config.lifespan_class(self._config)
        await lifespan.startup()
        if lifespan.should_exit:
            self._sock.close()
            raise ShardlineError("internal", "the application did not start: its log says why")
        loop = asyncio.get_running_loop()
        limits = self._limits

        def protocol() -> GuardedProtocol:
            return GuardedProtocol(self._config, self._state, lifespan.state, loop, limits=limits)

        if self._tls is None:
            self._server = await loop.create_server(protocol, sock=self._sock, backlog=BACKLOG)
            return
        shaking = min(HANDSHAKES, max(16, limits.connections // 8))
        self._door = TlsListener(self._sock, protocol, self._tls, limit=shaking, handshake_s=self._settings.header_s)
        self._door.start()

    async def stop(self, limit_s: float | None = None) -> None:
        """Stop accepting, drain, close. Idempotent; returns when nothing of the server is left.

        Open requests and streams have `limit_s` (default `drain_s`), the drain hook included, then they are closed.
        """
        if self._stopping:
            await self._stopped.wait()
            return
        self._stopping = True
        try:
            await self._close(self._settings.drain_s if limit_s is None else limit_s)
        finally:
            self._stopped.set()

    async def _close(self, limit_s: float) -> None:
        if self._server is not None:
            self._server.close()
        if self._door is not None:
            await self._door.close()
        self._sock.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(limit_s):
                await self._drained()
        except TimeoutError:
            log.warning("drain_incomplete", connections=len(self._state.connections), limit_s=limit_s)
        finally:
            await self._cut()
            await self._shut_down(limit_s)

    async def _cut(self) -> None:
        """End what is still open: connections first, so that no cancelled request tries to answer."""
        for connection in list(self._state.connections):
            connection.transport.abort()
        if self._state.connections:
            self._limits.empty.clear()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._limits.empty.wait()
            except TimeoutError:
                log.warning("connections_left", connections=len(self._state.connections))
        for task in list(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_CLOSE_S)

    async def _drained(self) -> None:
        if self._drain is not None:
            await self._drain()
        while self._state.tasks:
            await asyncio.wait(list(self._state.tasks))
        if self._state.connections:
            # Answers that their readers have not taken yet.
            self._limits.empty.clear()
            await self._limits.empty.wait()

    async def _shut_down(self, limit_s: float) -> None:
        if self._lifespan is None:
            return
        try:
            async with asyncio.timeout(max(_CLOSE_S, limit_s)):
                await self._lifespan.shutdown()
        except TimeoutError:
            log.warning("shutdown_incomplete", limit_s=limit_s)

    async def _serve_one(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = WholeRequest(receive, scope["state"][CLIENT])
            send = with_files(scope, send)
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # Only `_close` cancels requests, after their connections are gone: there is nobody to tell.
            if scope["type"] != "http" or not self._stopping:
                raise


async def serve(
    app: ASGIApp,
    *,
    settings: Settings,
    sock: socket.socket | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    drain: Drain | None = None,
    connections: int = CONNECTIONS,
    tls: ssl.SSLContext | None = None,
    lifespan: Literal["on", "off"] = "on",
) -> HttpServer:
    """A started server for `app`, on `sock` (from `bind`) or on a freshly bound `host:port`; the caller stops it."""
    server = HttpServer(
        app,
        sock=bind(host, port) if sock is None else sock,
        settings=settings,
        drain=drain,
        connections=connections,
        tls=tls,
        lifespan=lifespan,
    )
    await server.start()
    return server
