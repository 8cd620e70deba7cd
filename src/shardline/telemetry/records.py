"""Records of Route Sessions at the Gateway: the one place where each number of a generation is written down.

Owns live and ended records, how long and how many of them are kept, and who listens. Refuses to know HTTP and the
route: the session code writes, the API reads. The clock is an argument. Shown by tests/telemetry/test_records.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.telemetry.events import EventLog
from shardline.telemetry.watch import Watch
from shardline.wire.messages import ENDED, HopTimes, Phase, Route, SeamCount
from shardline.wire.telemetry import (
    DecodeView,
    HopView,
    Output,
    PrefillView,
    QueueView,
    RouteView,
    SeamView,
    TelemetryEvent,
)

_RATE_WINDOW_S = 2.0
_PROGRESS_INTERVAL_S = 0.25
_RECORD_BYTES = 4 << 10
_HOP_BYTES = 1 << 10
_TIME_BYTES = 32
"""What a record takes in memory beside its events: itself, each hop of its route, each token time. Rather too much."""
_encoder = msgspec.json.Encoder()


def _finite(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds: `unix` for what people read, `ticks` (monotonic) for spans."""

    unix: Callable[[], float] = time.time
    ticks: Callable[[], float] = time.perf_counter


def not_running(reason: str) -> None:
    """Cancels what does not run: nothing."""


