"""One HTTP/1.1 connection of a client: writes a request, parses the response, tells one sink.

Owns the socket, the parser and the rule when a connection may serve again. It does not choose connections, retry,
or know what a body means: the client and the sinks do. Lowest latency is the aim: everything happens in the socket's
read, no task, no queue; a large body goes from the socket to where it shall lie, without a copy. Shown by
tests/transport/test_http_client.py (every split of a response) and test_fill.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import httptools

from shardline.transport.failures import BeforeResponse, BrokenResponse, HttpFailure, NotOurPeer

HEADER_COUNT = 100
"""Header fields that a response may have."""

_PIECES_AT_ONCE = 64

Buffer = bytes | bytearray | memoryview


class Sink(Protocol):
    """Whom a connection tells of one response. Called from the socket's read: never blocks, never awaits."""

    def head(self, status: int, headers: dict[str, str]) -> memoryview | None:
        """Where a body of known length shall lie, in exactly that length; None: `body` hears it in parts."""

    def body(self, data: bytes) -> None: ...

    def end(self) -> None:
        """The response is complete, and the connection has left its hands."""

    def lost(self, failure: Exception) -> None:
        """There will be no further call; the connection is closed."""


class Connection(asyncio.Protocol):
    """At most one request at a time. `done` is called with (connection, may it serve again) after each response."""

    __slots__ = (
        "_complete",
        "_done",
        "_fd",
        "_foreign",
        "_gone",
        "_head_bytes",
        "_head_limit",
        "_headed",
        "_headers",
        "_keep",
        "_open_ended",
        "_parser",
        "_paused",
        "_place",
        "_sink",
        "_started",
        "_status",
        "_transport",
        "lost",
        "peer",
        "served",
    )

    def __init__(
        self,
        peer: str,
        head_limit: int,
        done: Callable[[Connection, bool], None],
        gone: Callable[[Connection], None],
        *,
        foreign: bool = False,
    ) -> None:
        """`foreign`: a response may have no marked end, and then ends with the connection, as in HTTP/1.0; whoever
        reads it must see by itself whether it is whole."""
        self.peer = peer
        self.served = 0
        """Responses that were read from this connection to their end."""
        self.lost = False
        """The connection is closed, and everybody has been told."""
        self._head_limit = head_limit
        self._foreign = foreign
        self._done = done
        self._gone = gone
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._headers: dict[str, str] = {}
        self._status = 0
        self._place: memoryview | None = None
        """Where the rest of the body goes, if the sink has a place for it."""
        self._fd: int | None = None
        """Of a plain socket that takes several pieces in one call."""
        self._head_bytes = 0
        self._started = self._headed = self._complete = self._keep = self._paused = self._open_ended = False

    # What the client calls.

    def send(self, sink: Sink, pieces: Sequence[Buffer]) -> None:
        """Write one request, whose response goes to `sink`. The pieces stay unchanged until the sink is told."""
        if self._transport.is_closing():
            sink.lost(BeforeResponse(self.peer, "connection closed before the request", reused=self.served > 0))
            return
        self._sink = sink
        self._headers = {}
        self._place = None
        self._head_bytes = 0
        self._started = self._headed = self._complete = self._keep = self._open_ended = False
        self._write(pieces)

    def _write(self, pieces: Sequence[Buffer]) -> None:
        """At once, where the socket takes it: a loop's own transport may write only when the callback that it is in
        has returned, and what a callback does behind a push would then delay it."""
        transport = self._transport
        if self._fd is None or len(pieces) > _PIECES_AT_ONCE or transport.get_write_buffer_size():
            transport.writelines(pieces)
            return
        try:
            sent = os.writev(self._fd, pieces)
        except OSError:
            sent = 0  # full, or broken: the transport finds out which
        rest = [p if isinstance(p, bytes) else memoryview(p).cast("B") for p in pieces] if sent else list(pieces)
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if rest:
            rest[0] = memoryview(rest[0])[sent:]
            transport.writelines(rest)

    def is_usable(self) -> bool:
        return not self._transport.is_closing()

    def leave(self, sink: Sink) -> None:
        """The caller goes: if `sink` still waits, close, because the rest of its response would come."""
        if self._sink is sink:
            self.abort()

    def abort(self) -> None:
        """Close at once, without a word to the sink."""
        self._sink = None
        self._transport.abort()

    def close(self) -> None:
        """Close an idle connection."""
        self._transport.close()

    def fail(self, failure: Exception) -> None:
        """Close, and tell the sink why."""
        sink, self._sink = self._sink, None
        self._transport.abort()
        if sink is not None:
            sink.lost(failure)

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(os, "writev") and transport.get_extra_info("sslcontext") is None:
                self._fd = sock.fileno()

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            # Nobody asked: the other side is confused, and this connection with it.
            self._transport.abort()
            return
        self._started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail(NotOurPeer(self.peer, "it wants to switch the protocol"))
        except httptools.HttpParserError as error:
            self._parse_failed(error)
        if self._complete:
            self._finish()
        elif self._place is not None and self._sink is not None:
            self._fill(self._place)
        elif not self._headed and self._sink is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self._head_limit:
                self.fail(BrokenResponse(self.peer, f"response head is longer than {self._head_limit} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._gone(self)
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if exc is None and self._open_ended:
            self.served += 1
            sink.end()
            return
        why = f"connection lost ({exc})" if exc is not None else "connection closed by the other side"
        failure: HttpFailure
        if self._started:
            failure = BrokenResponse(self.peer, f"{why} in the middle of the response")
        else:
            failure = BeforeResponse(self.peer, f"{why} before the response", reused=self.served > 0)
        sink.lost(failure)

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
        if len(headers) > HEADER_COUNT:
            raise BrokenResponse(self.peer, f"response has more than {HEADER_COUNT} header fields")

    def on_headers_complete(self) -> None:
        sink = self._sink
        if sink is None or self._complete:
            return
        status = self._status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        headers = self._headers
        self._headed = True
        if "content-length" not in headers and "transfer-encoding" not in headers and status not in (204, 304):
            if not self._foreign:
                raise NotOurPeer(self.peer, "its response has no marked end")
            self._open_ended = True
        place = sink.head(status, headers)
        if place is not None and str(len(place)) != headers.get("content-length"):
            raise ValueError("the place for a body is not as long as the body")
        self._place = place

    def on_body(self, data: bytes) -> None:
        sink, place = self._sink, self._place
        if sink is None or self._complete:
            return
        if place is None:
            sink.body(data)
        else:
            place[: len(data)] = data
            self._place = place[len(data) :]

    def on_message_complete(self) -> None:
        if self._headed and self._sink is not None and not self._complete:
            self._complete = True
            self._keep = self._parser.should_keep_alive()

    def _fill(self, place: memoryview) -> None:
        """The rest of the body goes from the socket to its place, past the parser, which is of no use after that."""
        self._keep = self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        self._switch(_Filling(self, place))

    def filled(self) -> None:
        """The whole body lies in its place."""
        self._switch(self)
        if self._sink is not None:
            self._finish()

    def _switch(self, protocol: Connection | _Filling) -> None:
        # A loop may ask what kind of protocol it has only when reading begins.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        self._transport.resume_reading()

    def _parse_failed(self, error: httptools.HttpParserError) -> None:
        if self._complete:
            # The response was whole; what came behind it is not HTTP.
            self._keep = False
            return
        cause = error.__context__
        if isinstance(error, httptools.HttpParserCallbackError) and isinstance(cause, Exception):
            self.fail(cause)
        else:
            self.fail(NotOurPeer(self.peer, f"it does not speak HTTP ({error})"))

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        self._place = None
        self._complete = False
        self.served += 1
        transport = self._transport
        # An answer that overtook its request leaves bytes of the request behind: not reusable.
        keep = self._keep and not transport.is_closing() and transport.get_write_buffer_size() == 0
        self.resume()
        self._done(self, keep)
        if sink is not None:
            sink.end()


class _Filling(asyncio.BufferedProtocol):
    """Stands in for a connection while the rest of one body is read. `place` is not empty."""

    def __init__(self, connection: Connection, place: memoryview) -> None:
        self._connection = connection
        self._place = place

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._place

    def buffer_updated(self, nbytes: int) -> None:
        self._place = self._place[nbytes:]
        if not self._place:
            self._connection.filled()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
