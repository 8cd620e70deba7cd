"""The Tracker over HTTP, on loopback, with the real client: what strangers meet, and what its own parties get."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.app import create_app
from shardline.tracker.state import PROOF_BYTES, TrackerState, dial_with
from shardline.transport.bodies import send_body, send_json
from shardline.transport.http_client import HttpClient, Response
from shardline.transport.http_server import serve
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import Outcome, PlacementRequest, RegisterAnswer, RouteRequest, Signed
from tests.tracker.cluster_values import CLASS, SigningNode, shard

CREDENTIAL = "correct horse"
SETTINGS = Settings(dial_back_s=0.5, tracker_expiry_s=1.0, control_body_bytes=64 << 10)

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]


class Cluster:
    """A Tracker that listens on loopback, and a client with the cluster's credential."""

    def __init__(self, url: str, state: TrackerState, client: HttpClient, stranger: HttpClient) -> None:
        self.url = url
        self.state = state
        self.client = client
        self.stranger = stranger
        self.tracker = TrackerClient(client, url)

    async def raw(self, method: str, path: str, **named: Any) -> Response:
        client = named.pop("client", self.client)
        return await client.request(method, self.url + path, timeout_s=5.0, limit="control", **named)  # type: ignore[no-any-return]

    async def register(self, node: SigningNode) -> RegisterAnswer:
        nonce = await self.tracker.nonce()
        statement = node.register_statement(nonce.nonce, self.state.clock.unix())
        answer = await self.tracker.register(Signed(statement=statement))
        node.epoch, node.count = answer.epoch, 0
        return answer


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    client, stranger, dialler = HttpClient(SETTINGS, credential=CREDENTIAL), HttpClient(SETTINGS), HttpClient(SETTINGS)
    state = TrackerState(SETTINGS, dial=dial_with(dialler, SETTINGS), loopback=True)
    server = await serve(create_app(state, CREDENTIAL), settings=SETTINGS)
    try:
        yield Cluster(server.url, state, client, stranger)
    finally:
        for c in (client, stranger, dialler):
            await c.aclose()
        await server.stop()


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    server = await serve(app, settings=SETTINGS, lifespan="off")
    try:
        yield server.url
    finally:
        await server.stop(0.2)


@asynccontextmanager
async def node_at(first: int, last: int, seen: list[Scope] | None = None) -> AsyncIterator[SigningNode]:
    """A Node's address that proves its key, and nothing more."""
    node = SigningNode("", [shard(first, last)])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if seen is not None:
            seen.append(scope)
        nonce = scope["query_string"].decode().removeprefix("nonce=")
        await send_json(send, node.prove(nonce))

    async with listening(app) as url:
        node.url = url
        yield node


def error_in(response: Response) -> dict[str, Any]:
    found = json.loads(response.body)
    assert list(found) == ["error"]
    assert {"code", "message", "type", "retryable", "advice"} <= set(found["error"])
    return found["error"]  # type: ignore[no-any-return]


