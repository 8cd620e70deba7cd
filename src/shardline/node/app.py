"""The HTTP face of a Node: reads requests, asks the host, writes answers. Decides nothing.

`/v1/steps` is the hot path and has a lane of its own (StepsLane); the rest is dispatched by a small table. Error
bodies, request ids and the credential are the transport room's. Shown by tests/node/test_trust.py.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn
from urllib.parse import parse_qs

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.node.artifact_door import ArtifactDoor
from shardline.node.host import ShardHost
from shardline.node.info import Identity
from shardline.node.stream import SessionStream
from shardline.node.tickets import TicketGate
from shardline.options import LogReader
from shardline.settings import PROTOCOL, Settings
from shardline.transport.authority import name_of
from shardline.transport.bodies import read_body, read_json, send_body, send_json
from shardline.transport.boundary import ControlGate, ErrorBoundary, check_protocol, has_credential, no_such_method
from shardline.transport.carrier import EMPTY_ACK
from shardline.transport.direct import Headers
from shardline.transport.guard import PARTIES
from shardline.transport.spans import note
from shardline.transport.tls import may_route
from shardline.wire.messages import Beats, NodeInfo, OpenSession, StepAck, TokenizeAnswer, TokenizeRequest
from shardline.wire.steps import decode

log = structlog.get_logger(__name__)
_ack_encoder = msgspec.json.Encoder()
_NONCE = re.compile(r"[A-Za-z0-9_-]{8,128}")
_KEY = re.compile(r"[0-9a-f]{32}")
_BOOT = re.compile(r"[0-9a-f]{0,32}")
_NUMBER = re.compile(r"[0-9]{1,15}")
_OF_GATEWAYS = ("/v1/sessions", "/v1/beats", "/v1/tokenize", "/v1/text/", "/v1/log")
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


class NodeApp:
    """Endpoints of one Node, without the gate and the error boundary: see `node_app`."""

    def __init__(
        self,
        *,
        host: ShardHost,
        identity: Identity,
        settings: Settings,
        credential: str,
        info: Callable[[], NodeInfo],
        ticket_key: Callable[[], bytes | None],
        expelled: Callable[[], frozenset[str]] = frozenset,
        door: ArtifactDoor | None = None,
        log_lines: LogReader | None = None,
    ) -> None:
        """`door`: to the pieces of Model Artifacts that this Node gives away. `log_lines`: of its own log."""
        self._log_lines = log_lines
        self._door = door
        self._host = host
        self._identity = identity
        self._settings = settings
        self._credential = credential
        self._info = info
        self._ticket_key = ticket_key
        self._expelled = expelled
        self.steps = StepsLane(host, credential, settings.step_body_bytes)
        self._gate = TicketGate(identity.node_id)
        self._metrics = NodeMetrics(info)
        self._routes: dict[tuple[str, str], Endpoint] = {
            ("POST", "/v1/sessions"): self._open,
            ("POST", "/v1/beats"): self._beats,
            ("POST", "/v1/tokenize"): self._tokenize,
            ("GET", "/v1/node"): self._node,
            ("GET", "/v1/log"): self._log,
            ("GET", "/healthz"): self._healthz,
            ("GET", "/metrics"): self._show_metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        check_party(scope, path, self._expelled())
        if path == "/v1/steps" and method == "POST":
            await self._steps(scope, receive, send)
            return
        endpoint = self._routes.get((method, path))
        if endpoint is not None:
            await endpoint(scope, receive, send)
        elif path.startswith("/v1/sessions/") and method == "DELETE":
            await self._close(path.removeprefix("/v1/sessions/"), scope, send)
        elif path.startswith("/v1/text/") and method == "GET":
            await self._text(path.removeprefix("/v1/text/"), send)
        elif self._door is not None and self._door.leads(path):
            await self._door(scope, receive, send)
        else:
            self._refuse(path)

    def _refuse(self, path: str) -> NoReturn:
        """A path without an endpoint, or with one for another method."""
        if path.startswith("/v1/sessions/"):
            raise no_such_method("DELETE")
        if path.startswith("/v1/text/"):
            raise no_such_method("GET")
        allowed = [method for method, known in (*self._routes, ("POST", "/v1/steps")) if known == path]
        if allowed:
            raise no_such_method(", ".join(allowed))
        raise ShardlineError("not_found", "nothing is served at this path")

    async def _steps(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Where the direct lane did not take the request: it was not of the plain kind, or is to be refused."""
        body = await read_body(receive, scope, self._settings.step_body_bytes)
        answer = self.steps.take(body)
        await send_body(send, 202, answer if isinstance(answer, bytes) else await answer)

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open a session; its response stays open as long as the session does on this Node."""
        request = await read_json(receive, scope, OpenSession, self._settings.control_body_bytes)
        ticket = self._gate.admit(request, ticket_key=self._ticket_key(), shard=self._host.description, now=time.time())
        stream = self._host.open(ticket, request)
        log.info("session_opened", route=ticket.route, layers=[ticket.first, ticket.last], kv_tokens=ticket.kv_tokens)
        note(route=ticket.route, node=self._identity.node_id, layers=f"{ticket.first}:{ticket.last}")
        key = bytes.fromhex(request.key)
        await hold_stream(stream, lambda: self._host.sessions.close(key), receive, send)

    async def _close(self, key: str, scope: Scope, send: Send) -> None:
        """`keep=1`: the session ended well, what it computed may be kept."""
        closed = self._host.sessions.close(session_key(key), keep=scope["query_string"] == b"keep=1")
        await send_json(send, {"closed": closed})

    async def _beats(self, scope: Scope, receive: Receive, send: Send) -> None:
        beats = await read_json(receive, scope, Beats, self._settings.control_body_bytes)
        self._host.sessions.beat(beats.gateway)
        await send_json(send, {})

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_json(receive, scope, TokenizeRequest, self._settings.api_body_bytes)
        description = self._host.description
        if description is None or not description.is_head:
            raise ShardlineError("text_unavailable", "only a head Node tokenises, once it is loaded")
        if request.content_id is not None and request.content_id != description.content_id:
            raise ShardlineError("model_unavailable", "this Node holds another Model Artifact")
        tokens = await self._host.engine.tokenize(
            request.text, add_special=request.add_special, parse_special=request.parse_special
        )
        await send_json(send, TokenizeAnswer(tokens=tokens))

    async def _text(self, digest: str, send: Send) -> None:
        description = self._host.description
        bundle = self._host.engine.text_bundle()
        if description is None or bundle is None or digest != description.text_digest:
            raise ShardlineError("not_found", "no such text bundle here")
        await send_body(send, 200, bundle, b"application/msgpack")

    async def _node(self, scope: Scope, receive: Receive, send: Send) -> None:
        await tell_node(scope, send, self._identity, self._credential, self._info)

    async def _log(self, scope: Scope, receive: Receive, send: Send) -> None:
        await tell_log(scope, send, self._log_lines)

    async def _healthz(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"state": self._host.state})

    async def _show_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, self._metrics.text(), b"text/plain; version=0.0.4")


async def hold_stream(stream: SessionStream, close: Callable[[], object], receive: Receive, send: Send) -> None:
    """The open answer of `POST /v1/sessions`, as long as the session lives; a connection that breaks means what DELETE
    means: `close` is called then, and at the end."""

    async def close_when_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        close()

    try:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with asyncio.TaskGroup() as tasks:
            leaving = tasks.create_task(close_when_left())
            while (chunk := await stream.next_chunk()) is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            leaving.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        close()


def session_key(text: str) -> bytes:
    """The key of a session, as it stands in a path; raises `invalid_value`."""
    if not _KEY.fullmatch(text):
        raise ShardlineError("invalid_value", "a session key is 32 hex digits", param="key")
    return bytes.fromhex(text)


def check_party(scope: Scope, path: str, expelled: frozenset[str]) -> None:
    """In a cluster with keys: who is out is out, and sessions are the Gateways'; Nodes send each other steps.

    Steps that take their own lane are not asked: they are worth what their session key is.
    """
    found = scope.get("state", {}).get(PARTIES)
    if found is None:
        return
    for uri in found & expelled:
        raise ShardlineError("forbidden", f"the operator of this cluster has expelled {name_of(uri)}")
    if path.startswith(_OF_GATEWAYS) and not may_route(found):
        raise ShardlineError("forbidden", "only a Gateway may open, keep and end sessions")


async def tell_node(
    scope: Scope, send: Send, identity: Identity, credential: str, info: Callable[[], NodeInfo]
) -> None:
    """`GET /v1/node`: with the credential all facts; with a nonce a proof of identity, for anybody."""
    query = parse_qs(scope["query_string"].decode("latin-1"))
    nonce = query.get("nonce", [""])[0]
    if nonce:
        if not _NONCE.fullmatch(nonce):
            raise ShardlineError("invalid_value", "a nonce has 8 to 128 letters and digits", param="nonce")
        await send_json(send, identity.prove(nonce))
        return
    if not has_credential(scope, credential):
        raise ShardlineError("unauthorized", "the cluster credential is missing or wrong")
    check_protocol(scope)
    await send_json(send, info())


async def tell_log(scope: Scope, send: Send, log_lines: LogReader | None) -> None:
    """`GET /v1/log?boot=B&after=N`: the last lines of this process's log."""
    if log_lines is None:
        raise ShardlineError("not_found", "this process keeps no lines of its log")
    query = parse_qs(scope["query_string"].decode("latin-1"))
    boot, after = query.get("boot", [""])[0], query.get("after", ["0"])[0]
    if not (_BOOT.fullmatch(boot) and _NUMBER.fullmatch(after)):
        raise ShardlineError("invalid_value", "boot has at most 32 hex digits, after is a number", param="after")
    await send_json(send, log_lines(boot, int(after)))


