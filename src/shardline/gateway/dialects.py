"""A chat answer in the words of another API: the same generation, told under other names.

Owns the order of such an answer (opening, parts, then an end or a failure, never both), its keep-alive, and how errors
of the chat request get the names of the client's own fields. The words are those of responses_answers.py and
anthropic_answers.py. Shown by tests/gateway/test_responses.py and test_anthropic.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog
from starlette.types import Send

from shardline.errors import ShardlineError
from shardline.gateway import sse
from shardline.gateway.choices import Added, Choice, Ended, Events, opened, running
from shardline.gateway.completions import Completions, Prepared
from shardline.gateway.openai_answers import Json, Usage
from shardline.gateway.openai_requests import ChatRequest, chat_request
from shardline.gateway.replies import SESSION_HEADER, WRITE_BYTES, usage_of
from shardline.gateway.tools_parts import CallPart, Content, Part, Piece
from shardline.settings import Settings
from shardline.transport.bodies import send_json

log = structlog.get_logger(__name__)

Event = tuple[str, Json]
"""A named event of a stream, and its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the answer ended: `stop`, `length`, `tool_calls`, or of a composite model `content_filter`; `stop` is the
    stop string that did it, None: none."""

    reason: str
    stop: str | None
    usage: Usage
    telemetry: Any


class Words(Protocol):
    """One answer as its API tells it. What is streamed and what is whole come of the same calls, in this order."""

    def opening(self, usage: Usage) -> list[Event]: ...

    def add(self, part: Part) -> list[Event]: ...

    def end(self, ending: Ending) -> list[Event]: ...

    def fail(self, error: ShardlineError, usage: Usage) -> list[Event]:
        """Instead of `end`, in a stream that has begun."""

    def answer(self) -> Json:
        """The whole of it, after `end`."""


class Dialect:
    """One request of another API. `translate`: its body into that of `POST /v1/chat/completions`, and the words of
    its answer; `names`: what fields of the chat request are called in it."""

    def __init__(
        self,
        completions: Completions,
        translate: Callable[[bytes], tuple[Json, Callable[[], Words]]],
        names: Mapping[str, str],
    ) -> None:
        self._completions = completions
        self._translate = translate
        self._names = names
        self._words: Callable[[], Words] | None = None

    async def prepare(self, body: bytes, key_id: str) -> Prepared:
        """Raises what a chat request raises, in the names of this API."""
        with _renamed(self._names):
            return await self._completions.chat(body, key_id, self._request)

    def reply(self, prepared: Prepared, choices: Sequence[Choice], settings: Settings) -> DialectReply:
        if self._words is None:
            raise ShardlineError("internal", "an answer before its request")
        return DialectReply(prepared, choices[0], settings, self._words())

    def _request(self, body: bytes) -> ChatRequest:
        chat, self._words = self._translate(body)
        asked = {name: value for name, value in chat.items() if value is not None}
        return chat_request(msgspec.json.encode(asked), own=True)


class DialectReply:
    """The answer, streamed or whole. Run `send` once; it cancels what it leaves unfinished."""

    def __init__(self, prepared: Prepared, choice: Choice, settings: Settings, words: Words) -> None:
        self._prepared = prepared
        self._choice = choice
        self._settings = settings
        self._words = words
        self._clock = asyncio.get_running_loop().time
        self._written = self._clock()

    async def send(self, send: Send) -> None:
        """Answer. Raises `ShardlineError` while a status can still go out with it, and for a client that stalls."""
        session = self._choice.generation.id
        headers = [(SESSION_HEADER, session.encode())]
        try:
            async with running([self._choice], limit_s=self._settings.control_s) as events:
                if self._prepared.asked.stream:
                    response = sse.EventResponse(send, stall_s=self._settings.client_stall_s, headers=headers)
                    await self._streamed(events, response)
                else:
                    await self._whole(events)
            if self._prepared.asked.stream:
                await response.end()
            else:
                await send_json(send, self._words.answer(), headers=headers)
        except ShardlineError as error:
            error.details.setdefault("route_sessions", [session])
            raise

    async def _whole(self, events: Events) -> None:
        ended = False
        self._words.opening(self._usage())
        while not ended:
            # Silence is not a fault here: the generation has limits of its own, and fails at them.
            batch = await events.batch(self._settings.keep_alive_comment_s)
            for event in batch.happened if batch else ():
                self._told(event)
                ended = isinstance(event, Ended)

    async def _streamed(self, events: Events, response: sse.EventResponse) -> None:
        try:
            await opened([self._choice], within_s=self._settings.keep_alive_comment_s)
            await response.start()
            await self._write(response, _encoded(self._words.opening(self._usage())))
            await self._follow(events, response)
        except ShardlineError as error:
            if not response.started or error.code == "slow_client":
                raise
            await self._fail(response, error)
        except Exception:
            # The status has gone out: nobody behind this place can still tell the client.
            if not response.started:
                raise
            log.exception("stream_failed", session=self._choice.generation.id)
            await self._fail(response, ShardlineError("internal", "the Gateway failed at this answer"))

    async def _follow(self, events: Events, response: sse.EventResponse) -> None:
        ended = False
        while not ended:
            due = self._written + self._settings.keep_alive_comment_s
            batch = await events.batch(max(0.0, due - self._clock()))
            out = bytearray()
            for event in batch.happened if batch else ():
                out += _encoded(self._told(event))
                ended = isinstance(event, Ended)
                if len(out) >= WRITE_BYTES:
                    # A client that was slow has much to take: it waits here, not in the socket's buffer.
                    await self._write(response, bytes(out))
                    out.clear()
            if not out and self._clock() >= due:
                out += sse.comment("shardline", self._choice.generation.telemetry())
            await self._write(response, bytes(out))

    def _told(self, event: Added | Ended) -> list[Event]:
        if isinstance(event, Added):
            text = event.delta.text
            parts: Sequence[Piece] = event.parts if event.parts is not None else [Content(text)] if text else []
            # No API but OpenAI's is told of calls in pieces: these come whole, behind them.
            return [said for part in parts if not isinstance(part, CallPart) for said in self._words.add(part)]
        return self._words.end(
            Ending(
                reason=event.reason,
                stop=self._choice.stopped_by,
                usage=self._usage(),
                telemetry=self._choice.generation.telemetry(),
            )
        )

    async def _write(self, response: sse.EventResponse, events: bytes) -> None:
        if events:
            await response.write(events)
            self._written = self._clock()

    async def _fail(self, response: sse.EventResponse, error: ShardlineError) -> None:
        delivered = None if self._prepared.passed_on else self._choice.generated
        error.details.setdefault("tokens_delivered", delivered)
        error.details.setdefault("route_sessions", [self._choice.generation.id])
        await self._write(response, _encoded(self._words.fail(error, self._usage())))

    def _usage(self) -> Usage:
        return usage_of(self._prepared, [self._choice])


def _encoded(events: Sequence[Event]) -> bytes:
    return b"".join(sse.named(name, msgspec.json.encode(fields)) for name, fields in events)


@contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """What is wrong with a field of the chat request is told of the field that the client has sent."""
    try:
        yield
    except ShardlineError as error:
        sent = error.param or ""
        name = names.get(sent.partition("[")[0].partition(".")[0])
        if name is None:
            raise
        message = error.message.replace(f"'{sent}'", f"'{name}'")
        raise ShardlineError(error.code, message, param=name, advice=error.advice, **error.details) from None
