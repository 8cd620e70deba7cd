"""The engine as the Node sees it: asynchronous, one batch after another, lost and restarted without the Node.

Owns the `Engine` protocol, the rule for restarts, and `InlineEngine`, which runs a paced (scripted) backend on the
Node's own loop. A backend that really computes belongs into `worker_engine.WorkerEngine`. Refuses to schedule:
which batch is next is the Node's decision. Shown by tests/model/test_engine.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from shardline.errors import ShardlineError
from shardline.model.backend import Backend, BackendEntry, ShardDescription, SlotSpec
from shardline.model.generation import Generator, StepResult, fault_of
from shardline.model.limits import over_limit, step_limit
from shardline.settings import Settings
from shardline.wire.messages import EngineHealth, Grammar, StepTimes

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of one `submit`. With `failure` set the engine is gone, and `results` is empty."""

    results: list[StepResult | ShardlineError]
    """One an entry, in order. Buffers in it belong to the receiver."""
    compute_us: float
    """Time inside the engine, hand-over not counted."""
    failure: ShardlineError | None = None


Done = Callable[[BatchResult], None]


class Engine(Protocol):
    """One loaded Shard behind the event loop. All methods are called on that loop, and all callbacks run on it.

    When the engine dies or hangs, `on_lost(error)` is called first, then the `done` of each batch with the same
    error as its `failure`; waiting calls raise it. All slots are gone then. The engine starts itself again, at most
    `worker_restarts` times (1, 2, 4 … s apart), and calls `on_ready()` when slots can be opened again; when it gives
    up, `on_lost` is called once more.
    """

    on_lost: Callable[[ShardlineError], None]
    on_ready: Callable[[], None]
    on_progress: Callable[[int, int], None]
    """While it loads: how much is done, of how much; in units of the engine's own (layers, bytes)."""
    takes_ahead: bool
    """A second batch may be submitted while one runs; the engine begins with it by itself."""
    before_restart: Callable[[], Awaitable[None]]
    """Awaited before it starts itself again: what must be on disk may be lost, too. What it raises is a failed try."""

    async def start(self) -> ShardDescription:
        """Load the Shard. Raises what loading raised, or `engine_lost`; a first start is not repeated."""

    async def open(self, slot: int, spec: SlotSpec) -> None:
        """Make a cache: empty, or as `spec.reuse` says. A caller that gives up waiting closes the slot: calls keep
        their order. Where it raises, the slot is not open."""

    async def keep(self, slot: int, tokens: int) -> None:
        """The session of `slot` has ended: hold on to its first `tokens` for others to begin with (`Reuse`), until the
        slot is closed. Where it raises, the caller closes the slot."""

    async def close(self, slot: int) -> None:
        """Free a slot, behind all batches that were submitted. Nothing to do where the engine is down."""

    def submit(self, entries: Sequence[BackendEntry], done: Done) -> None:
        """Run one batch, the only one until `done`, or one of two where the engine takes one ahead. `done` never runs
        inside this call; of a batch that is refused, it may be called before that of the one in front of it. Buffers
        of `entries` may be dropped when it returns, unless the engine is inline. Limits: `step`, or `prefill_chunk` for
        more than one row of a session."""

    async def rollback(self, slot: int, position: int) -> None: ...

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text, beside whatever runs. Raises `deadline` (limit `control`) and `queue_overflow`, too."""

    async def check_grammar(self, grammar: Grammar) -> None:
        """See whether a tail can keep to a grammar, beside whatever runs; a slot that is opened with it then has it at
        once. Raises `grammar_invalid`, `unsupported_parameter`, and what `tokenize` raises."""

    def text_bundle(self) -> bytes | None:
        """MessagePack of `TextBundle`; None before the start, and on a Shard that is neither head nor tail."""

    def health(self) -> EngineHealth: ...

    def kv(self) -> int:
        """Tokens in the caches of all slots, as the backend reports them; 0 while the engine is down."""

    async def self_test(self) -> StepTimes:
        """Compute something over the whole range and check it; slots that are open are left alone."""

    async def stop(self) -> None:
        """Free everything; idempotent. What still waits, a batch too, fails with `draining`; `on_lost` is not called.
        To be awaited by whoever made the engine, also after a start that failed or was cancelled."""


async def nothing_to_make() -> None:
    """Of an engine that needs no files of its own."""


class Restarts:
    """How often and how soon a lost engine is started again. Pure: times are arguments."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._in_a_row = 0
        self.count = 0
        """Restarts so far, over the whole life."""

    def next_delay_s(self, ran_s: float) -> float | None:
        """Pause before the next try, after a run of `ran_s`; None: give up."""
        if ran_s >= self._settings.worker_good_run_s:
            self._in_a_row = 0
        if self._in_a_row >= self._settings.worker_restarts:
            return None
        self._in_a_row += 1
        self.count += 1
        return float(self._settings.worker_backoff_s * 2 ** (self._in_a_row - 1))


def given_up(last: ShardlineError, settings: Settings) -> ShardlineError:
    return ShardlineError(
        "engine_lost", f"given up after {settings.worker_restarts} restarts in a row; last: {last.message}"
    )


class PacedBackend(Backend, Protocol):
    """A backend that says how long it wants to take and computes in no time: fit to run on the event loop."""

    def load_pace_s(self) -> float: ...

    def open_pace_s(self, slot: int) -> float: ...

    def pace_s(self, entries: Sequence[BackendEntry]) -> float:
        """Seconds this batch takes; infinite: it hangs."""

    def self_test(self) -> StepTimes: ...


