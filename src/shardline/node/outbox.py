"""Hands computed rows on: to the next hop, or from the tail to the head.

Owns the rule that a session has at most one unacknowledged step a hop, the byte counts of the Seams, and what a
failed push means. Sessions that were computed together ride in one request. It decides nothing about sessions: it
reports to its owner. Shown by tests/cluster/test_spoiled_steps.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from shardline.errors import ShardlineError
from shardline.node.slots import Slot
from shardline.settings import Settings
from shardline.telemetry.contained import contained
from shardline.transport.carrier import Carrier
from shardline.transport.failures import BeforeResponse, HttpFailure, OwnLack, TimedOut
from shardline.wire.messages import Reject, StepAck, TicketPeer
from shardline.wire.steps import LANE_DECODE, SeamLayout, Step, encode

# Rejects that are no failure of the session: the rows were there before, or nobody wants them any more.
_HARMLESS = frozenset({"duplicate", "session_gone"})


_TOLD_AS_THEY_ARE = frozenset({"numerical_error", "seam_gap", "rollback_unsupported", "queue_overflow"})
_FULL = frozenset({"resources_exhausted", "too_many_connections"})
"""The next hop is there, and says that it has no place for a connection or a body: no fault of the link."""
log = structlog.get_logger(__name__)


class Outgoing(NamedTuple):
    slot: Slot
    step: Step


class OutboxOwner(Protocol):
    """Who hears what became of a push."""

    def push_failed(self, slot: Slot, error: ShardlineError) -> None: ...

    def push_done(self, slots: Sequence[Slot], took_ms: float) -> None: ...


class _Parcel(NamedTuple):
    peer: TicketPeer
    layout: SeamLayout
    item: Outgoing


class _Push(NamedTuple):
    """One request on its way."""

    peer: TicketPeer
    items: list[Outgoing]
    pieces: list[bytes | memoryview]
    started: float


class Outbox:
    """Pushes of one Node. Its tasks live in the task group that it is given."""

    def __init__(
        self,
        *,
        node_id: str,
        carrier: Carrier,
        probe: Callable[[str], Awaitable[bool]],
        settings: Settings,
        owner: OutboxOwner,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._node_id = node_id
        self._carrier = carrier
        self._probe = probe
        self._settings = settings
        self._owner = owner
        self._tasks = tasks
        self._unacknowledged: set[bytes] = set()
        self._held: dict[bytes, deque[_Parcel]] = {}

    def busy(self, slot: Slot) -> bool:
        """Whether a step of this session is on its way or held: its place in front of the next hop is taken."""
        return slot.key in self._unacknowledged

    def send(self, peer: TicketPeer, layout: SeamLayout, items: Sequence[Outgoing]) -> None:
        """Push `items`, all of one lane, in one request; those of a session with a step on its way wait for its ack."""
        ready = []
        for item in items:
            key = item.slot.key
            if key in self._unacknowledged:
                self._held.setdefault(key, deque()).append(_Parcel(peer, layout, item))
            else:
                self._unacknowledged.add(key)
                ready.append(item)
        if ready:
            self._post(peer, layout, ready)

    def forget(self, slot: Slot) -> None:
        """The session is closed: what is held of it is dropped. A push on its way ends by itself."""
        self._held.pop(slot.key, None)

    def _post(self, peer: TicketPeer, layout: SeamLayout, items: list[Outgoing]) -> None:
        """A decode step leaves at once, over a connection that is there; everything else gets a task."""
        pieces = encode([item.step for item in items], layout)
        push = _Push(peer, items, pieces, time.perf_counter())
        if items[0].step.entry.lane != LANE_DECODE or not self._carrier.push_now(
            peer.url, pieces, timeout_s=self._settings.push_s, limit="push", done=partial(self._answered, push)
        ):
            self._start(push, fresh=False)
        self._tally(pieces, layout, items)

    def _start(self, push: _Push, *, fresh: bool) -> None:
        def fault(error: Exception) -> None:
            self._settle(push, ShardlineError("internal", "the push failed: the log has the cause"))

        self._tasks.create_task(contained(self._send(push, fresh=fresh), "push", fault))

    def _answered(self, push: _Push, outcome: StepAck | HttpFailure | ShardlineError) -> None:
        if isinstance(outcome, BeforeResponse):
            # Perhaps the other side closed the idle connection just then: once more, on a fresh one. `seq` makes a
            # second delivery harmless.
            self._start(push, fresh=True)
        else:
            self._settle(push, outcome)

    async def _send(self, push: _Push, *, fresh: bool) -> None:
        outcome: StepAck | HttpFailure | ShardlineError
        try:
            if push.items[0].step.entry.lane == LANE_DECODE:
                outcome = await self._carrier.push(
                    push.peer.url, push.pieces, timeout_s=self._settings.push_s, limit="push", fresh=fresh
                )
            else:
                outcome = await self._push_prefill(push.peer, push.pieces)
        except (HttpFailure, ShardlineError) as error:
            outcome = error
        self._settle(push, outcome)

    def _settle(self, push: _Push, outcome: StepAck | HttpFailure | ShardlineError) -> None:
        """The request is over: who failed hears of it, and what was held back may go."""
        took_ms = (time.perf_counter() - push.started) * 1e3
        items = push.items
        for item in items:
            self._unacknowledged.discard(item.slot.key)
        if isinstance(outcome, StepAck):
            for reject in outcome.rejected:
                if reject.code not in _HARMLESS and 0 <= reject.entry < len(items):
                    self._fail(items[reject.entry].slot, self._as_reject(reject, push.peer))
        else:
            for item in items:
                self._fail(item.slot, self._as_seam_failure(outcome, push.peer))
        self._owner.push_done([item.slot for item in items], took_ms)
        for item in items:
            self._send_held(item.slot)

    async def _push_prefill(self, peer: TicketPeer, pieces: list[bytes | memoryview]) -> StepAck:
        """The ack of a chunk is withheld until there is room. While it is, ask whether the link still carries."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch_link(peer))
                ack = await self._carrier.push(
                    peer.url, pieces, timeout_s=self._settings.prefill_chunk_s, limit="prefill_chunk"
                )
                watch.cancel()
        except* (HttpFailure, ShardlineError) as failures:
            raise failures.exceptions[0] from None
        return ack

    async def _watch_link(self, peer: TicketPeer) -> None:
        while True:
            # Pause and probe together stay below `push_s`: a cut is told within that limit in prefill, too.
            await asyncio.sleep(self._settings.push_s / 2)
            if not await self._probe(peer.url):
                raise ShardlineError("seam_lost", "no answer over the link while a chunk was on its way")

    def _tally(self, pieces: Sequence[bytes | memoryview], layout: SeamLayout, items: list[Outgoing]) -> None:
        """Count body bytes: a session's own rows, and its share of what the request has beside rows."""
        total = sum(map(len, pieces))
        own = [(layout.row_bytes + 4) * item.step.entry.rows for item in items]
        share, rest = divmod(total - sum(own), len(items))
        for i, (item, size) in enumerate(zip(items, own, strict=True)):
            slot, entry = item.slot, item.step.entry
            tally = slot.sent_decode if entry.lane == LANE_DECODE else slot.sent_prefill
            tally.add(entry.rows, size + share + (rest if i == 0 else 0))

    def _fail(self, slot: Slot, error: ShardlineError) -> None:
        if not slot.closed:
            self._owner.push_failed(slot, error)

    def _as_seam_failure(self, error: Exception, peer: TicketPeer) -> ShardlineError:
        details = {"from": self._node_id, "to": peer.node}
        if isinstance(error, OwnLack):
            return error.error()
        if isinstance(error, ShardlineError) and error.code in _FULL:
            return ShardlineError("resources_exhausted", f"{peer.node} did not take a step: {error.message}")
        if isinstance(error, ShardlineError) and error.fault.status < 500:
            # It was heard, and refused as a whole: the link is well, what crosses it is not.
            message = f"{peer.node} refused a step document of {self._node_id}: {error.message}"
            return ShardlineError("seam_invalid", message, reject=error.code, **details)
        if isinstance(error, TimedOut):
            details["limit"] = error.limit
        log.info("push_failed", to=peer.node, reason=str(error))
        why = error.brief if isinstance(error, HttpFailure) else str(error)
        return ShardlineError("seam_lost", f"{peer.node} did not take a step ({why})", **details)

    def _as_reject(self, reject: Reject, peer: TicketPeer) -> ShardlineError:
        code = reject.code if reject.code in _TOLD_AS_THEY_ARE else "seam_invalid"
        details = {"from": self._node_id, "to": peer.node, "reject": reject.code}
        return ShardlineError(code, f"{peer.node} refused a step of {self._node_id}: {reject.message}", **details)

    def _send_held(self, slot: Slot) -> None:
        held = self._held.get(slot.key)
        if not held or slot.closed or slot.key in self._unacknowledged:
            return
        parcel = held.popleft()
        if not held:
            del self._held[slot.key]
        self.send(parcel.peer, parcel.layout, [parcel.item])
