"""A composite Node's sessions, and the state of the server behind it: from a verified ticket to a freed place.

Owns places (each one whole context, as nobody tells what the upstream really holds), the streams of sessions, and the
watch over the upstream: a lost one ends its sessions at once, and counts for routes again only after a self-test.
What the upstream says is upstream.py's; sockets are composite_app.py's. Shown by tests/cluster/test_composite.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from shardline.errors import ShardlineError
from shardline.model.backend import ShardDescription
from shardline.node.gateway_watch import GatewayWatch, silence_of_gateway
from shardline.node.slots import KvLedger
from shardline.node.stream import SessionStream
from shardline.node.upstream import Upstream
from shardline.settings import Settings
from shardline.telemetry.contained import contained
from shardline.wire.composite import UpstreamCall
from shardline.wire.messages import Beat, Closed, EngineInfo, Failed, Opened, OpenSession, ShardState, Ticket
from shardline.wire.steps import TOKENS_ONLY

log = structlog.get_logger(__name__)
BACKEND: Final = "upstream"
_STREAM_SLACK = 1_024
"""Lines beyond its tokens that a session may have unread: beats while its Gateway pauses."""
_LOOK_S = 1.0
"""Pause between two looks at an upstream that has no session."""
_RETRY_S = 0.5
_RETRY_MOST_S = 8.0
"""Pauses before an upstream is tested again: each time that it fails the test, the next one is twice as long."""
_DOUBTFUL = frozenset({"engine_lost", "deadline", "setting_invalid"})
"""What a session says of an upstream that may be gone, or takes this Node's key no more."""
_LOST = _DOUBTFUL | {"model_not_found"}
"""What a look finds where every session would fail."""
_BUSY = frozenset({"capacity", "resources_exhausted"})
"""What it finds where the upstream, or this Node, has too much to do for the moment."""
_FINAL = frozenset({"model_not_found", "setting_invalid"})
"""Before it was ready for the first time: its operator must correct something."""