class InlineEngine:
    """A paced backend on the Node's loop, with the same losses, limits and restarts as a worker process."""

    takes_ahead = False

    def __init__(self, load: Callable[[], PacedBackend], settings: Settings) -> None:
        self.on_lost: Callable[[ShardlineError], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self.before_restart: Callable[[], Awaitable[None]] = nothing_to_make
        """Not asked: a script is read once."""
        self._load = load
        self._settings = settings
        self._restarts = Restarts(settings)
        self._backend: PacedBackend | None = None
        self._generator: Generator | None = None
        self._text: bytes | None = None
        self._timer: asyncio.Handle | None = None
        """Of the running batch, or of the next restart: there is never both."""
        self._done: Done | None = None
        self._down: ShardlineError = ShardlineError("engine_lost", "the engine was not started")
        self._ready_at = 0.0
        self._batch_at = 0.0
        self._stopped = False

    async def start(self) -> ShardDescription:
        try:
            backend = self._load()
        except Exception as error:  # whatever loading raises is told as the engine's fault
            raise fault_of(error) from error
        await self._pause(backend.load_pace_s(), "worker_start", self._settings.worker_start_s)
        return self._serve(backend)

    def _serve(self, backend: PacedBackend) -> ShardDescription:
        generator = Generator(backend)
        self._backend, self._generator, self._text = backend, generator, generator.text
        self._ready_at = time.monotonic()
        return generator.description

    async def _pause(self, seconds: float, name: str, limit_s: float) -> None:
        """Take the time that the backend wants; over the limit the engine is lost."""
        if seconds > 0:
            await asyncio.sleep(min(seconds, limit_s))
        if seconds > limit_s:
            error = over_limit(name, limit_s)
            self._lose(error)
            raise error

    def _up(self) -> Generator:
        if self._generator is None:
            raise self._down
        return self._generator

    async def open(self, slot: int, spec: SlotSpec) -> None:
        self._up()
        if self._backend is not None:
            await self._pause(self._backend.open_pace_s(slot), "step", self._settings.step_s)
        try:
            self._up().open(slot, spec)
        except ShardlineError as error:
            if error.code == "engine_lost":
                self._lose(error)
            raise

    async def keep(self, slot: int, tokens: int) -> None:
        self._up().keep(slot, tokens)

    async def close(self, slot: int) -> None:
        if self._generator is not None:
            self._generator.close(slot)

    def submit(self, entries: Sequence[BackendEntry], done: Done) -> None:
        if self._done is not None:
            raise RuntimeError("a batch is running already")
        loop = asyncio.get_running_loop()
        if self._backend is None:
            loop.call_soon(done, BatchResult([], 0.0, self._down))
            return
        self._done = done
        self._batch_at = time.perf_counter()
        name, limit_s = step_limit(entries, self._settings)
        pace = self._backend.pace_s(entries)
        if pace > limit_s:
            self._timer = loop.call_later(limit_s, self._lose, over_limit(name, limit_s))
        elif pace > 0:
            self._timer = loop.call_later(pace, self._run, entries)
        else:
            self._timer = loop.call_soon(self._run, entries)

    def _run(self, entries: Sequence[BackendEntry]) -> None:
        done, self._done, self._timer = self._done, None, None
        if done is None or self._generator is None:
            return
        try:
            results = self._generator.run(entries)
        except ShardlineError as error:
            self._done = done
            self._lose(error)
            return
        done(BatchResult(results, (time.perf_counter() - self._batch_at) * 1e6))

    def _lose(self, error: ShardlineError) -> None:
        """Everything that was open is gone; say so, then plan the next start."""
        if self._generator is None or self._stopped:
            return
        log.warning("engine_lost", code=error.code, reason=error.message)
        ran_s = time.monotonic() - self._ready_at
        done = self._take_down(error)
        self.on_lost(error)
        if done is not None:
            done(BatchResult([], 0.0, error))
        self._plan_restart(ran_s)

    def _take_down(self, error: ShardlineError) -> Done | None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        done, self._done = self._done, None
        self._backend = self._generator = None
        self._down = error
        return done

    def _plan_restart(self, ran_s: float) -> None:
        delay_s = self._restarts.next_delay_s(ran_s)
        if delay_s is None:
            self._down = given_up(self._down, self._settings)
            self.on_lost(self._down)
        elif not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._restart)

    def _restart(self) -> None:
        self._timer = None
        try:
            backend = self._load()
            if backend.load_pace_s() == math.inf:
                raise over_limit("worker_start", self._settings.worker_start_s)
            self._serve(backend)
        except Exception as error:  # whatever loading raises is one failed try
            self._down = fault_of(error)
            self._plan_restart(0.0)
            return
        self.on_ready()

    async def rollback(self, slot: int, position: int) -> None:
        self._up().rollback(slot, position)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._up().backend.tokenize(text, add_special=add_special, parse_special=parse_special)

    async def check_grammar(self, grammar: Grammar) -> None:
        await asyncio.to_thread(self._up().grammars.check, grammar)

    def text_bundle(self) -> bytes | None:
        return self._text

    def health(self) -> EngineHealth:
        alive = self._generator is not None
        return EngineHealth(
            alive=alive,
            running_step_age_ms=(time.perf_counter() - self._batch_at) * 1e3 if self._done is not None else None,
            restarts=self._restarts.count,
            last_error=None if alive else self._down.message,
        )

    def kv(self) -> int:
        return self._generator.kv_tokens if self._generator is not None else 0

    async def self_test(self) -> StepTimes:
        self._up()
        if self._backend is None:
            raise self._down
        return self._backend.self_test()

    async def stop(self) -> None:
        self._stopped = True
        done = self._take_down(ShardlineError("draining", "the engine was stopped"))
        if done is not None:
            done(BatchResult([], 0.0, self._down))
