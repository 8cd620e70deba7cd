"""The rules of one session on one Node: which step is accepted, in which order, at which position.

Owns sequence numbers, positions, the two lanes' places and the KV ledger. Refuses to know sockets, engines and the
clock: times are arguments. Shown by tests/node/test_slots.py.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, field

from shardline.errors import ShardlineError
from shardline.wire.messages import HopTimes, SeamCount, Ticket
from shardline.wire.steps import (
    FLAG_LAST_CHUNK,
    FLAG_OUTPUT,
    FLAG_ROLLBACK,
    LANE_DECODE,
    LANE_PREFILL,
    Entry,
    Step,
)


@dataclass(slots=True)
class QueuedStep:
    """A step that was accepted and not computed yet."""

    step: Step
    arrived: float
    size: int
    back: bool = False
    """It begins below what the engine holds: that is dropped first."""


@dataclass(slots=True)
class SeamTally:
    """What was sent of one session over the Seam behind this Node, in one lane."""

    steps: int = 0
    rows: int = 0
    bytes: int = 0

    def add(self, rows: int, size: int) -> None:
        self.steps += 1
        self.rows += rows
        self.bytes += size

    def count(self) -> SeamCount:
        return SeamCount(steps=self.steps, rows=self.rows, bytes=self.bytes)


@dataclass(slots=True, eq=False)
class Slot:
    """One open session. `number` is the engine's name for its cache."""

    number: int
    key: bytes
    ticket: Ticket
    prompt_tokens: int
    opened: bool = False
    """The engine has opened its slot, and the stream has said so: steps may come."""
    next_seq: int = 0
    accepted_end: int = 0
    computed_end: int = 0
    """0 until a step was computed, also where the cache began with something."""
    salt: bytes = b""
    ids: bytearray | None = None
    """Token ids of all that was accepted, I32 little-endian; None: nothing of this session may be kept."""
    prompt_complete: bool = False
    """The last prefill chunk was accepted: from here on the decode lane."""
    queue: deque[QueuedStep] = field(default_factory=deque)
    closed: bool = False
    running: int = 0
    """Engine calls with this slot: it is freed after them, not during one."""
    ahead: bool = False
    """The engine has the step behind the running one, although its token is not known here yet."""
    keep: bool = False
    """It ended well: its cache may stay for others to begin with."""
    released: bool = False
    """Its cache is being dropped, or is: that happens once."""
    finished: bool = False
    generated: int = 0
    times: HopTimes | None = None
    sent_prefill: SeamTally = field(default_factory=SeamTally)
    sent_decode: SeamTally = field(default_factory=SeamTally)

    @property
    def decoding(self) -> bool:
        return self.prompt_complete and not self.finished

    def has_room(self, limit: int) -> bool:
        """Whether one more prefill chunk may be accepted without waiting."""
        return len(self.queue) < limit

    def accept(self, step: Step, arrived: float, size: int) -> QueuedStep:
        """Take `step` in; raises the entry-level reject without having changed anything."""
        return self.take(step, self.check(step), arrived, size)

    def take(self, step: Step, end: int, arrived: float, size: int) -> QueuedStep:
        """Take in what was checked; `end` is what `check` returned."""
        entry = step.entry
        back = entry.position < self.accepted_end
        if back:
            self._go_back(entry.position)
        if self.ids is not None:
            self.ids += step.tokens
        self.next_seq = entry.seq + 1
        self.accepted_end = end
        if entry.lane == LANE_PREFILL and entry.flags & FLAG_LAST_CHUNK:
            self.prompt_complete = True
        queued = QueuedStep(step, arrived, size, back)
        self.queue.append(queued)
        return queued

    @property
    def foreseeable(self) -> bool:
        """Whether the step behind the last one can be no other than the next token's."""
        more = self.accepted_end < self.ticket.kv_tokens
        return more and self.decoding and not (self.closed or self.ahead or self.queue)

    def foresee(self) -> QueuedStep:
        """Take in the next decode step before its token is known. It waits for that alone, so it never waited."""
        step = token_step(self.key, self.next_seq, self.accepted_end, b"")
        self.next_seq += 1
        self.accepted_end += 1
        self.ahead = True
        return QueuedStep(step, math.inf, 0)

    def came_round(self, token: bytes) -> None:
        """The token of the step that was foreseen."""
        self.ahead = False
        if self.ids is not None:
            self.ids += token

    def begin_with(self, tokens: int, ids: bytes) -> None:
        """The cache holds the first `tokens` of the prompt, which have these ids."""
        self.accepted_end = tokens
        if self.ids is not None:
            self.ids[:] = ids

    def _go_back(self, position: int) -> None:
        """What was computed above counts no more, although the engine drops it only before the step's own turn."""
        self.computed_end = min(self.computed_end, position)
        if self.ids is not None:
            del self.ids[4 * position :]

    def check(self, step: Step) -> int:
        """The accepted end after `step`, or the reject it deserves."""
        entry = step.entry
        if not self.opened:
            raise ShardlineError("seam_gap", "a step before the session was opened here")
        if entry.hop != self.ticket.hop:
            raise ShardlineError("frame_invalid", f"step for hop {entry.hop}, this is hop {self.ticket.hop}")
        if entry.seq < self.next_seq:
            raise ShardlineError("duplicate", f"step {entry.seq} was accepted before, next is {self.next_seq}")
        if entry.seq > self.next_seq:
            raise ShardlineError("seam_gap", f"step {entry.seq} came, step {self.next_seq} is missing")
        self._check_lane(step)
        rollback = bool(entry.flags & FLAG_ROLLBACK)
        if entry.position != self.accepted_end and not (rollback and entry.position < self.accepted_end):
            raise ShardlineError("seam_gap", f"rows for position {entry.position}, the end is {self.accepted_end}")
        end = entry.position + entry.rows
        if end > self.ticket.kv_tokens:
            raise ShardlineError("frame_invalid", f"rows up to {end}, {self.ticket.kv_tokens} are reserved")
        return end

    def _check_lane(self, step: Step) -> None:
        entry = step.entry
        if entry.lane == LANE_DECODE:
            if entry.rows != 1:
                raise ShardlineError("frame_invalid", f"a decode step of {entry.rows} rows, 1 is right")
            if not self.prompt_complete:
                raise ShardlineError("seam_gap", "a decode step before the last prefill chunk")
            if self.queue or self.ahead:
                # The one place of a session is taken: a ring that is whole never gets here.
                raise ShardlineError("seam_invalid", "a decode step before the last one was computed")
            return
        if self.prompt_complete:
            raise ShardlineError("frame_invalid", "a prefill chunk behind the last one")
        if entry.rows > self.ticket.prefill_chunk:
            raise ShardlineError(
                "frame_invalid", f"a chunk of {entry.rows} rows, at most {self.ticket.prefill_chunk} are agreed"
            )
        last = bool(entry.flags & FLAG_LAST_CHUNK)
        end = entry.position + entry.rows
        if last != (end == self.prompt_tokens):
            raise ShardlineError("frame_invalid", f"chunk ends at {end} of {self.prompt_tokens}, last={last}")