class StepsLane:
    """`POST /v1/steps`, answered from within the socket's read. Implements `DirectLane`."""

    path = b"/v1/steps"

    def __init__(self, host: ShardHost, credential: str, limit: int) -> None:
        self.limit = limit
        self._host = host
        self._authorization = b"Bearer " + credential.encode("latin-1")
        self._protocol = str(PROTOCOL).encode()

    def admits(self, headers: Headers) -> bool:
        """The same that the gate of the control plane wants; it says what is wrong, where this says no."""
        authorized = spoken = False
        for name, value in headers:
            if name == b"authorization":
                authorized = hmac.compare_digest(value, self._authorization)
            elif name == b"shardline-protocol":
                spoken = value == self._protocol
            elif name in (b"origin", b"sec-fetch-site"):
                return False
        return authorized and spoken

    def take(self, body: bytes) -> bytes | Coroutine[Any, Any, bytes]:
        description = self._host.description
        if description is None:
            raise ShardlineError("engine_lost", "the Shard is not loaded")
        answer = self._host.accept(decode(body, description.layout_in))
        if isinstance(answer, StepAck):
            return EMPTY_ACK if not answer.rejected else _ack_encoder.encode(answer)
        return self._later(answer)

    async def _later(self, answer: Coroutine[None, None, StepAck]) -> bytes:
        return _ack_encoder.encode(await answer)


