"""What a Shard's engine is given next: queued steps in, engine calls out.

Owns the steps that wait, the calls that the engine has, and what was measured of both; which steps ride together is
batch.py's rule. An engine that takes a call ahead never waits for the Node: it has its next decode batch while it
computes one (docs/decisions/0014-steps-ahead.md). Refuses to talk to the engine. Shown by tests/node/test_schedule.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from shardline.model.backend import ShardDescription
from shardline.node.batch import Choice, Lane, Measured, Waiting, choose, decode_cap
from shardline.node.slots import QueuedStep, Slot
from shardline.wire.steps import LANE_DECODE

_MEDIAN_OF = 15


@dataclass(slots=True, eq=False)
class EngineCall:
    """One batch that the engine has, or is about to get."""

    lane: Lane
    batch: list[tuple[Slot, QueuedStep]]
    submitted: bool = False
    began: float = 0.0
    """When the engine could begin with it: it was submitted, and the one before had returned."""
    full_at: int | None = None
    """While it runs: how many decode steps the batch behind it may have, counted once."""


@dataclass(slots=True)
class Schedule:
    """`sessions`: all that are open. `blocked`: whether what a prefill chunk of this session makes has no place yet."""

    sessions: Iterable[Slot]
    blocked: Callable[[Slot], bool]
    queue_bytes: int = 0
    """Of rows that wait."""
    calls: deque[EngineCall] = field(default_factory=deque)
    """That the engine has: one that runs, and one behind it."""
    _queued: dict[int, Slot] = field(default_factory=dict)
    _last_lane: Lane = "prefill"
    _decode_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_OF))
    _hop_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_OF))

    # ---- steps in --------------------------------------------------------------------------------------------

    def add(self, slot: Slot, size: int) -> None:
        """A step of `size` bytes was put into the queue of `slot`."""
        self.queue_bytes += size
        self._queued[slot.number] = slot

    def drop(self, slot: Slot) -> None:
        """Its session is closed: what waits of it is void."""
        self.queue_bytes -= sum(q.size for q in slot.queue)
        slot.queue.clear()
        self._queued.pop(slot.number, None)

    # ---- calls out -------------------------------------------------------------------------------------------

    def next(self, shard: ShardDescription) -> EngineCall | None:
        """What an idle engine begins with; None: nothing waits that can run."""
        if not self._queued:
            return None
        choice = self._only_step()
        if choice is None:
            decode, prefill = self._waiting(shard)
            cap = self._cap() if len(decode) > 1 else 1
            choice = choose(decode, prefill, last_lane=self._last_lane, cap=cap)
        return self._call(choice)

    def ahead(self, shard: ShardDescription) -> EngineCall | None:
        """What the engine is given behind its only call; None where it would better wait for that.

        On a Shard that is the whole model, the next steps of the sessions in the running batch: the engine knows their
        tokens as soon as it has sampled them. On others, a batch that no later step could join. Nothing goes ahead of
        what waits, so the lanes take turns as without it.
        """
        (running,) = self.calls
        if running.lane != "decode" or not running.submitted:
            return None
        if shard.is_head and shard.is_tail:
            return None if self._queued else _foreseen(running)
        decode, prefill = self._waiting(shard)
        # This is asked with every step that comes while the engine computes: all sessions are not looked at each time.
        if not decode:
            return None
        if running.full_at is None:
            running.full_at = self._cap()
        if prefill or len(decode) < running.full_at:
            return None
        cap = self._cap()
        return self._call(choose(decode, [], last_lane="decode", cap=cap)) if len(decode) >= cap else None

    def _cap(self) -> int:
        """How many rows a decode batch may have now."""
        sessions: dict[str, int] = {}
        hops: dict[str, int] = {}
        for slot in self.sessions:
            if slot.decoding:
                route = slot.ticket.next.node
                sessions[route] = sessions.get(route, 0) + 1
                hops[route] = slot.ticket.hops
        return decode_cap(sessions, hops, self._measured())

    def _only_step(self) -> Choice | None:
        if len(self._queued) == 1:
            ((number, slot),) = self._queued.items()
            if slot.queue[0].step.entry.lane == LANE_DECODE:
                return Choice("decode", (number,))
        return None

    def _waiting(self, shard: ShardDescription) -> tuple[list[Waiting], list[Waiting]]:
        """The steps that could run now: decode, prefill."""
        decode: list[Waiting] = []
        prefill: list[Waiting] = []
        for number, slot in self._queued.items():
            head = slot.queue[0]
            waiting = Waiting(number, head.arrived, slot.ticket.next.node, slot.ticket.hops)
            if head.step.entry.lane == LANE_DECODE:
                decode.append(waiting)
            elif shard.is_tail or not self.blocked(slot):
                prefill.append(waiting)
        return decode, prefill

    def _call(self, choice: Choice | None) -> EngineCall | None:
        if choice is None:
            return None
        slots = [self._queued[number] for number in choice.slots]
        return EngineCall(choice.lane, [(slot, self._take(slot)) for slot in slots])

    def _take(self, slot: Slot) -> QueuedStep:
        queued = slot.queue.popleft()
        if not slot.queue:
            del self._queued[slot.number]
        self.queue_bytes -= queued.size
        return queued

    # ---- calls under way -------------------------------------------------------------------------------------

    def begin(self, call: EngineCall) -> None:
        """The engine has it, or gets it next."""
        self._last_lane = call.lane
        for slot, _ in call.batch:
            slot.running += 1
        self.calls.append(call)

    def returned(self, call: EngineCall, now: float) -> bool:
        """It is over; False: the engine was lost before, and the call with it. One that was refused may be over before
        the one in front of it."""
        if call not in self.calls:
            return False
        was_first = self.calls[0] is call
        self.calls.remove(call)
        if was_first and self.calls:
            self.calls[0].began = now
        return True

    def lost(self) -> list[Slot]:
        """The engine is gone: the slots of all that it had, one for each call with it."""
        slots = [slot for call in self.calls for slot, _ in call.batch]
        self.calls.clear()
        return slots

    # ---- measured --------------------------------------------------------------------------------------------

    def decoded(self, row_ms: float) -> None:
        """One decode row took so long in the engine."""
        self._decode_ms.append(row_ms)

    def pushed(self, took_ms: float) -> None:
        """A step was handed to the next hop, and acknowledged so much later."""
        self._hop_ms.append(took_ms)

    def _measured(self) -> Measured:
        return Measured(
            decode_ms=median(self._decode_ms) if self._decode_ms else 0.0,
            hop_ms=median(self._hop_ms) if self._hop_ms else 0.0,
        )


def _foreseen(running: EngineCall) -> EngineCall | None:
    batch = [(slot, slot.foresee()) for slot, _ in running.batch if slot.foreseeable]
    return EngineCall("decode", batch) if batch else None
