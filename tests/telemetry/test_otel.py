"""Spans on their way to a collector: what arrives, and that nothing waits for one that is slow or gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardline.telemetry.otel import CLOSE_S, QUEUE, Exporter
from shardline.wire.spans import Span, new_place
from tests.support.collector import collector


def span(name: str = "chat m", **more: object) -> Span:
    fields = {"name": name, "place": new_place(), "parent": None, "kind": "server", "began_ns": 10, "ended_ns": 30}
    return Span(**{**fields, **more})  # type: ignore[arg-type]


@contextmanager
def exporter(url: str) -> Iterator[Exporter]:
    made = Exporter(f"{url}/v1/traces", {"x-tenant": "me"}, {"service.name": "shardline-gateway"})
    try:
        yield made
    finally:
        made.close()


def test_a_span_arrives_as_it_was() -> None:
    parent = new_place()
    with collector() as there:
        with exporter(there.url) as export:
            sent = span(place=parent.child(), parent=parent, attributes={"a": 1, "b": ["x", "y"]}, error="node_lost")
            export(sent)
            export(span("route session", kind="internal"))
        seen, other = there.until(2)
    assert (seen.service, seen.name, seen.kind, other.kind) == ("shardline-gateway", "chat m", 2, 1)
    assert (seen.trace, seen.parent) == (parent.trace, parent.span)
    assert (seen.trace, seen.id) == (sent.place.trace, sent.place.span)
    assert (seen.began_ns, seen.ended_ns, seen.failed, other.failed) == (10, 30, True, False)
    assert seen.attributes == {"a": 1, "b": ["x", "y"]} and there.headers[0]["x-tenant"] == "me"


def test_nobody_waits_for_a_collector_that_does_not_answer() -> None:
    open_again = threading.Event()
    with collector() as there:
        there.before = lambda: open_again.wait(20) and None
        try:
            with exporter(there.url) as export:
                began = time.monotonic()
                for _ in range(3 * QUEUE):
                    export(span())
                gave = time.monotonic() - began
                began = time.monotonic()
            closed = time.monotonic() - began
        finally:
            open_again.set()
    # Each takes some microseconds; one wait for the collector alone would be longer than all of them.
    assert gave < 5 and closed < CLOSE_S + 3


def test_a_collector_that_is_not_there_harms_nothing() -> None:
    before = set(threading.enumerate())
    with collector() as there:
        url = there.url
    with exporter(url) as export:
        export(span())
    assert set(threading.enumerate()) <= before, "nothing goes on trying"
