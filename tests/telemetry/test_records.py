"""Records of Route Sessions: whole events, honest rates, bounded memory, and each key its own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.telemetry.records import Clock, Record, Records
from shardline.wire.messages import Hop, HopTimes, Route, SeamCount

SETTINGS = Settings(record_limit=5, record_events=8, record_ttl_s=100.0)


def a_route(hops: int = 2) -> Route:
    made = [
        Hop(
            index=i, node=f"n-{i}", url="http://127.0.0.1:1", first=i, last=i + 1, engine_class="e", content_id="mac1-0"
        )
        for i in range(hops)
    ]
    return Route(
        id="r-1",
        model="m",
        content_id="mac1-0",
        engine_class="e",
        n_layers=hops,
        hops=made,
        prefill_chunk=16,
        context_length=64,
        vocab_size=100,
        text_digest="0",
    )


@dataclass
class Hand:
    """A clock that is moved by hand."""

    now: float = 1000.0
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(unix=lambda: self.now + 1e9, ticks=lambda: self.now)


def a_record(prompt: int = 10, hand: Hand | None = None) -> Record:
    return Record(key_id="k", model="m", prompt_tokens=prompt, settings=SETTINGS, clock=(hand or Hand()).clock)


def test_the_first_event_is_there_before_anything_happens() -> None:
    ((seq, event),) = a_record().events_after(0)
    body = json.loads(event)
    assert (seq, body["phase"], body["route"], body["prefill"]) == (
        1,
        "queued",
        None,
        {"done": 0, "total": 10, "chunk": None, "cached": 0, "reuse": None},
    )


@pytest.mark.parametrize(
    ("came", "generated", "told"),
    [(4, 5, 5), (4, 4, 4), (4, 2, 2), (0, 1, 1), (0, 0, 0)],
    ids=["end", "limit", "stop-string", "end-at-once", "vector"],
)
def test_at_the_end_there_are_as_many_tokens_as_usage_counts(came: int, generated: int, told: int) -> None:
    """The id that ends a text counts and is not sent; what was computed beyond a stop string does not."""
    record = a_record()
    record.routed(a_route())
    record.enter("prefill")
    for _ in range(came):
        record.token()
    record.counted(generated)
    record.token()  # one that was on its way
    record.enter("completed")
    assert record.snapshot().decode.tokens == record.tokens == told


def test_of_a_composite_node_no_layers_are_made_up_and_its_rate_is_that_of_the_whole_answer() -> None:
    hand = Hand()
    record = a_record(hand=hand)
    record.passed_on = True
    record.routed(a_route(1))
    record.enter("prefill")
    for _ in range(5):
        record.text()
        hand.now += 0.5
    assert record.snapshot().decode.tokens_per_s is None
    record.used(7, 100, None)
    record.enter("completed")
    view = msgspec.to_builtins(record.snapshot())
    assert (view["route"]["n_layers"], view["route"]["hops"][0]["layers"]) == (None, None)
    # Of 100 tokens in five pieces, 80 came behind the first one, in 2 s.
    assert (view["decode"]["tokens"], view["decode"]["tokens_per_s"]) == (100, 40.0)


@pytest.mark.parametrize("pieces", [0, 1])
def test_an_answer_in_one_piece_has_no_rate(pieces: int) -> None:
    record = a_record()
    record.passed_on = True
    for _ in range(pieces):
        record.text()
    record.used(7, 100, None)
    record.enter("completed")
    assert record.snapshot().decode.tokens_per_s is None


def test_an_event_is_a_whole_account() -> None:
    record = a_record()
    record.enter("routing")
    record.routed(a_route())
    record.enter("opening")
    record.enter("prefill")
    record.hop_times(1, HopTimes(queue_ms=0.1, compute_ms=2.0, send_ms=None))
    record.seam(0, SeamCount(steps=1, rows=10, bytes=500), None)
    record.prefilled(10)
    record.token()
    view = msgspec.to_builtins(record.snapshot())
    assert view["phase"] == "decode"
    assert [h["layers"] for h in view["route"]["hops"]] == [(0, 1), (1, 2)]
    assert view["route"]["hops"][1]["compute_ms"] == 2.0
    assert view["seams"][0]["from"] == "n-0"
    assert view["seams"][0]["to"] == "n-1"
    assert view["seams"][0]["prefill"] == {"steps": 1, "rows": 10, "bytes": 500}
    assert view["decode"]["tokens"] == 1
    assert view["decode"]["tokens_per_s"] is None, "no rate over no time"
    assert view["decode"]["ttft_ms"] >= 0


def test_an_ended_session_stays_as_it_ended() -> None:
    record = a_record()
    record.fail(ShardlineError("node_lost", "gone", node="n-1"))
    record.enter("completed")
    record.fail(ShardlineError("internal", "later"))
    assert record.phase == "failed"
    assert record.failure is not None and record.failure["node"] == "n-1"


@given(st.lists(st.just(0.0) | st.floats(1e-6, 3), max_size=50))
def test_rates_are_finite_or_null(gaps: list[float]) -> None:
    record = a_record()
    now = 0.0
    for gap in gaps:
        now += gap
        record._recent.append(now)
    rate = record.rate(now)
    recent = [t for t in record._recent if now - t <= 2.0]
    if len(recent) < 2 or recent[0] == recent[-1]:
        assert rate is None
    else:
        assert rate is not None and 0 < rate < float("inf")
    assert b"NaN" not in msgspec.json.encode(record.snapshot())


def test_records_are_bounded_and_running_ones_are_kept() -> None:
    hand = Hand()
    records = Records(SETTINGS, hand.clock)
    running = records.new(key_id="k", model="m", prompt_tokens=1)
    for _ in range(20):
        records.new(key_id="k", model="m", prompt_tokens=1).enter("completed")
    kept = records.list("k")
    assert len(kept) <= SETTINGS.record_limit
    assert running.id in [r["id"] for r in kept]
    hand.now += SETTINGS.record_ttl_s + 1
    assert [r["id"] for r in records.list("k")] == [running.id]


def test_the_latest_are_all_that_run_and_some_that_ended() -> None:
    records = Records(SETTINGS)
    made = [records.new(key_id="k", model="m", prompt_tokens=1) for _ in range(5)]
    records.new(key_id="other", model="m", prompt_tokens=1)
    for record in (made[0], made[2], made[4]):
        record.enter("completed")
    assert [view["id"] for view in records.latest("k", 2)] == [made[n].id for n in (3, 1, 4, 2)]


async def test_a_key_sees_and_cancels_its_own_only() -> None:
    records = Records(SETTINGS)
    record = records.new(key_id="mine", model="m", prompt_tokens=1)
    cancelled: list[str] = []

    def cancel(reason: str) -> None:
        cancelled.append(reason)
        record.enter("cancelled")

    record.cancel = cancel
    assert records.list("other") == []
    for session, key in ((record.id, "other"), ("rs-none", "mine")):
        with pytest.raises(ShardlineError) as caught:
            records.get(session, key)
        assert caught.value.code == "session_not_found"
    with pytest.raises(ShardlineError):
        await records.cancel(record.id, "other")
    assert cancelled == []
    await records.cancel(record.id, "mine")
    await records.cancel(record.id, "mine")
    assert len(cancelled) == 1


async def test_a_cancel_returns_when_the_session_has_ended() -> None:
    records = Records(SETTINGS)
    record = records.new(key_id="k", model="m", prompt_tokens=1)
    asked = asyncio.Event()
    record.cancel = lambda reason: asked.set()
    async with asyncio.TaskGroup() as tasks:
        cancelling = tasks.create_task(records.cancel(record.id, "k"))
        await asked.wait()
        record.queued_at(3)  # something else happens meanwhile
        await asyncio.sleep(0.01)
        assert not cancelling.done()
        record.enter("cancelled")
    assert records.get(record.id, "k")["phase"] == "cancelled"


async def test_a_cancel_waits_for_a_session_that_does_not_end_within_a_limit() -> None:
    records = Records(msgspec.structs.replace(SETTINGS, control_s=0.02))
    record = records.new(key_id="k", model="m", prompt_tokens=1)
    await records.cancel(record.id, "k")
    assert records.get(record.id, "k")["phase"] == "queued"


def a_long_session(records: Records, hand: Hand, tokens: int = 600) -> Record:
    """An event every second: the worst that a session can make of its account."""
    record = records.new(key_id="k", model="m", prompt_tokens=10)
    record.enter("routing")
    record.routed(a_route(3))
    record.enter("prefill")
    for step in range(tokens):
        hand.now += 1.0
        for hop in range(3):
            record.hop_times(hop, HopTimes(queue_ms=step % 7 / 10, compute_ms=step % 11 / 3, send_ms=step % 5 / 10))
            record.seam(
                hop, SeamCount(steps=1, rows=10, bytes=50_000), SeamCount(steps=step, rows=step, bytes=9 * step)
            )
        record.token()
    return record


def test_a_long_session_takes_little() -> None:
    hand = Hand()
    records = Records(Settings(), hand.clock)
    record = a_long_session(records, hand)
    record.enter("completed")
    events = record.events_after(0)
    assert len(events) == 512
    assert records.size * 3 < sum(len(event) for _, event in events)
    assert records.size < 250_000
    assert json.loads(events[-1][1])["phase"] == "completed"


def test_the_bytes_of_all_records_are_bounded_and_the_one_that_ended_first_goes_first() -> None:
    hand = Hand()
    limit = 1 << 20
    records = Records(Settings(record_bytes=limit), hand.clock)
    running = a_long_session(records, hand)
    long_ago = [a_long_session(records, hand) for _ in range(3)]
    for record in reversed(long_ago):
        record.enter("completed")
    recent = [a_long_session(records, hand) for _ in range(3)]
    assert records.size <= limit
    for record in recent:
        record.enter("completed")
    kept = [view["id"] for view in records.list("k")]
    assert running.id in kept and [record.id for record in reversed(recent)] == kept[: len(recent)]
    assert long_ago[2].id not in kept, "it ended first"
    assert records.size <= limit


def test_where_only_running_sessions_are_left_their_older_events_go() -> None:
    hand = Hand()
    limit = 300_000
    records = Records(Settings(record_bytes=limit), hand.clock)
    running = [a_long_session(records, hand) for _ in range(4)]
    assert records.size <= limit
    assert [view["id"] for view in records.list("k")] == [record.id for record in reversed(running)]
    for record in running:
        events = record.events_after(0)
        assert events and json.loads(events[-1][1])["decode"]["tokens"] == 600


def test_a_record_that_was_dropped_is_counted_no_more() -> None:
    hand = Hand()
    records = Records(SETTINGS, hand.clock)
    record = a_long_session(records, hand, tokens=20)
    record.enter("completed")
    hand.now += SETTINGS.record_ttl_s + 1
    assert records.list("k") == []
    assert records.size == 0
    record.hop_health(0, "lost")
    assert (records.list("k"), records.size) == ([], 0)


def test_a_rate_ends_with_its_session() -> None:
    hand = Hand()
    record = a_record(hand=hand)
    for _ in range(30):
        hand.now += 0.1
        record.token()
    assert record.rate() == 10.0
    record.enter("completed")
    hand.now += 100
    assert record.rate() == 10.0
    assert not record._recent, "times of single tokens are not kept with the account"


async def test_a_listener_hears_every_event_once_and_can_come_back() -> None:
    records = Records(msgspec.structs.replace(SETTINGS, record_events=100))
    record = records.new(key_id="k", model="m", prompt_tokens=1)
    heard: list[tuple[int, str]] = []

    async def listen(after: int) -> None:
        async for seq, event in records.subscribe(record.id, "k", after):
            heard.append((seq, json.loads(event)["phase"]))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listen(0))
        for phase in ("routing", "opening", "prefill", "decode", "completed"):
            await asyncio.sleep(0)
            record.enter(phase)
    assert [phase for _, phase in heard] == ["queued", "routing", "opening", "prefill", "decode", "completed"]
    assert [seq for seq, _ in heard] == list(range(1, 7))
    heard.clear()
    await listen(4)
    assert [phase for _, phase in heard] == ["decode", "completed"]


def test_progress_that_came_too_soon_is_said_with_the_next_beat() -> None:
    hand = Hand()
    record = a_record(prompt=100, hand=hand)
    record.enter("prefill")
    record.prefilled(60)
    assert record.events_after(0)[-1][0] == 2, "too soon after the last event"
    hand.now += 0.25
    record.catch_up()
    assert json.loads(record.events_after(0)[-1][1])["prefill"]["done"] == 60
    seq = record.events_after(0)[-1][0]
    record.catch_up()
    assert record.events_after(0)[-1][0] == seq, "nothing new, no event"


def test_what_was_there_before_counts_as_prefilled_and_a_reason_stands_where_nothing_was() -> None:
    record = a_record(prompt=100)
    record.routed(a_route())
    record.enter("opening")
    assert (record.snapshot().prefill.cached, record.snapshot().prefill.reuse) == (0, None)
    record.reused(64, None)
    record.enter("prefill")
    prefill = record.snapshot().prefill
    assert (prefill.done, prefill.cached, prefill.reuse) == (64, 64, None)
    record.prefilled(80)
    assert (record.snapshot().prefill.done, record.snapshot().prefill.cached) == (80, 64)
    other = a_record()
    other.reused(0, "nothing kept of this prompt")
    assert (other.snapshot().prefill.done, other.snapshot().prefill.reuse) == (0, "nothing kept of this prompt")
