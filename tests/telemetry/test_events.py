"""The kept events: the same bytes come out, in order, and their size in memory is known and small."""

from __future__ import annotations

import json
import sys
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from shardline.telemetry.events import _OBJECTS_BYTES, EventLog


@given(st.lists(st.binary(max_size=300), max_size=30), st.integers(1, 8), st.integers(-1, 40))
def test_bytes_in_are_bytes_out(events: list[bytes], limit: int, after: int) -> None:
    log = EventLog(limit)
    for event in events:
        if event[:1] > b"\x80":
            log.renew()
        log.append(event)
    numbered = list(enumerate(events, 1))[-limit:]
    assert log.after(0) == numbered
    assert log.after(after) == [(seq, event) for seq, event in numbered if seq > after]
    assert log.seq == len(events)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=30), st.integers(1, 8))
def test_nothing_is_counted_that_is_not_kept(events: list[bytes], limit: int) -> None:
    """Halved until one event is left, the size is that of the event alone."""
    log = EventLog(limit)
    for number, event in enumerate(events):
        if number % 3 == 0:
            log.renew()
        log.append(event)
    while len(log.after(0)) > 1:
        before = log.size
        log.halve()
        assert log.size < before
    assert log.after(0) == [(len(events), events[-1])]
    (kept,) = log._events
    assert log.size == len(kept.packed) + len(kept.pattern) + _OBJECTS_BYTES


def an_event(number: int, hops: int) -> bytes:
    """As telemetry writes them."""
    route = [
        {
            "node": f"n-{i}",
            "layers": [i, i + 1],
            "engine_class": "torch/2.13.0/none/f32",
            "content_id": "mac1-" + "0123456789abcdef" * 4,
            "health": "ok",
            "rtt_ms": 0.25,
            "compute_ms": (number * 7919 + i * 104729) % 9973 / 1000,
        }
        for i in range(hops)
    ]
    seams = [
        {"from": f"n-{i}", "to": f"n-{i + 1}", "decode": {"steps": number, "rows": number, "bytes": 2400 * number}}
        for i in range(hops)
    ]
    body = {"id": "rs-" + "0123456789ab" * 2, "seq": number, "time": 1e9 + number / 4, "route": route, "seams": seams}
    return json.dumps(body).encode()


def test_events_that_resemble_one_another_take_little() -> None:
    log = EventLog(512)
    plain = 0
    for number in range(512):
        event = an_event(number, 3)
        plain += len(event)
        log.append(event)
    assert log.size * 3 < plain
    assert [json.loads(event)["seq"] for _, event in log.after(0)] == list(range(512))


def test_the_size_is_that_of_the_memory() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        log = EventLog(512)
        for number in range(512):
            log.append(an_event(number, 5))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert sys.getsizeof(log) < 1000
    assert 0.7 * taken < log.size < 1.5 * taken
