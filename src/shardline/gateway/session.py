"""One Route Session, seen from the Gateway: open on every Node, prefill, listen, close on every Node.

Owns the session key, the open streams, and the verdict on what went wrong. A failure is final: nothing is repaired or
repeated here. Text, admission and HTTP answers are others'. Shown by tests/gateway/test_session.py and the fault
table in tests/cluster/.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from shardline.errors import CATALOGUE, ShardlineError, from_body
from shardline.gateway.agreed import check_agreed, check_embedded
from shardline.gateway.line import Line
from shardline.gateway.liveness import Liveness
from shardline.gateway.reuse import Start, check_opened, start_of
from shardline.gateway.verdicts import of_node
from shardline.settings import Settings
from shardline.telemetry.records import Record
from shardline.transport.carrier import Carrier
from shardline.transport.failures import HttpFailure, OwnLack
from shardline.transport.http_client import HttpClient
from shardline.wire.composite import UpstreamCall
from shardline.wire.messages import (
    Beat,
    Closed,
    Embed,
    Embedded,
    Failed,
    Finished,
    Opened,
    OpenSession,
    Outcome,
    Progress,
    Route,
    RouteAnswer,
    Sampling,
    StreamEvent,
    Ticket,
    Token,
)
from shardline.wire.prefix import Prefix
from shardline.wire.steps import (
    FLAG_LAST_CHUNK,
    FLAG_OUTPUT,
    FLAG_ROLLBACK,
    LANE_PREFILL,
    TOKENS_ONLY,
    Entry,
    Step,
    encode,
)
from shardline.wire.tickets import peek

_BLAMED_NODE = frozenset({"node_lost", "engine_lost", "numerical_error"})
log = structlog.get_logger(__name__)
_events = msgspec.json.Decoder(StreamEvent)
_CLOSE_S = 1.0
"""How long a Node may take to say `closed` before its connection is cut, which means the same."""
_BREAK_GRACE_S = 0.3
"""How long a failed push waits for the news that its target is gone altogether."""


class RouteSession:
    """One session on one route. `tasks` is the group in which its tasks live. `prefix`: what Nodes may have of its
    prompt already; None: they are not asked, and keep nothing of it."""

    def __init__(
        self,
        *,
        answer: RouteAnswer,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        prefix: Prefix | None,
        embed: Embed | None = None,
        call: UpstreamCall | None = None,
        client: HttpClient,
        carrier: Carrier,
        liveness: Liveness,
        record: Record,
        settings: Settings,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.route: Route = answer.route
        self.failure: ShardlineError | None = None
        self.finished: Finished | None = None
        self.embedded: Embedded | None = None
        self._tickets = answer.tickets
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._prefix = prefix
        self._embed = embed
        self._call = call
        self._start_at = Start()
        self._client = client
        self._context = contextvars.copy_context()
        """Of the request: what begins in a socket's read would know nothing of it."""
        self._carrier = carrier
        self._liveness = liveness
        self._record = record
        self._settings = settings
        self._tasks = tasks
        self._key = secrets.token_bytes(16)
        self._urls = [hop.url for hop in self.route.hops]
        now = time.monotonic()
        self._lines = [Line(hop, now) for hop in self.route.hops]
        self._tokens: deque[Token] = deque()
        self._changed = asyncio.Event()
        self._pending_verdict = False
        self._closing = False
        self._moved = now
        """When any hop last got further."""
        self._next_index = 0
        self._closed = asyncio.Event()

    # ---- opening ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open on all Nodes, in parallel. All or nothing: a refusal closes the others and is raised."""
        self._liveness.watch(self, self._urls)
        try:
            for line, ticket in zip(self._lines, self._tickets, strict=True):
                line.task = self._tasks.create_task(self._hold(line, ticket))
            async with asyncio.timeout(self._settings.open_s):
                while self.failure is None and not all(line.opened for line in self._lines):
                    await self._next_change()
        except TimeoutError:
            late = next((line for line in self._lines if not line.opened), None)
            if late is not None:  # else the last answer came together with the end of the limit
                self._fail(self._lost(late, "did not open the session in time", limit="open"))
        except BaseException:
            await self.close()
            raise
        if self.failure is not None:
            if self.failure.code in ("node_lost", "deadline"):
                # The client hears of it now; a Node that does not answer is given its second beside that.
                self._tasks.create_task(self.close())
            else:
                await self.close()
            raise self.failure
        answers = [line.answer for line in self._lines if line.answer is not None]
        self._start_at = start_of(answers, len(self._prompt), asked=self._prefix is not None)
        self._record.reused(self._start_at.position, self._start_at.reason)

    async def _hold(self, line: Line, ticket: str) -> None:
        """Keep the stream of one hop open; its lines arrive in `_heard`, straight from the socket."""
        terms = peek(ticket, Ticket)
        request = OpenSession(
            ticket=ticket,
            key=self._key.hex(),
            prompt_tokens=len(self._prompt),
            max_tokens=self._max_tokens,
            sampling=self._sampling,
            layout_in=terms.layout_in,
            layout_out=terms.layout_out,
            prefix=self._prefix,
            embed=self._embed,
            call=self._call,
        )
        try:
            async with self._client.stream(
                "POST",
                f"{line.hop.url}/v1/sessions",
                body=msgspec.json.encode(request),
                content_type="application/json",
                timeout_s=self._settings.open_s,
                limit="open",
                on_line=lambda raw: self._heard(line, raw),
            ) as stream:
                if stream.status >= 400:
                    self._fail(self._of_node(line, await stream.error(), fallback="node_refused"))
                    return
                if stream.status != 200:
                    self._fail(self._lost(line, f"answered with status {stream.status}"))
                    return
                failure = await stream.ended()
            if not line.ended:
                why = failure.brief if isinstance(failure, HttpFailure) else "without a word"
                self._fail(self._lost(line, f"ended the session's stream ({why})"))
        except OwnLack as failure:
            self._fail(failure.error())
        except HttpFailure as failure:
            log.info("node_not_reached", node=line.hop.node, reason=str(failure))
            self._fail(self._lost(line, f"is not reached ({failure.brief})"))
        finally:
            line.ended = True
            self._changed.set()

    def _lost(self, line: Line, why: str, **details: Any) -> ShardlineError:
        return ShardlineError("node_lost", f"{self._named(line)} {why}", node=line.hop.node, **details)

    def _named(self, line: Line) -> str:
        return f"Node {line.hop.node} ({line.hop.first}:{line.hop.last})"

    # ---- listening -------------------------------------------------------------------------------------------

    def _heard(self, line: Line, raw: bytes) -> None:
        line.heard = time.monotonic()
        try:
            event = _events.decode(raw)
        except (msgspec.MsgspecError, RecursionError):
            error = ShardlineError("node_lost", f"Node {line.hop.node} sent what is no event", node=line.hop.node)
            self._fail(error)
            return
        self._take(line, event)
        self._changed.set()

    def _take(self, line: Line, event: StreamEvent) -> None:
        is_tail = line.hop.index == len(self._lines) - 1
        match event:
            case Token():
                if is_tail and self.failure is None and not self._closing:
                    self._check_token(line, event)
            case Beat() | Progress():
                self._advanced(line, event, is_tail)
            case Opened():
                self._opened(line, event)
            case Embedded():
                if is_tail and self.failure is None and not self._closing:
                    self._take_vector(event)
            case Finished():
                if is_tail and self.failure is None and not self._closing:
                    self._check_finished(line, event)
            case Failed():
                line.failed = line.ended = True
                self._node_failed(line, event)
            case Closed():
                line.closed = line.ended = True
                if not self._closing and self.failure is None and not self._pending_verdict:
                    self._fail(self._lost(line, "closed the session by itself"))

    def _opened(self, line: Line, event: Opened) -> None:
        try:
            check_opened(event, len(self._prompt))
            if line.hop.index == len(self._lines) - 1:
                check_agreed(event, self._sampling, self._embed, node=line.hop.node)
        except ShardlineError as error:
            self._fail(self._of_node(line, error, fallback="seam_invalid"))
            return
        line.answer = msgspec.structs.replace(event, node=line.hop.node)
        self._moved = line.heard

    def _advanced(self, line: Line, event: Beat | Progress, is_tail: bool) -> None:
        """A Node says how far it is."""
        index = line.hop.index
        self._record.hop_times(index, event.times)
        if event.position > line.position:
            line.position = event.position
            self._record.hop_position(index, event.position)
            self._moved = line.heard
        if isinstance(event, Beat):
            self._record.hop_health(index, "ok")
            self._record.seam(index, event.prefill, event.decode)
            self._record.catch_up()
        if is_tail:
            self._record.prefilled(event.position)

    def _check_token(self, line: Line, token: Token) -> None:
        if not 0 <= token.id < self.route.vocab_size:
            message = f"Node {line.hop.node} sent token id {token.id}, the vocabulary has {self.route.vocab_size}"
            self._fail(ShardlineError("seam_invalid", message, node=line.hop.node))
            return
        if token.index != self._next_index or token.index >= self._max_tokens:
            message = f"Node {line.hop.node} sent token {token.index} of {self._max_tokens}, {self._next_index} is next"
            self._fail(ShardlineError("seam_invalid", message, node=line.hop.node))
            return
        self._next_index += 1
        self._moved = line.heard
        self._record.hop_times(line.hop.index, token.times)
        self._tokens.append(token)

    def _take_vector(self, event: Embedded) -> None:
        line = self._lines[-1]
        try:
            check_embedded(event, line.answer, self._embed)
        except ShardlineError as error:
            self._fail(self._of_node(line, error, fallback="seam_invalid"))
            return
        self.embedded, self.finished = event, Finished(reason="stop", generated=0)

    def _check_finished(self, line: Line, finished: Finished) -> None:
        """What is counted, and may be billed, is what came; with `stop` an id more, which counts and is not sent."""
        if self._embed is not None:
            message = f"Node {line.hop.node} ends without the vector that it was asked for"
            self._fail(ShardlineError("seam_invalid", message, node=line.hop.node))
            return
        came = self._next_index + (finished.reason == "stop")
        if finished.generated != came:
            message = f"Node {line.hop.node} counts {finished.generated} tokens at its end, {came} came"
            self._fail(ShardlineError("seam_invalid", message, node=line.hop.node))
            return
        self.finished = finished

    def _node_failed(self, line: Line, event: Failed) -> None:
        error = self._of_node(line, from_body(event.error, fallback="engine_error"), fallback="engine_error")
        if error.code != "seam_lost":
            self._fail(error)
            return
        target = next((x for x in self._lines if x.hop.node == error.details["to"]), None)
        if self.failure is None and not self._pending_verdict:
            self._start(self._arbitrate(error, target))

    def _of_node(self, line: Line, said: ShardlineError, *, fallback: str) -> ShardlineError:
        nodes = [x.hop.node for x in self._lines]
        return of_node(said, node=line.hop.node, nodes=nodes, opened=line.opened, fallback=fallback)

    async def _arbitrate(self, error: ShardlineError, target: Line | None) -> None:
        """A push failed. If its target is dead or silent too, that is the news; else the link between them is."""
        deadline = time.monotonic() + _BREAK_GRACE_S
        while target is not None and self.failure is None and not self._closing:
            now = time.monotonic()
            if target.failed:
                break  # both ends of a link that is cut notice it, about at the same time
            if target.ended:
                self._fail(self._lost(target, "is gone"))
                return
            silent = now - target.heard > 2 * self._settings.beat_interval_s
            if not silent and now >= deadline:
                break
            await asyncio.sleep(0.05)  # `judge` ends this when the target stays silent
        self._fail(error)

    def judge(self, now: float) -> None:
        """Called by the watch: a Node that has not been heard for too long is lost."""
        if self._closing or self.failure is not None:
            return
        for line in self._lines:
            silent_s = now - line.heard
            if silent_s > self._settings.beat_timeout_s:
                self._record.hop_health(line.hop.index, "lost")
                self._fail(self._lost(line, f"has been silent for {silent_s:.1f} s", limit="heartbeat"))
                return
            if silent_s > 2.5 * self._settings.beat_interval_s:
                self._record.hop_health(line.hop.index, "silent")
        self._judge_progress(now)

    def _judge_progress(self, now: float) -> None:
        """All Nodes beat, but nothing moves: a step has been lost without anybody's knowing."""
        prefill = self._record.phase == "prefill"
        limit_s = self._settings.prefill_chunk_s if prefill else self._settings.step_s
        if now - self._moved > limit_s and self.finished is None:
            limit = "prefill_chunk" if prefill else "step"
            self._fail(ShardlineError("deadline", f"no step was computed for {limit_s:g} s", limit=limit))

    def _fail(self, error: ShardlineError) -> None:
        """The first verdict stands."""
        if self.failure is not None or self._closing:
            return
        error.details.setdefault("phase", self._record.phase)
        lost = next((x for x in self._lines if x.hop.node == error.details.get("node")), None)
        if lost is not None:
            self._blame(error, lost)
            if error.code == "node_lost":
                self._record.hop_health(lost.hop.index, "lost")
        error.details.setdefault("position", self._record.prefill_done + self._record.tokens)
        self.failure = error
        self._changed.set()

    def _blame(self, error: ShardlineError, line: Line) -> None:
        error.details["layers"] = [line.hop.first, line.hop.last]

    async def _next_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    # ---- prefill and tokens ----------------------------------------------------------------------------------

    async def prefill(self) -> None:
        """Push the prompt in chunks to the head, from what all Nodes have on; one that has more goes back with the
        first. Each ack may be withheld until there is room."""
        head = self.route.hops[0]
        begin = self._start_at
        chunk = self.route.prefill_chunk
        total = len(self._prompt)
        for seq, start in enumerate(range(begin.position, total, chunk)):
            if self.failure is not None or self._closing:
                return
            tokens = self._prompt[start : start + chunk]
            last = start + len(tokens) == total
            flags = FLAG_LAST_CHUNK | FLAG_OUTPUT if last else 0
            flags |= FLAG_ROLLBACK if begin.rollback and seq == 0 else 0
            entry = Entry(self._key, seq, start, len(tokens), 0, LANE_PREFILL, flags)
            raw = b"".join(t.to_bytes(4, "little") for t in tokens)
            body = encode([Step(entry, raw, ())], TOKENS_ONLY)
            try:
                ack = await self._carrier.push(
                    head.url, body, timeout_s=self._settings.prefill_chunk_s, limit="prefill_chunk"
                )
            except OwnLack as failure:
                self._fail(failure.error())
                return
            except HttpFailure as failure:
                log.info("head_not_reached", node=head.node, reason=str(failure))
                details = {"from": "gateway", "to": head.node}
                message = f"the head {head.node} did not take a chunk ({failure.brief})"
                self._start(self._arbitrate(ShardlineError("seam_lost", message, **details), self._lines[0]))
                return
            except ShardlineError as error:
                self._fail(self._of_node(self._lines[0], error, fallback="seam_invalid"))
                return
            for reject in ack.rejected:
                if reject.code not in ("duplicate", "session_gone"):
                    code = reject.code if reject.code in CATALOGUE else "seam_invalid"
                    said = ShardlineError(code, reject.message)
                    self._fail(self._of_node(self._lines[0], said, fallback="seam_invalid"))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._pending_verdict = True
        self._tasks.create_task(work, context=self._context.copy())

    async def next_tokens(self) -> list[Token]:
        """Tokens that came since the last call, at least one; empty when the tail has finished. Raises the failure,
        but only after every token that came before it was given out."""
        while True:
            if self._tokens:
                tokens = list(self._tokens)
                self._tokens.clear()
                return tokens
            if self.finished is not None:
                return []
            if self.failure is not None:
                raise self.failure
            await self._next_change()

    # ---- closing ---------------------------------------------------------------------------------------------

    async def close(self, *, keep: bool = False) -> None:
        """Close on every Node, whatever their state; returns when all have freed or a limit has passed. Idempotent.
        `keep`: it ended well, and its caches may stay for prompts that begin alike."""
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._changed.set()
        self.unwatch()
        try:
            async with asyncio.TaskGroup() as group:
                for line in self._lines:
                    if line.task is not None and not line.task.done():
                        group.create_task(self._close_line(line, keep=keep and self.failure is None))
        finally:
            self._closed.set()

    def unwatch(self) -> None:
        """Beat and judge no more. Idempotent; part of `close`."""
        self._liveness.unwatch(self, self._urls)

    async def _close_line(self, line: Line, *, keep: bool) -> None:
        """Ask the Node to close, wait for `closed` on the stream; a stream that does not end is cut."""
        if line.task is None:
            return
        try:
            if line.opened and not line.ended:
                url = f"{line.hop.url}/v1/sessions/{self._key.hex()}{'?keep=1' if keep else ''}"
                with contextlib.suppress(HttpFailure):  # a Node that is gone has freed by that
                    await self._client.request("DELETE", url, timeout_s=_CLOSE_S, limit="close")
                await asyncio.wait({line.task}, timeout=_CLOSE_S)
        finally:
            line.task.cancel()

    def outcome(self, status: str) -> Outcome:
        """What the Tracker should hear of this session."""
        error = self.failure
        if error is None:
            return Outcome(status="cancelled" if status == "cancelled" else "completed", tokens=self._record.tokens)
        link = None
        source, target = error.details.get("from"), error.details.get("to")
        if error.code == "seam_lost" and isinstance(source, str) and isinstance(target, str) and source != "gateway":
            link = (source, target)
        node = error.details.get("node") if error.code in _BLAMED_NODE else None
        return Outcome(
            status="failed",
            code=error.code,
            node=node if isinstance(node, str) else None,
            link=link,
            phase=str(error.details.get("phase")),
            tokens=self._record.tokens,
        )