class Record:
    """One Route Session. Written by its session, on the Gateway's loop; every change may become an event."""

    def __init__(
        self, *, key_id: str, model: str, prompt_tokens: int, settings: Settings, clock: Clock | None = None
    ) -> None:
        self._clock = clock or Clock()
        self.id = "rs-" + secrets.token_hex(12)
        self.key_id = key_id
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.phase: Phase = "queued"
        self.created = self._clock.unix()
        self.ended: float | None = None
        self.queue_position: int | None = None
        self.route: Route | None = None
        self.prefill_done = 0
        self.cached = 0
        self.tokens = 0
        self.passed_on = False
        """Its tokens are an upstream's: unknown until `used` tells how many they were, and their times for good."""
        self.output: Output = "text"
        """What the prompt becomes; a vector has no tokens."""
        self._used = False
        self._is_counted = False
        self._pieces = 0
        """Of text, each with a time, where tokens have none."""
        self._cached_told: int | None = None
        self.failure: dict[str, Any] | None = None
        self.cancel: Callable[[str], None] = not_running
        """Set by the session while it runs."""
        self.grown: Callable[[Record], None] = lambda record: None
        """Told after each event; set by who counts the bytes."""
        self._started = self._clock.ticks()
        self._phase_started: dict[str, float] = {"queued": self._started}
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._recent: deque[float] = deque(maxlen=4096)
        """Times of the tokens of the last 2 s."""
        self._last_rate: float | None = None
        """Of a session that has ended."""
        self._times: dict[int, HopTimes] = {}
        self._health: dict[int, str] = {}
        self._positions: dict[int, int] = {}
        self._seams: dict[int, tuple[SeamCount, SeamCount]] = {}
        self._events = EventLog(settings.record_events)
        self._reuse: str | None = None
        self._unsaid = False
        self._last_event = 0.0
        self._changed = asyncio.Event()
        self._emit()

    # ---- written by the session ------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """The session is in `phase` now. Ended ones stay ended."""
        if self.phase in ENDED or phase == self.phase:
            return
        self.phase = phase
        self._phase_started[phase] = self._clock.ticks()
        if phase in ENDED:
            self.ended = self._clock.unix()
            self.queue_position = None
            self._last_rate = self._whole_rate() if self.passed_on else self.rate(self._last_token)
            self._recent.clear()
        self._emit()

    def queued_at(self, position: int | None) -> None:
        if position != self.queue_position:
            self.queue_position = position
            self._emit()

    def routed(self, route: Route) -> None:
        self.route = route
        self._times, self._seams, self._positions = {}, {}, {}
        self._health = dict.fromkeys(range(len(route.hops)), "ok")
        self._events.renew()

    def reused(self, tokens: int, reason: str | None) -> None:
        """So much of the prompt is there already on the whole route; `reason`: why nothing is."""
        self.cached = self.prefill_done = tokens
        self._reuse = reason

    def prefilled(self, position: int) -> None:
        done = min(position, self.prompt_tokens)
        if done > self.prefill_done:
            self.prefill_done = done
            self._progress()

    def hop_times(self, hop: int, times: HopTimes | None) -> None:
        if times is not None:
            self._times[hop] = times

    def hop_position(self, hop: int, position: int) -> None:
        """So many tokens are computed there."""
        if position > self._positions.get(hop, 0):
            self._positions[hop] = position
            self._progress()

    def hop_health(self, hop: int, health: str) -> None:
        if self._health.get(hop) != health:
            self._health[hop] = health
            self._emit()

    def seam(self, hop: int, prefill: SeamCount | None, decode: SeamCount | None) -> None:
        before = self._seams.get(hop, (SeamCount(), SeamCount()))
        self._seams[hop] = (prefill or before[0], decode or before[1])

    def token(self) -> None:
        if self._is_counted:
            return
        now = self._clock.ticks()
        self.tokens += 1
        if self._first_token is None:
            self._first_token = now
            self.prefill_done = self.prompt_tokens
            self._events.renew()
            self.enter("decode")
        self._last_token = now
        self._recent.append(now)
        while now - self._recent[0] > _RATE_WINDOW_S:
            self._recent.popleft()
        self._progress()

    def text(self) -> None:
        """Text has come from a composite Node: of how many tokens, nobody says."""
        self._last_token = self._clock.ticks()
        self._pieces += 1
        if self._first_token is None:
            self._first_token = self._last_token
            self._events.renew()
            self.enter("decode")

    def counted(self, generated: int) -> None:
        """So many tokens does usage count at the end: the id that ended the text too, which is sent to nobody, and none
        that was computed beyond a stop string. No token counts behind it."""
        if generated == self.tokens + 1:
            self.token()
        self.tokens = min(self.tokens, generated)
        self._is_counted = True

    def used(self, prompt: int, generated: int, cached: int | None) -> None:
        """What the upstream of a composite Node says that its answer took."""
        self.prompt_tokens = self.prefill_done = prompt
        self.tokens = generated
        self.cached, self._cached_told = cached or 0, cached
        self._used = True

    def fail(self, error: ShardlineError) -> None:
        if self.phase not in ENDED:
            self.failure = error.body()
            self.enter("failed")

    # ---- read by the API -------------------------------------------------------------------------------------

    def rate(self, now: float | None = None) -> float | None:
        """Rolling tokens/s over the last 2 s, from token times alone (not from how often anybody asks)."""
        if not self._recent:
            return self._last_rate
        now = self._clock.ticks() if now is None else now
        recent = [t for t in self._recent if now - t <= _RATE_WINDOW_S]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return None
        return _finite((len(recent) - 1) / (recent[-1] - recent[0]), 2)

    def _whole_rate(self) -> float | None:
        """Of a composite Node: from the first piece of its text to the last one, as if all pieces had equally many
        tokens."""
        first, last = self._first_token, self._last_token
        if not self._used or first is None or last is None or last <= first:
            return None
        return _finite(self.tokens * (self._pieces - 1) / self._pieces / (last - first), 2)

    @property
    def ttft_ms(self) -> float | None:
        return None if self._first_token is None else _finite((self._first_token - self._started) * 1e3)

    def timings(self) -> dict[str, float | None]:
        """Milliseconds of prefill and decode, for llama-server's `timings`."""
        began = self._phase_started.get("prefill")
        first, last = self._first_token, self._last_token
        prompt_ms = None if began is None or first is None else _finite((first - began) * 1e3)
        predicted_ms = None if first is None or last is None else _finite((last - first) * 1e3)
        return {"prompt_ms": prompt_ms, "predicted_ms": predicted_ms}

    def phases(self) -> list[tuple[str, float]]:
        """Each phase with the ms from the arrival of the request to its (last) beginning, in this order."""
        began = sorted(self._phase_started.items(), key=lambda entry: entry[1])
        return [(phase, round((ticks - self._started) * 1e3, 3)) for phase, ticks in began]

    def snapshot(self) -> TelemetryEvent:
        return self._account(self._events.seq)

    def _account(self, seq: int) -> TelemetryEvent:
        waited_until = self._phase_started.get("prefill", self._clock.ticks())
        return TelemetryEvent(
            id=self.id,
            seq=seq,
            time=round(self._clock.unix(), 3),
            phase=self.phase,
            model=self.model,
            output=self.output,
            queue=QueueView(
                position=self.queue_position, waited_ms=_finite(max(0.0, waited_until - self._started) * 1e3)
            ),
            route=self._route_view(),
            prefill=self._prefill_view(),
            decode=DecodeView(
                tokens=None if self.passed_on and not self._used else self.tokens,
                tokens_per_s=self.rate(),
                ttft_ms=self.ttft_ms,
            ),
            seams=self._seam_views(),
            failure=self.failure,
        )

    def _prefill_view(self) -> PrefillView:
        if self.passed_on and not self._used:
            return PrefillView(done=None, total=None, cached=None)
        chunk = None if self.route is None or self.passed_on else self.route.prefill_chunk
        cached = self._cached_told if self.passed_on else self.cached
        return PrefillView(
            done=self.prefill_done, total=self.prompt_tokens, chunk=chunk, cached=cached, reuse=self._reuse
        )

    def _route_view(self) -> RouteView | None:
        route = self.route
        if route is None:
            return None
        hops = []
        for hop in route.hops:
            times = self._times.get(hop.index, HopTimes())
            hops.append(
                HopView(
                    node=hop.node,
                    layers=None if self.passed_on else (hop.first, hop.last),
                    engine_class=hop.engine_class,
                    content_id=hop.content_id,
                    health=self._health.get(hop.index, "ok"),
                    rtt_ms=_finite(hop.rtt_ms),
                    queue_ms=_finite(times.queue_ms),
                    compute_ms=_finite(times.compute_ms),
                    send_ms=_finite(times.send_ms),
                    position=self._positions.get(hop.index),
                )
            )
        return RouteView(
            id=route.id,
            content_id=route.content_id,
            engine_class=route.engine_class,
            n_layers=None if self.passed_on else route.n_layers,
            hops=hops,
        )

    def _seam_views(self) -> list[SeamView]:
        if self.route is None or len(self.route.hops) < 2:
            return []
        hops = self.route.hops
        views = []
        for i, hop in enumerate(hops):
            prefill, decode = self._seams.get(i, (SeamCount(), SeamCount()))
            views.append(SeamView(source=hop.node, to=hops[(i + 1) % len(hops)].node, prefill=prefill, decode=decode))
        return views

    def events_after(self, seq: int) -> list[tuple[int, bytes]]:
        return self._events.after(seq)

    async def changed(self) -> None:
        await self._changed.wait()

    # ---- events ----------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        if self._clock.ticks() - self._last_event >= _PROGRESS_INTERVAL_S:
            self._emit()
        else:
            self._unsaid = True

    def catch_up(self) -> None:
        """Say what was too soon to be said: called with every beat, so that no progress waits for more of it."""
        if self._unsaid:
            self._progress()

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        hops = 0 if self.route is None else len(self.route.hops)
        return _RECORD_BYTES + hops * _HOP_BYTES + len(self._recent) * _TIME_BYTES + self._events.size

    def thin(self) -> None:
        """Forget the older half of the events: each is a whole account, so that a reader misses only steps between."""
        self._events.halve()

    def _emit(self) -> None:
        self._unsaid = False
        self._last_event = self._clock.ticks()
        self._events.append(_encoder.encode(self._account(self._events.seq + 1)))
        self._changed.set()
        self._changed = asyncio.Event()
        self.grown(self)


