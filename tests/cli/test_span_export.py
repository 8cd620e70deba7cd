"""From OpenTelemetry's variables to an exporter, or to a reason why there is none."""

from __future__ import annotations

import sys

import pytest
from structlog.testing import capture_logs

from shardline.cli.span_export import endpoint_of, pairs_of, span_export
from shardline.wire.spans import Span, new_place
from tests.support.collector import collector

BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318/"}


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "  "}, None),
        (BASE, "http://127.0.0.1:4318/v1/traces"),
        ({**BASE, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/x"}, "http://127.0.0.1:9/x"),
        ({**BASE, "OTEL_SDK_DISABLED": "true"}, None),
        ({**BASE, "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_the_endpoint(environ: dict[str, str], endpoint: str | None) -> None:
    assert endpoint_of(environ) == endpoint


def test_pairs() -> None:
    assert pairs_of("a=1, b%20c = d%3De,alone,") == {"a": "1", "b c": "d=e"}


def test_nothing_is_imported_where_nothing_is_exported() -> None:
    before = {name for name in sys.modules if name.startswith("opentelemetry")}
    with span_export({}, "node") as spans:
        assert spans is None
    assert {name for name in sys.modules if name.startswith("opentelemetry")} == before


def test_spans_of_a_role_arrive_before_it_has_ended() -> None:
    with collector() as there:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": there.url, "OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20b"}
        with span_export(environ, "tracker") as spans:
            assert spans is not None
            spans(Span(name="route", place=new_place(), parent=None, kind="server", began_ns=1, ended_ns=2))
        (seen,) = there.spans
    assert (seen.service, seen.name, there.headers[0]["x-key"]) == ("shardline-tracker", "route", "a b")


def test_what_cannot_be_exported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as told, span_export({**BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "node") as spans:
        assert spans is None
    monkeypatch.setitem(sys.modules, "shardline.telemetry.otel", None)
    with capture_logs() as more, span_export(BASE, "node") as spans:
        assert spans is None
    monkeypatch.undo()
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "99999")  # read by OpenTelemetry itself
    with capture_logs() as last, span_export(BASE, "node") as spans:
        assert spans is None
    assert [line["event"] for line in (*told, *more, *last)] == ["spans_off"] * 3
    assert "batch" in last[0]["reason"]
    assert "grpc" in told[0]["reason"] and "shardline[otel]" in more[0]["goes_on"]
