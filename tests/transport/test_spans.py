"""Which requests have a span, where it stands in its trace, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.transport.bodies import send_json
from shardline.transport.boundary import ErrorBoundary
from shardline.transport.spans import Traced, current_span, note
from shardline.transport.tracing import trace_fields
from shardline.wire.spans import Span

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def answered(app: ASGIApp, path: str, *headers: tuple[str, str], method: str = "POST") -> list[Span]:
    spans: list[Span] = []
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    fields = [(name.encode(), value.encode()) for name, value in headers]
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": fields, "state": {}}
    await Traced(ErrorBoundary(app), spans.append)(scope, receive, send)
    assert sent[0]["type"] == "http.response.start"
    return spans


class App:
    """Remembers what would be passed on with requests made meanwhile."""

    def __init__(self, fails: ShardlineError | None = None) -> None:
        self.passed = ""
        self.fails = fails

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.passed = trace_fields()
        note(route="r-1")
        if self.fails is not None:
            raise self.fails
        await send_json(send, {"said": "a word of somebody"})


async def test_a_request_without_a_trace_begins_one_and_others_hang_below_it() -> None:
    app = App()
    (span,) = await answered(app, "/v1/chat/completions", ("tracestate", "x=1"))
    assert span.parent is None and span.name == "chat" and span.kind == "server"
    assert f"traceparent: 00-{span.place.trace}-{span.place.span}-01\r\n" in app.passed
    assert "tracestate" not in app.passed
    assert span.attributes["shardline.route"] == "r-1" and span.attributes["http.response.status_code"] == 200
    assert "a word of somebody" not in repr(span)
    assert 0 <= span.ended_ns - span.began_ns < 60e9 and current_span() is None


async def test_a_clients_trace_is_gone_on_with() -> None:
    app = App()
    headers = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "x=1"))
    (span,) = await answered(app, "/v1/sessions", *headers)
    assert span.parent is not None and (span.parent.trace, span.parent.span) == (TRACE, PARENT)
    assert span.place.trace == TRACE and span.place.span != PARENT
    assert f"traceparent: 00-{TRACE}-{span.place.span}-01\r\n" in app.passed and "tracestate: x=1" in app.passed


async def test_a_trace_that_is_not_recorded_is_passed_on_only() -> None:
    app = App()
    assert await answered(app, "/v1/routes", ("traceparent", f"00-{TRACE}-{PARENT}-00")) == []
    assert f"traceparent: 00-{TRACE}-{PARENT}-00\r\n" in app.passed


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/v1/sessions"), ("POST", "/v1/steps")])
async def test_other_requests_have_none(method: str, path: str) -> None:
    assert await answered(App(), path, method=method) == []


async def test_a_failure_is_told_by_its_code() -> None:
    (span,) = await answered(App(ShardlineError("capacity", "all full")), "/v1/routes")
    assert (span.error, span.attributes["error.type"]) == ("capacity", "capacity")
    assert span.attributes["http.response.status_code"] == ShardlineError("capacity", "").fault.status


async def test_what_is_broken_off_is_told_by_its_kind() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a word of somebody")

    spans: list[Span] = []
    scope = {"type": "http", "method": "POST", "path": "/v1/routes", "headers": []}
    with pytest.raises(ValueError, match="a word"):
        await Traced(broken, spans.append)(scope, None, None)  # type: ignore[arg-type]
    assert spans[0].error == "ValueError" and "a word" not in repr(spans[0])
