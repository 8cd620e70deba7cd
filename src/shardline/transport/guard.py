"""The server's side of a connection: uvicorn's httptools protocol, with limits on what a stranger may hold.

Owns the time for a request head, its size and field count, the number of connections, what happens to a body that
nobody reads, and what the end of a client's side means. Who makes way when all connections are taken is crowd.py's;
bodies that are read are bounded in bodies.py. Shown by tests/transport/test_guard.py and test_half_closed.py.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import structlog
from starlette.types import Message, Receive
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.bodies import BODY_BYTES_PER_S, BODY_GRACE_S, ROOM
from shardline.transport.body_room import SMALL_BYTES, BodyRoom, Place
from shardline.transport.boundary import error_bytes, error_headers
from shardline.transport.crowd import Crowd
from shardline.transport.direct import DirectLane, accepted, content_length, refused
from shardline.transport.tls import party_at, valid_until

HEADER_COUNT = 100
CONNECTIONS = 4096
SPARE_FILES = 128
"""File descriptors of the process that connections leave to files, workers and pipes; …"""
FILES_PER_CONNECTION = 4
"""… and of the rest, so many are kept for each: itself, one that finds no place, and two to others for its request."""
CLIENT = "shardline.client_side"
"""Where the `ClientSide` of a request stands in `scope["state"]`."""
PARTIES = "shardline.parties"
"""There, over HTTPS: the parties that the caller's certificate names; none for a caller without one."""
PIPELINE = 8
"""Requests that a client may send ahead of the answers."""
LINGER_BYTES = 24 << 20
"""Of a body that was refused, so much is still read, for `LINGER_S`: many clients write it all before they look for an
answer, and a connection that is closed meanwhile loses the answer with it."""
LINGER_S = 2.0

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class ClientSide:
    """Whether the client has ended its side of a connection, after a whole request."""

    ended: bool = False


class WholeRequest:
    """`receive` of one request. When the client has ended its side, it is told as a departure once the body is read.

    Somebody who leaves looks the same as somebody who only has no more to say; so whoever listens for departures stops,
    and whatever answers without listening is heard: the other direction stays open.
    """

    __slots__ = ("_client", "_receive", "_whole")

    def __init__(self, receive: Receive, client: ClientSide) -> None:
        self._receive = receive
        self._client = client
        self._whole = False

    async def __call__(self) -> Message:
        while not (self._whole and self._client.ended):
            message = await self._receive()
            if message["type"] != "http.request" or not self._whole:
                self._whole = not message.get("more_body", False)
                return message
        return {"type": "http.disconnect"}


