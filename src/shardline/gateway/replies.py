"""One answer under way: the choices' events into a stream of chunks, or into one object at the end.

Owns when the status goes out, the rhythm of telemetry and keep-alive, and how an answer ends: finish chunks, usage
and `[DONE]`, or one error event, never both. It does not know how choices are run or what chunks look like.
Shown by tests/gateway/test_app_streams.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog
from starlette.types import Send

from shardline.errors import ShardlineError
from shardline.gateway import sse
from shardline.gateway.choices import Added, Choice, Ended, Events, opened, running
from shardline.gateway.completions import Prepared
from shardline.gateway.detokenize import ShownToken
from shardline.gateway.openai_answers import Json, Usage, WholeChoice, prompt_progress, timings
from shardline.gateway.tools_parts import Piece
from shardline.settings import Settings
from shardline.transport.bodies import send_json
from shardline.wire.telemetry import TelemetryEvent

log = structlog.get_logger(__name__)

SESSION_HEADER = b"shardline-route-session"
WRITE_BYTES = 16 << 10
"""Events that are ready together are written together, up to about so many bytes."""


class Reply:
    """The answer to one request, streamed or whole. Run `send` once; it cancels what it leaves unfinished."""

    def __init__(self, prepared: Prepared, choices: Sequence[Choice], settings: Settings) -> None:
        self._prepared = prepared
        self._choices = choices
        self._settings = settings
        self._envelope = prepared.envelope

    @property
    def sessions(self) -> list[str]:
        """Public ids of the Route Sessions, one for each choice, in order."""
        return [choice.generation.id for choice in self._choices]

    async def send(self, send: Send) -> None:
        """Answer. Raises `ShardlineError` while a status can still go out with it, and for a client that stalls."""
        headers = [(SESSION_HEADER, ",".join(self.sessions).encode())]
        try:
            if self._prepared.asked.stream:
                response = sse.EventResponse(send, stall_s=self._settings.client_stall_s, headers=headers)
                await StreamedReply(self._prepared, self._choices, self._settings, response).send()
            else:
                await send_json(send, await self._whole(), headers=headers)
        except ShardlineError as error:
            error.details.setdefault("route_sessions", self.sessions)
            raise

    async def _whole(self) -> Json:
        texts = [[echo] for echo in self._prepared.echoes]
        tokens: list[list[ShownToken]] = [[] for _ in self._choices]
        parts: list[list[Piece] | None] = [None for _ in self._choices]
        reasons = [""] * len(self._choices)
        left = len(self._choices)
        async with running(self._choices, limit_s=self._settings.control_s) as events:
            while left:
                # Silence is not a fault here: each generation has limits of its own, and fails at them.
                batch = await events.batch(self._settings.keep_alive_comment_s)
                for event in batch.happened if batch else ():
                    if isinstance(event, Added):
                        texts[event.index].append(event.delta.text)
                        tokens[event.index].extend(event.delta.tokens)
                        if event.parts is not None:
                            parts[event.index] = found = parts[event.index] or []
                            found += event.parts
                    else:
                        reasons[event.index] = event.reason
                        left -= 1
        telemetry = [choice.generation.telemetry() for choice in self._choices]
        wholes = [
            WholeChoice(text="".join(text), tokens=shown, finish_reason=reason, telemetry=view, parts=read)
            for text, shown, reason, view, read in zip(texts, tokens, reasons, telemetry, parts, strict=True)
        ]
        usage = usage_of(self._prepared, self._choices)
        answer = self._envelope.whole(wholes, usage, offsets=[len(echo) for echo in self._prepared.echoes])
        if self._prepared.asked.timings_per_token:
            answer["timings"] = timings_of(self._choices[0])
        return answer


class StreamedReply:
    """One stream. Telemetry goes out as comments for everybody, and as chunk fields for those who ask."""

    def __init__(
        self, prepared: Prepared, choices: Sequence[Choice], settings: Settings, response: sse.EventResponse
    ) -> None:
        self._prepared = prepared
        self._asked = prepared.asked
        self._envelope = prepared.envelope
        self._choices = choices
        self._settings = settings
        self._response = response
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._written = self._began
        """When something was last written."""
        self._commented = self._began - settings.telemetry_comment_s
        self._telemetry: dict[int, TelemetryEvent] = {}
        """What has not gone out yet, the choice that waits longest first."""
        self._progress = [-1] * len(choices)
        self._delivered = 0

    async def send(self) -> None:
        async with running(self._choices, limit_s=self._settings.control_s) as events:
            try:
                await opened(self._choices, within_s=self._settings.keep_alive_comment_s)
                self._began = self._clock()
                await self._response.start()
                self._telemetry[0] = self._choices[0].generation.telemetry()
                await self._write(self._opening() + self._account())
                await self._follow(events)
            except ShardlineError as error:
                if not self._response.started or error.code == "slow_client":
                    raise
                await self._fail(error)
            except Exception:
                # The status has gone out: nobody behind this place can still tell the client.
                if not self._response.started:
                    raise
                log.exception("stream_failed", answer=self._envelope.id)
                await self._fail(ShardlineError("internal", "the Gateway failed at this answer"))
        await self._response.end()

    async def _follow(self, events: Events) -> None:
        left = len(self._choices)
        while left:
            batch = await events.batch(self._patience())
            out = bytearray()
            if batch is not None:
                for index, view in batch.telemetry.items():
                    self._telemetry.setdefault(index, view)
                    self._telemetry[index] = view
                    out += self._prompt_progress(index, view)
                for event in batch.happened:
                    out += self._added(event) if isinstance(event, Added) else self._ended(event)
                    left -= isinstance(event, Ended)
                    if len(out) >= WRITE_BYTES:
                        # A client that was slow has much to take: it waits here, not in the socket's buffer.
                        await self._write(bytes(out))
                        out.clear()
            out += self._account()
            if out:
                await self._write(bytes(out))
        out = bytearray()
        if self._asked.include_usage:
            out += sse.data(self._envelope.usage(usage_of(self._prepared, self._choices)))
        await self._write(bytes(out) + sse.DONE)

    def _opening(self) -> bytes:
        out = bytearray()
        for choice, echo in zip(self._choices, self._prepared.echoes, strict=True):
            if self._envelope.chat:
                out += sse.data(self._envelope.opening(choice.index))
            elif echo:
                out += sse.data(self._envelope.delta(choice.index, echo, ()))
        return bytes(out)

    def _added(self, event: Added) -> bytes:
        index, delta = event.index, event.delta
        out = b""
        if self._asked.return_progress:
            # The end of the prefill, should the first token have overtaken it.
            out = self._prompt_progress(index, self._choices[index].generation.telemetry())
        self._delivered += len(delta.tokens)
        for chunk in self._chunks(event):
            if self._asked.timings_per_token:
                chunk["timings"] = timings_of(self._choices[index])
            out += sse.data(chunk)
        return out

    def _chunks(self, event: Added) -> list[Json]:
        """One; or one a part, the tokens with the first."""
        index, delta = event.index, event.delta
        if event.parts is None:
            offset = len(self._prepared.echoes[index])
            return [self._envelope.delta(index, delta.text, delta.tokens, offset=offset)]
        told = delta.tokens if self._envelope.logprobs is not None else ()
        parts: list[Piece | None] = [*event.parts] or ([None] if told else [])
        return [self._envelope.part(index, part, () if n else told) for n, part in enumerate(parts)]

    def _ended(self, event: Ended) -> bytes:
        choice = self._choices[event.index]
        chunk = self._envelope.finish(event.index, event.reason)
        if self._asked.include_telemetry:
            chunk["telemetry"] = choice.generation.telemetry()
        if self._asked.timings_per_token:
            chunk["timings"] = timings_of(choice)
        self._telemetry.pop(event.index, None)
        return sse.data(chunk)

    def _prompt_progress(self, index: int, view: TelemetryEvent) -> bytes:
        """llama-server's chunk, each time that the prefill has come further; nothing behind its end."""
        if not self._asked.return_progress or view.phase in ("queued", "routing", "opening"):
            return b""
        done = view.prefill.done or 0
        if self._progress[index] >= done:
            return b""
        self._progress[index] = done
        progress = prompt_progress(view.prefill, view.prefill.cached or 0, (self._clock() - self._began) * 1e3)
        return sse.data(self._envelope.beside(index, prompt_progress=progress))

    def _account(self) -> bytes:
        """Telemetry when it is due: of one choice at a time, so that many choices make no more noise than one."""
        now = self._clock()
        if self._telemetry and now - self._commented >= self._settings.telemetry_comment_s:
            index, view = next(iter(self._telemetry.items()))
            del self._telemetry[index]
        elif now - self._written >= self._settings.keep_alive_comment_s:
            index, view = 0, self._choices[0].generation.telemetry()
        else:
            return b""
        self._commented = now
        out = sse.comment("shardline", view)
        if self._asked.include_telemetry:
            out += sse.data(self._envelope.beside(index, telemetry=view))
        return out

    def _patience(self) -> float:
        """Seconds until something must be written, should nothing happen."""
        now = self._clock()
        due = self._written + self._settings.keep_alive_comment_s
        if self._telemetry:
            due = min(due, self._commented + self._settings.telemetry_comment_s)
        return max(0.0, due - now)

    async def _write(self, events: bytes) -> None:
        if events:
            await self._response.write(events)
            self._written = self._clock()

    async def _fail(self, error: ShardlineError) -> None:
        """One error event instead of an end: whoever reads it cannot take the answer for a whole one."""
        error.details.setdefault("tokens_delivered", None if self._prepared.passed_on else self._delivered)
        error.details.setdefault("route_sessions", [choice.generation.id for choice in self._choices])
        await self._write(sse.data({"error": error.body()}))