@dataclass(slots=True, eq=False)
class _Session:
    key: bytes
    ticket: Ticket
    kv_tokens: int
    """Its place."""
    stream: SessionStream
    task: asyncio.Task[None] | None = None
    closed: bool = False
    """Its Gateway has heard how it ended, or has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """What a composite Node tells of its model. `places`: requests that its upstream is given at a time."""

    model: str
    content_id: str
    places: int
    context_length: int | None = None
    """As the operator says; None: as the upstream says."""
    build: str = ""
    engine_class: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine_class", f"{BACKEND}/{self.model}")

    def engine(self) -> EngineInfo:
        return EngineInfo(
            backend=BACKEND,
            engine_class=self.engine_class,
            build=self.build,
            dtype="",
            quantisation="",
            device="",
            threads=0,
        )

    def description(self, context_length: int) -> ShardDescription:
        """As of a Shard with one layer: how many there are is not known."""
        return ShardDescription(
            model_name=self.model,
            content_id=self.content_id,
            first=0,
            last=1,
            n_layers=1,
            engine=self.engine(),
            layout_in=TOKENS_ONLY,
            layout_out=TOKENS_ONLY,
            kv_bytes_per_token=0,
            weight_bytes=0,
            context_length=context_length,
            vocab_size=0,
            rollback=False,
        )


class CompositeHost:
    """All sessions of one composite Node. `run` works until it is cancelled; its tasks live in `tasks`."""

    def __init__(
        self, *, node_id: str, composite: Composite, upstream: Upstream, settings: Settings, tasks: asyncio.TaskGroup
    ) -> None:
        self.node_id = node_id
        self.composite = composite
        self.state: ShardState = "loading"
        self.reason: str | None = "the upstream was not asked yet"
        self.losses = 0
        self.description: ShardDescription | None = None
        self.ledger = KvLedger(0)
        self.on_change: Callable[[], None] = lambda: None
        self.failure: ShardlineError | None = None
        """Why it can never be ready, before it ever was."""
        self.settled = asyncio.Event()
        """It is ready for the first time, or cannot be."""
        self._upstream = upstream
        self._settings = settings
        self._tasks = tasks
        self._sessions: dict[bytes, _Session] = {}
        self._gateways = GatewayWatch(settings, time.monotonic())
        self._doubt = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    # ---- the upstream ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reach the upstream, test it, watch it, and again after each loss."""
        self._tasks.create_task(self._watch_gateways())
        while True:
            await self._reach()
            if self.failure is not None:
                return
            await self._until_lost()

    async def _reach(self) -> None:
        pause = _RETRY_S
        while True:
            try:
                told = await self._upstream.context_length()
                self._set_state("testing")
                self._describe(told)
                await self._upstream.test()
            except ShardlineError as error:
                if error.code in _FINAL and not self.settled.is_set():
                    self.failure = error
                    self._set_state("failed", error.message)
                    self.settled.set()
                    return
                tested = self.state == "testing"  # which costs the upstream an answer
                pause = min(2 * pause, _RETRY_MOST_S) if tested else _RETRY_S
                self._set_state("loading", error.message)
                await asyncio.sleep(pause)
            else:
                self._doubt.clear()
                self._set_state("ready")
                self.settled.set()
                return

    def _describe(self, told: int | None) -> None:
        context = self.composite.context_length or told
        if context is None:
            raise ShardlineError(
                "setting_invalid",
                "the upstream does not say how long its context is",
                advice="Say it: --context-length TOKENS.",
                param="context_length",
            )
        if self.description is None or self.description.context_length != context:
            self.description = self.composite.description(context)
        self.ledger.capacity = context * self.composite.places

    async def _until_lost(self) -> None:
        """Look at an upstream without sessions; those that run show by themselves whether it lives, and some servers
        give up an answer for the sake of any other request."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._doubt.wait()
            except TimeoutError:
                if self._sessions:
                    continue
            doubted = self._doubt.is_set()
            self._doubt.clear()  # one that comes while it is asked is one more reason to ask
            try:
                await self._upstream.context_length()
            except ShardlineError as error:
                if error.code in _LOST or (doubted and error.code not in _BUSY):
                    self._lose(error)
                    return

    def _lose(self, error: ShardlineError) -> None:
        self.losses += 1
        log.warning("upstream_lost", reason=error.message)
        self._set_state("loading", error.message)
        lost = ShardlineError("engine_lost", f"the upstream was lost: {error.message}")
        for session in list(self._sessions.values()):
            self._fail(session, lost)

    def _set_state(self, state: ShardState, reason: str | None = None) -> None:
        if self.state == "draining" or (self.state, self.reason) == (state, reason):
            return
        self.state, self.reason = state, reason
        self.on_change()

    # ---- sessions --------------------------------------------------------------------------------------------

    def open(self, ticket: Ticket, request: OpenSession) -> SessionStream:
        """Begin a session whose ticket was verified: the upstream is asked at once. Raises what refuses it."""
        if self.state == "draining":
            raise ShardlineError("draining", "this Node is stopping")
        if self.state != "ready" or request.call is None:
            raise ShardlineError("shard_unready", f"the upstream is {self.state}", retry_after=2)
        self._upstream.check(request.call)
        # A whole context of this upstream: the ticket's is the shortest of all Nodes of this name.
        place = max(ticket.kv_tokens, 0 if self.description is None else self.description.context_length)
        self.ledger.reserve(place)
        key = bytes.fromhex(request.key)
        session = _Session(key, ticket, place, SessionStream(limit=2 * request.max_tokens + _STREAM_SLACK))
        self._sessions[key] = session
        self._gateways.opened(ticket.gateway, time.monotonic())
        session.stream.emit(Opened(node=self.node_id, kv_reserved=place))
        session.task = self._tasks.create_task(self._work(session, request.call, request.max_tokens))
        return session.stream

    async def _work(self, session: _Session, call: UpstreamCall, max_tokens: int) -> None:
        """Made here, so that a session that is closed before its task begins leaves nothing that nobody awaits."""
        work = self._answer(session, call, max_tokens)
        await contained(work, "upstream_call", lambda _: self._broken(session))

    async def _answer(self, session: _Session, call: UpstreamCall, max_tokens: int) -> None:
        try:
            await self._upstream.answer(call, max_tokens, session.stream.emit)
        except ShardlineError as error:
            if error.code in _DOUBTFUL:
                self._doubt.set()
            self._fail(session, error)

    def _broken(self, session: _Session) -> None:
        self._fail(session, ShardlineError("internal", "this Node failed at the answer of its upstream"))

    def _fail(self, session: _Session, error: ShardlineError) -> None:
        if session.closed:
            return
        session.stream.emit(Failed(error={"node": self.node_id, "layers": [0, 1], **error.body()}))
        self.close(session.key)

    def close(self, key: bytes) -> bool:
        """End a session, whatever its upstream is doing: the connection to it is cut. Idempotent."""
        session = self._sessions.pop(key, None)
        if session is None:
            return False
        session.closed = True
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()
        self.ledger.release(session.kv_tokens)
        session.stream.emit(Closed(kv_released=session.kv_tokens))
        session.stream.end()
        return True

    # ---- Gateways --------------------------------------------------------------------------------------------

    def beat(self, gateway: str) -> None:
        """A Gateway says that it lives."""
        self._gateways.beat(gateway, time.monotonic())

    async def _watch_gateways(self) -> None:
        """Beat on every stream, and end the sessions of Gateways that fell silent."""
        while True:
            await asyncio.sleep(max(0.0, self._gateways.due - time.monotonic()))
            now = time.monotonic()
            for session in list(self._sessions.values()):
                if session.stream.overflowed:
                    self.close(session.key)
                else:
                    session.stream.emit(Beat())
            silent = self._gateways.silent(now, (s.ticket.gateway for s in self._sessions.values()))
            for session in [s for s in self._sessions.values() if s.ticket.gateway in silent]:
                self._fail(session, silence_of_gateway(self.node_id, self._settings))

    # ---- the end ---------------------------------------------------------------------------------------------

    def close_doors(self) -> None:
        """Take no session any more."""
        self._set_state("draining", "the Node is stopping")

    async def drain(self) -> None:
        """Wait for the running sessions up to `drain_s`, then fail what is left."""
        self.close_doors()
        deadline = time.monotonic() + self._settings.drain_s
        while self._sessions and time.monotonic() < deadline:  # noqa: ASYNC110 - many end, one wait serves all
            await asyncio.sleep(0.05)
        for session in list(self._sessions.values()):
            self._fail(session, ShardlineError("draining", "the Node is stopping", limit="drain"))