@dataclass(eq=False)
class GuardLimits:
    """Limits of one server, and the connections that wait for their clients."""

    header_s: float
    header_bytes: int
    connections: int = CONNECTIONS
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last connection goes."""
    waiting: Crowd[GuardedProtocol] = field(default_factory=Crowd)
    leaving: set[GuardedProtocol] = field(default_factory=set)
    """Connections that found no place, and are there for a moment to hear it; at most as many as have one."""
    direct: DirectLane | None = None
    room: BodyRoom = field(default_factory=lambda: BodyRoom(Settings().body_memory_bytes))

    def __post_init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            self.connections = max(16, min(self.connections, (soft - SPARE_FILES) // FILES_PER_CONNECTION))


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: GuardLimits,
    ) -> None:
        self._client_side = ClientSide()
        state = {**app_state, CLIENT: self._client_side, ROOM: limits.room}
        super().__init__(config, server_state, state, _loop)
        self.limits = limits
        self.heard = 0
        """Bytes that came since it is the client's turn."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._head_fields = 0
        self._head_size = 0
        self._in_body = False
        self._lingered = 0
        self._refused: ShardlineError | None = None
        self._turned_away: ShardlineError | None = None
        """Why there is no place, until it was said."""
        self._direct: DirectLane | None = None
        """Set from the head of a direct request to its answer."""
        self._direct_body: list[bytes] = []
        self._direct_since = 0.0
        self._direct_place: Place | None = None
        self._direct_length = 0
        self._welcome_until = math.inf
        """When the certificate of the caller ends (loop time); what runs then goes on, and nothing new begins."""
        self._known_head = b""
        """Of the last direct request, where it came in one piece: the same bytes need not be read again."""
        self._known_length = 0
        """Of the body behind it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self.scheme == "https":
            self.app_state[PARTIES] = party_at(transport)
            self._welcome_until = self.loop.time() + valid_until(transport) - time.time()
        limits = self.limits
        if len(self.connections) - len(limits.leaving) > limits.connections:
            slowest = limits.waiting.pick(self.loop.time())
            if slowest is None:
                self._turn_away()
                return
            slowest.make_way()
        self._wait_for_client()
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.waiting.works(self)
        self.limits.leaving.discard(self)
        self._free_direct()
        self._cancel_timers()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if not self.connections:
            self.limits.empty.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refused is not None or self.parser is None:
            if self._turned_away is not None:
                self._tell_turned_away(self._turned_away)
            return
        if self._known_head and data.startswith(self._known_head) and self._is_known(data):
            self._take_known(data)
            return
        counted = not self._in_body
        began = counted and not self._head_bytes and self._direct is None
        self._direct_length = 0
        self.heard += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.refuse(ShardlineError("invalid_value", "upgrades and tunnels are not served here"))
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not isinstance(cause, ShardlineError):
                cause = ShardlineError("invalid_value", "the request is not valid HTTP")
            self.refuse(cause)
            return
        if self._direct_length:
            self._know(data, began)
        self._rest(data, counted)

    def _rest(self, data: bytes, counted: bool) -> None:
        """What is still on its way behind these bytes, and how long it may take. `counted`: they began in no body."""
        if self._direct is not None:
            if self._in_body:
                self._await_body()
        elif self._in_body:
            self._linger(len(data))
        elif self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete):
            # Bytes came, and there is no request: its head is on the way, or is being dribbled.
            self._head_bytes += len(data) if counted else 0
            if self._head_bytes > self.limits.header_bytes:
                self.refuse(self._too_large())
            elif self._head_timer is None and not self.transport.is_closing():
                self._arm_head_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has ended its side. True keeps ours open, where an answer is due that has not begun."""
        cycle = self.cycle
        if self._in_body or self._direct is not None or self._refused is not None or self.scheme == "https":
            return False
        if cycle is None or cycle.response_started or cycle.more_body or self.pipeline:
            return False
        self._client_side.ended = True
        cycle.keep_alive = False
        cycle.message_event.set()
        return True

    # httptools callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_fields = 0
        self._head_size = 0

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow(len(name) + len(value) + 4)
        self._head_fields += 1
        if self._head_fields > HEADER_COUNT:
            raise ShardlineError("headers_too_large", f"more than {HEADER_COUNT} header fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINE:
            raise ShardlineError("invalid_value", "too many requests were sent ahead of their answers")
        self._in_body = True
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_client()
        if self._direct is not None:
            raise ShardlineError("invalid_value", "a request was sent ahead of the answer to a step")
        if self._is_direct():
            self._direct = self.limits.direct
            self._direct_body = []
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._direct is None:
            super().on_body(body)
        else:
            self._direct_body.append(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self.limits.waiting.works(self)
        self._lingered = 0
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if self._direct is not None:
            self._take_direct(self._direct)
            return
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # The rest of a body that nobody wanted has come after all: the connection is idle from now on.
            self._await_next()

    # The direct lane

    def _is_direct(self) -> bool:
        handler = self.limits.direct
        if handler is None or self.url != handler.path or self.parser.get_method() != b"POST":
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        length = content_length(self.headers)
        if length is None or not 0 < length <= handler.limit or self.parser.get_http_version() != "1.1":
            return False
        if not handler.admits(self.headers):
            return False
        if length > SMALL_BYTES:
            # Where there is no room for it now, the ordinary way waits for some.
            self._direct_place = self.limits.room.take_now(length)
            return self._direct_place is not None
        self._direct_length = length
        return True

    def _know(self, data: bytes, began: bool) -> None:
        """Remember the head of a small direct request that came whole, alone, and in one piece."""
        end = data.find(b"\r\n\r\n") + 4
        if began and not self._in_body and len(data) == end + self._direct_length:
            self._known_head, self._known_length = data[:end], self._direct_length

    def _is_known(self, data: bytes) -> bool:
        """Whether this is one more request with that head, whole, on a connection that waits for one."""
        waits = self._direct is None and not self._in_body and not self._head_bytes and self._head_timer is None
        done = self.cycle is None or self.cycle.response_complete
        return waits and done and not self.pipeline and len(data) == len(self._known_head) + self._known_length

    def _take_known(self, data: bytes) -> None:
        handler = self.limits.direct
        if handler is None:
            raise RuntimeError("a direct request on a server without a direct lane")
        self.limits.waiting.works(self)
        self._direct = handler
        self._direct_body = [data[len(self._known_head) :]]
        self._take_direct(handler)

    def _await_body(self) -> None:
        """The rest of the body is on its way: it has as long as any body (bodies.py)."""
        now = self.loop.time()
        if self._linger_timer is None:
            self._direct_since = now
        else:
            self._linger_timer.cancel()
        due = self._direct_since + BODY_GRACE_S + sum(map(len, self._direct_body)) / BODY_BYTES_PER_S
        self._linger_timer = self.loop.call_at(max(now, due), self.transport.abort)

    def _take_direct(self, handler: DirectLane) -> None:
        chunks, self._direct_body = self._direct_body, []
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._free_direct()  # what is taken, its owner counts
        try:
            answer = handler.take(body)
        except ShardlineError as error:
            self._answer_direct(refused(error))
            return
        except Exception:
            # The boundary of this lane, as ErrorBoundary is of the other.
            log.exception("request_failed", path=self.url.decode("latin-1"))
            self._answer_direct(refused(ShardlineError("internal", "internal error: the log has its cause")))
            return
        if isinstance(answer, bytes):
            self._answer_direct(accepted(answer))
            return
        task = self.loop.create_task(self._answer_later(answer))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    async def _answer_later(self, answer: Coroutine[Any, Any, bytes]) -> None:
        try:
            self._answer_direct(accepted(await answer))
        except ShardlineError as error:
            self._answer_direct(refused(error))
        except Exception:
            log.exception("request_failed", path=self.url.decode("latin-1"))
            self._answer_direct(refused(ShardlineError("internal", "internal error: the log has its cause")))

    def _answer_direct(self, answer: bytes) -> None:
        self._direct = None
        if self.transport.is_closing():
            return
        self.transport.write(answer)
        self.server_state.total_requests += 1
        self._await_next()

    def _free_direct(self) -> None:
        place, self._direct_place = self._direct_place, None
        if place is not None:
            self.limits.room.give(place)

    # Turns

    def _wait_for_client(self) -> None:
        self.heard = 0
        self.limits.waiting.waits(self, self.loop.time())

    def _await_next(self) -> None:
        """Idle: the next request may come for a while, from a caller who may still come."""
        if self.loop.time() >= self._welcome_until:
            self._part()
            return
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self._wait_for_client()

    def _part(self) -> None:
        """The caller's certificate is over. It comes back with a new one, if it has one: as after any idle time."""
        self._unset_keepalive_if_required()
        self.limits.waiting.works(self)
        self._cancel_timers()
        self.transport.close()

    def make_way(self) -> None:
        """All connections are taken, and this one has kept the server waiting: a newcomer has its place."""
        self.limits.waiting.works(self)
        if self._in_body and self.flow.read_paused:
            self.refuse(self._too_many())
        elif self._in_body or self._head_bytes:
            self.refuse(ShardlineError("slow_body", "all connections are taken, and this request came too slowly"))
        else:
            self._refused = self._too_many()
            self._cancel_timers()
            self.transport.close()

    def _too_many(self) -> ShardlineError:
        return ShardlineError("too_many_connections", f"{self.limits.connections} connections are open", retry_after=1)

    # Refusals

    def refuse(self, error: ShardlineError) -> None:
        """Answer with `error` where no answer has begun, and close."""
        self._refused = error
        self._cancel_timers()
        cycle = self.cycle
        if not self.transport.is_closing() and (cycle is None or cycle.response_complete or not cycle.response_started):
            self._write(error)
        self.transport.close()

    def _turn_away(self) -> None:
        """There is no place. It is said when the request comes: a connection that is closed before could lose the
        answer, and a client would take a full server for a dead one."""
        limits = self.limits
        if len(limits.leaving) >= limits.connections:
            self.refuse(self._too_many())
            return
        limits.leaving.add(self)
        self._refused = self._turned_away = self._too_many()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _tell_turned_away(self, error: ShardlineError) -> None:
        self._turned_away = None
        self._write(error)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _write(self, error: ShardlineError) -> None:
        body = error_bytes(error)
        lines = [STATUS_LINE[error.fault.status], b"content-type: application/json\r\n", b"connection: close\r\n"]
        lines += [b"%s: %s\r\n" % pair for pair in error_headers(error)]
        lines += [b"content-length: %d\r\n\r\n" % len(body), body]
        self.transport.write(b"".join(lines))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.loop.time() >= self._welcome_until and not self._in_body:
            self._part()
            return
        if self.timeout_keep_alive_task is not None:
            self._wait_for_client()
        if self._in_body and not self.transport.is_closing():
            # Answered without reading the body. Closing at once could destroy the answer on its way (a reset), and
            # reading on forever would be a gift: swallow a little, for a little while.
            self._unset_keepalive_if_required()
            if self._linger_timer is None:
                self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _linger(self, size: int) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            self._lingered += size
            if self._lingered > LINGER_BYTES:
                self.transport.close()

    def _grow(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self.limits.header_bytes:
            raise self._too_large()

    def _too_large(self) -> ShardlineError:
        return ShardlineError("headers_too_large", f"the request head is longer than {self.limits.header_bytes} bytes")

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_s, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._linger_timer = None
