"""The choices of one answer while they run: tokens into text, several generations into one line of events.

Owns a reading task for each choice, the place where events wait for a slow client (at most the tokens that were
asked for, and the newest telemetry), and the promise that every generation is read to its end, stopped or
cancelled. It writes nothing to a client. Shown by tests/gateway/test_choices.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from shardline.errors import ShardlineError
from shardline.gateway.detokenize import EMPTY, Delta, TextStream
from shardline.gateway.generate_api import FinishedEvent, Generation, TextsEvent, TokensEvent
from shardline.gateway.tools_parts import Part, Piece, Reader
from shardline.wire.composite import EndReason, UpstreamUsage
from shardline.wire.messages import Token
from shardline.wire.telemetry import TelemetryEvent

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Added:
    """Choice `index` has more text."""

    index: int
    delta: Delta
    parts: Sequence[Piece] | None = None
    """What of the text is known now, where calls and reasoning are read out of it; it can be behind the delta."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Choice `index` is complete; nothing comes after it."""

    index: int
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Batch:
    """What has come since the last one: the newest telemetry of each choice, then text and ends in order."""

    telemetry: dict[int, TelemetryEvent]
    happened: list[Added | Ended]


class Choice:
    """One generation and its text; `reader`: what is read out of it."""

    def __init__(self, index: int, generation: Generation, text: TextStream, reader: Reader | None = None) -> None:
        self.index = index
        self.generation = generation
        self.generated = 0
        """Tokens that usage counts: up to and including the one that completes a stop string."""
        self.reasoned = 0
        """How many of them were reasoning."""
        self.ended = False
        self.usage: UpstreamUsage | None = None
        """Of a composite model, as its upstream tells it at the end."""
        self._text = text
        self._reader = reader

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None: none has."""
        return self._text.stopped_by

    async def read(self, events: Events) -> None:
        """Read the generation to its end. What goes wrong is told to the reader of `events`, behind the text."""
        try:
            reason = await self._read(events)
        except Exception as error:
            # Carried to whoever writes the answer: only there is it known how an error can still be told.
            events.fail(error)
            return
        self.ended = True
        called = reason == "stop" and self._reader is not None and self._reader.calls > 0
        events.put(Ended(self.index, "tool_calls" if called else reason))

    async def _read(self, events: Events) -> EndReason:
        async for event in self.generation:
            if isinstance(event, TokensEvent):
                added = self._push(event.tokens)
                events.put(added)
                if added.delta.stopped:
                    await self.generation.stop(self.generated)
                    return "stop"
            elif isinstance(event, FinishedEvent):
                self.generated = event.generated
                added = self._finish()
                events.put(added)
                return "stop" if added.delta.stopped else event.reason
            elif not isinstance(event, TextsEvent):
                events.see(self.index, event)
        raise ShardlineError("internal", "a generation ended without saying why", session=self.generation.id)

    def _push(self, tokens: Sequence[Token]) -> Added:
        delta = EMPTY
        parts: list[Part] = []
        for token in tokens:
            self.generated += 1
            more = self._text.push(token)
            delta = delta.then(more)
            if self._reader is not None:
                self.reasoned += self._reader.thinking
                parts += self._reader.push(more.text)
            if delta.stopped:
                break
        if self._reader is None:
            return Added(self.index, delta)
        return Added(self.index, delta, [*parts, *(self._reader.finish() if delta.stopped else ())])

    def _finish(self) -> Added:
        delta = self._text.finish()
        if self._reader is None:
            return Added(self.index, delta)
        return Added(self.index, delta, [*self._reader.push(delta.text), *self._reader.finish()])


class Events:
    """Between the reading tasks and the one that writes. Nothing in here waits for the client."""

    def __init__(self) -> None:
        self._happened: deque[Added | Ended] = deque()
        self._telemetry: dict[int, TelemetryEvent] = {}
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    def put(self, event: Added | Ended) -> None:
        if isinstance(event, Added) and not event.delta and not event.parts:
            return
        self._happened.append(event)
        self._wake.set()

    def see(self, index: int, telemetry: TelemetryEvent) -> None:
        """The older one that nobody took is not missed: each is a whole account."""
        self._telemetry[index] = telemetry
        self._wake.set()

    def fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self._wake.set()

    async def batch(self, silence_s: float) -> Batch | None:
        """All that has come; None when nothing did for `silence_s`. Raises what failed, behind the text before it."""
        if not self._happened and not self._telemetry and self._failure is None:
            self._wake.clear()
            try:
                async with asyncio.timeout(silence_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        if self._failure is not None and not self._happened:
            raise self._failure
        batch = Batch(self._telemetry, list(self._happened))
        self._telemetry = {}
        self._happened.clear()
        return batch


@asynccontextmanager
async def running(choices: Sequence[Choice], *, limit_s: float) -> AsyncIterator[Events]:
    """Read all choices; on the way out, cancel those that have not ended (which takes at most `limit_s`)."""
    events = Events()
    failure: Exception | None = None
    reason = "the client has gone"
    try:
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(choice.read(events)) for choice in choices]
            try:
                yield events
                reason = "the answer has failed"
            except Exception as error:
                # Held back, so that it leaves as itself and not as the task group's.
                failure, reason = error, str(error)
            for reader in readers:
                reader.cancel()
    finally:
        await _cancel(choices, reason, limit_s)
    if failure is not None:
        raise failure


async def opened(choices: Sequence[Choice], *, within_s: float) -> bool:
    """Whether all routes are open within `within_s`; raises the error of the first that will not be."""
    waits = [asyncio.create_task(choice.generation.wait_open()) for choice in choices]
    try:
        done, left = await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_EXCEPTION)
        for wait in done:
            wait.result()
        return not left
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        for wait in waits:
            # Seen, so that nobody is told that it was not: one failure is enough.
            _ = wait.cancelled() or wait.exception()


async def _cancel(choices: Sequence[Choice], reason: str, limit_s: float) -> None:
    left = [choice for choice in choices if not choice.ended]
    if not left:
        return
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
            for choice in left:
                tasks.create_task(choice.generation.cancel(reason))
    except TimeoutError:
        log.warning("generations_still_closing", sessions=[choice.generation.id for choice in left], limit_s=limit_s)