def token_step(key: bytes, seq: int, position: int, token: bytes) -> Step:
    """The step that begins at the head with one token (I32 little-endian) that the tail has sampled."""
    return Step(Entry(key, seq, position, 1, 0, LANE_DECODE, FLAG_OUTPUT), token, ())


def check_tokens(step: Step, vocab_size: int) -> None:
    """Every token id lies in the vocabulary; the reject names the first that does not."""
    if step.entry.rows == 1 and int.from_bytes(step.tokens, "little") < vocab_size:
        return
    ids = array("i", bytes(step.tokens))
    if vocab_size and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ShardlineError("seam_invalid", f"token id {bad} lies outside the vocabulary of {vocab_size}")


@dataclass(slots=True)
class KvLedger:
    """Reservations in tokens. What is *used* is asked of the engine; this only says what may be promised. What is kept
    of ended sessions stands in nobody's way: it is given up before a reservation is made."""

    capacity: int
    reserved: int = 0

    def check(self, tokens: int) -> None:
        """`kv_exhausted` where so much cannot be promised."""
        if self.reserved + tokens > self.capacity:
            raise ShardlineError(
                "kv_exhausted",
                f"{tokens} KV tokens wanted, {self.capacity - self.reserved} of {self.capacity} are free",
                wanted=tokens,
                free=self.capacity - self.reserved,
                capacity=self.capacity,
            )

    def reserve(self, tokens: int) -> None:
        self.check(tokens)
        self.reserved += tokens

    def release(self, tokens: int) -> None:
        self.reserved -= tokens
