"""The open sessions of one Node: from a verified ticket to a freed or kept cache, and who still listens.

Owns slots, their streams, the KV ledger, and the watch over Gateways. Which step runs when is host.py's; the rules of
one session are in slots.py, those of what is kept in prefixes.py. A slot is freed once, when no engine call has it.
Shown by tests/node/test_kept_sessions.py, tests/gateway/test_session.py and tests/cluster/.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Literal

import structlog
from msgspec import structs

from shardline.errors import ShardlineError
from shardline.model.backend import Reuse, ShardDescription, SlotSpec
from shardline.model.engine import Engine
from shardline.model.pooling import pooling_of
from shardline.node.gateway_watch import GatewayWatch, silence_of_gateway
from shardline.node.prefixes import Kept, Match, Prefixes
from shardline.node.slots import KvLedger, Slot
from shardline.node.stream import SessionStream
from shardline.settings import Settings
from shardline.telemetry.contained import contained
from shardline.wire.messages import Beat, Closed, Failed, Opened, OpenSession, Ticket
from shardline.wire.prefix import check_prefix, digests_of

log = structlog.get_logger(__name__)
_STREAM_SLACK = 1024
"""Lines beyond its tokens that a session may have unread: beats and progress while its Gateway pauses."""
_ENGINE_ENDS = frozenset({"engine_lost", "draining", "deadline"})
"""Refusals after which the engine is not asked again."""


class Sessions:
    """All sessions of one Node. `dropped(slot)` is called when one is closed: what waits of it is void. `clock`:
    monotonic seconds."""

    def __init__(
        self,
        *,
        node_id: str,
        settings: Settings,
        engine: Engine,
        tasks: asyncio.TaskGroup,
        dropped: Callable[[Slot], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = KvLedger(0)
        self.prefixes = Prefixes(
            share=settings.prefix_share, limit=settings.prefix_tokens, count=settings.prefix_sessions
        )
        self._node_id = node_id
        self._settings = settings
        self._engine = engine
        self._tasks = tasks
        self._dropped = dropped
        self._slots: dict[bytes, Slot] = {}
        self._streams: dict[bytes, SessionStream] = {}
        self._free_numbers: list[int] = []
        self._next_number = 0
        self._engine_lives = 0
        """How often the engine was lost: what it held before is not there after."""
        self._clock = clock
        self._gateways = GatewayWatch(settings, clock())

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def find(self, key: bytes) -> Slot | None:
        return self._slots.get(key)

    def stream(self, slot: Slot) -> SessionStream:
        return self._streams[slot.key]

    @property
    def all_freed(self) -> bool:
        return not self._streams

    # ---- opening ---------------------------------------------------------------------------------------------

    def open(self, ticket: Ticket, request: OpenSession, shard: ShardDescription) -> SessionStream:
        """Reserve KV for a session whose ticket was verified, and have the engine open a slot; the stream says when
        it has, or why not. It beats from the start: a slow engine is not a silent Node."""
        if request.prefix is not None:
            check_prefix(request.prefix)
        embed = request.embed if shard.is_tail else None
        pooling = None if embed is None else pooling_of(shard.embeddings, embed.pooling)
        unused = self._cannot_keep(shard)
        slot, match = self._reserve(ticket, request, shard)
        sampling = request.sampling if shard.is_tail else None
        asked = (request.prompt_tokens, request.max_tokens, sampling)
        spec = SlotSpec(*asked, pooling=pooling)
        slot.running = 1  # the engine has it: a close in the meantime waits
        stream = self._streams[slot.key]
        opened = Opened(node=self._node_id, kv_reserved=slot.ticket.kv_tokens, pooling=pooling)
        if request.prefix is not None:
            opened = structs.replace(opened, reusable_tokens=0, unused=unused)
        self._tasks.create_task(
            contained(self._open_slot(slot, spec, match, opened), "open_slot", lambda error: self._open_failed(slot))
        )
        return stream

    def _cannot_keep(self, shard: ShardDescription) -> Literal["off", "engine"] | None:
        if self.prefixes.off:
            return "off"
        return None if shard.rollback else "engine"

    async def _open_slot(self, slot: Slot, spec: SlotSpec, match: Match | None, opened: Opened) -> None:
        refusal: ShardlineError | None = None
        try:
            async with asyncio.timeout(self._settings.open_s):
                if spec.sampling is not None and spec.sampling.grammar is not None:
                    await self._engine.check_grammar(spec.sampling.grammar)
                    opened = structs.replace(opened, grammar=True)
                if match is not None:
                    opened = await self._fork(slot, spec, match, opened)
                if not opened.reusable_tokens:
                    await self._engine.open(slot.number, spec)
        except TimeoutError:
            refusal = ShardlineError("deadline", "the engine did not open a slot in time", limit="open")
        except ShardlineError as error:
            refusal = error
        if refusal is not None:
            self.fail(slot, refusal)
        if self.engine_returned(slot):
            slot.opened = True
            self._streams[slot.key].emit(opened)

    async def _fork(self, slot: Slot, spec: SlotSpec, match: Match, opened: Opened) -> Opened:
        """Begin with what is kept. An engine that cannot, for want of memory or because it has lost it, is asked for an
        empty slot: the prompt can always be computed."""
        kept, ids = match.kept, match.kept.ids[: 4 * match.tokens]
        reuse = Reuse(kept.number, match.tokens, b"" if spec.sampling is None else ids)
        try:
            await self._engine.open(slot.number, replace(spec, reuse=reuse))
        except ShardlineError as error:
            if error.code in _ENGINE_ENDS:
                raise
            log.warning("prefix_not_reused", code=error.code, reason=error.message)
            self._give_up(kept)
            return structs.replace(opened, unused="lost")
        slot.begin_with(match.tokens, ids)
        return structs.replace(opened, reusable_tokens=match.tokens)

    def _open_failed(self, slot: Slot) -> None:
        self.fail(slot, ShardlineError("engine_error", "the engine's slot was not opened: the log has the cause"))
        self.engine_returned(slot)

    def _reserve(self, ticket: Ticket, request: OpenSession, shard: ShardDescription) -> tuple[Slot, Match | None]:
        """A slot with its KV, and what of its prompt is kept here."""
        key = bytes.fromhex(request.key)
        if key in self._streams:
            raise ShardlineError("session_exists", "this session key is in use")
        self.ledger.check(ticket.kv_tokens)
        if shard.slots is not None and len(self._streams) >= shard.slots:
            raise ShardlineError("capacity", f"the engine has {shard.slots} slots, and all are open")
        # Of a prompt that becomes a vector every row is computed, and nothing is left behind.
        prefix = request.prefix if request.embed is None and self._cannot_keep(shard) is None else None
        match = None if prefix is None else self.prefixes.find(prefix.digests, request.prompt_tokens)
        number = self._make_room(ticket.kv_tokens, shard, None if match is None else match.kept)
        self.ledger.reserve(ticket.kv_tokens)
        slot = Slot(number=number, key=key, ticket=ticket, prompt_tokens=request.prompt_tokens)
        if prefix is not None:
            slot.salt, slot.ids = prefix.salt, bytearray()
        self._slots[key] = slot
        self._streams[key] = SessionStream(limit=request.max_tokens + _STREAM_SLACK)
        self._gateways.opened(ticket.gateway, self._clock())
        return slot, match

    def _make_room(self, tokens: int, shard: ShardDescription, source: Kept | None) -> int:
        """The number of a new slot. What is kept gives way, oldest first; `source`, which the session begins with, only
        where even that stands in the way: the session then takes it over, and nothing is copied."""
        for kept in self.prefixes:
            if self._has_room(tokens, shard):
                break
            if kept is not source:
                self._give_up(kept)
        if source is None or self._has_room(tokens, shard):
            return self._take_number()
        self.prefixes.remove(source)
        return source.number

    def _has_room(self, tokens: int, shard: ShardDescription) -> bool:
        """Whether a session of `tokens` fits beside all that is promised and kept."""
        if self.ledger.reserved + self.prefixes.tokens + tokens > self.ledger.capacity:
            return False
        return shard.slots is None or len(self._streams) + len(self.prefixes) < shard.slots

    def _take_number(self) -> int:
        if self._free_numbers:
            return heapq.heappop(self._free_numbers)
        self._next_number += 1
        return self._next_number - 1

    # ---- closing ---------------------------------------------------------------------------------------------

    def close(self, key: bytes, *, keep: bool = False) -> bool:
        """End a session, whatever it is doing; idempotent. False: nothing was open under `key`. `keep`: it ended well,
        and what it computed may stay for others to begin with."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return False
        slot.closed = True
        slot.keep = keep
        self._dropped(slot)
        if not slot.running:
            self._release(slot)
        return True

    def fail(self, slot: Slot, error: ShardlineError) -> None:
        """Say on the session's stream why this Node gives it up, then close it here."""
        if slot.closed:
            return
        where = {"node": self._node_id, "layers": [slot.ticket.first, slot.ticket.last], "position": slot.computed_end}
        self._streams[slot.key].emit(Failed(error={**where, **error.body()}))
        self.close(slot.key)

    def fail_all(self, error: ShardlineError) -> None:
        for slot in list(self._slots.values()):
            self.fail(slot, error)

    def engine_returned(self, slot: Slot) -> bool:
        """An engine call with `slot` is over. False: the session was closed meanwhile, and is freed with its last."""
        slot.running -= 1
        if slot.closed and not slot.running:
            self._release(slot)
        return not slot.closed

    def _release(self, slot: Slot) -> None:
        if slot.released:
            return
        slot.released = True
        if not self._in_background(self._free(slot), "free_slot"):
            self._freed(slot, None)  # somebody is still to be told

    async def _free(self, slot: Slot) -> None:
        """No engine call has it: keep the cache, or drop it."""
        kept = None
        try:
            kept = await self._keep(slot)
            if kept is None:
                await self._close_in_engine(slot.number)
        finally:
            self._freed(slot, kept)

    async def _close_in_engine(self, number: int) -> None:
        with contextlib.suppress(ShardlineError):  # an engine that died has dropped the cache by that
            await self._engine.close(number)

    async def _keep(self, slot: Slot) -> Kept | None:
        """Cut the cache to whole blocks of what was computed, whose ids crossed this Node; None: nothing is kept."""
        if not slot.keep or slot.ids is None:
            return None
        tokens = self.prefixes.whole(slot.computed_end, self.ledger.capacity)
        ids = bytes(slot.ids[: 4 * tokens])
        digests = digests_of(slot.salt, ids)
        if not digests or self.prefixes.holds(digests):
            return None
        life = self._engine_lives
        try:
            await self._engine.keep(slot.number, tokens)
        except ShardlineError as error:
            log.info("session_not_kept", code=error.code, reason=error.message)
            return None
        return Kept(slot.number, digests, ids) if life == self._engine_lives else None

    def _freed(self, slot: Slot, kept: Kept | None) -> None:
        """Give the reservation back, end the stream."""
        self.ledger.release(slot.ticket.kv_tokens)
        if kept is None:
            heapq.heappush(self._free_numbers, slot.number)
        else:
            for gone in self.prefixes.add(kept, self.ledger.capacity):
                self._drop(gone)
        stream = self._streams.pop(slot.key)
        stream.emit(_beat_of(slot))  # the last numbers, also of a session shorter than a beat
        stream.emit(Closed(kv_released=slot.ticket.kv_tokens))
        stream.end()

    def _give_up(self, kept: Kept) -> None:
        """What is kept makes room."""
        if self.prefixes.remove(kept):
            self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        """Free a cache that is kept no more. Tasks begin in the order in which they were made, and the engine keeps the
        order of its calls: whatever is opened after this finds the room."""
        self._in_background(self._free_kept(kept), "free_kept")

    async def _free_kept(self, kept: Kept) -> None:
        try:
            await self._close_in_engine(kept.number)
        finally:
            heapq.heappush(self._free_numbers, kept.number)

    def engine_lost(self, error: ShardlineError) -> None:
        """All caches are gone, and all sessions with them."""
        self._engine_lives += 1
        for kept in self.prefixes.clear():
            heapq.heappush(self._free_numbers, kept.number)
        self.fail_all(error)

    def _in_background(self, work: Coroutine[None, None, None], name: str) -> bool:
        """Run `work`. False where the Node goes down, and its engine with it: there is nothing to free."""
        running = contained(work, name)
        try:
            self._tasks.create_task(running)
        except RuntimeError:
            running.close()
            work.close()
            return False
        return True

    # ---- liveness --------------------------------------------------------------------------------------------

    def beat(self, gateway: str) -> None:
        """A Gateway says that it lives."""
        self._gateways.beat(gateway, self._clock())

    async def watch(self) -> None:
        """Look every `beat_interval_s`, until cancelled."""
        self._gateways.due = self._clock() + self._settings.beat_interval_s
        while True:
            await asyncio.sleep(max(0.0, self._gateways.due - self._clock()))
            self.look()

    def look(self) -> None:
        """Beat on every stream, and end the sessions of Gateways that fell silent."""
        now = self._clock()
        self._send_beats()
        silent = self._gateways.silent(now, (s.ticket.gateway for s in self._slots.values()))
        for slot in [s for s in self._slots.values() if s.ticket.gateway in silent]:
            self.fail(slot, silence_of_gateway(self._node_id, self._settings))

    def _send_beats(self) -> None:
        for slot in list(self._slots.values()):
            stream = self._streams[slot.key]
            if stream.overflowed:
                # Its Gateway beats, but does not read: what it would read now has holes.
                self.close(slot.key)
            else:
                stream.emit(_beat_of(slot))


def _beat_of(slot: Slot) -> Beat:
    return Beat(
        position=slot.computed_end,
        times=slot.times,
        prefill=slot.sent_prefill.count(),
        decode=slot.sent_decode.count(),
    )
