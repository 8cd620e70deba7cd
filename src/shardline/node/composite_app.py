"""The HTTP face of a composite Node: sessions, beats, who it is. What needs layers or token ids is not served here.

Decides nothing. The same gate, tickets and streams as of a Node with a Shard (app.py). Shown by
tests/cluster/test_composite.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.node.app import NodeMetrics, check_party, hold_stream, is_open, session_key, tell_log, tell_node
from shardline.node.composite import CompositeHost
from shardline.node.info import Identity
from shardline.node.tickets import TicketGate
from shardline.options import LogReader
from shardline.settings import Settings
from shardline.transport.bodies import read_json, send_body, send_json
from shardline.transport.boundary import ControlGate, ErrorBoundary
from shardline.transport.spans import note
from shardline.wire.messages import Beats, NodeInfo, OpenSession

log = structlog.get_logger(__name__)
_OPEN_SLACK = 64 << 10
"""Bytes of an opening beside the request that it passes on."""


def composite_app(
    host: CompositeHost,
    identity: Identity,
    settings: Settings,
    credential: str,
    *,
    info: Callable[[], NodeInfo],
    ticket_key: Callable[[], bytes | None],
    expelled: Callable[[], frozenset[str]],
    log_lines: LogReader | None = None,
) -> ASGIApp:
    """Behind the gate of the control plane and the error boundary. `log_lines`: of its own log."""
    gate = TicketGate(identity.node_id)
    metrics = NodeMetrics(info)

    async def open_session(scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_json(receive, scope, OpenSession, settings.api_body_bytes + _OPEN_SLACK)
        ticket = gate.admit(request, ticket_key=ticket_key(), shard=host.description, now=time.time(), composite=True)
        stream = host.open(ticket, request)
        log.info("session_opened", route=ticket.route, kv_tokens=ticket.kv_tokens)
        note(route=ticket.route, node=identity.node_id)
        key = bytes.fromhex(request.key)
        del request  # the prompt is with the upstream now
        await hold_stream(stream, lambda: host.close(key), receive, send)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        match method, path:
            case "POST", "/v1/sessions":
                await open_session(scope, receive, send)
            case "POST", "/v1/beats":
                beats = await read_json(receive, scope, Beats, settings.control_body_bytes)
                host.beat(beats.gateway)
                await send_json(send, {})
            case "GET", "/v1/node":
                await tell_node(scope, send, identity, credential, info)
            case "GET", "/v1/log":
                await tell_log(scope, send, log_lines)
            case "GET", "/healthz":
                await send_json(send, {"state": host.state})
            case "GET", "/metrics":
                await send_body(send, 200, metrics.text(), b"text/plain; version=0.0.4")
            case "DELETE", _ if path.startswith("/v1/sessions/"):
                await send_json(send, {"closed": host.close(session_key(path.removeprefix("/v1/sessions/")))})
            case _:
                raise ShardlineError("not_found", "a composite Node does not serve this: it has no layers of its own")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        check_party(scope, scope["path"], expelled())
        await answer(scope, receive, send)

    return ErrorBoundary(ControlGate(app, credential=credential, is_open=is_open))
