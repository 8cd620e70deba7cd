"""A choice whose text comes from another server, ready made: told on as it comes, or calls whole where that is wanted.

Owns the putting together of calls from their pieces. Which pieces there are, the upstream says; what they mean, nobody
here guesses. Shown by tests/cluster/test_composite.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardline.errors import ShardlineError
from shardline.gateway.choices import Added, Choice, Events
from shardline.gateway.composite_requests import NO_VOCABULARY
from shardline.gateway.detokenize import Delta, TextStream
from shardline.gateway.generate_api import FinishedEvent, Generation, TextsEvent
from shardline.gateway.tools_parts import Call, CallPart, Content, Piece, Reasoning
from shardline.wire.composite import CallPiece, EndReason, Text
from shardline.wire.telemetry import TelemetryEvent


@dataclass(slots=True)
class _Begun:
    id: str
    name: str
    arguments: str


class PassedChoice(Choice):
    """`chat`: its parts are told apart. `whole_calls`: each call is one part, at the end, for those who take no
    pieces."""

    def __init__(self, index: int, generation: Generation, *, chat: bool, whole_calls: bool) -> None:
        super().__init__(index, generation, TextStream(NO_VOCABULARY))
        self._chat = chat
        self._whole_calls = whole_calls
        self._calls: dict[int, _Begun] = {}
        self._stop: str | None = None

    @property
    def stopped_by(self) -> str | None:
        return self._stop

    async def _read(self, events: Events) -> EndReason:
        async for event in self.generation:
            if isinstance(event, TextsEvent):
                for text in event.texts:
                    events.put(self._added(text))
            elif isinstance(event, FinishedEvent):
                self.usage, self.generated, self._stop = event.usage, event.generated, event.stop
                if event.usage is not None:
                    self.reasoned = event.usage.reasoning_tokens or 0
                events.put(Added(self.index, Delta(""), self._whole()))
                return event.reason
            elif isinstance(event, TelemetryEvent):
                events.see(self.index, event)
        raise ShardlineError("internal", "a generation ended without saying why", session=self.generation.id)

    def _added(self, text: Text) -> Added:
        if not self._chat:
            return Added(self.index, Delta(text.text))
        parts: list[Piece] = []
        if text.reasoning:
            parts.append(Reasoning(text.reasoning))
        if text.text:
            parts.append(Content(text.text))
        for piece in text.calls:
            self._collect(piece)
            if not self._whole_calls:
                parts.append(CallPart(piece.index, piece.id, piece.name, piece.arguments))
        return Added(self.index, Delta(text.text), parts)

    def _collect(self, piece: CallPiece) -> None:
        begun = self._calls.setdefault(piece.index, _Begun("", "", ""))
        begun.id = begun.id or piece.id or ""
        begun.name = begun.name or piece.name or ""
        begun.arguments += piece.arguments

    def _whole(self) -> list[Piece]:
        if not self._whole_calls:
            return []
        return [Call(index, call.id, call.name, call.arguments) for index, call in sorted(self._calls.items())]
