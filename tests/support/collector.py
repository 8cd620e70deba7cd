"""A collector of spans: takes OTLP over HTTP on loopback, decodes it, and keeps what came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """A span as the collector got it. Ids are hexadecimal."""

    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """`spans`: all that came. `answers`: called for each request, before it is answered."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.headers: list[dict[str, str]] = []
        self.before: Callable[[], None] = lambda: None
        self.status = 200
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces" and headers["content-type"] == "application/x-protobuf"
        self.headers.append(headers)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [_seen(service, span) for span in of_scope.spans]

    def until(self, count: int, within_s: float = 10.0) -> list[Seen]:
        deadline = time.monotonic() + within_s
        while len(self.spans) < count:
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.02)
        return self.spans


@contextmanager
def collector() -> Iterator[Collector]:
    kept = Collector()

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.before()
            body = self.rfile.read(int(self.headers["content-length"]))
            if kept.status == 200:
                kept.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(kept.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    server.daemon_threads = True
    kept.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()


def _seen(service: str, span: Any) -> Seen:
    return Seen(
        service=service,
        name=span.name,
        kind=span.kind,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        failed=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