PATHS = [
    ("GET", "/v1/register/nonce"),
    ("GET", "/v1/nodes"),
    ("POST", "/v1/nodes"),
    ("POST", "/v1/nodes/n-1/heartbeat"),
    ("DELETE", "/v1/nodes/n-1"),
    ("GET", "/v1/models"),
    ("POST", "/v1/placement"),
    ("POST", "/v1/routes"),
    ("POST", "/v1/routes/r-1/outcome"),
    ("GET", "/v1/routes/explain?model=tiny"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_strangers_get_nothing(cluster: Cluster, method: str, path: str) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {CREDENTIAL}"},
        {"authorization": f"Bearer {CREDENTIAL}x"},
        {"authorization": "Bearer "},
    ):
        response = await cluster.raw(method, path, client=cluster.stranger, headers=headers)
        assert response.status == 401
        assert error_in(response)["code"] == "unauthorized"
        assert "access-control-allow-origin" not in response.headers


async def test_a_web_page_gets_nothing_even_with_the_credential(cluster: Cluster) -> None:
    response = await cluster.raw("GET", "/v1/nodes", headers={"origin": "http://evil.test"})
    assert (response.status, error_in(response)["code"]) == (403, "forbidden")


async def test_health_is_for_everybody_and_says_nothing(cluster: Cluster) -> None:
    response = await cluster.raw("GET", "/healthz", client=cluster.stranger)
    assert (response.status, json.loads(response.body)) == (200, {"status": "ok"})
    said = parsedate_to_datetime(dict(response.headers)["date"])
    assert abs(said.timestamp() - time.time()) < 30


async def test_a_cluster_from_the_first_node_to_the_last(cluster: Cluster) -> None:
    async with node_at(0, 15) as head, node_at(15, 30) as tail:
        assert (await cluster.register(head)).waiting == [(15, 30)]
        response = await cluster.raw("GET", "/readyz")
        assert (response.status, "15:30" in error_in(response)["message"]) == (503, True)
        assert (await cluster.register(tail)).waiting == []
        assert json.loads((await cluster.raw("GET", "/readyz")).body) == {"status": "ready", "models": ["tiny"]}
        beat = Signed(statement=head.heartbeat_statement())
        peers = await cluster.tracker.heartbeat(head.id, beat)
        assert [(p.node, p.url) for p in peers.peers] == [(tail.id, tail.url)]
        (model,) = (await cluster.tracker.models()).models
        assert (model.ready, model.missing) == (True, [])
        asked = RouteRequest(model="tiny", kv_tokens=5, gateway="g-1")
        answer = await cluster.tracker.routes(asked)
        assert [hop.url for hop in answer.route.hops] == [head.url, tail.url]
        explained = json.loads((await cluster.raw("GET", "/v1/routes/explain?model=tiny&kv_tokens=5")).body)
        assert explained["taken"] == [head.id, tail.id]
        blame = Outcome(status="failed", code="node_lost", node=tail.id)
        await cluster.tracker.outcome(answer.route.id, blame)
        states = {n["id"]: n["state"] for n in (await cluster.tracker.nodes())["nodes"]}
        assert states == {head.id: "ready", tail.id: "out"}
        with pytest.raises(ShardlineError) as error:
            await cluster.tracker.routes(asked)
        assert (error.value.code, error.value.details["missing"]) == ("model_unavailable", [[15, 30]])
        goodbye = Signed(statement=tail.heartbeat_statement(leaving=True))
        await cluster.tracker.leave(tail.id, goodbye)
        listed = {n["id"]: n for n in (await cluster.tracker.nodes())["nodes"]}
        assert listed[tail.id]["state"] == "left"
        only = listed[head.id]
        assert {"id", "url", "pid", "host", "shards", "engine", "health", "kv", "state", "last_seen_s"} <= set(only)
        text = (await cluster.raw("GET", "/metrics")).body.decode()
        assert 'shardline_tracker_routes_total{result="model_unavailable"} 1.0' in text
        assert 'shardline_tracker_nodes{state="ready"} 1.0' in text


async def test_a_model_that_is_not_whole_says_when_to_come_again(cluster: Cluster) -> None:
    async with node_at(0, 15) as head:
        await cluster.register(head)
        body = msgspec.json.encode(RouteRequest(model="tiny", kv_tokens=5, gateway="g-1"))
        response = await cluster.raw("POST", "/v1/routes", body=body, content_type="application/json")
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
        assert error_in(response)["missing"] == [[15, 30]]
        body = msgspec.json.encode(RouteRequest(model="none", kv_tokens=5, gateway="g-1"))
        response = await cluster.raw("POST", "/v1/routes", body=body, content_type="application/json")
        assert (response.status, error_in(response)["code"]) == (404, "model_not_found")


async def test_the_dial_back_asks_for_proof_without_the_credential(cluster: Cluster) -> None:
    seen: list[Scope] = []
    async with node_at(0, 30, seen) as node:
        await cluster.register(node)
    (scope,) = seen
    assert (scope["method"], scope["path"]) == ("GET", "/v1/node")
    assert b"authorization" not in dict(scope["headers"])


async def test_a_silent_node_expires_by_itself(cluster: Cluster) -> None:
    async with node_at(0, 30) as node:
        await cluster.register(node)
        async with asyncio.timeout(10):
            while (await cluster.tracker.nodes())["nodes"][0]["state"] != "expired":
                await asyncio.sleep(0.05)


async def _html(scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, b"<html>router</html>", b"text/html")


async def _redirect(scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 302, b"", headers=[(b"location", b"http://169.254.169.254/latest/meta-data")])


async def _huge(scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, b" " * (PROOF_BYTES + 1))


async def _slow(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await receive()


async def _null(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, None)


@pytest.mark.parametrize("answer", [_html, _redirect, _huge, _slow, _null])
async def test_what_is_no_node_is_refused_with_its_address(cluster: Cluster, answer: Answer) -> None:
    async with listening(answer) as url:
        with pytest.raises(ShardlineError) as error:
            await cluster.register(SigningNode(url, [shard(0, 30)]))
    assert error.value.code == "registration_refused"
    assert url in error.value.message
    assert cluster.state.nodes() == {"nodes": []}


async def test_a_node_of_another_cluster_at_the_advertised_address_is_refused(cluster: Cluster) -> None:
    async with node_at(0, 30) as other:
        with pytest.raises(ShardlineError) as error:
            await cluster.register(SigningNode(other.url, [shard(0, 30)]))
    assert other.id in error.value.message


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/routes", b"", 400, "invalid_json"),
        ("POST", "/v1/routes", b"{", 400, "invalid_json"),
        ("POST", "/v1/routes", b"[]", 400, "invalid_value"),
        ("POST", "/v1/routes", b'{"model": 5, "kv_tokens": 1, "gateway": "g"}', 400, "invalid_value"),
        ("POST", "/v1/routes", b'{"model": "m", "kv_tokens": 1.5, "gateway": "g"}', 400, "invalid_value"),
        ("POST", "/v1/routes", b"\xff\xfe", 400, "invalid_json"),
        ("POST", "/v1/routes", b'{"more": ' + b"[" * 50_000, 400, "invalid_json"),
        ("POST", "/v1/nodes", b'{"statement": "x.y"}', 403, "registration_refused"),
        ("POST", "/v1/nodes/n-1/heartbeat", b'{"statement": "x.y"}', 404, "unknown_node"),
        ("DELETE", "/v1/nodes/n-1", b'{"statement": "x.y"}', 404, "unknown_node"),
        ("POST", "/v1/routes/r-1/outcome", b'{"status": "failed"}', 404, "session_not_found"),
        ("POST", "/v1/routes/r-1/outcome", b'{"status": "bad"}', 400, "invalid_value"),
        ("POST", "/v1/placement", b"{}", 400, "invalid_value"),
        ("POST", "/v1/routes", b'"' + b"x" * (64 << 10) + b'"', 413, "body_too_large"),
        ("GET", "/v1/routes/explain", b"", 400, "invalid_value"),
        ("GET", "/v1/routes/explain?model=none", b"", 404, "model_not_found"),
        ("GET", "/v1/routes/explain?model=tiny&kv_tokens=-1", b"", 400, "invalid_value"),
        ("GET", "/v1/nothing", b"", 404, "not_found"),
        ("PUT", "/v1/nodes", b"{}", 405, "method_not_allowed"),
    ],
)
async def test_bad_input_is_an_error_of_the_catalogue(
    cluster: Cluster, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    response = await cluster.raw(method, path, body=body, content_type="application/json" if body else None)
    assert (response.status, error_in(response)["code"]) == (status, code)
    assert b"Traceback" not in response.body


async def test_placement_over_http(cluster: Cluster) -> None:
    asked = PlacementRequest(
        content_id="c" * 8,
        engine_class=CLASS,
        n_layers=4,
        memory_bytes=25,
        layer_bytes=[10] * 4,
        embedding_bytes=0,
        output_bytes=0,
    )
    first = await cluster.tracker.placement(asked)
    second = await cluster.tracker.placement(asked)
    assert [(a.first, a.last) for a in (first, second)] == [(0, 2), (2, 4)]


async def test_another_protocol_in_the_header_is_named(cluster: Cluster) -> None:
    response = await cluster.raw(
        "GET", "/v1/nodes", client=cluster.stranger, headers={"authorization": f"Bearer {CREDENTIAL}"}
    )
    assert response.status == 200
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"GET /v1/nodes HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {CREDENTIAL}\r\n"
        "shardline-protocol: 9\r\nconnection: close\r\n\r\n".encode()
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert b" 426 " in answer.split(b"\r\n", 1)[0]
    assert b"protocol 9" in answer
    assert b"protocol 1" in answer
