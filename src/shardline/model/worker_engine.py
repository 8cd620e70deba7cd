"""The engine of a real model: a worker process that is started, watched, and started again when it is lost.

Owns the `Engine` protocol over `WorkerProcess` and the restarts. One task, the supervisor, lives from `start` to
`stop`. Refuses to know what is computed. Shown by tests/model/test_worker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import structlog

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, ShardDescription, ShardSpec, SlotSpec
from shardline.model.channel import (
    AREAS,
    Answer,
    BatchDone,
    Close,
    Compile,
    Fault,
    Keep,
    Load,
    Loaded,
    Open,
    Outcome,
    Place,
    PooledPrompt,
    Refused,
    Rollback,
    SharedRows,
    Skipped,
    Test,
    Tested,
    Tokenize,
)
from shardline.model.engine import BatchResult, Done, Restarts, given_up, nothing_to_make
from shardline.model.generation import Pooled, SampledToken, StepResult
from shardline.model.limits import step_limit
from shardline.model.worker_process import WorkerProcess, worker_environment
from shardline.settings import Settings
from shardline.wire.messages import EngineHealth, Grammar, StepTimes

log = structlog.get_logger(__name__)


class _Call(NamedTuple):
    done: Done
    area: int
    """Number of the shared file that its rows are in."""
    outputs: tuple[Place, ...]


class WorkerEngine:
    """`Engine` over a worker process. Whoever made it calls `stop`, also after a start that failed or was cancelled."""

    takes_ahead = True

    def __init__(self, name: str, spec: ShardSpec, settings: Settings, *, inherited: Mapping[str, str]) -> None:
        """`name`: of `backends.BACKENDS`. `inherited`: environment that the worker may take engine variables from."""
        self.on_lost: Callable[[ShardlineError], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self.before_restart: Callable[[], Awaitable[None]] = nothing_to_make
        self._name = name
        self._spec = spec
        self._settings = settings
        self._environment = worker_environment(inherited, spec.threads)
        self._step = ("step", settings.step_s)
        self._restarts = Restarts(settings)
        self._supervisor: asyncio.Task[None] | None = None
        self._first: asyncio.Future[ShardDescription] | None = None
        self._description: ShardDescription | None = None
        self._text: bytes | None = None
        self._worker: WorkerProcess | None = None
        """The process, while there is one."""
        self._serving: WorkerProcess | None = None
        """The same, once its Shard is loaded and until it is lost."""
        self._ready_at = 0.0
        self._down = ShardlineError("engine_lost", "the engine is not loaded yet")
        self._calls: deque[_Call] = deque()
        """Batches that were submitted and not answered, in order: one that runs, one behind it."""

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self) -> ShardDescription:
        if self._supervisor is not None:
            raise RuntimeError("an engine is started once")
        loop = asyncio.get_running_loop()
        self._first = loop.create_future()
        self._supervisor = loop.create_task(self._supervise(self._first), name="engine supervisor")
        return await self._first

    async def stop(self) -> None:
        error = ShardlineError("draining", "the engine was stopped")
        self._down = error
        self._serving = None
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop(error)
        self._fail_batches(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    async def _supervise(self, first: asyncio.Future[ShardDescription]) -> None:
        """One worker after another, until one cannot be started or too many were lost."""
        while True:
            error, ran_s = await self._live()
            if not first.done():
                first.set_exception(error)
                return
            delay_s = self._restarts.next_delay_s(ran_s)
            if delay_s is None:
                break
            log.warning("worker_restart_planned", in_s=delay_s, restarts=self._restarts.count)
            await asyncio.sleep(delay_s)
        self._down = given_up(error, self._settings)
        log.error("worker_given_up", reason=error.message)
        self._call(self.on_lost, self._down)

    async def _live(self) -> tuple[ShardlineError, float]:
        """One worker from start to burial: why it was lost, and for how many seconds it served."""
        ended = asyncio.Event()
        try:
            if self._description is not None:
                await self.before_restart()
            worker = WorkerProcess(self._settings, self._environment)
        except ShardlineError as refused:
            self._down = refused
            return refused, 0.0
        self._worker = worker
        worker.on_ended = ended.set
        worker.on_progress = lambda done, total: self.on_progress(done, total)
        log.info("worker_started", pid=worker.pid, engine=self._name, layers=[self._spec.first, self._spec.last])
        worker.request(
            Load(self._name, self._spec),
            lambda answer: self._loaded(worker, answer),
            lambda _: None,
            ("worker_start", self._settings.worker_start_s),
        )
        await ended.wait()
        error = await worker.bury()
        self._worker = None
        self._down = error
        served, self._serving = self._serving is not None, None
        ran_s = time.monotonic() - self._ready_at if served else 0.0
        log.warning("worker_lost", pid=worker.pid, code=error.code, reason=error.message)
        if served:
            # First the loss as a whole, then what was running: the receiver then knows that no slot is left.
            self._call(self.on_lost, error)
        worker.fail_pending(error)
        self._fail_batches(error)
        return error, ran_s

    def _loaded(self, worker: WorkerProcess, answer: Answer) -> None:
        if not isinstance(answer, Loaded):
            worker.discard(answer.fault.error() if isinstance(answer, Refused) else _unexpected(answer))
            return
        description = answer.description
        if self._description is not None and self._description != description:
            worker.discard(ShardlineError("model_file_invalid", "what the worker loaded is not what it was before"))
            return
        self._description, self._text = description, answer.text
        worker.serve(description)
        self._serving, self._ready_at = worker, time.monotonic()
        if self._first is not None and not self._first.done():
            self._first.set_result(description)
        else:
            self._call(self.on_ready)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """From the loop itself: what a receiver raises is its own fault, and does not end the supervisor."""
        asyncio.get_running_loop().call_soon(callback, *arguments)

    # ---- batches -----------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[BackendEntry], done: Done) -> None:
        if len(self._calls) == AREAS:
            raise RuntimeError("a batch is running and another waits already")
        if self._serving is None:
            self._call(done, BatchResult([], 0.0, self._down))
            return
        limit = step_limit(entries, self._settings)
        area = 1 - self._calls[0].area if self._calls else 0
        try:
            outputs = self._serving.submit(entries, area, self._batch_answered, _told_with_all, limit)
        except ShardlineError as error:
            self._call(done, BatchResult([error] * len(entries), 0.0))
            return
        self._calls.append(_Call(done, area, outputs))

    def _batch_answered(self, answer: Answer) -> None:
        worker = self._serving
        if worker is None or not self._calls:
            return
        done, area, outputs = self._calls[0]
        if isinstance(answer, Refused):
            result = BatchResult([answer.fault.error()] * len(outputs), 0.0)
        elif isinstance(answer, BatchDone) and len(answer.outcomes) == len(outputs):
            rows = worker.areas[area]
            results = [_result(o, p, rows) for o, p in zip(answer.outcomes, outputs, strict=True)]
            result = BatchResult(results, answer.compute_us)
        else:
            # The call stays: it is told with all others when the worker is buried.
            worker.discard(_unexpected(answer))
            return
        self._calls.popleft()
        done(result)

    def _fail_batches(self, error: ShardlineError) -> None:
        """The worker is gone; also what it answered in its last moment, or wrongly, is told so."""
        while self._calls:
            self._call(self._calls.popleft().done, BatchResult([], 0.0, error))

    # ---- control -----------------------------------------------------------------------------------------------

    async def _ask(self, request: Open | Keep | Close | Rollback | Test, limit: tuple[str, float]) -> Answer:
        if self._serving is None:
            raise self._down
        return await self._serving.ask(request, limit)

    async def open(self, slot: int, spec: SlotSpec) -> None:
        asked = Open(slot, spec.prompt_tokens, spec.max_tokens, spec.sampling, spec.reuse, spec.pooling)
        await self._ask(asked, self._step)

    async def keep(self, slot: int, tokens: int) -> None:
        await self._ask(Keep(slot, tokens), self._step)

    async def close(self, slot: int) -> None:
        if self._serving is not None:
            await self._ask(Close(slot), self._step)

    async def rollback(self, slot: int, position: int) -> None:
        await self._ask(Rollback(slot, position), self._step)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if self._serving is None:
            raise self._down
        return await self._serving.texts.tokenize(Tokenize(text, add_special, parse_special))

    async def check_grammar(self, grammar: Grammar) -> None:
        if self._serving is None:
            raise self._down
        await self._serving.texts.compile(Compile(grammar))

    async def self_test(self) -> StepTimes:
        answer = await self._ask(Test(), ("prefill_chunk", self._settings.prefill_chunk_s))
        if not isinstance(answer, Tested):
            raise _unexpected(answer)
        return answer.times

    def text_bundle(self) -> bytes | None:
        return self._text

    def kv(self) -> int:
        return self._serving.areas[0].kv_tokens if self._serving is not None else 0

    def health(self) -> EngineHealth:
        worker, serving = self._worker, self._serving
        age_s = serving.running_step_age_s if serving is not None else None
        alive = serving is not None and serving.fresh
        return EngineHealth(
            alive=alive,
            running_step_age_ms=None if age_s is None else age_s * 1e3,
            restarts=self._restarts.count,
            pid=worker.pid if worker is not None else None,
            last_error=None if alive else self._down.message,
        )


def _result(outcome: Outcome, place: Place, rows: SharedRows) -> StepResult | ShardlineError:
    if isinstance(outcome, Fault):
        return outcome.error()
    if isinstance(outcome, Skipped):
        return StepResult(skipped=True)
    if isinstance(outcome, PooledPrompt):
        return StepResult(pooled=Pooled(outcome.vector, outcome.pooling))
    if outcome is not None:
        top = None if outcome.top is None else tuple(outcome.top)
        return StepResult(token=SampledToken(outcome.id, outcome.logprob, top, outcome.end))
    # Copied: the shared rows are overwritten by the batch after the next, while these are still on their way out.
    return StepResult(hidden=tuple(bytes(rows.rows_out(*at)) for at in place.hidden))


def _told_with_all(error: ShardlineError) -> None:
    """Of one batch: `_fail_batches` tells it."""


def _unexpected(answer: Answer) -> ShardlineError:
    return ShardlineError("engine_lost", f"the engine worker gave the wrong kind of answer ({type(answer).__name__})")
