"""The step protocol's rules, one session at a time (no engine, no socket)."""

from __future__ import annotations

import struct

import pytest

from shardline.errors import ShardlineError
from shardline.node.slots import KvLedger, Slot, check_tokens
from shardline.wire.messages import Ticket, TicketPeer
from shardline.wire.steps import (
    FLAG_LAST_CHUNK,
    FLAG_OUTPUT,
    FLAG_ROLLBACK,
    LANE_DECODE,
    LANE_PREFILL,
    Entry,
    Step,
)

KEY = bytes(range(16))


def a_ticket(**changes: object) -> Ticket:
    facts: dict[str, object] = {
        "id": "t-1",
        "route": "r-1",
        "gateway": "g-1",
        "node": "n-1",
        "hop": 1,
        "hops": 3,
        "content_id": "mac1-0",
        "first": 2,
        "last": 4,
        "kv_tokens": 16,
        "prefill_chunk": 4,
        "previous": None,
        "next": TicketPeer(node="n-2", url="http://127.0.0.1:1"),
        "layout_in": "a",
        "layout_out": "b",
        "not_after": 0.0,
    }
    return Ticket(**{**facts, **changes})  # type: ignore[arg-type]


def a_slot(prompt: int = 6, **changes: object) -> Slot:
    return Slot(number=0, key=KEY, ticket=a_ticket(**changes), prompt_tokens=prompt, opened=True)


def prefill(seq: int, position: int, rows: int, *, last: bool = False, hop: int = 1, flags: int = 0) -> Step:
    flags |= FLAG_LAST_CHUNK | FLAG_OUTPUT if last else 0
    return Step(Entry(KEY, seq, position, rows, hop, LANE_PREFILL, flags), bytes(4 * rows), ())


def decode(seq: int, position: int, rows: int = 1, flags: int = FLAG_OUTPUT) -> Step:
    return Step(Entry(KEY, seq, position, rows, 1, LANE_DECODE, flags), bytes(4 * rows), ())


def refused(slot: Slot, step: Step) -> str:
    """The code of the reject; nothing of the slot may have changed."""
    before = (slot.next_seq, slot.accepted_end, slot.prompt_complete, len(slot.queue))
    with pytest.raises(ShardlineError) as caught:
        slot.accept(step, 0.0, 1)
    assert (slot.next_seq, slot.accepted_end, slot.prompt_complete, len(slot.queue)) == before
    return caught.value.code


def test_a_step_that_is_foreseen_has_the_place_of_the_session() -> None:
    """Its token comes from the engine; what anybody else sends in its place is refused, and is not in the ids."""
    slot = a_slot(4)
    slot.ids = bytearray()
    slot.accept(prefill(0, 0, 4, last=True), 0.0, 0)
    slot.queue.clear()
    assert slot.foreseeable
    foreseen = slot.foresee()
    assert (foreseen.step.entry.seq, foreseen.step.entry.position, foreseen.step.entry.hop) == (1, 4, 0)
    assert not slot.foreseeable
    assert refused(slot, decode(1, 4)) == "duplicate"
    assert refused(slot, decode(2, 5)) == "seam_invalid"
    slot.came_round(b"\x09\0\0\0")
    assert slot.foreseeable
    assert bytes(slot.ids) == bytes(16) + b"\x09\0\0\0"


def test_a_session_runs_through_both_lanes() -> None:
    slot = a_slot()
    slot.accept(prefill(0, 0, 4), 0.0, 1)
    slot.accept(prefill(1, 4, 2, last=True), 0.0, 1)
    slot.queue.clear()
    slot.accept(decode(2, 6), 0.0, 1)
    slot.queue.clear()
    slot.accept(decode(3, 7), 0.0, 1)
    assert (slot.next_seq, slot.accepted_end, slot.decoding) == (4, 8, True)


def test_repeated_skipped_and_old_steps_change_nothing() -> None:
    slot = a_slot()
    slot.accept(prefill(0, 0, 4), 0.0, 1)
    assert refused(slot, prefill(0, 0, 4)) == "duplicate"
    assert refused(slot, prefill(2, 4, 2, last=True)) == "seam_gap"
    slot.accept(prefill(1, 4, 2, last=True), 0.0, 1)
    assert refused(slot, prefill(1, 4, 2, last=True)) == "duplicate"
    assert refused(slot, prefill(0, 0, 4)) == "duplicate"
    slot.queue.clear()
    assert refused(slot, decode(4, 6)) == "seam_gap"


