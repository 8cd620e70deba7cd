"""A Route Session on a composite Node: the request goes out with the opening, and text comes back instead of tokens.

Owns what such a Node may send, and in which order. Opening, liveness, closing and verdicts are those of every session
(session.py). What its upstream does not tell stays unknown: prompt tokens, positions, times of steps. Shown by
tests/gateway/test_upstream_session.py and tests/cluster/test_composite.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway.generate_api import FinishedEvent
from shardline.gateway.line import Line
from shardline.gateway.session import RouteSession
from shardline.wire.composite import CALLS, Answered, Taken, Text, can_be, chars_of, most_chars
from shardline.wire.messages import Finished, Opened, Progress, StreamEvent, Token

_FOR_CLIENTS = frozenset({"unsupported_parameter", "invalid_value", "context_length_exceeded"})
"""What an upstream, or the Node in front of it, may find wrong with the request itself."""


class UpstreamSession(RouteSession):
    """`open`, then `taken`, then `next_texts` until it is empty: `answered` says how it ended."""

    def __init__(self, **given: Any) -> None:
        """As of `RouteSession`, with its `call`."""
        super().__init__(**given)
        self.answered: Answered | None = None
        self._texts: deque[Text] = deque()
        self._chars_left = most_chars(self._max_tokens)
        self._taken = False
        self._stops = () if self._call is None else self._call.fields.get("stop", ())

    async def open(self) -> None:
        await super().open()
        self._record.reused(0, None)  # whether anything is, the upstream says at the end

    async def taken(self) -> None:
        """Return when the upstream answers, or raise why it will not."""
        while not self._taken and self.failure is None:
            await self._next_change()
        if self.failure is not None and self.answered is None:  # one that is whole has lost nothing
            raise self.failure

    async def next_texts(self) -> list[Text]:
        """What came since the last call; empty when the answer is whole. Raises the failure, behind all that came."""
        while True:
            if self._texts:
                texts = list(self._texts)
                self._texts.clear()
                return texts
            if self.answered is not None:
                return []
            if self.failure is not None:
                raise self.failure
            await self._next_change()

    def ending(self) -> FinishedEvent | None:
        """How the answer ended; its record then has what the upstream has told of its tokens."""
        answered = self.answered
        if answered is None:
            return None
        usage = answered.usage
        if usage is None:
            return FinishedEvent(reason=answered.reason, generated=0, stop=answered.stop)
        self._record.used(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return FinishedEvent(reason=answered.reason, generated=usage.completion_tokens, usage=usage, stop=answered.stop)

    # ---- listening -------------------------------------------------------------------------------------------

    def _take(self, line: Line, event: StreamEvent) -> None:
        if isinstance(event, Token | Finished | Progress):
            self._fail(self._spoiled(line, "tells of tokens"))
        elif not isinstance(event, Taken | Text | Answered):
            super()._take(line, event)
        elif self.failure is None and not self._closing:
            self._moved = line.heard
            self._hear(line, event)

    def _opened(self, line: Line, event: Opened) -> None:
        """Nothing is agreed on but that it is open: no prefix, no grammar."""
        line.answer = msgspec.structs.replace(event, node=line.hop.node)
        self._moved = line.heard

    def _hear(self, line: Line, event: Taken | Text | Answered) -> None:
        if self.answered is not None or self._taken == isinstance(event, Taken):
            self._fail(self._spoiled(line, "sent the parts of an answer out of order"))
        elif isinstance(event, Taken):
            self._taken = True
        elif isinstance(event, Answered):
            self._answer(line, event)
        elif not all(0 <= piece.index < CALLS for piece in event.calls):
            self._fail(self._spoiled(line, "sent a call with a number that none has"))
        else:
            self._chars_left -= chars_of(event)
            if self._chars_left < 0:
                self._fail(self._spoiled(line, "sent more than such an answer has"))
            else:
                self._texts.append(event)

    def _answer(self, line: Line, event: Answered) -> None:
        """What it counts, books and metrics count too; the stop string is one of the request."""
        if event.usage is not None and not can_be(event.usage):
            self._fail(self._spoiled(line, "counts tokens as they cannot be"))
        elif event.stop is not None and event.stop not in self._stops:
            self._fail(self._spoiled(line, "ended at a stop string that was not asked for"))
        else:
            self.answered = event

    def _spoiled(self, line: Line, what: str) -> ShardlineError:
        return ShardlineError("seam_invalid", f"Node {line.hop.node} {what}", node=line.hop.node)

    def _of_node(self, line: Line, said: ShardlineError, *, fallback: str) -> ShardlineError:
        if said.code in _FOR_CLIENTS:
            return ShardlineError(said.code, said.message, param=said.param, advice=said.advice, node=line.hop.node)
        return super()._of_node(line, said, fallback=fallback)

    def _judge_progress(self, now: float) -> None:
        """The Node judges the silence of its upstream, which it hears: also where that adds no text."""

    def _named(self, line: Line) -> str:
        return f"Node {line.hop.node}"

    def _blame(self, error: ShardlineError, line: Line) -> None:
        """It has all layers, and nobody knows how many."""
        error.details["layers"] = None

    def _fail(self, error: ShardlineError) -> None:
        """Where it stood, and how much of it was delivered, in tokens, is not known."""
        for name in ("position", "tokens_delivered"):
            error.details.setdefault(name, None)
        super()._fail(error)
