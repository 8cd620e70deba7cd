"""The HTTP/1.1 client of all traffic inside a cluster: Node to Node, Gateway to Node, everybody to the Tracker.

Owns the keep-alive pool (no hidden limit: callers bound their own concurrency), limits, cancellation and the one
retry rule. It follows no redirect, keeps no cookie, asks for no compression and reads no proxy variable: cluster
traffic goes where the URL says. Shown by tests/transport/test_http_client.py and test_carrier.py.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from shardline.settings import PROTOCOL, Settings
from shardline.transport import answers
from shardline.transport.addresses import host_port, split_url
from shardline.transport.answers import Response
from shardline.transport.connection import Buffer, Connection, Sink
from shardline.transport.deadlines import Deadline
from shardline.transport.failures import (
    BeforeResponse,
    BrokenResponse,
    ConnectFailed,
    HttpFailure,
    NotOurPeer,
    TimedOut,
)
from shardline.transport.lines import LineStream

__all__ = [
    "BeforeResponse",
    "BrokenResponse",
    "ConnectFailed",
    "HttpClient",
    "HttpFailure",
    "LineStream",
    "NotOurPeer",
    "Response",
    "TimedOut",
]

Body = bytes | Sequence[Buffer]
T = TypeVar("T")
_FIELD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t -~\x80-\xff]*")
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_CLOSE_S = 2.0

log = structlog.get_logger(__name__)


class _Answer(Sink, Protocol):
    """A sink with a future for whoever waits until it is opened."""

    @property
    def opened(self) -> asyncio.Future[Any]: ...


_S = TypeVar("_S", bound=_Answer)


class _Gather:
    """Sink that makes one whole Response of at most `max_body` bytes."""

    __slots__ = ("_chunks", "_headers", "_left", "_max_body", "_peer", "_status", "opened")

    def __init__(self, connection: Connection, max_body: int) -> None:
        self.opened: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._peer = connection.peer
        self._max_body = self._left = max_body
        self._chunks: list[bytes] = []

    def head(self, status: int, headers: dict[str, str]) -> None:
        self._status = status
        self._headers = headers
        length = headers.get("content-length")
        if length is not None and int(length) > self._max_body:
            raise BrokenResponse(self._peer, f"answer of {length} bytes, limit {self._max_body}")

    def body(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise BrokenResponse(self._peer, f"answer is longer than {self._max_body} bytes")
        self._chunks.append(data)

    def end(self) -> None:
        if not self.opened.done():
            self.opened.set_result(Response(self._status, self._headers, b"".join(self._chunks)))

    def lost(self, failure: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(failure)


class _CallBack(_Gather):
    """Sink of a request that nobody waits for: its end is a call."""

    __slots__ = ("_deadline", "_done", "connection")

    def __init__(self, connection: Connection, max_body: int, done: Callable[[Response | HttpFailure], None]) -> None:
        self._peer = connection.peer
        self._max_body = self._left = max_body
        self._chunks = []
        self._done = done
        self._deadline: Deadline | None = None

    def watch(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def end(self) -> None:
        self._finish(Response(self._status, self._headers, b"".join(self._chunks)))

    def lost(self, failure: Exception) -> None:
        if not isinstance(failure, HttpFailure):
            failure = BrokenResponse(self._peer, str(failure))
        self._finish(failure)

    def _finish(self, outcome: Response | HttpFailure) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._done(outcome)


class _Origin:
    """One (scheme, host, port, checked address): where its connections go, and those that wait for work."""

    __slots__ = ("authority", "dial", "host", "idle", "open", "peer", "retired", "tls")

    def __init__(self, host: str, port: int, address: tuple[str, int] | None, tls: ssl.SSLContext | None) -> None:
        self.host = host
        self.peer = host_port(host, port)
        self.authority = host_port(host.partition("%")[0], port)
        self.dial = address or (host, port)
        self.tls = tls
        self.open = 0
        """Connections that are open or being opened."""
        self.retired = False
        """Dropped from the client: a connection that still comes back is closed."""
        self.idle: dict[Connection, float] = {}
        """Idle connections with the loop time since when; the newest last, and taken first."""


class HttpClient:
    """One per process and plane. Close it with `aclose()`; every method raises `HttpFailure` for the wire's faults.

    `tls` is the context for https URLs; without one, an https URL is verified against the system's roots.
    """

    def __init__(self, settings: Settings, *, credential: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._settings = settings
        self._tls = tls
        self._origins: dict[tuple[str, str, int, tuple[str, int] | None], _Origin] = {}
        self._open: set[Connection] = set()
        self._closed = False
        self._all_gone: asyncio.Event | None = None
        self._sweep: asyncio.TimerHandle | None = None
        plain = f"shardline-protocol: {PROTOCOL}\r\n"
        if credential is not None:
            _check_field("authorization", credential)
        self._plain = plain
        self._authorized = plain if credential is None else f"{plain}authorization: Bearer {credential}\r\n"

    # Requests.

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: Body = b"",
        content_type: str | None = None,
        headers: Mapping[str, str] = {},
        timeout_s: float,
        limit: str,
        max_body: int | None = None,
        authorize: bool = True,
        address: tuple[str, int] | None = None,
        retry_once: bool = False,
        fresh: bool = False,
    ) -> Response:
        """Send one request, and return its whole answer, whatever its status.

        `timeout_s` bounds all of it; `limit` is the name of that bound in `TimedOut`. `address`: dial this (checked)
        address instead of resolving the URL's host. `max_body` defaults to `control_body_bytes`. `retry_once`: a
        connection that breaks before the first response byte is tried once more on a fresh one even if it was
        fresh itself; only for requests that may be carried out twice. `fresh`: make a connection for this request.
        """
        most = self._settings.control_body_bytes if max_body is None else max_body
        origin, pieces = self._compose(method, url, body, content_type, headers, authorize, address)
        sink = await self._exchange(
            origin,
            pieces,
            partial(_Gather, max_body=most),
            timeout_s=timeout_s,
            limit=limit,
            retry_once=retry_once,
            fresh=fresh,
        )
        return sink.opened.result()

    def post_now(
        self,
        url: str,
        body: Body,
        *,
        content_type: str,
        timeout_s: float,
        limit: str,
        done: Callable[[Response | HttpFailure], None],
    ) -> bool:
        """POST over an idle connection, written before this returns; `done` hears the end, from the socket's read.

        False, and nothing is sent, where no idle connection is there: use `request`. `done` is not called from
        within this call. There is no retry: `BeforeResponse` tells the caller that it may.
        """
        origin, pieces = self._compose("POST", url, body, content_type, {}, True, None)
        connection = self._take(origin)
        if connection is None:
            return False
        loop = asyncio.get_running_loop()
        sink = _CallBack(connection, self._settings.control_body_bytes, done)
        expired = partial(_expired, connection, limit=limit, timeout_s=timeout_s)
        sink.watch(Deadline(loop, loop.time() + timeout_s, self._settings.late_timer_s, expired))
        connection.send(sink, pieces)
        return True

    async def json(
        self,
        method: str,
        url: str,
        kind: type[T],
        *,
        body: msgspec.Struct | None = None,
        headers: Mapping[str, str] = {},
        timeout_s: float | None = None,
        limit: str = "control",
        max_body: int | None = None,
        authorize: bool = True,
        address: tuple[str, int] | None = None,
    ) -> T:
        """Send a control message, and return the answer as `kind` (NoneType: only whether it succeeded).

        Raises the ShardlineError of an answer with status >= 400, and `NotOurPeer` for an answer that is not ours.
        """
        response = await self.request(
            method,
            url,
            body=b"" if body is None else msgspec.json.encode(body),
            content_type=None if body is None else "application/json",
            headers=headers,
            timeout_s=self._settings.control_s if timeout_s is None else timeout_s,
            limit=limit,
            max_body=max_body,
            authorize=authorize,
            address=address,
        )
        return answers.decode(peer_of(url), response, kind)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        url: str,
        *,
        body: Body = b"",
        content_type: str | None = None,
        headers: Mapping[str, str] = {},
        timeout_s: float,
        limit: str,
        idle_s: float | None = None,
        on_line: Callable[[bytes], None] | None = None,
        on_end: Callable[[Exception | None], None] | None = None,
        authorize: bool = True,
        address: tuple[str, int] | None = None,
    ) -> AsyncIterator[LineStream]:
        """A request whose answer is a stream of lines; `timeout_s` bounds the wait for the response's head only.

        With `on_line`, lines are not buffered: it is called with each (without newline) from within the socket's
        read, also before this context is entered, and only if the status is below 400. `on_end` is called once,
        with None after a clean end or else with what broke the stream (also an exception of `on_line`), but not
        after the context was left. `idle_s` bounds each wait of `async for`. A stream left early is closed.
        """
        origin, pieces = self._compose(method, url, body, content_type, headers, authorize, address)
        late_s = self._settings.late_timer_s
        make = partial(LineStream, on_line=on_line, on_end=on_end, idle_s=idle_s, late_s=late_s)
        stream = await self._exchange(origin, pieces, make, timeout_s=timeout_s, limit=limit, retry_once=False)
        try:
            yield stream
        finally:
            stream.leave()

    async def aclose(self) -> None:
        """Close all connections; requests that run fail. Returns when the sockets are closed."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self._open):
            connection.fail(BrokenResponse(connection.peer, "the client was closed"))
        if self._open:
            self._all_gone = asyncio.Event()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._all_gone.wait()
            except TimeoutError:
                log.warning("connections_left", connections=len(self._open))

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._open)

    # One exchange.

    def _compose(
        self,
        method: str,
        url: str,
        body: Body,
        content_type: str | None,
        headers: Mapping[str, str],
        authorize: bool,
        address: tuple[str, int] | None,
    ) -> tuple[_Origin, list[Buffer]]:
        """The origin, and the request as pieces for one vectored write."""
        if method not in _METHODS:
            raise ValueError(f"method {method!r} is not used inside a cluster")
        scheme, host, port, target = split_url(url)
        key = (scheme, host, port, address)
        origin = self._origins.get(key)
        if origin is None:
            tls = (self._tls or ssl.create_default_context()) if scheme == "https" else None
            origin = self._origins[key] = _Origin(host, port, address, tls)
        pieces: list[Buffer] = [body] if isinstance(body, bytes) else list(body)
        size = sum(piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces)
        lines = [f"{method} {target} HTTP/1.1\r\nhost: {origin.authority}\r\n"]
        lines.append(self._authorized if authorize else self._plain)
        if size or method != "GET":
            lines.append(f"content-length: {size}\r\n")
        if content_type is not None:
            _check_field("content-type", content_type)
            lines.append(f"content-type: {content_type}\r\n")
        for name, value in headers.items():
            _check_field(name, value)
            lines.append(f"{name}: {value}\r\n")
        lines.append("\r\n")
        return origin, ["".join(lines).encode("latin-1"), *pieces]

    async def _exchange(
        self,
        origin: _Origin,
        pieces: list[Buffer],
        make: Callable[[Connection], _S],
        *,
        timeout_s: float,
        limit: str,
        retry_once: bool,
        fresh: bool = False,
    ) -> _S:
        """Send, wait until the sink is opened, and once more on a fresh connection where the rule allows it."""
        expired = partial(_expired, limit=limit, timeout_s=timeout_s)
        due = asyncio.get_running_loop().time() + timeout_s
        connection = None if fresh else self._take(origin)
        if connection is None:
            connection = await self._dial(origin, due)
        try:
            return await self._attempt(connection, pieces, make, due, expired)
        except BeforeResponse as failure:
            if not (failure.reused or retry_once):
                raise
        return await self._attempt(await self._dial(origin, due), pieces, make, due, expired)

    async def _attempt(
        self,
        connection: Connection,
        pieces: list[Buffer],
        make: Callable[[Connection], _S],
        due: float,
        expired: Callable[[Connection], None],
    ) -> _S:
        sink = make(connection)
        loop = asyncio.get_running_loop()
        deadline = Deadline(loop, due, self._settings.late_timer_s, partial(expired, connection))
        try:
            connection.send(sink, pieces)
            await sink.opened
        except BaseException:
            # Also our own cancellation: a connection in the middle of an answer serves nobody else.
            connection.leave(sink)
            raise
        finally:
            deadline.cancel()
        return sink

    # The pool.

    def _take(self, origin: _Origin) -> Connection | None:
        """The idle connection that was used last; None if there is no fresh enough one."""
        oldest = asyncio.get_running_loop().time() - self._settings.client_idle_s
        while origin.idle:
            connection, since = origin.idle.popitem()
            if since >= oldest and connection.is_usable():
                return connection
            connection.close()
        return None

    async def _dial(self, origin: _Origin, due: float) -> Connection:
        loop = asyncio.get_running_loop()
        seconds = max(0.0, min(self._settings.connect_s, due - loop.time()))
        host, port = origin.dial
        done, gone = partial(self._done, origin), partial(self._gone, origin)
        if self._closed:
            raise ConnectFailed(origin.peer, "the client is closed")
        origin.open += 1
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(origin.peer, self._settings.header_bytes, done, gone),
                    host,
                    port,
                    ssl=origin.tls,
                    server_hostname=None if origin.tls is None else origin.host,
                )
        except TimeoutError:
            raise ConnectFailed(origin.peer, f"no connection within the limit connect ({seconds:.3g} s)") from None
        except (OSError, UnicodeError) as error:
            raise ConnectFailed(origin.peer, f"no connection ({error})") from None
        finally:
            origin.open -= 1
        # Counted here and not when the socket is made: a loop need not tell the end of a connection whose making was
        # cancelled.
        if connection.lost:
            raise ConnectFailed(origin.peer, "the connection was closed as soon as it was open")
        if self._closed:
            connection.abort()
            raise ConnectFailed(origin.peer, "the client is closed")
        origin.open += 1
        self._open.add(connection)
        return connection

    def _done(self, origin: _Origin, connection: Connection, keep: bool) -> None:
        if not keep or self._closed or origin.retired:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        origin.idle[connection] = loop.time()
        if self._sweep is None:
            self._sweep = loop.call_later(self._settings.client_idle_s, self._drop_idle)

    def _gone(self, origin: _Origin, connection: Connection) -> None:
        if connection not in self._open:
            return
        self._open.remove(connection)
        origin.open -= 1
        origin.idle.pop(connection, None)
        if self._all_gone is not None and not self._open:
            self._all_gone.set()

    def _drop_idle(self) -> None:
        """Close what was idle too long; come again when the next one will have been."""
        self._sweep = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._settings.client_idle_s
        next_since: float | None = None
        for key, origin in list(self._origins.items()):
            for connection, since in list(origin.idle.items()):
                if since > oldest:
                    next_since = since if next_since is None else min(next_since, since)
                    break
                del origin.idle[connection]
                connection.close()
            if not origin.open:
                origin.retired = True
                del self._origins[key]
        if next_since is not None:
            self._sweep = loop.call_later(max(0.01, next_since - oldest), self._drop_idle)


def peer_of(url: str) -> str:
    """`host:port` of a URL, as failures name it."""
    parts = split_url(url)
    return host_port(parts.host, parts.port)


def _expired(connection: Connection, *, limit: str, timeout_s: float) -> None:
    connection.fail(TimedOut(connection.peer, limit, timeout_s))


def _check_field(name: str, value: str) -> None:
    if not _FIELD.fullmatch(name) or not _VALUE.fullmatch(value):
        raise ValueError(f"not a header field: {name[:100]!r}")
