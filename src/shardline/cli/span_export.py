"""Whether this process exports spans, and where: from the variables that OpenTelemetry has for it.

Owns the reading of these, and the life of the exporter around a role. Without an endpoint nothing of OpenTelemetry is
imported. What cannot be exported is said once, and the role runs without it. Shown by tests/cli/test_span_export.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import unquote

import structlog

import shardline
from shardline.wire.spans import SpanSink

log = structlog.get_logger(__name__)
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def endpoint_of(environ: Mapping[str, str]) -> str | None:
    """The full URL to send spans to; None where none is named, or all is switched off."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    whole, general = environ.get(_TRACES_ENDPOINT, "").strip(), environ.get(_ENDPOINT, "").strip()
    return whole or (f"{general.rstrip('/')}/v1/traces" if general else None)


def pairs_of(text: str) -> dict[str, str]:
    """`a=b,c=d`, each percent-encoded, as headers and resource attributes are written; what has no `=` is left out."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


@contextmanager
def span_export(environ: Mapping[str, str], role: str) -> Iterator[SpanSink | None]:
    """Around the run of a role: where its spans go, or None. At the end what waits is sent, for a short time."""
    endpoint = endpoint_of(environ)
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if endpoint is None:
        yield None
        return
    if protocol != "http/protobuf":
        log.warning("spans_off", reason=f"OTLP by {protocol[:40]} is not spoken here", goes_on="http/protobuf would be")
        yield None
        return
    try:
        from shardline.telemetry.otel import Exporter
    except ImportError as error:
        log.warning("spans_off", reason=f"no {error.name}", goes_on="with: pip install 'shardline[otel]'")
        yield None
        return
    resource = {
        **pairs_of(environ.get("OTEL_RESOURCE_ATTRIBUTES", "")),
        "service.name": environ.get("OTEL_SERVICE_NAME") or f"shardline-{role}",
        "service.version": shardline.__version__,
    }
    headers = next((pairs_of(environ[name]) for name in _HEADERS if environ.get(name)), {})
    try:
        exporter = Exporter(endpoint, headers, resource)
    except (OSError, ValueError) as error:  # OpenTelemetry reads further variables by itself
        log.warning("spans_off", reason=f"OpenTelemetry refuses a variable of its own: {error}"[:300])
        yield None
        return
    try:
        yield exporter
    finally:
        exporter.close()
