"""The Shard host: sessions in, steps through the engine, rows out.

Owns the open slots, the KV ledger, what the engine runs next, and when a slot is freed. Its rules are in slots.py and
batch.py, its pushes in outbox.py; sockets are app.py's. Everything happens on one event loop, so nothing here locks:
between two awaits the state is whole. Shown by tests/node/test_host.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from statistics import median

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, ShardDescription, SlotSpec
from shardline.model.engine import BatchResult, Engine
from shardline.model.generation import SampledToken
from shardline.node.batch import Choice, Lane, Measured, Waiting, choose
from shardline.node.outbox import Outbox, Outgoing
from shardline.node.rows import all_finite
from shardline.node.slots import KvLedger, QueuedStep, Slot, check_tokens
from shardline.node.stream import SessionStream
from shardline.settings import Settings
from shardline.transport.carrier import Carrier
from shardline.wire.messages import (
    Beat,
    Closed,
    Failed,
    Finished,
    HopTimes,
    Opened,
    Progress,
    Reject,
    ShardState,
    StepAck,
    StepTimes,
    Ticket,
    Token,
    TokenLogprob,
)
from shardline.wire.messages import OpenSession as OpenRequest
from shardline.wire.steps import (
    FLAG_OUTPUT,
    FLAG_ROLLBACK,
    LANE_DECODE,
    LANE_PREFILL,
    TOKENS_ONLY,
    Entry,
    Step,
)

_MEDIAN_OF = 15


class ShardHost:
    """One Shard on one Node. `run()` owns all tasks; the HTTP shell calls the other methods, on the same loop."""

    def __init__(
        self,
        *,
        node_id: str,
        settings: Settings,
        engine: Engine,
        carrier: Carrier,
        probe: Callable[[str], Awaitable[bool]],
        kv_capacity: Callable[[ShardDescription], int],
        prefill_chunk: Callable[[StepTimes], int],
    ) -> None:
        self.node_id = node_id
        self.settings = settings
        self.engine = engine
        self.state: ShardState = "loading"
        self.reason: str | None = None
        self.times: StepTimes | None = None
        self.prefill_chunk = settings.prefill_chunk_min
        """Agreed with every route over this Shard; chosen once, after the first self-test."""
        self.ledger = KvLedger(0)
        self.queue_bytes = 0
        self.description: ShardDescription | None = None
        self._kv_capacity = kv_capacity
        self._choose_chunk = prefill_chunk
        self._carrier = carrier
        self._probe = probe
        self._outbox: Outbox | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._slots: dict[bytes, Slot] = {}
        self._streams: dict[bytes, SessionStream] = {}
        self._queued: dict[int, Slot] = {}
        self._numbers: list[int] = []
        self._next_number = 0
        self._running: list[tuple[Slot, QueuedStep]] = []
        self._batch_started = 0.0
        self._held_for_rollback = False
        self._last_lane: Lane = "prefill"
        self._room = asyncio.Event()
        self._gateways: dict[str, float] = {}
        self._decode_ms: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._hop_ms: deque[float] = deque(maxlen=_MEDIAN_OF)
        self.steps_computed: Counter[str] = Counter()
        self.settled = asyncio.Event()
        """The first load has succeeded or failed."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `state` changed: presence tells the Tracker at once."""

    # ---- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live until cancelled: load, test, serve. The engine is stopped by its owner, not here."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._outbox = Outbox(
                node_id=self.node_id,
                carrier=self._carrier,
                probe=self._probe,
                settings=self.settings,
                owner=self,
                tasks=tasks,
            )
            self.engine.on_lost = self._engine_lost
            self.engine.on_ready = self._engine_ready
            tasks.create_task(self._watch())
            await self._load()

    async def _load(self) -> None:
        try:
            self.description = await self.engine.start()
            self.ledger.capacity = self._kv_capacity(self.description)
            await self._test()
        except ShardlineError as error:
            self._set_state("failed", error.message)

    async def _test(self) -> None:
        """A Shard counts for routes only after its range has computed something sane."""
        self._set_state("testing")
        times = await self.engine.self_test()
        if self.times is None:
            self.prefill_chunk = self._choose_chunk(times)
        self.times = times
        self._set_state("ready")

    def _set_state(self, state: ShardState, reason: str | None = None) -> None:
        self.state, self.reason = state, reason
        if state in ("ready", "failed"):
            self.settled.set()
        self.on_change()

    def _engine_lost(self, error: ShardlineError) -> None:
        """All caches are gone: every session ends now, with the engine's own last words."""
        self._running = []
        for slot in list(self._slots.values()):
            slot.running = False
            self.fail(slot, error)
        self._set_state("loading", error.message)

    def _engine_ready(self) -> None:
        self._start_task(self._retest())

    async def _retest(self) -> None:
        try:
            await self._test()
        except ShardlineError as error:
            self._set_state("failed", error.message)

    async def drain(self) -> None:
        """Stop taking sessions, wait for the running ones up to `drain_s`, then fail what is left."""
        self._set_state("draining", "the Node is stopping")
        deadline = time.monotonic() + self.settings.drain_s
        while self._slots and time.monotonic() < deadline:  # noqa: ASYNC110 - many end, one wait serves all
            await asyncio.sleep(0.05)
        for slot in list(self._slots.values()):
            self.fail(slot, ShardlineError("draining", "the Node was stopped by its operator", limit="drain"))
        while self._streams and time.monotonic() < deadline + 1.0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    # ---- sessions --------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> int:
        return len(self._slots)

    async def open(self, ticket: Ticket, request: OpenRequest) -> SessionStream:
        """Reserve KV and an engine slot for a session whose ticket was verified."""
        if self.state == "draining":
            raise ShardlineError("draining", "this Node is stopping")
        if self.state != "ready" or self.description is None:
            raise ShardlineError("engine_lost", f"the Shard is {self.state}: {self.reason or 'not ready yet'}")
        key = bytes.fromhex(request.key)
        if key in self._slots or key in self._streams:
            raise ShardlineError("session_exists", "this session key is in use")
        self.ledger.reserve(ticket.kv_tokens)
        slot = Slot(
            number=self._take_number(),
            key=key,
            ticket=ticket,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            opened=time.monotonic(),
        )
        stream = SessionStream(limit=request.max_tokens + 1024)
        self._slots[key] = slot
        self._streams[key] = stream
        self._gateways.setdefault(ticket.gateway, time.monotonic())
        sampling = request.sampling if self.description.is_tail else None
        spec = SlotSpec(prompt_tokens=request.prompt_tokens, max_tokens=request.max_tokens, sampling=sampling)
        slot.running = True
        try:
            async with asyncio.timeout(self.settings.open_s):
                await self.engine.open(slot.number, spec)
        except TimeoutError:
            self._abandon(slot)
            raise ShardlineError("deadline", "the engine did not open a slot in time", limit="open") from None
        except BaseException:
            self._abandon(slot)
            raise
        slot.running = False
        if slot.closed:
            self._release(slot)
            raise ShardlineError("session_gone", "the session was closed while it was opened")
        stream.emit(Opened(node=self.node_id, kv_reserved=ticket.kv_tokens))
        return stream

    def _abandon(self, slot: Slot) -> None:
        slot.running = False
        if not slot.closed:
            self.close(slot.key)
        else:
            self._release(slot)

    def _take_number(self) -> int:
        if self._numbers:
            return heapq.heappop(self._numbers)
        self._next_number += 1
        return self._next_number - 1

    def close(self, key: bytes) -> bool:
        """End a session, whatever it is doing; idempotent. False: nothing was open under `key`."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return False
        slot.closed = True
        self._drop_queue(slot)
        if self._outbox is not None:
            self._outbox.forget(slot)
        if not slot.running:
            self._release(slot)
        return True

    def fail(self, slot: Slot, error: ShardlineError) -> None:
        """Say on the session's stream why this Node gives it up, then close it here."""
        stream = self._streams.get(slot.key)
        if stream is None or slot.closed:
            return
        where = {"node": self.node_id, "layers": [slot.ticket.first, slot.ticket.last], "position": slot.computed_end}
        stream.emit(Failed(error={**where, **error.body()}))
        self.close(slot.key)

    def _drop_queue(self, slot: Slot) -> None:
        self.queue_bytes -= sum(q.size for q in slot.queue)
        slot.queue.clear()
        self._queued.pop(slot.number, None)
        self._room.set()

    def _release(self, slot: Slot) -> None:
        if not slot.released:
            slot.released = True
            self._start_task(self._free(slot))

    async def _free(self, slot: Slot) -> None:
        """Between two engine calls: drop the cache, give the reservation back, end the stream."""
        with contextlib.suppress(ShardlineError):  # an engine that died has dropped the cache by that
            await self.engine.close(slot.number)
        self.ledger.release(slot.ticket.kv_tokens)
        heapq.heappush(self._numbers, slot.number)
        stream = self._streams.pop(slot.key, None)
        if stream is not None:
            released = slot.ticket.kv_tokens
            stream.emit(
                Closed(kv_released=released, prefill=slot.sent_prefill.count(), decode=slot.sent_decode.count())
            )
            stream.end()

    def beat(self, gateway: str) -> None:
        """A Gateway says that it lives. Unknown ones are ignored: they have no session here."""
        if gateway in self._gateways:
            self._gateways[gateway] = time.monotonic()

    async def _watch(self) -> None:
        """Beat on every stream, and end the sessions of Gateways that fell silent."""
        interval = self.settings.beat_interval_s
        expected = time.monotonic() + interval
        while True:
            await asyncio.sleep(max(0.0, expected - time.monotonic()))
            now = time.monotonic()
            late = now - expected > self.settings.late_timer_s
            expected = now + interval
            self._send_beats()
            if not late:  # after a pause of our own, read the sockets first and judge in the next round
                self._judge_gateways(now)

    def _send_beats(self) -> None:
        for slot in self._slots.values():
            stream = self._streams.get(slot.key)
            if stream is not None:
                stream.emit(
                    Beat(
                        position=slot.computed_end,
                        times=slot.times,
                        prefill=slot.sent_prefill.count(),
                        decode=slot.sent_decode.count(),
                    )
                )

    def _judge_gateways(self, now: float) -> None:
        silent = {g for g, last in self._gateways.items() if now - last > self.settings.beat_timeout_s}
        if silent:
            for slot in [s for s in self._slots.values() if s.ticket.gateway in silent]:
                self.fail(slot, ShardlineError("gateway_lost", "the Gateway fell silent", limit="heartbeat"))
            for gateway in silent:
                del self._gateways[gateway]
        elif len(self._gateways) > 64:
            used = {s.ticket.gateway for s in self._slots.values()}
            self._gateways = {g: t for g, t in self._gateways.items() if g in used}

    # ---- steps in --------------------------------------------------------------------------------------------

    async def accept(self, steps: Sequence[Step]) -> StepAck:
        """Take the entries of one request. Returns when each has its place, or is rejected by itself."""
        rejects: list[Reject] = []
        waiting: list[tuple[int, Step]] = []
        for i, step in enumerate(steps):
            try:
                if not self._accept_now(step):
                    waiting.append((i, step))
            except ShardlineError as error:
                rejects.append(Reject(entry=i, code=error.code, message=error.message))
        self._pump()
        for i, step in waiting:
            try:
                await self._accept_when_room(step)
            except ShardlineError as error:
                rejects.append(Reject(entry=i, code=error.code, message=error.message))
        return StepAck(rejected=rejects)

    def _accept_now(self, step: Step) -> bool:
        """Accept one entry; False where a prefill chunk must wait for room."""
        entry = step.entry
        slot = self._slots.get(entry.key)
        if slot is None:
            raise ShardlineError("session_gone", "no such session here")
        if self.description is None:
            raise ShardlineError("engine_lost", "the Shard is not loaded")
        slot.check(step)
        size = (self.description.layout_in.row_bytes + 4) * entry.rows
        if entry.lane == LANE_PREFILL and not self._has_room(slot, size):
            return False
        if entry.flags & FLAG_ROLLBACK and not self.description.rollback:
            raise ShardlineError("rollback_unsupported", "this engine cannot go back to a position exactly")
        check_tokens(step, self.description.vocab_size)
        if not all_finite(step, self.description.layout_in):
            sender = slot.ticket.previous.node if slot.ticket.previous else "the Gateway"
            raise ShardlineError("numerical_error", f"rows of step {entry.seq} from {sender} are not finite")
        slot.accept(step, time.perf_counter(), size)
        self.queue_bytes += size
        self._queued[slot.number] = slot
        return True

    def _has_room(self, slot: Slot, size: int) -> bool:
        if not slot.has_room(self.settings.prefill_queue_per_session):
            return False
        return self.queue_bytes + size <= self.settings.queue_bytes or self.queue_bytes == 0

    async def _accept_when_room(self, step: Step) -> None:
        """Withhold the ack of a prefill chunk until it has a place: this is the back-pressure of the prefill lane."""
        try:
            async with asyncio.timeout(self.settings.prefill_chunk_s):
                while not self._accept_now(step):
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise ShardlineError("queue_overflow", "no room for a chunk in time") from None
        self._pump()

    # ---- the engine ------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start the next engine call, if the engine is free and something waits."""
        if self._running or self._held_for_rollback or not self._queued or self.state not in ("ready", "draining"):
            return
        choice = self._choose()
        if choice is None:
            return
        self._last_lane = choice.lane
        batch = []
        for number in choice.slots:
            slot = self._queued[number]
            queued = slot.queue.popleft()
            if not slot.queue:
                del self._queued[number]
            self.queue_bytes -= queued.size
            slot.running = True
            batch.append((slot, queued))
        self._room.set()
        self._running = batch
        if any(q.step.entry.flags & FLAG_ROLLBACK for _, q in batch):
            self._held_for_rollback = True
            self._start_task(self._run_after_rollback(batch))
        else:
            self._submit(batch)

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        if self._tasks is None:
            raise RuntimeError("the host does not run")
        self._tasks.create_task(work)

    def _choose(self) -> Choice | None:
        decode: list[Waiting] = []
        prefill: list[Waiting] = []
        is_tail = self.description is not None and self.description.is_tail
        for number, slot in self._queued.items():
            head = slot.queue[0]
            waiting = Waiting(number, head.arrived, slot.ticket.next.node, slot.ticket.hops)
            if head.step.entry.lane == LANE_DECODE:
                decode.append(waiting)
            elif is_tail or (self._outbox is not None and not self._outbox.busy(slot)):
                prefill.append(waiting)
        sessions: Counter[str] = Counter()
        hops: dict[str, int] = {}
        if len(decode) > 1:
            for slot in self._slots.values():
                if slot.decoding:
                    sessions[slot.ticket.next.node] += 1
                    hops[slot.ticket.next.node] = slot.ticket.hops
        return choose(
            decode,
            prefill,
            last_lane=self._last_lane,
            sessions_by_route=sessions,
            hops_by_route=hops,
            measured=self.measured(),
        )

    def measured(self) -> Measured:
        return Measured(
            decode_ms=median(self._decode_ms) if self._decode_ms else 0.0,
            hop_ms=median(self._hop_ms) if self._hop_ms else 0.0,
        )

    async def _run_after_rollback(self, batch: list[tuple[Slot, QueuedStep]]) -> None:
        """Restore positions first; a session whose engine cannot do it falls out of the batch."""
        kept = []
        try:
            for slot, queued in batch:
                entry = queued.step.entry
                try:
                    if entry.flags & FLAG_ROLLBACK:
                        await self.engine.rollback(slot.number, entry.position)
                    kept.append((slot, queued))
                except ShardlineError as error:
                    slot.running = False
                    if slot.closed:
                        self._release(slot)
                    self.fail(slot, error)
        finally:
            self._held_for_rollback = False
        self._running = kept
        if kept:
            self._submit(kept)
        else:
            self._pump()

    def _submit(self, batch: list[tuple[Slot, QueuedStep]]) -> None:
        entries = [
            BackendEntry(
                slot=slot.number,
                position=queued.step.entry.position,
                rows=queued.step.entry.rows,
                tokens=queued.step.tokens,
                hidden=queued.step.hidden,
                want_output=bool(queued.step.entry.flags & FLAG_OUTPUT),
            )
            for slot, queued in batch
        ]
        self._batch_started = time.perf_counter()
        self.engine.submit(entries, self._batch_done)

    def _batch_done(self, result: BatchResult) -> None:
        batch, self._running = self._running, []
        compute_ms = result.compute_us / 1e3
        outgoing: dict[tuple[str, int], list[Outgoing]] = {}
        for i, (slot, queued) in enumerate(batch):
            slot.running = False
            if slot.closed:
                self._release(slot)
                continue
            outcome = result.failure if result.failure is not None else result.results[i]
            if isinstance(outcome, ShardlineError):
                self.fail(slot, outcome)
                continue
            entry = queued.step.entry
            slot.computed_end = entry.position + entry.rows
            send_ms = slot.times.send_ms if slot.times else None
            slot.times = HopTimes(
                queue_ms=round((self._batch_started - queued.arrived) * 1e3, 3),
                compute_ms=round(compute_ms, 3),
                send_ms=send_ms,
            )
            self._count(entry, compute_ms, len(batch))
            step = self._next_step(slot, queued, outcome)
            if step is not None:
                outgoing.setdefault((slot.ticket.next.node, entry.lane), []).append(Outgoing(slot, step))
        for items in outgoing.values():
            self._hand_on(items)
        self._pump()

    def _count(self, entry: Entry, compute_ms: float, rows: int) -> None:
        if entry.lane == LANE_DECODE:
            self._decode_ms.append(compute_ms / rows)
            self.steps_computed["decode"] += 1
        else:
            self.steps_computed["prefill"] += 1

    def _next_step(self, slot: Slot, queued: QueuedStep, outcome: object) -> Step | None:
        """What follows from a computed step: rows for the next hop, a token for the head, or nothing."""
        entry = queued.step.entry
        if self.description is None or not self.description.is_tail:
            onward = Entry(entry.key, entry.seq, entry.position, entry.rows, entry.hop + 1, entry.lane, entry.flags)
            return Step(onward, queued.step.tokens, outcome.hidden)  # type: ignore[attr-defined]
        token = outcome.token  # type: ignore[attr-defined]
        if token is None:
            self._streams[slot.key].emit(Progress(position=slot.computed_end, times=slot.times))
            return None
        return self._token_sampled(slot, entry, token)

    def _token_sampled(self, slot: Slot, entry: Entry, token: SampledToken) -> Step | None:
        stream = self._streams[slot.key]
        index = slot.generated
        slot.generated += 1
        if token.end != "stop":
            top = None if token.top is None else [TokenLogprob(id=i, logprob=p) for i, p in token.top]
            stream.emit(Token(id=token.id, index=index, logprob=token.logprob, top=top, times=slot.times))
        if token.end is not None:
            slot.finished = True
            stream.emit(Finished(reason=token.end, generated=slot.generated))
            return None
        onward = Entry(slot.key, entry.seq + 1, entry.position + entry.rows, 1, 0, LANE_DECODE, FLAG_OUTPUT)
        return Step(onward, token.id.to_bytes(4, "little"), ())

    def _hand_on(self, items: list[Outgoing]) -> None:
        if self.description is None or self._outbox is None:
            return
        peer = items[0].slot.ticket.next
        is_tail = self.description.is_tail
        if is_tail and peer.node == self.node_id:
            # One Node is the whole route: the ring closes here, without a socket.
            for item in items:
                try:
                    self._accept_now(item.step)
                except ShardlineError as error:
                    self.fail(item.slot, error)
            return
        self._outbox.send(peer, TOKENS_ONLY if is_tail else self.description.layout_out, items)

    # ---- what became of a push (OutboxOwner) -----------------------------------------------------------------

    def push_failed(self, slot: Slot, error: ShardlineError) -> None:
        self.fail(slot, error)

    def push_done(self, slots: Sequence[Slot], took_ms: float) -> None:
        self._hop_ms.append(took_ms)
        for slot in slots:
            if slot.times is not None:
                slot.times = HopTimes(
                    queue_ms=slot.times.queue_ms, compute_ms=slot.times.compute_ms, send_ms=round(took_ms, 3)
                )
        self._pump()
