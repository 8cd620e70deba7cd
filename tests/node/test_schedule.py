"""What an engine is given next, and what it is given ahead: a pure account of queues and calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from shardline.model.backend import ShardSpec
from shardline.model.scripted import load_inline
from shardline.node.schedule import EngineCall, Schedule
from shardline.node.slots import Slot
from shardline.wire.messages import TicketPeer
from shardline.wire.steps import FLAG_LAST_CHUNK, FLAG_OUTPUT, LANE_DECODE, LANE_PREFILL, Entry, Step
from tests.node.test_slots import a_ticket

PROMPT = 4
TOKEN = bytes([7, 0, 0, 0])


@dataclass
class Desk:
    """A schedule with sessions beside it, which share one route of `hops`."""

    shard: Any
    hops: int
    slots: list[Slot] = field(default_factory=list)
    blocked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.schedule = Schedule(self.slots, lambda slot: slot.number in self.blocked)
        self.now = 0.0

    def session(self, *, decoding: bool = True) -> Slot:
        number = len(self.slots)
        ticket = a_ticket(hop=0, hops=self.hops, kv_tokens=40, next=TicketPeer(node="n-2", url="http://x"))
        slot = Slot(number=number, key=bytes([number] * 16), ticket=ticket, prompt_tokens=PROMPT, opened=True)
        slot.ids = bytearray()
        self.slots.append(slot)
        if decoding:
            self.prefill(slot)
            self.run()
        return slot

    def prefill(self, slot: Slot) -> None:
        flags = FLAG_LAST_CHUNK | FLAG_OUTPUT if slot.prompt_tokens == PROMPT else 0
        entry = Entry(slot.key, 0, 0, PROMPT, 0, LANE_PREFILL, flags)
        self._put(slot, Step(entry, bytes(4 * PROMPT), ()), 100)

    def decode(self, *slots: Slot) -> None:
        for slot in slots:
            entry = Entry(slot.key, slot.next_seq, slot.accepted_end, 1, 0, LANE_DECODE, FLAG_OUTPUT)
            self._put(slot, Step(entry, TOKEN, ()), 10)

    def _put(self, slot: Slot, step: Step, size: int) -> None:
        self.now += 1
        slot.accept(step, self.now, size)
        self.schedule.add(slot, size)

    def begin(self) -> EngineCall:
        call = self.schedule.next(self.shard)
        assert call is not None
        self._submit(call)
        return call

    def ahead(self) -> EngineCall | None:
        call = self.schedule.ahead(self.shard)
        if call is not None:
            self._submit(call)
        return call

    def _submit(self, call: EngineCall) -> None:
        self.schedule.begin(call)
        call.submitted, call.began = True, self.now

    def back(self, call: EngineCall) -> bool:
        self.now += 1
        if not self.schedule.returned(call, self.now):
            return False
        for slot, _ in call.batch:
            slot.running -= 1
        return True

    def run(self) -> None:
        assert self.back(self.begin())


def numbers(call: EngineCall | None) -> list[int] | None:
    return None if call is None else [slot.number for slot, _ in call.batch]


@pytest.fixture
def a_desk(tmp_path: Any) -> Any:
    path = tmp_path / "script.json"
    path.write_text('{"model": "demo", "n_layers": 6, "answer": ["a"]}')

    def make(first: int, last: int, hops: int) -> Desk:
        return Desk(load_inline(ShardSpec(str(path), first, last)).describe(), hops)

    return make


# ---- a Shard that is the whole model -----------------------------------------------------------------------------


def test_what_follows_a_decode_step_of_a_whole_model_is_foreseen(a_desk: Any) -> None:
    desk = a_desk(0, 6, 1)
    a, b = desk.session(), desk.session()
    desk.decode(a, b)
    first = desk.begin()
    second = desk.ahead()
    assert (numbers(first), numbers(second)) == ([0, 1], [0, 1])
    assert second is not None
    assert [(q.step.entry.seq, q.step.entry.position, bytes(q.step.tokens)) for _, q in second.batch] == [
        (2, PROMPT + 1, b"")
    ] * 2
    assert (a.running, a.ahead, len(a.ids or b"")) == (2, True, 4 * (PROMPT + 1))
    assert desk.back(first)
    a.came_round(TOKEN)
    assert (a.running, a.ahead, len(a.ids or b"")) == (1, False, 4 * (PROMPT + 2))
    assert second.began == desk.now, "it began when the one before had returned"
    b.finished = True  # its first token was the last
    assert numbers(desk.ahead()) == [0]


def test_nothing_is_foreseen_of_a_prompt_of_a_closed_session_and_past_what_is_reserved(a_desk: Any) -> None:
    desk = a_desk(0, 6, 1)
    a = desk.session(decoding=False)
    desk.prefill(a)
    call = desk.begin()
    assert desk.ahead() is None, "where a prompt ends, its tail may not want more"
    desk.back(call)
    desk.decode(a)
    call = desk.begin()
    a.closed = True
    assert desk.ahead() is None
    a.closed = False
    a.accepted_end = a.ticket.kv_tokens
    assert desk.ahead() is None
    a.accepted_end -= 1
    assert numbers(desk.ahead()) == [0]


def test_nothing_goes_ahead_of_what_waits_nor_before_the_first_was_submitted(a_desk: Any) -> None:
    desk = a_desk(0, 6, 1)
    a, b = desk.session(), desk.session(decoding=False)
    desk.decode(a)
    call = desk.begin()
    call.submitted = False  # positions are being restored first
    assert desk.ahead() is None
    call.submitted = True
    desk.prefill(b)
    assert desk.ahead() is None
    desk.back(call)
    desk.decode(a)
    assert numbers(desk.begin()) == [1], "the lanes take turns"


# ---- a part of a model -------------------------------------------------------------------------------------------


def in_step(desk: Desk, count: int, *, decode_ms: float = 10.0, hop_ms: float = 0.5) -> list[Slot]:
    slots = [desk.session() for _ in range(count)]
    desk.schedule.decoded(decode_ms)
    desk.schedule.pushed(hop_ms)
    return slots


def test_a_whole_group_is_handed_over_while_the_other_runs(a_desk: Any) -> None:
    desk = a_desk(0, 3, 2)
    slots = in_step(desk, 8)
    desk.decode(*slots[:4])
    assert numbers(desk.begin()) == [0, 1, 2, 3]
    desk.decode(*slots[4:7])
    assert desk.ahead() is None, "the fourth shall ride with them"
    desk.decode(slots[7])
    ahead = desk.ahead()
    assert numbers(ahead) == [4, 5, 6, 7]
    assert not any(slot.ahead for slot in slots)
    assert len(desk.schedule.calls) == 2


def test_a_lone_step_goes_ahead_where_each_session_is_a_group(a_desk: Any) -> None:
    desk = a_desk(0, 3, 2)
    slots = in_step(desk, 2)
    desk.decode(slots[0])
    desk.begin()
    assert desk.ahead() is None
    desk.decode(slots[1])
    assert numbers(desk.ahead()) == [1]


def test_how_many_make_a_batch_full_is_counted_once_a_call(a_desk: Any) -> None:
    desk = a_desk(0, 3, 2)
    slots = in_step(desk, 8)
    desk.decode(*slots[:4])
    first = desk.begin()
    assert (desk.ahead(), first.full_at) == (None, None)
    desk.decode(slots[4])
    assert (desk.ahead(), first.full_at) == (None, 4)
    for slot in slots[5:]:
        slot.finished = True
    assert desk.ahead() is None, "counted when the first step came"
    desk.back(first)
    assert numbers(desk.begin()) == [4]


def half_waiting(desk: Desk, newcomer: Slot, slots: list[Slot]) -> EngineCall:
    """Two of four decode steps run, the others wait, and so does a prompt."""
    desk.decode(*slots[:2])
    running = desk.begin()
    desk.prefill(newcomer)
    desk.decode(*slots[2:])
    return running


def test_a_chunk_is_neither_taken_ahead_nor_overtaken(a_desk: Any) -> None:
    desk = a_desk(0, 3, 2)
    slots = in_step(desk, 4)
    first = half_waiting(desk, desk.session(decoding=False), slots)
    assert desk.ahead() is None
    desk.back(first)
    assert numbers(desk.begin()) == [4]


def test_a_chunk_whose_rows_have_no_place_yet_is_passed(a_desk: Any) -> None:
    desk = a_desk(0, 3, 2)
    slots = in_step(desk, 4)
    newcomer = desk.session(decoding=False)
    newcomer.prompt_tokens = 2 * PROMPT
    desk.blocked.add(newcomer.number)
    half_waiting(desk, newcomer, slots)
    assert numbers(desk.ahead()) == [2, 3]


# ---- the account -------------------------------------------------------------------------------------------------


def test_bytes_that_wait_are_counted_and_a_closed_session_takes_its_own_along(a_desk: Any) -> None:
    desk = a_desk(0, 3, 2)
    a, b = desk.session(), desk.session(decoding=False)
    desk.decode(a)
    desk.prefill(b)
    assert desk.schedule.queue_bytes == 110
    desk.schedule.drop(b)
    assert (desk.schedule.queue_bytes, len(b.queue)) == (10, 0)
    assert numbers(desk.begin()) == [0]
    assert desk.schedule.queue_bytes == 0


def test_a_lost_engine_has_nothing_and_what_it_had_does_not_return(a_desk: Any) -> None:
    desk = a_desk(0, 6, 1)
    a = desk.session()
    desk.decode(a)
    first, second = desk.begin(), desk.ahead()
    assert second is not None and a.running == 2
    assert desk.schedule.lost() == [a, a]
    assert not desk.schedule.calls
    assert (desk.back(first), desk.back(second)) == (False, False)


def test_a_call_that_is_refused_behind_a_running_one_leaves_its_time_alone(a_desk: Any) -> None:
    desk = a_desk(0, 6, 1)
    a = desk.session()
    desk.decode(a)
    first, second = desk.begin(), desk.ahead()
    assert second is not None
    began = first.began
    assert desk.back(second)
    assert first.began == began
    assert list(desk.schedule.calls) == [first]