def test_position_is_checked_against_the_accepted_end() -> None:
    slot = a_slot()
    slot.accept(prefill(0, 0, 4), 0.0, 1)
    assert refused(slot, prefill(1, 3, 2)) == "seam_gap"
    assert refused(slot, prefill(1, 5, 1, last=True)) == "seam_gap"


def test_going_back_needs_a_new_seq_and_the_flag() -> None:
    slot = a_slot()
    slot.accept(prefill(0, 0, 4), 0.0, 1)
    slot.accept(prefill(1, 4, 2, last=True), 0.0, 1)
    slot.queue.clear()
    slot.accept(decode(2, 6), 0.0, 1)
    slot.queue.clear()
    assert refused(slot, decode(3, 6)) == "seam_gap"
    slot.accept(decode(3, 6, flags=FLAG_OUTPUT | FLAG_ROLLBACK), 0.0, 1)
    assert slot.accepted_end == 7
    slot.queue.clear()
    assert refused(slot, decode(4, 9, flags=FLAG_OUTPUT | FLAG_ROLLBACK)) == "seam_gap"


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (prefill(0, 0, 5), "frame_invalid"),  # a chunk longer than agreed
        (prefill(0, 0, 4, hop=0), "frame_invalid"),
        (prefill(0, 0, 4, hop=2), "frame_invalid"),
        (prefill(0, 0, 4, last=True), "frame_invalid"),  # "last", but the prompt has six tokens
        (decode(0, 0), "seam_gap"),  # decoding before the prompt is there
        (decode(0, 0, rows=2), "frame_invalid"),
    ],
)
def test_a_first_step_that_does_not_fit(step: Step, code: str) -> None:
    assert refused(a_slot(), step) == code


def test_the_chunk_that_ends_the_prompt_must_say_so() -> None:
    slot = a_slot(prompt=4)
    assert refused(slot, prefill(0, 0, 4)) == "frame_invalid"
    slot.accept(prefill(0, 0, 4, last=True), 0.0, 1)
    assert refused(slot, prefill(1, 4, 1)) == "frame_invalid"


def test_rows_stay_within_the_reservation() -> None:
    slot = a_slot(prompt=4, kv_tokens=5)
    slot.accept(prefill(0, 0, 4, last=True), 0.0, 1)
    slot.queue.clear()
    slot.accept(decode(1, 4), 0.0, 1)
    slot.queue.clear()
    assert refused(slot, decode(2, 5)) == "frame_invalid"


def test_a_session_has_one_place_in_the_decode_lane() -> None:
    slot = a_slot(prompt=4)
    slot.accept(prefill(0, 0, 4, last=True), 0.0, 1)
    assert refused(slot, decode(1, 4)) == "seam_invalid"
    slot.queue.clear()
    slot.accept(decode(1, 4), 0.0, 1)
    assert refused(slot, decode(2, 5)) == "seam_invalid"


def test_no_step_before_the_session_was_opened() -> None:
    slot = a_slot()
    slot.opened = False
    assert refused(slot, prefill(0, 0, 4)) == "seam_gap"


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1])
def test_token_ids_outside_the_vocabulary(bad: int) -> None:
    step = Step(Entry(KEY, 0, 0, 2, 1, LANE_PREFILL, 0), struct.pack("<ii", 7, bad), ())
    with pytest.raises(ShardlineError, match=str(bad)):
        check_tokens(step, 100)
    check_tokens(Step(step.entry, struct.pack("<ii", 0, 99), ()), 100)


def test_kv_is_promised_only_while_there_is_some() -> None:
    ledger = KvLedger(capacity=10)
    ledger.reserve(6)
    with pytest.raises(ShardlineError) as caught:
        ledger.reserve(5)
    assert caught.value.code == "kv_exhausted"
    assert (caught.value.details["wanted"], caught.value.details["free"]) == (5, 4)
    ledger.reserve(4)
    ledger.release(6)
    assert ledger.reserved == 4
