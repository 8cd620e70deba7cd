"""The Tracker's HTTP: reads a body, calls `TrackerState`, writes the answer. It decides nothing.

Owns paths, methods and status codes. Credential, protocol version, Origin and the shape of errors are those of every
control plane (transport/boundary.py). Shown by tests/tracker/test_app.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any, TypeVar, cast, get_args

import msgspec
import structlog
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.tracker.bundle_files import BundleFiles
from shardline.tracker.enrolment import Enrolment
from shardline.tracker.state import TrackerState
from shardline.transport.authority import OPERATOR
from shardline.transport.bodies import read_json
from shardline.transport.boundary import ControlGate, ErrorBoundary
from shardline.transport.guard import PARTIES
from shardline.transport.spans import note
from shardline.transport.tls import is_party, may_route
from shardline.wire.joining import Expulsion, JoinRequest, Part
from shardline.wire.messages import Outcome, PlacementRequest, RouteRequest, Signed

log = structlog.get_logger(__name__)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
T = TypeVar("T")


JOINING = frozenset({"/v1/cluster/ca", "/v1/join"})
"""What a stranger may ask, who has no certificate and no credential yet."""
JOIN_BYTES = 128 << 10
"""Of a request of a stranger."""
OPEN = JOINING | {"/healthz"}


def create_app(state: TrackerState, credential: str, enrolment: Enrolment | None = None) -> ASGIApp:
    """The ASGI application of one Tracker. Its lifespan runs the expiry of silent Nodes, and the challenges.

    `enrolment`: of a cluster with keys, whose parties show certificates.
    """

    @asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(state.watch()), group.create_task(state.examine())]
            yield
            for task in running:
                task.cancel()

    endpoints = _Endpoints(state, enrolment)
    joining = [] if enrolment is None else _joining(enrolment, endpoints)
    router = Router(
        [
            *joining,
            Path("/healthz", endpoints.healthz),
            Path("/readyz", endpoints.readyz),
            Path("/metrics", endpoints.metrics),
            Path("/v1/register/nonce", endpoints.nonce),
            Path("/v1/nodes", endpoints.nodes),
            Path("/v1/nodes", endpoints.register, methods=["POST"]),
            Path("/v1/nodes/{node}/heartbeat", endpoints.heartbeat, methods=["POST"]),
            Path("/v1/nodes/{node}", endpoints.leave, methods=["DELETE"]),
            Path("/v1/nodes/{node}/pieces", endpoints.advertise, methods=["POST"]),
            Path("/v1/artifacts", endpoints.artifacts),
            Path("/v1/artifacts/{content_id}/sources", endpoints.sources),
            Path(
                "/v1/artifacts/{content_id}/bundle/{path:path}",
                BundleFiles(state.catalogue.offers.values(), state.settings),
            ),
            Path("/v1/models", endpoints.models),
            Path("/v1/placement", endpoints.placement, methods=["POST"]),
            Path("/v1/routes", endpoints.route, methods=["POST"]),
            Path("/v1/routes/explain", endpoints.explain),
            Path("/v1/routes/{route}/outcome", endpoints.outcome, methods=["POST"]),
        ],
        lifespan=lifespan,
    )
    if enrolment is None:
        return ErrorBoundary(ControlGate(router, credential=credential))
    gate = ControlGate(router, credential=credential, is_open=lambda scope: scope["path"] in OPEN)
    return ErrorBoundary(_PartiesOnly(gate, enrolment))


class _PartiesOnly:
    """Lets nobody pass who has shown no certificate of the cluster, but to join; nobody who is expelled; and Nodes not
    to where Gateways ask."""

    def __init__(self, app: ASGIApp, enrolment: Enrolment) -> None:
        self._app = app
        self._enrolment = enrolment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            found = scope["state"].get(PARTIES, frozenset())
            self._check(scope["method"], scope["path"], found)
            self._enrolment.heard(found, (scope.get("client") or ("",))[0])
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, found: frozenset[str]) -> None:
        if not found:
            raise ShardlineError(
                "unauthorized",
                "no certificate of this cluster was shown",
                advice="Join first: shardline invite, on the machine of the Tracker, prints how.",
            )
        self._enrolment.check_not_expelled(found)
        if method == "POST" and path.startswith("/v1/routes") and not may_route(found):
            raise ShardlineError("forbidden", "only a Gateway may ask for routes, and say how sessions ended")


def _joining(enrolment: Enrolment, endpoints: _Endpoints) -> list[Path]:
    """The paths of a cluster with keys."""

    async def authority(request: Request) -> Response:
        return _json(enrolment.authority())

    async def join(request: Request) -> Response:
        asked = await endpoints.body(request, JoinRequest, JOIN_BYTES)
        client = request.client
        return _json(enrolment.join(asked, "127.0.0.1" if client is None else client.host, endpoints.model_names()))

    def check_operator(request: Request) -> None:
        if not is_party(request.scope["state"][PARTIES], OPERATOR):
            raise ShardlineError("forbidden", "only a command on the machine of the Tracker may invite and expel")

    async def invite(request: Request) -> Response:
        check_operator(request)
        part = request.query_params.get("part", "node")
        if part not in get_args(Part):
            raise ShardlineError("invalid_value", "part is node or gateway", param="part")
        return _json(enrolment.invite(cast(Part, part)))

    async def expel(request: Request) -> Response:
        check_operator(request)
        return _json(endpoints.expel(enrolment, request.path_params["party"], undo=request.method == "DELETE"))

    return [
        Path("/v1/cluster/ca", authority),
        Path("/v1/join", join, methods=["POST"]),
        Path("/v1/invitations", invite, methods=["POST"]),
        Path("/v1/parties/{party}/expulsion", expel, methods=["POST", "DELETE"]),
    ]


class _Endpoints:
    """One method a path."""

    def __init__(self, state: TrackerState, enrolment: Enrolment | None) -> None:
        self._state = state
        self._enrolment = enrolment

    def model_names(self) -> list[str]:
        return sorted({known.model for known in self._state.models().models})

    def expel(self, enrolment: Enrolment, party: str, *, undo: bool) -> Expulsion:
        answer = enrolment.expel(party, undo=undo)
        self._state.drop(party, undo=undo)
        return answer

    async def healthz(self, request: Request) -> Response:
        """The date, too: by it `shardline doctor` compares clocks."""
        answer = _json({"status": "ok"})
        answer.headers["date"] = formatdate(usegmt=True)
        return answer

    async def readyz(self, request: Request) -> Response:
        return _json({"status": "ready", "models": self._state.check_ready()})

    async def metrics(self, request: Request) -> Response:
        return Response(self._state.render_metrics(), media_type=METRICS_TYPE)

    async def nonce(self, request: Request) -> Response:
        return _json(self._state.nonce())

    async def nodes(self, request: Request) -> Response:
        gateways = {} if self._enrolment is None else {"gateways": self._enrolment.gateways()}
        return _json({**self._state.nodes(), **gateways})

    async def register(self, request: Request) -> Response:
        signed = await self.body(request, Signed)
        return _json(await _counted(self._state.metrics.registrations, self._state.register(signed.statement)))

    async def heartbeat(self, request: Request) -> Response:
        signed = await self.body(request, Signed)
        work = self._state.heartbeat(request.path_params["node"], signed.statement)
        return _json(await _counted(self._state.metrics.heartbeats, work))

    async def leave(self, request: Request) -> Response:
        signed = await self.body(request, Signed)
        self._state.leave(request.path_params["node"], signed.statement)
        return _json(None)

    async def advertise(self, request: Request) -> Response:
        signed = await self.body(request, Signed)

        async def work() -> None:
            self._state.advertise(request.path_params["node"], signed.statement)

        return _json(await _counted(self._state.metrics.advertisements, work()))

    async def artifacts(self, request: Request) -> Response:
        return _json(self._state.artifacts())

    async def sources(self, request: Request) -> Response:
        asker = request.query_params.get("node", "")
        address = "" if request.client is None else request.client.host
        return _json(self._state.sources(request.path_params["content_id"], asker, address))

    async def models(self, request: Request) -> Response:
        return _json(self._state.models())

    async def placement(self, request: Request) -> Response:
        return _json(self._state.place(await self.body(request, PlacementRequest)))

    async def route(self, request: Request) -> Response:
        asked = await self.body(request, RouteRequest)

        async def work() -> Any:
            answer = self._state.route(asked)
            nodes = [hop.node for hop in answer.route.hops]
            log.info("route_given", route=answer.route.id, nodes=nodes)
            note(route=answer.route.id, nodes=nodes, model=asked.model)
            return answer

        return _json(await _counted(self._state.metrics.routes, work()))

    async def outcome(self, request: Request) -> Response:
        self._state.outcome(request.path_params["route"], await self.body(request, Outcome))
        return _json(None)

    async def explain(self, request: Request) -> Response:
        model = request.query_params.get("model")
        if not model:
            raise ShardlineError("invalid_value", "say which model: /v1/routes/explain?model=NAME", param="model")
        kv_tokens = request.query_params.get("kv_tokens", "0")
        if not (kv_tokens.isascii() and kv_tokens.isdigit() and len(kv_tokens) < 16):
            raise ShardlineError("invalid_value", "kv_tokens is a count of tokens", param="kv_tokens")
        return _json(self._state.explain(model, int(kv_tokens)))

    async def body(self, request: Request, kind: type[T], most: int | None = None) -> T:
        limit = min(self._state.settings.control_body_bytes, most or sys.maxsize)
        return await read_json(request.receive, request.scope, kind, limit)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _counted(counter: Counter, work: Awaitable[T]) -> T:
    """Await `work`, and count how it ended: `ok`, or the code of the error."""
    try:
        answer = await work
    except ShardlineError as error:
        counter.labels(error.code).inc()
        raise
    counter.labels("ok").inc()
    return answer
