"""What the spans of a Route Session hold, where not everything about it is known."""

from __future__ import annotations

from typing import Any

from shardline.gateway.spans import _session
from shardline.settings import Settings
from shardline.telemetry.records import Records
from shardline.transport.spans import OpenSpan
from shardline.wire.spans import Span, new_place


def spans_of(*, passed_on: bool) -> dict[str, Span]:
    records = Records(Settings())
    record = records.new(key_id="k", model="m", prompt_tokens=0 if passed_on else 5)
    record.passed_on = passed_on
    for phase in ("routing", "opening", "prefill", "decode", "completed"):
        record.enter(phase)
    given: list[Span] = []
    view: dict[str, Any] = records.get(record.id, "k")
    _session(OpenSpan("chat", new_place(), None, given.append), view)
    return {span.name: span for span in given}


def test_counts_that_nobody_knows_are_left_out() -> None:
    known, unknown = spans_of(passed_on=False), spans_of(passed_on=True)
    assert list(known) == list(unknown) == ["route session", "queued", "routing", "opening", "prefill", "decode"]
    assert known["prefill"].attributes == {"shardline.tokens": 0, "shardline.tokens_kept": 0}
    assert known["decode"].attributes == {"shardline.tokens": 0}
    assert unknown["prefill"].attributes == unknown["decode"].attributes == {}
