"""The HTTP/1.1 client of all traffic inside a cluster: Node to Node, Gateway to Node, everybody to the Tracker.

Owns how a request is written, limits, cancellation and the one retry rule; connections are pool.py's. It follows no
redirect, keeps no cookie, asks for no compression and reads no proxy variable: cluster traffic goes where the URL
says. Shown by tests/transport/test_http_client.py, test_post_now.py and test_carrier.py.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import msgspec

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
    OwnLack,
    TimedOut,
)
from shardline.transport.lines import LineStream
from shardline.transport.pool import Origin, Pool
from shardline.transport.tls import ClusterTls
from shardline.transport.tracing import trace_fields

__all__ = [
    "BeforeResponse",
    "BrokenResponse",
    "ConnectFailed",
    "HttpClient",
    "HttpFailure",
    "LineStream",
    "NotOurPeer",
    "OwnLack",
    "Response",
    "TimedOut",
]

Body = bytes | Sequence[Buffer]
T = TypeVar("T")
_FIELD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t -~\x80-\xff]*")
_split = lru_cache(maxsize=512)(split_url)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})


class _Answer(Sink, Protocol):
    """A sink with a future for whoever waits until it is opened."""

    @property
    def opened(self) -> asyncio.Future[Any]: ...


_S = TypeVar("_S", bound=_Answer)


class _Whole:
    """What a sink of one whole Response of at most `max_body` bytes collects."""

    __slots__ = ("_chunks", "_headers", "_left", "_max_body", "_peer", "_status")

    def __init__(self, connection: Connection, max_body: int) -> None:
        self._peer = connection.peer
        self._max_body = self._left = max_body
        self._chunks: list[bytes] = []

    def head(self, status: int, headers: dict[str, str]) -> memoryview | None:
        self._status = status
        self._headers = headers
        length = headers.get("content-length")
        if length is not None and int(length) > self._max_body:
            raise BrokenResponse(self._peer, f"answer of {length} bytes, limit {self._max_body}")
        return None

    def body(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise BrokenResponse(self._peer, f"answer is longer than {self._max_body} bytes")
        self._chunks.append(data)

    def _response(self) -> Response:
        return Response(self._status, self._headers, b"".join(self._chunks))


class _Gather(_Whole):
    """Sink of a request that somebody waits for."""

    __slots__ = ("opened",)

    def __init__(self, connection: Connection, max_body: int) -> None:
        super().__init__(connection, max_body)
        self.opened: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.opened.done():
            self.opened.set_result(self._response())

    def lost(self, failure: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(failure)


class _Fill(_Gather):
    """Sink of a request whose body has a place waiting, if it is a success and exactly as long as that."""

    __slots__ = ("_into", "filled")

    def __init__(self, connection: Connection, max_body: int, into: memoryview) -> None:
        super().__init__(connection, max_body)
        self._into = into
        self.filled = False

    def head(self, status: int, headers: dict[str, str]) -> memoryview | None:
        super().head(status, headers)
        if status >= 300 or headers.get("content-length") != str(len(self._into)) or not self._into:
            return None
        self.filled = True
        return self._into


class _CallBack(_Whole):
    """Sink of a request that nobody waits for: its end is a call."""

    __slots__ = ("_deadline", "_done")

    def __init__(self, connection: Connection, max_body: int, done: Callable[[Response | HttpFailure], None]) -> None:
        super().__init__(connection, max_body)
        self._done = done
        self._deadline: Deadline | None = None

    def watch(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def end(self) -> None:
        self._finish(self._response())

    def lost(self, failure: Exception) -> None:
        if not isinstance(failure, HttpFailure):
            failure = BrokenResponse(self._peer, str(failure))
        self._finish(failure)

    def _finish(self, outcome: Response | HttpFailure) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._done(outcome)


class HttpClient:
    """One per process and plane. Close it with `aclose()`; every method raises `HttpFailure` for the wire's faults.

    `tls` is the context for https URLs; without one, an https URL is verified against the system's roots. With the
    keys of a cluster (`ClusterTls`) a URL names the party that must answer (`https://PARTY@HOST:PORT`), and nobody else
    is called. `part`: what this process is, for the error that says what it lacks. `foreign`: the servers are none of
    ours, and an answer may end with its connection, as in HTTP/1.0.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        credential: str | None = None,
        tls: ssl.SSLContext | ClusterTls | None = None,
        part: str = "this process",
        foreign: bool = False,
    ) -> None:
        self._settings = settings
        self._pool = Pool(settings, part=part, tls=tls, foreign=foreign)
        plain = f"shardline-protocol: {PROTOCOL}\r\n"
        if credential is not None:
            _check_field("authorization", credential)
        self._plain = plain
        self._authorized = plain if credential is None else f"{plain}authorization: Bearer {credential}\r\n"
        self._post_head = lru_cache(maxsize=512)(self._composed_post)

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
        origin, pieces = self._compose(
            method, url, body, content_type=content_type, headers=headers, authorize=authorize, address=address
        )
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

    async def fill(
        self,
        url: str,
        into: memoryview,
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        limit: str,
        max_body: int,
        authorize: bool = True,
        address: tuple[str, int] | None = None,
        retry_once: bool = False,
    ) -> tuple[Response, bool]:
        """GET a large body straight into memory: the answer, and whether its body went to `into` (bytes, writable).

        It does where the answer is a success with exactly as many bytes; any other has its body as from `request`, of
        at most `max_body` bytes. What stands in `into` after a failure means nothing. The rest is as of `request`.
        """
        origin, pieces = self._compose(
            "GET", url, b"", content_type=None, headers=headers, authorize=authorize, address=address
        )
        make = partial(_Fill, max_body=max_body, into=into)
        sink = await self._exchange(origin, pieces, make, timeout_s=timeout_s, limit=limit, retry_once=retry_once)
        return sink.opened.result(), sink.filled

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
        origin = self._pool.origin(_split(url), None)
        connection = self._pool.take(origin)
        if connection is None:
            return False
        pieces: list[Buffer] = [body] if isinstance(body, bytes) else list(body)
        size = sum([piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces])
        pieces.insert(0, self._post_head(url, size, content_type))
        sink = _CallBack(connection, self._settings.control_body_bytes, done)
        sink.watch(self._send(connection, sink, pieces, _Limit(limit, timeout_s)))
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
        read, also before this context is entered, and only with status 200. `on_end` is called once,
        with None after a clean end or else with what broke the stream (also an exception of `on_line`), but not
        after the context was left. `idle_s` bounds each wait of `async for`. A stream left early is closed.
        """
        origin, pieces = self._compose(
            method, url, body, content_type=content_type, headers=headers, authorize=authorize, address=address
        )
        late_s = self._settings.late_timer_s
        make = partial(LineStream, on_line=on_line, on_end=on_end, idle_s=idle_s, late_s=late_s)
        stream = await self._exchange(origin, pieces, make, timeout_s=timeout_s, limit=limit, retry_once=False)
        try:
            yield stream
        finally:
            stream.leave()

    async def aclose(self) -> None:
        """Close all connections; requests that run fail. Returns when the sockets are closed."""
        await self._pool.aclose()

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._pool)

    # One exchange.

    def _composed_post(self, url: str, size: int, content_type: str) -> bytes:
        """The head of a POST with a body of `size` bytes. One decode step is like the last, so it is remembered."""
        parts = split_url(url)
        _check_field("content-type", content_type)
        authority = host_port(parts.host.partition("%")[0], parts.port)
        head = f"POST {parts.target} HTTP/1.1\r\nhost: {authority}\r\n{self._authorized}"
        return f"{head}content-length: {size}\r\ncontent-type: {content_type}\r\n\r\n".encode("latin-1")

    def _compose(
        self,
        method: str,
        url: str,
        body: Body,
        *,
        content_type: str | None,
        headers: Mapping[str, str] = {},
        authorize: bool = True,
        address: tuple[str, int] | None = None,
    ) -> tuple[Origin, list[Buffer]]:
        """The origin, and the request as pieces for one vectored write."""
        if method not in _METHODS:
            raise ValueError(f"method {method!r} is not used inside a cluster")
        parts = split_url(url)
        origin = self._pool.origin(parts, address)
        pieces: list[Buffer] = [body] if isinstance(body, bytes) else list(body)
        size = sum(piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in pieces)
        lines = [f"{method} {parts.target} HTTP/1.1\r\nhost: {origin.authority}\r\n"]
        lines.append(self._authorized if authorize else self._plain)
        if size or method != "GET":
            lines.append(f"content-length: {size}\r\n")
        if content_type is not None:
            _check_field("content-type", content_type)
            lines.append(f"content-type: {content_type}\r\n")
        for name, value in headers.items():
            _check_field(name, value)
            lines.append(f"{name}: {value}\r\n")
        lines.append(trace_fields())
        lines.append("\r\n")
        return origin, ["".join(lines).encode("latin-1"), *pieces]

    async def _exchange(
        self,
        origin: Origin,
        pieces: list[Buffer],
        make: Callable[[Connection], _S],
        *,
        timeout_s: float,
        limit: str,
        retry_once: bool,
        fresh: bool = False,
    ) -> _S:
        """Send, wait until the sink is opened, and once more on a fresh connection where the rule allows it."""
        until = _Limit(limit, timeout_s)
        connection = None if fresh else self._pool.take(origin)
        if connection is None:
            connection = await self._pool.dial(origin, until.due)
        try:
            return await self._attempt(connection, pieces, make, until)
        except BeforeResponse as failure:
            if not (failure.reused or retry_once):
                raise
        return await self._attempt(await self._pool.dial(origin, until.due), pieces, make, until)

    async def _attempt(
        self, connection: Connection, pieces: list[Buffer], make: Callable[[Connection], _S], until: _Limit
    ) -> _S:
        sink = make(connection)
        deadline = self._send(connection, sink, pieces, until)
        try:
            await sink.opened
        except BaseException:
            # Also our own cancellation: a connection in the middle of an answer serves nobody else.
            connection.leave(sink)
            raise
        finally:
            deadline.cancel()
        return sink

    def _send(self, connection: Connection, sink: Sink, pieces: list[Buffer], until: _Limit) -> Deadline:
        """Write one request. Its deadline, which the caller cancels when the answer is there."""
        loop = asyncio.get_running_loop()
        deadline = Deadline(loop, until.due, self._settings.late_timer_s, partial(until.expired, connection))
        connection.send(sink, pieces)
        return deadline


class _Limit:
    """How long an exchange may take, and what that limit is called."""

    __slots__ = ("_name", "_seconds", "due")

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self.due = asyncio.get_running_loop().time() + seconds

    def expired(self, connection: Connection) -> None:
        connection.fail(TimedOut(connection.peer, self._name, self._seconds))


def peer_of(url: str) -> str:
    """`host:port` of a URL, as failures name it."""
    parts = split_url(url)
    return host_port(parts.host, parts.port)


def _check_field(name: str, value: str) -> None:
    if not _FIELD.fullmatch(name) or not _VALUE.fullmatch(value):
        raise ValueError(f"not a header field: {name[:100]!r}")
