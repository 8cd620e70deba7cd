"""Records of Route Sessions at the Gateway: the one place where each number of a generation is written down.

Owns live and ended records, their events and who listens. Refuses to know HTTP and the route: the session code
writes, the API reads. The clock is an argument of the constructor. Shown by tests/telemetry/test_records.py.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.wire.messages import ENDED, HopTimes, Phase, Route, SeamCount
from shardline.wire.telemetry import (
    DecodeView,
    HopView,
    PrefillView,
    QueueView,
    RouteView,
    SeamView,
    TelemetryEvent,
)

_RATE_WINDOW_S = 2.0
_PROGRESS_INTERVAL_S = 0.25
_encoder = msgspec.json.Encoder()


def _finite(value: float | None, digits: int = 3) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


class Record:
    """One Route Session. Written by its session, on the Gateway's loop; every change may become an event."""

    def __init__(self, *, key_id: str, model: str, prompt_tokens: int, settings: Settings) -> None:
        self.id = "rs-" + secrets.token_hex(12)
        self.key_id = key_id
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.phase: Phase = "queued"
        self.created = time.time()
        self.ended: float | None = None
        self.queue_position: int | None = None
        self.route: Route | None = None
        self.prefill_done = 0
        self.tokens = 0
        self.failure: dict[str, Any] | None = None
        self.cancel: Callable[[str], None] = lambda reason: None
        """Set by the session while it runs."""
        self._started = time.perf_counter()
        self._phase_started: dict[str, float] = {"queued": self._started}
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._recent: deque[float] = deque(maxlen=4096)
        self._times: dict[int, HopTimes] = {}
        self._health: dict[int, str] = {}
        self._seams: dict[int, tuple[SeamCount, SeamCount]] = {}
        self._events: deque[tuple[int, bytes]] = deque(maxlen=settings.record_events)
        self._seq = 0
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
        self._phase_started[phase] = time.perf_counter()
        if phase in ENDED:
            self.ended = time.time()
            self.queue_position = None
        self._emit()

    def queued_at(self, position: int | None) -> None:
        if position != self.queue_position:
            self.queue_position = position
            self._emit()

    def routed(self, route: Route) -> None:
        self.route = route
        self._times, self._seams = {}, {}
        self._health = dict.fromkeys(range(len(route.hops)), "ok")

    def prefilled(self, position: int) -> None:
        done = min(position, self.prompt_tokens)
        if done > self.prefill_done:
            self.prefill_done = done
            self._progress()

    def hop_times(self, hop: int, times: HopTimes | None) -> None:
        if times is not None:
            self._times[hop] = times

    def hop_health(self, hop: int, health: str) -> None:
        if self._health.get(hop) != health:
            self._health[hop] = health
            self._emit()

    def seam(self, hop: int, prefill: SeamCount | None, decode: SeamCount | None) -> None:
        before = self._seams.get(hop, (SeamCount(), SeamCount()))
        self._seams[hop] = (prefill or before[0], decode or before[1])

    def token(self) -> None:
        now = time.perf_counter()
        self.tokens += 1
        if self._first_token is None:
            self._first_token = now
            self.prefill_done = self.prompt_tokens
            self.enter("decode")
        self._last_token = now
        self._recent.append(now)
        self._progress()

    def fail(self, error: ShardlineError) -> None:
        if self.phase not in ENDED:
            self.failure = error.body()
            self.enter("failed")

    # ---- read by the API -------------------------------------------------------------------------------------

    def rate(self, now: float | None = None) -> float | None:
        """Rolling tokens/s over the last 2 s, from token times alone (not from how often anybody asks)."""
        now = time.perf_counter() if now is None else now
        if self.phase in ENDED:
            now = self._last_token or now
        recent = [t for t in self._recent if now - t <= _RATE_WINDOW_S]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return None
        return _finite((len(recent) - 1) / (recent[-1] - recent[0]), 2)

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

    def snapshot(self) -> TelemetryEvent:
        waited_until = self._phase_started.get("prefill", time.perf_counter())
        return TelemetryEvent(
            id=self.id,
            seq=self._seq,
            time=round(time.time(), 3),
            phase=self.phase,
            model=self.model,
            queue=QueueView(
                position=self.queue_position, waited_ms=_finite(max(0.0, waited_until - self._started) * 1e3)
            ),
            route=self._route_view(),
            prefill=PrefillView(
                done=self.prefill_done,
                total=self.prompt_tokens,
                chunk=None if self.route is None else self.route.prefill_chunk,
            ),
            decode=DecodeView(tokens=self.tokens, tokens_per_s=self.rate(), ttft_ms=self.ttft_ms),
            seams=self._seam_views(),
            failure=self.failure,
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
                    layers=(hop.first, hop.last),
                    engine_class=hop.engine_class,
                    content_id=hop.content_id,
                    health=self._health.get(hop.index, "ok"),
                    rtt_ms=_finite(hop.rtt_ms),
                    queue_ms=_finite(times.queue_ms),
                    compute_ms=_finite(times.compute_ms),
                    send_ms=_finite(times.send_ms),
                )
            )
        return RouteView(
            id=route.id,
            content_id=route.content_id,
            engine_class=route.engine_class,
            n_layers=route.n_layers,
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
        return [event for event in self._events if event[0] > seq]

    async def changed(self) -> None:
        await self._changed.wait()

    # ---- events ----------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        if time.perf_counter() - self._last_event >= _PROGRESS_INTERVAL_S:
            self._emit()
        else:
            self._unsaid = True

    def catch_up(self) -> None:
        """Say what was too soon to be said: called with every beat, so that no progress waits for more of it."""
        if self._unsaid:
            self._progress()

    def _emit(self) -> None:
        self._seq += 1
        self._unsaid = False
        self._last_event = time.perf_counter()
        self._events.append((self._seq, _encoder.encode(self.snapshot())))
        self._changed.set()
        self._changed = asyncio.Event()


class Records:
    """All records of one Gateway: live ones, and ended ones for `record_ttl_s`, at most `record_limit`."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._records: OrderedDict[str, Record] = OrderedDict()

    def new(self, *, key_id: str, model: str, prompt_tokens: int) -> Record:
        record = Record(key_id=key_id, model=model, prompt_tokens=prompt_tokens, settings=self._settings)
        self._records[record.id] = record
        self._prune()
        return record

    def _prune(self) -> None:
        """Drop ended records that are too old or too many; a running one is never dropped."""
        oldest = self._clock() - self._settings.record_ttl_s
        surplus = len(self._records) - self._settings.record_limit
        for record_id in list(self._records):
            record = self._records[record_id]
            if record.ended is None:
                continue
            if record.ended >= oldest and surplus <= 0:
                break
            del self._records[record_id]
            surplus -= 1

    def running(self, record_id: str) -> Record | None:
        """The record of a session that has not ended; None where there is none (any more)."""
        record = self._records.get(record_id)
        return None if record is None or record.phase in ENDED else record

    def _find(self, record_id: str, key_id: str) -> Record:
        record = self._records.get(record_id)
        if record is None or record.key_id != key_id:
            raise ShardlineError("session_not_found", "no such Route Session of this key")
        return record

    def list(self, key_id: str) -> list[dict[str, Any]]:
        """Newest first."""
        self._prune()
        return [self._view(r) for r in reversed(self._records.values()) if r.key_id == key_id]

    def get(self, record_id: str, key_id: str) -> dict[str, Any]:
        return self._view(self._find(record_id, key_id))

    def _view(self, record: Record) -> dict[str, Any]:
        view = msgspec.to_builtins(record.snapshot())
        return {**view, "created": round(record.created, 3), "ended": None if record.ended is None else record.ended}

    async def cancel(self, record_id: str, key_id: str) -> None:
        """Ask the session to end as cancelled; nothing happens to one that has ended."""
        record = self._find(record_id, key_id)
        if record.phase not in ENDED:
            record.cancel("cancelled by request")

    async def subscribe(self, record_id: str, key_id: str, after: int = 0) -> AsyncIterator[tuple[int, bytes]]:
        """Events with a number above `after`: those kept, then live ones until the session has ended."""
        record = self._find(record_id, key_id)
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