class NodeMetrics:
    """Prometheus gauges, read from the Node's own account at the moment of asking."""

    def __init__(self, info: Callable[[], NodeInfo]) -> None:
        self._info = info
        self._registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=self._registry)

        self._sessions = gauge("shardline_node_sessions", "Open sessions")
        self._kv_used = gauge("shardline_node_kv_used_tokens", "Tokens in the caches of open sessions")
        self._kv_reserved = gauge("shardline_node_kv_reserved_tokens", "Tokens promised to open sessions")
        self._kv_cached = gauge("shardline_node_kv_cached_tokens", "Tokens kept of sessions that have ended")
        self._kv_capacity = gauge("shardline_node_kv_capacity_tokens", "Tokens that may be promised")
        self._queue = gauge("shardline_node_queue_bytes", "Rows that wait for the engine")
        self._rss = gauge("shardline_node_resident_bytes", "Resident memory of the Node and its engine worker")
        self._alive = gauge("shardline_node_engine_alive", "1 while the engine worker lives")
        self._restarts = gauge("shardline_node_engine_restarts", "Restarts of the engine worker")
        self._tasks = gauge("shardline_node_tasks", "Tasks on the event loop")

    def text(self) -> bytes:
        info = self._info()
        self._sessions.set(info.kv.sessions)
        self._kv_used.set(info.kv.used_tokens)
        self._kv_reserved.set(info.kv.reserved_tokens)
        self._kv_cached.set(info.kv.cached_tokens)
        self._kv_capacity.set(info.kv.capacity_tokens)
        self._queue.set(info.queue_bytes)
        self._rss.set(info.rss_bytes)
        self._alive.set(int(info.health.alive))
        self._restarts.set(info.health.restarts)
        self._tasks.set(len(asyncio.all_tasks()))
        return generate_latest(self._registry)


def is_open(scope: Scope) -> bool:
    """What needs no credential: health, and the proof of identity (which checks by itself)."""
    return scope["path"] in ("/healthz", "/v1/node")


def node_app(app: NodeApp, credential: str) -> ASGIApp:
    """`app` behind the gate of the control plane and the error boundary."""
    return ErrorBoundary(ControlGate(app, credential=credential, is_open=is_open))
