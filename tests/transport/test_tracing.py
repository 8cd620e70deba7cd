"""Request ids and trace contexts: what is believed, what is passed on, and by whom it is not inherited."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from starlette.types import Receive, Scope, Send

from shardline.settings import Settings
from shardline.transport.bodies import send_json
from shardline.transport.boundary import ErrorBoundary
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import serve
from shardline.transport.tracing import Trace, trace_fields, trace_of, tracing, untraced

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_what_a_client_sends_is_taken_over() -> None:
    headers = [(b"x-request-id", b"mine-1"), (b"traceparent", PARENT.encode()), (b"tracestate", b"a=1,b=2")]
    trace = trace_of(headers, "fresh")
    assert trace == Trace("mine-1", PARENT, "a=1,b=2")
    assert trace.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert trace.fields == f"x-request-id: mine-1\r\ntraceparent: {PARENT}\r\ntracestate: a=1,b=2\r\n"


@pytest.mark.parametrize("sent", [b"", b"a b", b"x" * 129, b"a\r\nb: c", b"\xff", b"a\n"])
def test_an_id_that_cannot_be_one_is_replaced(sent: bytes) -> None:
    assert trace_of([(b"x-request-id", sent)], "fresh") == Trace("fresh")


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "ff" + PARENT[2:],
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-more",
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + "-01",
        PARENT + "\n",
    ],
)
def test_a_trace_context_that_is_none_is_dropped_with_its_state(sent: str) -> None:
    headers = [(b"traceparent", sent.encode()), (b"tracestate", b"a=1")]
    assert trace_of(headers, "fresh") == Trace("fresh")


def test_a_later_version_may_have_more_and_two_parents_are_none() -> None:
    later = "01" + PARENT[2:] + "-more"
    assert trace_of([(b"traceparent", later.encode())], "fresh").parent == later
    assert trace_of([(b"traceparent", PARENT.encode())] * 2, "fresh").parent == ""


async def test_tasks_that_a_request_starts_work_for_it_and_what_stays_does_not() -> None:
    async def seen() -> tuple[str, object]:
        return trace_fields(), structlog.contextvars.get_contextvars().get("request_id")

    with tracing(Trace("r-1", PARENT)):
        inside = asyncio.create_task(seen())
        with untraced():
            staying = asyncio.create_task(seen())
            assert trace_fields() == ""
        assert structlog.contextvars.get_contextvars()["trace_id"] == PARENT[3:35]
        assert (await inside)[0].startswith("x-request-id: r-1\r\n") and (await inside)[1] == "r-1"
        assert await staying == ("", None)
    assert await seen() == ("", None)


async def test_one_id_goes_from_part_to_part_and_no_further() -> None:
    """A server that asks another one over a pooled connection, for two clients."""
    heard: list[dict[bytes, bytes]] = []

    async def last(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append(dict(scope["headers"]))
        await send_json(send, {})

    settings = Settings()
    client = HttpClient(settings)
    behind = await serve(ErrorBoundary(last), settings=settings, lifespan="off")

    async def first(scope: Scope, receive: Receive, send: Send) -> None:
        answer = await client.request("GET", behind.url + "/x", timeout_s=5, limit="x")
        await send_json(send, {"behind": answer.headers["x-request-id"]})

    front = await serve(ErrorBoundary(first), settings=settings, lifespan="off")
    outside = HttpClient(settings)
    try:
        for headers in ({"x-request-id": "a-1", "traceparent": PARENT}, {"x-request-id": "a-2"}, {}):
            answer = await outside.request("GET", front.url + "/", headers=headers, timeout_s=5, limit="x")
            given = answer.headers["x-request-id"]
            assert given == headers.get("x-request-id", given)
            assert heard[-1][b"x-request-id"].decode() == given
            assert heard[-1].get(b"traceparent", b"").decode() == headers.get("traceparent", "")
        await client.request("GET", behind.url + "/x", timeout_s=5, limit="x")
        assert b"x-request-id" not in heard[-1]
    finally:
        for closing in (outside, client):
            await closing.aclose()
        for server in (front, behind):
            await server.stop(0.5)
