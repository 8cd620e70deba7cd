from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import PROTOCOL, Settings
from shardline.transport.http_server import ControlGate, ErrorBoundary, read_body, send_body, send_json
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.artifacts import SOURCES_LIMIT, Source, SourceList
from shardline.wire.messages import (
    HeartbeatAnswer,
    ModelList,
    Outcome,
    Peer,
    PlacementAnswer,
    PlacementRequest,
    RegisterAnswer,
    Route,
    RouteAnswer,
    RouteRequest,
    Signed,
    TrackerNonce,
)
from tests.transport.loopback import answer as http_answer
from tests.transport.loopback import client_of, scripted, serving

CREDENTIAL = "the-cluster-credential"
SIGNED = Signed(statement="a.b")
PLACEMENT = PlacementRequest(
    content_id="c", engine_class="e", n_layers=2, memory_bytes=9, layer_bytes=[1, 1], embedding_bytes=1, output_bytes=1
)
ROUTE = RouteAnswer(
    route=Route(
        id="r",
        model="m",
        content_id="c",
        engine_class="e",
        n_layers=2,
        hops=[],
        prefill_chunk=16,
        context_length=9,
        vocab_size=5,
        text_digest="d",
    ),
    tickets=[],
)
NONE = object()

Call = Callable[[TrackerClient], Awaitable[Any]]
ASK = RouteRequest(model="m", kv_tokens=5, gateway="g")
DONE = Outcome(status="completed")
KNOWN = RegisterAnswer(node="n", ticket_key="00", epoch="e", heartbeat_s=1.0)
HEARD = HeartbeatAnswer(peers=[Peer(node="n", url="u")])
PLACED = PlacementAnswer(first=0, last=1, reason="gap")
EXPLAIN = "/v1/routes/explain?model=a%20b%2F%C3%BC%26x%3D1"
CALLS: list[tuple[Call, str, str, Any, Any]] = [
    (lambda t: t.nonce(), "GET", "/v1/register/nonce", NONE, TrackerNonce(nonce="n", protocol=PROTOCOL)),
    (lambda t: t.register(SIGNED), "POST", "/v1/nodes", SIGNED, KNOWN),
    (lambda t: t.heartbeat("n/1", SIGNED), "POST", "/v1/nodes/n%2F1/heartbeat", SIGNED, HEARD),
    (lambda t: t.leave("n-1", SIGNED), "DELETE", "/v1/nodes/n-1", SIGNED, None),
    (lambda t: t.placement(PLACEMENT), "POST", "/v1/placement", PLACEMENT, PLACED),
    (lambda t: t.routes(ASK), "POST", "/v1/routes", ASK, ROUTE),
    (lambda t: t.outcome("r", DONE), "POST", "/v1/routes/r/outcome", DONE, None),
    (lambda t: t.models(), "GET", "/v1/models", NONE, ModelList(models=[])),
    (lambda t: t.nodes(), "GET", "/v1/nodes", NONE, {"nodes": []}),
    (lambda t: t.explain("a b/ü&x=1"), "GET", EXPLAIN, NONE, {"candidates": []}),
]


@contextlib.asynccontextmanager
async def tracker(answer: Any) -> AsyncIterator[tuple[TrackerClient, list[tuple[str, str, bytes]]]]:
    seen: list[tuple[str, str, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        query = scope["query_string"].decode()
        target = scope["raw_path"].decode() + ("?" + query if query else "")
        seen.append((scope["method"], target, await read_body(receive, scope, 1 << 20)))
        if isinstance(answer, ShardlineError):
            raise answer
        if answer is None:
            await send_body(send, 204, b"")
        else:
            await send_json(send, answer)

    async with (
        serving(ErrorBoundary(ControlGate(app, credential=CREDENTIAL))) as server,
        client_of(Settings(), CREDENTIAL) as client,
    ):
        yield TrackerClient(client, server.url + "/"), seen


@pytest.mark.parametrize(("call", "method", "target", "body", "result"), CALLS)
async def test_every_call(call: Call, method: str, target: str, body: Any, result: Any) -> None:
    async with tracker(result) as (client, seen):
        assert await call(client) == result
    assert seen == [(method, target, b"" if body is NONE else msgspec.json.encode(body))]


@pytest.mark.parametrize("call", [entry[0] for entry in CALLS])
async def test_a_tracker_that_is_not_there_is_called_unreachable(call: Call) -> None:
    async with scripted(lambda wire: wire.request()) as peer:  # type: ignore[arg-type,return-value]
        url = peer.url
    async with client_of(Settings(control_s=1.0)) as client:
        with pytest.raises(ShardlineError) as caught:
            await call(TrackerClient(client, url))
    assert caught.value.code == "tracker_unreachable" and url in caught.value.message


async def test_something_else_on_its_port_is_called_that() -> None:
    async def script(wire: Any) -> None:
        await wire.request()
        wire.send(http_answer(b"<html>", kind=b"text/html"))

    async with scripted(script) as peer, client_of() as client:
        with pytest.raises(ShardlineError) as caught:
            await TrackerClient(client, peer.url).models()
    assert caught.value.code == "tracker_unreachable" and "not our peer" in caught.value.message


async def test_its_refusals_pass_unchanged() -> None:
    refusal = ShardlineError("model_unavailable", "layers 4 to 9 are missing", missing=[[4, 9]])
    async with tracker(refusal) as (client, _):
        with pytest.raises(ShardlineError) as caught:
            await client.routes(RouteRequest(model="m", kv_tokens=5, gateway="g"))
    assert (caught.value.code, caught.value.details) == ("model_unavailable", {"missing": [[4, 9]]})


def test_a_url_is_checked_at_once() -> None:
    with pytest.raises(ShardlineError):
        TrackerClient(None, "localhost:8700")  # type: ignore[arg-type]


async def test_no_more_sources_are_taken_than_a_tracker_may_name() -> None:
    named = SourceList(sources=[Source(node=f"n-{n}", url="http://127.0.0.1:9") for n in range(5000)])
    async with tracker(named) as (client, _):
        assert await client.sources("c", "n") == named.sources[:SOURCES_LIMIT]
