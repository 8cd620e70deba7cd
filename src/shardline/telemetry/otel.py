"""Export of spans by OTLP over HTTP, with OpenTelemetry's own packages (the extra `otel`), which no other file imports.

Owns the queue between a process and its collector: spans are given away without waiting, sent by a thread, and dropped
where the collector does not keep up or does not answer; nothing of a request hangs on it. What a span holds is decided
where it is made. Shown by tests/telemetry/test_otel.py and tests/cluster/test_otel.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from shardline.wire.spans import Place, Span

QUEUE = 2048
"""Spans that wait; of more, the oldest are dropped."""
DELAY_MS = 1000.0
POST_S = 5.0
CLOSE_S = 2.0
"""What is still in the queue at the end of a process has so long to leave."""
_KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}


class Exporter:
    """Sends spans to `endpoint`, the full URL of the collector's `/v1/traces`."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], resource: Mapping[str, str]) -> None:
        self._resource = Resource(dict(resource))
        self._scope = InstrumentationScope("shardline")
        self._sending = OTLPSpanExporter(endpoint=endpoint, headers=dict(headers), timeout=POST_S)
        self._processor = BatchSpanProcessor(self._sending, max_queue_size=QUEUE, schedule_delay_millis=DELAY_MS)

    def __call__(self, span: Span) -> None:
        """Take a span; returns at once, whatever the collector does."""
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=_context(span.place, remote=False),
                parent=None if span.parent is None else _context(span.parent, remote=span.kind == "server"),
                resource=self._resource,
                attributes=dict(span.attributes),
                kind=_KINDS[span.kind],
                status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=span.began_ns,
                end_time=span.ended_ns,
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what waits, for at most `CLOSE_S`; what is not sent by then is dropped, and nothing tries again."""
        ending = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            self._sending.shutdown()  # type: ignore[no-untyped-call]
            ending.join(CLOSE_S)


def _context(place: Place, *, remote: bool) -> SpanContext:
    return SpanContext(int(place.trace, 16), int(place.span, 16), is_remote=remote, trace_flags=TraceFlags(1))
