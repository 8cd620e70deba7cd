"""The Shard host: sessions in, steps through the engine, rows out.

Owns what follows from a computed step. The sessions are in sessions.py, the rules in slots.py, what the engine runs
next in schedule.py, the pushes in outbox.py; sockets are app.py's. Everything happens on one event loop, so nothing
here locks: between two awaits the state is whole. Shown by tests/gateway/test_session.py and tests/cluster/.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, ShardDescription
from shardline.model.engine import BatchResult, Engine
from shardline.model.generation import SampledToken, StepResult
from shardline.node.outbox import Outbox, Outgoing
from shardline.node.plan import KvRoom
from shardline.node.rows import all_finite
from shardline.node.schedule import EngineCall, Schedule
from shardline.node.sessions import Sessions
from shardline.node.slots import QueuedStep, Slot, check_tokens, token_step
from shardline.node.stream import SessionStream
from shardline.settings import Settings
from shardline.telemetry.contained import contained
from shardline.transport.carrier import Carrier
from shardline.wire.messages import (
    Embedded,
    Finished,
    HopTimes,
    OpenSession,
    Progress,
    Reject,
    ShardState,
    StepAck,
    StepTimes,
    Ticket,
    Token,
    TokenLogprob,
)
from shardline.wire.steps import (
    FLAG_OUTPUT,
    LANE_DECODE,
    LANE_PREFILL,
    TOKENS_ONLY,
    Entry,
    Step,
)

_ALL_ACCEPTED = StepAck()


class ShardHost:
    """One Shard on one Node. Its tasks live in `tasks`; the HTTP shell calls its methods, on the same loop."""

    def __init__(
        self,
        *,
        node_id: str,
        settings: Settings,
        engine: Engine,
        carrier: Carrier,
        probe: Callable[[str], Awaitable[bool]],
        kv_room: Callable[[ShardDescription], KvRoom],
        prefill_chunk: Callable[[StepTimes], int],
        tasks: asyncio.TaskGroup,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` makes what the engine must find on disk, before each of its starts."""
        self.node_id = node_id
        self.settings = settings
        self.engine = engine
        self.state: ShardState = "loading"
        self.reason: str | None = None
        self.times: StepTimes | None = None
        self.prefill_chunk = settings.prefill_chunk_min
        """Agreed with every route over this Shard; chosen once, after the first self-test."""
        self.description: ShardDescription | None = None
        self._prepare = prepare
        self._kv_room = kv_room
        self._choose_chunk = prefill_chunk
        self._tasks = tasks
        self._outbox = Outbox(node_id=node_id, carrier=carrier, probe=probe, settings=settings, owner=self, tasks=tasks)
        self.sessions = Sessions(
            node_id=node_id, settings=settings, engine=engine, tasks=tasks, dropped=self._session_dropped
        )
        self._schedule = Schedule(self.sessions, self._outbox.busy)
        self._room = asyncio.Event()
        self.load_failure: ShardlineError | None = None
        """Why the first load failed."""
        self.settled = asyncio.Event()
        """The first load has succeeded or failed."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `state` changed: presence tells the Tracker at once."""

    # ---- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load, test, serve, until cancelled. The engine is stopped by its owner, not here."""
        self.engine.on_lost = self._engine_lost
        self.engine.on_ready = lambda: self._start(self._retest())
        self._tasks.create_task(self.sessions.watch())
        await self._load()
        await asyncio.Event().wait()

    async def _load(self) -> None:
        try:
            if self._prepare is not None:
                self.engine.before_restart = self._prepare
                await self._prepare()
            description = await self.engine.start()
            room = self._kv_room(description)
            self.description = replace(description, slots=room.slots)
            self.sessions.ledger.capacity = room.tokens
            await self._test()
        except ShardlineError as error:
            self.load_failure = error
            self._set_state("failed", error.message)

    async def _test(self) -> None:
        """A Shard counts for routes only after its range has computed something sane."""
        self._set_state("testing")
        times = await self.engine.self_test()
        if self.times is None:
            self.prefill_chunk = self._choose_chunk(times)
        self.times = times
        self._set_state("ready")

    async def _retest(self) -> None:
        try:
            await self._test()
        except ShardlineError as error:
            self._set_state("failed", error.message)

    def _set_state(self, state: ShardState, reason: str | None = None) -> None:
        if self.state == "draining":
            return  # nothing leads back from there
        self.state, self.reason = state, reason
        if state in ("ready", "failed"):
            self.settled.set()
        self.on_change()

    def _engine_lost(self, error: ShardlineError) -> None:
        """All caches are gone: every session ends now, with the engine's own last words."""
        for slot in self._schedule.lost():
            self.sessions.engine_returned(slot)
        self.sessions.engine_lost(error)
        # The engine says so a second time when it gives up starting again.
        self._set_state("failed" if self.state in ("loading", "failed") else "loading", error.message)

    def close_doors(self) -> None:
        """Take no session any more."""
        self._set_state("draining", "the Node is stopping")

    async def drain(self) -> None:
        """Wait for the running sessions up to `drain_s`, then fail what is left."""
        self.close_doors()
        deadline = time.monotonic() + self.settings.drain_s
        while len(self.sessions) and time.monotonic() < deadline:  # noqa: ASYNC110 - many end, one wait serves all
            await asyncio.sleep(0.05)
        self.sessions.fail_all(ShardlineError("draining", "the Node is stopping", limit="drain"))
        while not self.sessions.all_freed and time.monotonic() < deadline + 1.0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def open(self, ticket: Ticket, request: OpenSession) -> SessionStream:
        """Open a session whose ticket was verified."""
        if self.state == "draining":
            raise ShardlineError("draining", "this Node is stopping")
        if self.state != "ready" or self.description is None:
            raise ShardlineError("shard_unready", f"the Shard is {self.state}", retry_after=2)
        return self.sessions.open(ticket, request, self.description)

    def _session_dropped(self, slot: Slot) -> None:
        self._schedule.drop(slot)
        self._outbox.forget(slot)
        self._room.set()

    @property
    def queue_bytes(self) -> int:
        """Of rows that wait for the engine."""
        return self._schedule.queue_bytes

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.create_task(contained(work, "host"))

    def _shard(self) -> ShardDescription:
        if self.description is None:
            raise ShardlineError("engine_lost", "the Shard is not loaded")
        return self.description

    # ---- steps in --------------------------------------------------------------------------------------------

    def accept(self, steps: Sequence[Step]) -> StepAck | Coroutine[None, None, StepAck]:
        """Take the entries of one request, each by itself. What it answers comes later where one must wait for room."""
        rejects: list[Reject] = []
        waiting: list[tuple[int, Step]] = []
        for i, step in enumerate(steps):
            try:
                if not self._accept_now(step):
                    waiting.append((i, step))
            except ShardlineError as error:
                rejects.append(Reject(entry=i, code=error.code, message=error.message))
        self._pump()
        if waiting:
            return self._accept_later(waiting, rejects)
        return StepAck(rejected=rejects) if rejects else _ALL_ACCEPTED

    async def _accept_later(self, waiting: list[tuple[int, Step]], rejects: list[Reject]) -> StepAck:
        for i, step in waiting:
            try:
                await self._accept_when_room(step)
            except ShardlineError as error:
                rejects.append(Reject(entry=i, code=error.code, message=error.message))
        return StepAck(rejected=rejects)

    def _accept_now(self, step: Step) -> bool:
        """Accept one entry; False where a prefill chunk must wait for room."""
        entry = step.entry
        slot = self.sessions.find(entry.key)
        if slot is None:
            raise ShardlineError("session_gone", "no such session here")
        shard = self._shard()
        end = slot.check(step)
        size = (shard.layout_in.row_bytes + 4) * entry.rows
        if entry.lane == LANE_PREFILL and not self._has_room(slot, size):
            return False
        if entry.position < slot.accepted_end and not shard.rollback:
            raise ShardlineError("rollback_unsupported", "this engine cannot go back to a position exactly")
        check_tokens(step, shard.vocab_size)
        if not all_finite(step, shard.layout_in):
            sender = slot.ticket.previous.node if slot.ticket.previous else "the Gateway"
            raise ShardlineError("numerical_error", f"rows of step {entry.seq} from {sender} are not finite")
        slot.take(step, end, time.perf_counter(), size)
        self._schedule.add(slot, size)
        return True

    def _has_room(self, slot: Slot, size: int) -> bool:
        if not slot.has_room(self.settings.prefill_queue_per_session):
            return False
        return self.queue_bytes + size <= self.settings.queue_bytes or self.queue_bytes == 0

    async def _accept_when_room(self, step: Step) -> None:
        """Withhold the ack of a prefill chunk until it has a place: this is the back-pressure of the prefill lane."""
        try:
            # Less than the sender waits: it shall hear that there was no room, not that nobody answered.
            async with asyncio.timeout(0.9 * self.settings.prefill_chunk_s):
                while not self._accept_now(step):
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise ShardlineError("queue_overflow", "no room for a chunk in time") from None
        self._pump()

    # ---- the engine ------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give the engine what it can begin with: its next call, and where it takes that, the one behind it."""
        if self.state not in ("ready", "draining"):
            return
        schedule = self._schedule
        if not schedule.calls:
            self._begin(schedule.next(self._shard()))
        if len(schedule.calls) == 1 and self.engine.takes_ahead:
            self._begin(schedule.ahead(self._shard()))

    def _begin(self, call: EngineCall | None) -> None:
        if call is None:
            return
        self._schedule.begin(call)
        self._room.set()
        if any(q.back for _, q in call.batch):
            self._start(self._run_after_rollback(call))
        else:
            self._submit(call)

    async def _run_after_rollback(self, call: EngineCall) -> None:
        """Restore positions first; a session whose engine cannot do it falls out of the batch."""
        for item in list(call.batch):
            slot, queued = item
            refusal = None
            if queued.back:
                try:
                    await self.engine.rollback(slot.number, queued.step.entry.position)
                except ShardlineError as error:
                    refusal = error
            if call not in self._schedule.calls:
                return  # the engine was lost meanwhile, and all sessions with it
            if refusal is not None or slot.closed:
                call.batch.remove(item)
                self.sessions.engine_returned(slot)
            if refusal is not None:
                self.sessions.fail(slot, refusal)
        if call.batch:
            self._submit(call)
        else:
            self._schedule.returned(call, time.perf_counter())
            self._pump()

    def _submit(self, call: EngineCall) -> None:
        entries = [
            BackendEntry(
                slot=slot.number,
                position=queued.step.entry.position,
                rows=queued.step.entry.rows,
                tokens=queued.step.tokens,
                hidden=queued.step.hidden,
                want_output=bool(queued.step.entry.flags & FLAG_OUTPUT),
            )
            for slot, queued in call.batch
        ]
        call.submitted, call.began = True, time.perf_counter()
        self.engine.submit(entries, partial(self._batch_done, call))

    def _batch_done(self, call: EngineCall, result: BatchResult) -> None:
        """What others wait for comes first: steps of other sessions that the engine can begin with, rows and tokens for
        the next hop, and then the account of the step."""
        if not self._schedule.returned(call, time.perf_counter()):
            return
        computed: list[tuple[Slot, QueuedStep, StepResult]] = []
        outgoing: dict[tuple[str, int], list[Outgoing]] = {}
        for i, (slot, queued) in enumerate(call.batch):
            if not self.sessions.engine_returned(slot):
                continue
            outcome = result.failure if result.failure is not None else result.results[i]
            if isinstance(outcome, ShardlineError):
                self.sessions.fail(slot, outcome)
                continue
            if outcome.skipped:
                continue
            computed.append((slot, queued, outcome))
            step = self._next_step(slot, queued.step, outcome)
            if step is not None:
                outgoing.setdefault((slot.ticket.next.node, step.entry.lane), []).append(Outgoing(slot, step))
        own = self._own(outgoing)
        if call.lane == "decode" and not own:
            # A prefill chunk's place in the outbox is free only when the last one has left; steps of a route of one
            # Node are about to wait, too, and ride together.
            self._pump()
        self._hand_on(outgoing.values())
        for slot, queued, outcome in computed:
            queue_ms = round(max(0.0, call.began - queued.arrived) * 1e3, 3)
            self._account(slot, queued, outcome, queue_ms, result.compute_us / 1e3, len(call.batch))
        for item in own:
            self._close_ring(item)
        self._pump()

    def _next_step(self, slot: Slot, step: Step, outcome: StepResult) -> Step | None:
        """What follows from a computed step: rows for the next hop, a token for the head, or nothing."""
        entry, token = step.entry, outcome.token
        if not self._shard().is_tail:
            onward = Entry(entry.key, entry.seq, entry.position, entry.rows, entry.hop + 1, entry.lane, entry.flags)
            return Step(onward, step.tokens, outcome.hidden)  # type: ignore[arg-type]
        if token is None or token.end is not None:
            return None
        return token_step(slot.key, entry.seq + 1, entry.position + entry.rows, token.id.to_bytes(4, "little"))

    def _own(self, outgoing: dict[tuple[str, int], list[Outgoing]]) -> list[Outgoing]:
        """Takes out what goes nowhere, as one Node is the whole route."""
        return outgoing.pop((self.node_id, LANE_DECODE), []) if self._shard().is_tail else []

    def _hand_on(self, outgoing: Iterable[list[Outgoing]]) -> None:
        shard = self._shard()
        layout = TOKENS_ONLY if shard.is_tail else shard.layout_out
        for items in outgoing:
            self._outbox.send(items[0].slot.ticket.next, layout, items)

    def _close_ring(self, item: Outgoing) -> None:
        """The next step of a route of one Node, without a socket; the engine may have begun with it."""
        if item.slot.ahead:
            item.slot.came_round(bytes(item.step.tokens))
            return
        try:
            self._accept_now(item.step)
        except ShardlineError as error:
            self.sessions.fail(item.slot, error)

    def _account(
        self, slot: Slot, queued: QueuedStep, outcome: StepResult, queue_ms: float, compute_ms: float, rows: int
    ) -> None:
        """What a computed step says of its session: how far it is, how long it took; of a tail, its token."""
        entry = queued.step.entry
        slot.computed_end = entry.position + entry.rows
        slot.times = HopTimes(
            queue_ms=queue_ms,
            compute_ms=round(compute_ms, 3),
            send_ms=slot.times.send_ms if slot.times else None,
        )
        if entry.lane == LANE_DECODE:
            self._schedule.decoded(compute_ms / rows)
        if not self._shard().is_tail:
            return
        if outcome.token is not None:
            self._tell_token(slot, outcome.token)
            return
        stream = self.sessions.stream(slot)
        stream.emit(Progress(position=slot.computed_end, times=slot.times))
        if outcome.pooled is not None:
            slot.finished = True
            stream.emit(Embedded(pooling=outcome.pooled.pooling, vector=outcome.pooled.vector))

    def _tell_token(self, slot: Slot, token: SampledToken) -> None:
        stream = self.sessions.stream(slot)
        index = slot.generated
        slot.generated += 1
        if token.end != "stop":
            top = None if token.top is None else [TokenLogprob(id=i, logprob=p) for i, p in token.top]
            stream.emit(Token(id=token.id, index=index, logprob=token.logprob, top=top, times=slot.times))
        if token.end is not None:
            slot.finished = True
            stream.emit(Finished(reason=token.end, generated=slot.generated))

    # ---- what became of a push (OutboxOwner) -----------------------------------------------------------------

    def push_failed(self, slot: Slot, error: ShardlineError) -> None:
        self.sessions.fail(slot, error)

    def push_done(self, slots: Sequence[Slot], took_ms: float) -> None:
        self._schedule.pushed(took_ms)
        for slot in slots:
            if slot.times is not None:
                slot.times = HopTimes(
                    queue_ms=slot.times.queue_ms, compute_ms=slot.times.compute_ms, send_ms=round(took_ms, 3)
                )
        self._pump()
