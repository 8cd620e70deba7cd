"""From one generation request to its Route Session: admission, routing, opening, tokens, the end.

Owns the running generations of a Gateway and their tasks, and the order of phases. Tells the Tracker each outcome.
Refuses to know HTTP and text. Shown by tests/gateway/test_session.py and tests/cluster/.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator

import structlog

from shardline.errors import ShardlineError
from shardline.gateway.admission import CAPACITY_CODES, Admission
from shardline.gateway.avoided import Avoided
from shardline.gateway.generate_api import FinishedEvent, GenerationEvent, GenerationRequest, TextsEvent, TokensEvent
from shardline.gateway.liveness import Liveness
from shardline.gateway.metrics import GatewayMetrics, ended_session
from shardline.gateway.reuse import HotRoutes, gone_on, prefix_of
from shardline.gateway.served_models import ServedModels
from shardline.gateway.session import RouteSession
from shardline.gateway.upstream_session import UpstreamSession
from shardline.gateway.verdicts import RETRY_AFTER_S, of_tracker
from shardline.settings import Settings
from shardline.telemetry.records import Record, Records, not_running
from shardline.transport.carrier import Carrier
from shardline.transport.http_client import HttpClient
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import ModelInfo, RouteAnswer, RouteRequest
from shardline.wire.prefix import Prefix
from shardline.wire.telemetry import TelemetryEvent

log = structlog.get_logger(__name__)
_ADMISSIONS = 256
"""Queues of models that are kept without being used."""
_CLOSE_S = 0.25
"""How long the end of an answer waits for the last numbers of its Nodes."""


class RunningGeneration:
    """One choice of one request. Implements `Generation`."""

    def __init__(self, owner: RouteGenerations, request: GenerationRequest, record: Record) -> None:
        self.id = record.id
        self._owner = owner
        self._request = request
        self._record = record
        self._events: deque[GenerationEvent] = deque()
        self._telemetry_due = False
        self._reported = False
        self._wake = asyncio.Event()
        self._opened = asyncio.Event()
        self._begun = False
        self._ending = asyncio.Event()
        self._end_as: str | None = None
        self._ended = asyncio.Event()
        self._failure: ShardlineError | None = None
        self._session: RouteSession | None = None
        self._named: Prefix | None = None
        self._generated: list[int] = []
        record.cancel = self.end_cancelled

    # ---- for the API -----------------------------------------------------------------------------------------

    async def wait_open(self) -> None:
        await self._opened.wait()
        if self._failure is not None and not self._begun:
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        """Tokens and telemetry as they come, then one `FinishedEvent`; raises the failure behind the last token."""
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                if isinstance(event, FinishedEvent):
                    return
            if self._telemetry_due:
                self._telemetry_due = False
                yield self.telemetry()
                continue
            if self._failure is not None:
                raise self._failure
            if self._ended.is_set():
                return
            self._wake.clear()
            await self._wake.wait()

    async def cancel(self, reason: str) -> None:
        self.end_cancelled(reason)
        if self._failure is None:  # a failure was told already: nobody waits for what is still closed behind it
            await self._ended.wait()

    async def stop(self, generated: int) -> None:
        """What was computed beyond the text is dropped. Waits for slow Nodes as little as any end."""
        self._record.counted(generated)
        self._end("completed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._ended.wait()

    async def ended(self) -> None:
        """Return when all is closed and the record says how it ended."""
        await self._ended.wait()

    def telemetry(self) -> TelemetryEvent:
        return self._record.snapshot()

    def timings(self) -> dict[str, float | None]:
        return self._record.timings()

    # ---- the run ---------------------------------------------------------------------------------------------

    def end_cancelled(self, reason: str) -> None:
        """By its owner, or before it began."""
        self._end("cancelled")

    def shut_down(self) -> None:
        """The Gateway stops: the client gets an error, not an answer that looks whole."""
        self._end("failed")

    def _end(self, how: str) -> None:
        if self._end_as is None and not self._ended.is_set():
            self._end_as = how
            self._ending.set()

    def _emit(self, event: GenerationEvent) -> None:
        self._events.append(event)
        self._wake.set()

    async def run(self) -> None:
        """From queued to ended; raises nothing. All tasks of the session live and die in here."""
        try:
            if not self._ending.is_set():  # else it was ended before it began
                await self._run()
        except Exception as error:
            # The boundary of one generation: a fault of ours ends this session, not the Gateway.
            self._fault(error)
        except asyncio.CancelledError:
            self._end_as = self._end_as or "failed"
            raise
        finally:
            if self._session is not None:
                self._session.unwatch()  # also where a fault of ours, or the end of the Gateway, left it unclosed
            self._conclude()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            telemetry = tasks.create_task(self._forward_telemetry())
            work = tasks.create_task(self._work(tasks))
            ending = tasks.create_task(self._ending.wait())
            await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
            for task in (work, ending):
                task.cancel()
            await asyncio.wait({work, ending})
            if self._session is not None:
                await self._session.close(keep=self._end_as == "completed")
            telemetry.cancel()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        """What is done for the client. A failure is told at once; closing the Nodes comes after."""
        try:
            await self._generate(tasks)
        except ShardlineError as error:
            if self._end_as is None:
                self._tell_failure(error)
        except Exception as error:
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        log.exception("generation_failed", exc_info=error, session=self.id)
        if self._failure is None:
            self._tell_failure(ShardlineError("internal", "the Gateway failed at this generation", session=self.id))

    def _tell_failure(self, error: ShardlineError) -> None:
        """To the client and to the Tracker, before anything is closed: the next request must not take the same way."""
        self._failure = error
        self._record.fail(error)
        self._opened.set()
        self._wake.set()
        self._report()

    def _report(self) -> None:
        """How the session ended, once."""
        if self._reported or self._session is None:
            return
        self._reported = True
        try:
            self._owner.report(self._session, self._record.phase)
        except Exception as error:
            log.exception("report_failed", exc_info=error, session=self.id)

    def _conclude(self) -> None:
        """Nothing runs any more: say how it ended, to whoever waits first of all."""
        if self._failure is None and self._end_as == "failed":
            reason = "the Gateway was stopped by its operator"
            self._tell_failure(ShardlineError("draining", reason, limit="drain"))
        elif self._failure is None and self._end_as == "cancelled":
            self._failure = ShardlineError("cancelled", "the request was cancelled", session=self.id)
            self._record.enter("cancelled")
        else:
            self._record.enter("completed")
            self._remember()
        self._opened.set()
        self._ended.set()
        self._wake.set()
        self._record.cancel = not_running
        self._report()
        self._owner.ended(self._record)

    def _remember(self) -> None:
        """Where the Nodes have kept what this session computed."""
        if self._session is not None and self._named is not None and self._failure is None:
            left = gone_on(self._named, self._request.prompt, self._generated)
            nodes = (hop.node for hop in self._session.route.hops)
            self._owner.hot.add(self._request.content_id, left, nodes)

    async def _generate(self, tasks: asyncio.TaskGroup) -> None:
        admission = self._owner.admission(self._request.model)
        session = await admission.admit(lambda: self._try(tasks), self._record.queued_at)
        self._record.enter("prefill")
        try:
            async with asyncio.timeout(self._owner.settings.session_s):
                finished = await (
                    self._pass_on(session) if isinstance(session, UpstreamSession) else self._compute(session, tasks)
                )
        except TimeoutError:
            raise ShardlineError("deadline", "the session took too long", limit="session") from None
        if finished is not None:
            # Whoever reads the last event finds the record whole and the KV free, unless a Node is slow to close.
            closing = tasks.create_task(session.close(keep=True))
            await asyncio.wait({closing}, timeout=_CLOSE_S)
            self._record.enter("completed")
            self._emit(finished)

    def _begin(self) -> None:
        """From here on a failure is one of an answer that has begun."""
        self._begun = True
        self._opened.set()

    async def _compute(self, session: RouteSession, tasks: asyncio.TaskGroup) -> FinishedEvent | None:
        """Push the prompt, take the tokens."""
        self._begin()
        prefill = tasks.create_task(session.prefill())
        try:
            while tokens := await session.next_tokens():
                for token in tokens:
                    self._record.token()
                    self._generated.append(token.id)
                self._emit(TokensEvent(tokens=tokens))
        finally:
            prefill.cancel()
        finished = session.finished
        if finished is None:
            return None
        self._record.counted(finished.generated)
        return FinishedEvent(reason=finished.reason, generated=finished.generated, embedded=session.embedded)

    async def _pass_on(self, session: UpstreamSession) -> FinishedEvent | None:
        """The request is there already: take what its upstream makes of it."""
        await session.taken()
        self._begin()
        while texts := await session.next_texts():
            self._record.text()
            self._emit(TextsEvent(texts=texts))
        return session.ending()

    async def _try(self, tasks: asyncio.TaskGroup) -> RouteSession:
        try:
            return await self._open(tasks)
        except ShardlineError as error:
            if error.code in CAPACITY_CODES:
                self._record.enter("queued")  # again, or still: whoever refused it, the Tracker or a Node
            raise

    async def _open(self, tasks: asyncio.TaskGroup) -> RouteSession:
        """One try: route, tickets, all Nodes. What it opened is closed again before a refusal leaves it."""
        owner, request = self._owner, self._request
        self._record.enter("routing")
        prefix = self._prefix()
        answer = await owner.route(
            RouteRequest(
                model=request.content_id,
                kv_tokens=request.kv_tokens,
                gateway=owner.gateway_id,
                avoid_nodes=owner.avoided.nodes(time.monotonic()),
                avoid_links=owner.avoided.links(time.monotonic()),
                reusable_tokens=owner.hot.find(request.content_id, prefix.digests, len(request.prompt))
                if prefix
                else None,
            ),
            called=request.name or request.model,
        )
        self._record.routed(answer.route)
        self._record.enter("opening")
        make = RouteSession if request.call is None else UpstreamSession
        session = make(
            answer=answer,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            prefix=prefix,
            embed=request.embed,
            call=request.call,
            client=owner.client,
            carrier=owner.carrier,
            liveness=owner.liveness,
            record=self._record,
            settings=owner.settings,
            tasks=tasks,
        )
        try:
            await session.open()
        except ShardlineError:
            owner.report(session, "failed")
            raise
        except asyncio.CancelledError:
            owner.report(session, "cancelled")
            raise
        self._session = session
        return session

    def _prefix(self) -> Prefix | None:
        """The same for every try; None: nothing is reused, and nothing kept."""
        if self._owner.settings.prefix_sessions < 1 or not self._request.reuse:
            return None
        if self._named is None:
            self._named = prefix_of(self._request.prompt, self._request.key_id)
        return self._named

    async def _forward_telemetry(self) -> None:
        """One telemetry event is due at most: a reader that is behind gets the newest."""
        while True:
            self._telemetry_due = True
            self._wake.set()
            await self._record.changed()


class RouteGenerations:
    """All generations of one Gateway. Implements `Generations`; `run()` owns the tasks."""

    def __init__(
        self,
        *,
        tracker: TrackerClient,
        client: HttpClient,
        carrier: Carrier,
        records: Records,
        settings: Settings,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self.gateway_id = "g-" + secrets.token_hex(8)
        self.tracker = tracker
        self.client = client
        self.carrier = carrier
        self.records = records
        self.settings = settings
        self.liveness = Liveness(gateway_id=self.gateway_id, client=client, settings=settings)
        self._metrics = metrics or GatewayMetrics()
        self._admissions: dict[str, Admission] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self.avoided = Avoided()
        self._served = ServedModels(tracker)
        self.hot = HotRoutes()
        self._live: set[RunningGeneration] = set()
        self._draining = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await self.liveness.run()
            finally:
                self._tasks = None  # generations that end now tell nobody any more

    def announce(self, model: str, key_id: str) -> str:
        """Begin the record of a Route Session whose prompt is not known yet: its first event is there before any
        Node is asked, also to tokenise. Returns its id, for one `start` or one `withdraw`."""
        record = self.records.new(key_id=key_id, model=model, prompt_tokens=0)
        record.cancel = lambda reason: record.enter("cancelled")  # `start` sees it
        return record.id

    def withdraw(self, session: str, error: ShardlineError | None) -> None:
        """An announced session does not come to be: refused with `error`, or left by its client."""
        record = self.records.find(session)
        if record is None:
            return
        record.cancel = not_running
        if error is not None:
            record.fail(error)
        else:
            record.enter("cancelled")
        self._count(record)

    def start(self, request: GenerationRequest) -> RunningGeneration:
        """Begin at once, as the announced session where there is one. Raises `draining` when nothing can run any
        more."""
        if self._tasks is None:
            stopped = ShardlineError("draining", "the Gateway has stopped", limit="drain")
            if request.session is not None:
                self.withdraw(request.session, stopped)
            raise stopped
        tokens = len(request.prompt)
        announced = None if request.session is None else self.records.find(request.session)
        record = announced or self.records.new(key_id=request.key_id, model=request.model, prompt_tokens=tokens)
        record.prompt_tokens, record.passed_on = tokens, request.call is not None
        record.output = "text" if request.embed is None else "vector"
        generation = RunningGeneration(self, request, record)
        if self._draining:
            generation.shut_down()
        elif request.session is not None and (announced is None or announced.ended is not None):
            generation.end_cancelled("cancelled while its prompt was made")
        self._live.add(generation)
        task = self._tasks.create_task(generation.run())
        task.add_done_callback(lambda _: self._live.discard(generation))
        return generation

    async def drain(self) -> None:
        """Take nothing new; give the running ones `drain_s`, then cancel them."""
        self._draining = True
        deadline = time.monotonic() + self.settings.drain_s
        while self._live and time.monotonic() < deadline:  # noqa: ASYNC110 - many may end, one wait serves all
            await asyncio.sleep(0.05)
        for generation in list(self._live):
            generation.shut_down()
        while self._live and time.monotonic() < deadline + 2.0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def models(self) -> list[ModelInfo]:
        """What the Tracker's routing sees. A request that follows a failure is told what is missing since, not that the
        lost head Node does not answer."""
        try:
            return await self._served.all()
        except ShardlineError as error:
            raise of_tracker(error) from None

    async def route(self, asked: RouteRequest, *, called: str) -> RouteAnswer:
        """A route from the Tracker, for a model that was listed a moment ago, and that the client `called` so."""
        try:
            return await self.tracker.routes(asked)
        except ShardlineError as error:
            told = of_tracker(error, asked=asked.model, called=called)
            if error.code not in ("model_not_found", "model_unavailable"):
                raise told from None
            self._served.doubt()
            if error.code == "model_unavailable":
                raise told from None
            message = f"no Node serves the model '{called[:100]}' now"
            raise ShardlineError("model_unavailable", message, param="model", retry_after=RETRY_AFTER_S) from None

    def admission(self, model: str) -> Admission:
        if model not in self._admissions:
            if len(self._admissions) > _ADMISSIONS:
                self._admissions = {name: queue for name, queue in self._admissions.items() if queue.used}
            self._admissions[model] = Admission(self.settings)
        return self._admissions[model]

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests in the queues of all models."""
        return sum(queue.waiting for queue in self._admissions.values())

    def ended(self, record: Record) -> None:
        """A generation is over: its place is free, its numbers are final."""
        if record.model in self._admissions:
            self._admissions[record.model].freed()
        self._count(record)

    def _count(self, record: Record) -> None:
        session = ended_session(record)
        self._metrics.ended(session)
        log.info("session_ended", session=record.id, status=session.status, code=session.code, tokens=session.tokens)

    # ---- what failed is avoided at once, before the Tracker has heard of it ----------------------------------

    def report(self, session: RouteSession, status: str) -> None:
        """Tell the Tracker how it ended; avoid what failed until the Tracker knows."""
        outcome = session.outcome(status)
        named = self.avoided.failed(outcome, time.monotonic() + self.settings.control_s)
        if outcome.node is not None:
            self.hot.forget(outcome.node)
        if self._tasks is None:
            return
        telling = self._tasks.create_task(self._tell(session, status))
        if named:
            self._served.doubt(telling)

    async def _tell(self, session: RouteSession, status: str) -> None:
        with contextlib.suppress(ShardlineError):
            await self.tracker.outcome(session.route.id, session.outcome(status))
            self.avoided.told(session.outcome(status))
