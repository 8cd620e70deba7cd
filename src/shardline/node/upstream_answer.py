"""The answer of an upstream, line by line: an event stream of OpenAI's API into the events of a session's stream.

Owns what a chunk may look like, how much of it there may be, and when an answer is whole. What an upstream sends is a
stranger's: nothing of it is believed beyond its shape. Pure: it reads bytes and has no clock. Shown by
tests/node/test_upstream_answer.py.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from shardline.errors import ShardlineError
from shardline.telemetry.log_tail import printable
from shardline.wire.composite import (
    CALLS,
    Answered,
    CallPiece,
    EndReason,
    Taken,
    Text,
    UpstreamUsage,
    can_be,
    chars_of,
    most_chars,
)

_REASONS: dict[str, EndReason] = {reason: reason for reason in get_args(EndReason)} | {"function_call": "tool_calls"}
_WORDS_CHARS = 500
_FIELDS = (b":", b"event:", b"id:", b"retry:")
"""Lines of an event stream that carry no data."""
Event = Taken | Text | Answered


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """vLLM: the stop string, or the id of the stop token."""


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Reasoned(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoned | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    kind: str | None = msgspec.field(default=None, name="object")
    """`error`: the chunk is one, as some servers write it."""


_chunks = msgspec.json.Decoder(_Chunk)


class UpstreamAnswer:
    """The events of one answer of at most `max_tokens`. `push` each line; `end` when the stream is over. `secret`: what
    no word of an error may quote."""

    def __init__(self, max_tokens: int, stops: tuple[str, ...] = (), secret: str | None = None) -> None:
        self._secret = secret
        self._chars_left = most_chars(max_tokens)
        self._stops = stops
        self._reason: EndReason | None = None
        self._stop: str | None = None
        self._usage: UpstreamUsage | None = None
        self._called = False
        self._begun = False
        self.done = False
        """The answer is whole: what may follow is of no interest."""

    @property
    def complete(self) -> bool:
        """It has said why it ended: a stream that breaks now has lost nothing but, perhaps, its usage."""
        return self._reason is not None

    def push(self, line: bytes) -> list[Event]:
        """What `line` adds. Raises `engine_error` for what is no chunk of an answer, and what the upstream says."""
        line = line.removesuffix(b"\r")
        if self.done or not line or line.startswith(_FIELDS):
            return []
        if not line.startswith(b"data:"):
            raise _no_answer("a line that is none of an event stream")
        data = line[5:].strip()
        if data == b"[DONE]":
            return [self.end()]
        try:
            chunk = _chunks.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise _no_answer("a chunk that is none of an answer") from None
        if bytes(chunk.error) not in (b"", b"null"):
            raise ShardlineError("engine_error", f"the upstream failed: {words_of(bytes(chunk.error), self._secret)}")
        if chunk.kind == "error":
            raise ShardlineError("engine_error", f"the upstream failed: {words_of(data, self._secret)}")
        return self._read(chunk)

    def end(self) -> Answered:
        """The stream is over. Raises `engine_lost` where the answer is not."""
        if self._reason is None:
            raise ShardlineError("engine_lost", "the upstream ended its answer in the middle")
        self.done = True
        reason: EndReason = "tool_calls" if self._called and self._reason == "stop" else self._reason
        return Answered(reason=reason, usage=self._usage, stop=self._stop)

    def _read(self, chunk: _Chunk) -> list[Event]:
        events: list[Event] = [] if self._begun else [Taken()]
        self._begun = True
        if len(chunk.choices) > 1 or any(choice.index for choice in chunk.choices):
            raise _no_answer("several choices, where one was asked for")
        for choice in chunk.choices:
            text = self._text(choice)
            if text is not None:
                events.append(text)
            self._finish(choice)
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        return events

    def _text(self, choice: _Choice) -> Text | None:
        delta = choice.delta or _Delta()
        text = Text(
            text=(delta.content or "") + (delta.refusal or "") + (choice.text or ""),
            reasoning=delta.reasoning_content or delta.reasoning or "",
            calls=[_piece(call) for call in delta.tool_calls or []],
        )
        if text == Text():
            return None
        if self._reason is not None:
            raise _no_answer("text behind the end of its answer")
        self._called = self._called or bool(text.calls)
        self._chars_left -= chars_of(text)
        if self._chars_left < 0:
            raise _no_answer("more than the tokens that were asked for can hold")
        return text

    def _finish(self, choice: _Choice) -> None:
        if not choice.finish_reason:  # some servers have an empty one in every chunk
            return
        reason = _REASONS.get(choice.finish_reason)
        if reason is None:
            raise ShardlineError(
                "engine_error", f"the upstream ended its answer as {printable(choice.finish_reason, 40)!r}"
            )
        self._reason = reason
        self._stop = choice.stop_reason if choice.stop_reason in self._stops else None


def _piece(call: _Call) -> CallPiece:
    if not 0 <= call.index < CALLS:
        raise _no_answer(f"a call with the index {call.index}")
    function = call.function or _Function()
    return CallPiece(index=call.index, id=call.id, name=function.name, arguments=function.arguments or "")


def _usage(told: _Usage) -> UpstreamUsage:
    cached = None if told.prompt_tokens_details is None else told.prompt_tokens_details.cached_tokens
    reasoned = None if told.completion_tokens_details is None else told.completion_tokens_details.reasoning_tokens
    usage = UpstreamUsage(
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens,
        cached_tokens=cached,
        reasoning_tokens=reasoned,
    )
    if not can_be(usage):
        raise _no_answer("a usage that cannot be")
    return usage


def _no_answer(what: str) -> ShardlineError:
    return ShardlineError("engine_error", f"the upstream sent {what}")


def words_of(body: bytes, secret: str | None = None) -> str:
    """What an error object, or the body around one, says to people, but for `secret`; of anything else nothing."""
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "no reason given"
    for _ in range(2):
        if isinstance(said, dict):
            said = said.get("error", said.get("message", said.get("detail")))
    if not isinstance(said, str) or not said:
        return "no reason given"
    return printable(said.replace(secret, "[key]") if secret else said, _WORDS_CHARS)