def usage_of(prepared: Prepared, choices: Sequence[Choice]) -> Usage:
    """Each prompt counts once, with what was cached for its first choice; all choices count."""
    firsts = choices[:: prepared.asked.n]
    if prepared.passed_on:
        return _usage_told(firsts, choices)
    return Usage(
        prompt_tokens=prepared.prompt_tokens,
        completion_tokens=sum(choice.generated for choice in choices),
        cached_tokens=sum(choice.generation.telemetry().prefill.cached or 0 for choice in firsts),
        reasoning_tokens=sum(choice.reasoned for choice in choices),
    )


def _usage_told(firsts: Sequence[Choice], choices: Sequence[Choice]) -> Usage:
    """Of a composite model: what its upstream said; known where it did so for all choices."""
    told = [choice.usage for choice in choices if choice.usage is not None]
    begun = [choice.usage for choice in firsts if choice.usage is not None]
    cached = [usage.cached_tokens for usage in begun]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in begun),
        completion_tokens=sum(usage.completion_tokens for usage in told),
        cached_tokens=None if None in cached else sum(count or 0 for count in cached),
        reasoning_tokens=sum(usage.reasoning_tokens or 0 for usage in told),
        known=len(told) == len(choices),
    )


def timings_of(choice: Choice) -> dict[str, Any]:
    prefill, times = choice.generation.telemetry().prefill, choice.generation.timings()
    if prefill.total is None:  # of a composite model: what its upstream has not told
        return dict.fromkeys(timings(0, 0, 0, {}))
    return timings(prefill.total, prefill.cached, choice.generated, times)
