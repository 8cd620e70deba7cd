"""A span for each request of the kinds that people look for in a trace, where a process was given somewhere to put it.

Owns which requests have one, that it takes the place of the client's in `traceparent`, so that whoever is asked
meanwhile hangs below it, and how it ends. Stands outside of the error boundary; a process that exports nothing has
none of this. Steps have none: they go by their session. Shown by tests/transport/test_spans.py and
tests/cluster/test_otel.py.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.transport.tracing import trace_of
from shardline.wire.spans import Place, Span, SpanSink, Value, new_place

NAMES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/routes": "route",
    "/v1/sessions": "session",
}
"""Of POST requests: paths of Gateway, Tracker and Node, and what their spans are called first."""
_ERROR_BYTES = 64 << 10


class OpenSpan:
    """A span that has begun. Whoever works for it adds to `attributes`, and may name it, and its failure."""

    def __init__(self, name: str, place: Place, parent: Place | None, sink: SpanSink) -> None:
        self.name = name
        self.place = place
        self.attributes: dict[str, Value] = {}
        self.error: str | None = None
        self.parent = parent
        self.sink = sink
        self._began_ns = time.time_ns()
        self._began = time.monotonic_ns()

    def end(self) -> None:
        ended_ns = self._began_ns + time.monotonic_ns() - self._began
        if self.error is not None:
            self.attributes["error.type"] = self.error
        self.sink(
            Span(
                name=self.name,
                place=self.place,
                parent=self.parent,
                kind="server",
                began_ns=self._began_ns,
                ended_ns=ended_ns,
                attributes=self.attributes,
                error=self.error,
            )
        )


_current: ContextVar[OpenSpan | None] = ContextVar("shardline_span", default=None)


def current_span() -> OpenSpan | None:
    """Of the request at hand; None where nothing is exported, or it has none."""
    return _current.get()


def note(**attributes: Value) -> None:
    """Add `shardline.NAME` to the span of the request at hand, where it has one."""
    span = _current.get()
    if span is not None:
        span.attributes.update({f"shardline.{name}": value for name, value in attributes.items()})


class Traced:
    """Outermost application of a process that exports spans."""

    def __init__(self, app: ASGIApp, sink: SpanSink) -> None:
        self._app = app
        self._sink = sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = self._begin(scope) if scope["type"] == "http" else None
        if span is None:
            await self._app(scope, receive, send)
            return
        scope = {**scope, "headers": _headers_below(scope["headers"], span)}
        token = _current.set(span)
        try:
            await self._app(scope, receive, _Watch(span, send))
        except BaseException as error:
            span.error = span.error or type(error).__name__
            raise
        finally:
            _current.reset(token)
            span.end()

    def _begin(self, scope: Scope) -> OpenSpan | None:
        name = NAMES.get(scope["path"]) if scope["method"] == "POST" else None
        if name is None:
            return None
        theirs = trace_of(scope["headers"], "").parent
        if not theirs:
            place, parent = new_place(), None
        elif int(theirs[53:55], 16) & 1:
            place, parent = new_place(theirs[3:35]), Place(theirs[3:35], theirs[36:52])
        else:
            return None  # whoever began this trace does not record it
        span = OpenSpan(name, place, parent, self._sink)
        span.attributes.update({"http.request.method": "POST", "url.path": scope["path"]})
        return span


def traced(app: ASGIApp, sink: SpanSink | None) -> ASGIApp:
    """`app` as it is where there is nowhere to put spans."""
    return app if sink is None else Traced(app, sink)


class _Watch:
    """`send` of a request, which sees how it is answered."""

    def __init__(self, span: OpenSpan, send: Send) -> None:
        self._span = span
        self._send = send
        self._failed = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            status = message["status"]
            self._span.attributes["http.response.status_code"] = status
            self._failed = status >= 400
            for name, value in message.get("headers", ()):
                if name == b"x-request-id":
                    self._span.attributes["shardline.request_id"] = value.decode("latin-1")
        elif self._failed and self._span.error is None:
            self._span.error = _code_of(message.get("body", b""))
        await self._send(message)


def _code_of(body: bytes) -> str:
    """The code in an error body of ours, or of one of the dialects."""
    try:
        said: Any = msgspec.json.decode(body) if len(body) <= _ERROR_BYTES else None
    except msgspec.DecodeError:
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    code = error.get("code") or error.get("type") if isinstance(error, dict) else None
    return code if isinstance(code, str) else "refused"


def _headers_below(headers: list[tuple[bytes, bytes]], span: OpenSpan) -> list[tuple[bytes, bytes]]:
    """The same request, as a child of the span that was begun for it."""
    # What systems noted along a trace goes on with that trace only.
    dropped = (b"traceparent",) if span.parent is not None else (b"traceparent", b"tracestate")
    kept = [(name, value) for name, value in headers if name not in dropped]
    return [*kept, (b"traceparent", f"00-{span.place.trace}-{span.place.span}-01".encode())]