class Records:
    """All records of one Gateway: live ones, and ended ones for `record_ttl_s`, at most `record_limit`; all together
    take at most `record_bytes`. What ended longest ago goes first; a running session's record never goes."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or Clock()
        self._records: dict[str, Record] = {}
        """In order of creation."""
        self._ended: dict[str, Record] = {}
        """In order of their ends."""
        self._sizes: dict[str, int] = {}
        """What is counted of each in `size`."""
        self.size = 0
        """Bytes of all, about."""
        self._watches: set[Watch] = set()

    def new(self, *, key_id: str, model: str, prompt_tokens: int) -> Record:
        record = Record(
            key_id=key_id, model=model, prompt_tokens=prompt_tokens, settings=self._settings, clock=self._clock
        )
        record.grown = self._grown
        self._records[record.id] = record
        self._count(record)
        self._prune()
        self._note(record)
        return record

    def _note(self, record: Record) -> None:
        for watch in self._watches:
            if watch.key_id == record.key_id:
                watch.note(record.id)

    def _grown(self, record: Record) -> None:
        if record.id not in self._records:
            return
        self._note(record)
        self._count(record)
        if record.ended is not None:
            self._ended.setdefault(record.id, record)
        if record.ended is not None or self.size > self._settings.record_bytes:
            self._prune()

    def _count(self, record: Record) -> None:
        size = record.size
        self.size += size - self._sizes.get(record.id, 0)
        self._sizes[record.id] = size

    def _prune(self) -> None:
        """Drop ended records that are too old, too many or too large; where only running ones are left, thin them."""
        oldest = self._clock.unix() - self._settings.record_ttl_s
        while self._ended:
            record = next(iter(self._ended.values()))
            fits = len(self._records) <= self._settings.record_limit and self.size <= self._settings.record_bytes
            if fits and record.ended is not None and record.ended >= oldest:
                return
            del self._ended[record.id], self._records[record.id]
            self.size -= self._sizes.pop(record.id)
        if self.size > self._settings.record_bytes:
            for record in self._records.values():
                record.thin()
                self._count(record)

    def find(self, record_id: str) -> Record | None:
        """The record, running or ended; None where there is none (any more)."""
        return self._records.get(record_id)

    def _owned(self, record_id: str, key_id: str) -> Record:
        record = self._records.get(record_id)
        if record is None or record.key_id != key_id:
            raise ShardlineError("session_not_found", "no such Route Session of this key")
        return record

    def latest(self, key_id: str, ended: int) -> list[dict[str, Any]]:
        """All that run, then the `ended` that ended last; each newest first."""
        own = list(self._of(key_id))
        over = [record for record in own if record.ended is not None]
        return [self._view(record) for record in (*(r for r in own if r.ended is None), *over[:ended])]

    def list(self, key_id: str) -> list[dict[str, Any]]:
        """Newest first."""
        return [self._view(record) for record in self._of(key_id)]

    def _of(self, key_id: str) -> Iterator[Record]:
        self._prune()
        return (record for record in reversed(self._records.values()) if record.key_id == key_id)

    def get(self, record_id: str, key_id: str) -> dict[str, Any]:
        return self._view(self._owned(record_id, key_id))

    def _view(self, record: Record) -> dict[str, Any]:
        view = msgspec.to_builtins(record.snapshot())
        return {
            **view,
            "created": _finite(record.created),
            "ended": _finite(record.ended),
            "phases": [list(entry) for entry in record.phases()],
        }

    @contextlib.contextmanager
    def watching(self, key_id: str) -> Iterator[Watch]:
        """While inside, changes of the records of this key are noted."""
        watch = Watch(key_id)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def cancel(self, record_id: str, key_id: str) -> None:
        """Have the session end as cancelled, and return when it has, or after `control_s`; nothing happens to one that
        has ended."""
        record = self._owned(record_id, key_id)
        if record.phase in ENDED:
            return
        record.cancel("cancelled by request")
        with contextlib.suppress(TimeoutError):  # whoever asked sees how far it is
            async with asyncio.timeout(self._settings.control_s):
                while record.phase not in ENDED:
                    await record.changed()

    async def subscribe(self, record_id: str, key_id: str, after: int = 0) -> AsyncIterator[tuple[int, bytes]]:
        """Events with a number above `after`: those kept, then live ones until the session has ended."""
        record = self._owned(record_id, key_id)
        while True:
            events = record.events_after(after)
            for seq, event in events:
                after = seq
                yield seq, event
            if events:
                continue
            if record.phase in ENDED:
                return
            await record.changed()
