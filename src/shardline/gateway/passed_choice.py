"""A choice whose text comes from another server, ready made: told on as it comes, or calls whole where that is wanted.

Owns the putting together of calls from their pieces, and an id for those that have none. Which pieces there are, the
upstream says; what they mean, nobody here guesses. Shown by tests/cluster/test_composite.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway.choices import Added, Choice, Events
from shardline.gateway.composite_requests import NO_VOCABULARY
from shardline.gateway.detokenize import Delta, TextStream
from shardline.gateway.generate_api import FinishedEvent, Generation, TextsEvent
from shardline.gateway.tools_parts import Call, CallPart, Content, Piece, Reasoning, new_id
from shardline.wire.composite import CallPiece, EndReason, Text
from shardline.wire.telemetry import TelemetryEvent

CallForm = Literal["pieces", "whole", "objects"]
"""How calls are told: as they come; each as one part, at the end; so, and a call only where its arguments are an
object, as clients of other APIs than OpenAI's are given them decoded."""


@dataclass(slots=True)
class _Begun:
    id: str
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    """As they came."""


class PassedChoice(Choice):
    """`chat`: its parts are told apart."""

    def __init__(self, index: int, generation: Generation, *, chat: bool, calls: CallForm) -> None:
        super().__init__(index, generation, TextStream(NO_VOCABULARY))
        self._chat = chat
        self._form = calls
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
                parts = self._at_the_end()
                events.put(Added(self.index, Delta(""), parts))
                lost = self._form == "objects" and not any(isinstance(part, Call) for part in parts)
                return "stop" if event.reason == "tool_calls" and lost else event.reason
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
            part = self._collect(piece)
            if self._form == "pieces":
                parts.append(part)
        return Added(self.index, Delta(text.text), parts)

    def _collect(self, piece: CallPiece) -> CallPart:
        """The piece as it is told on: the first of a call has an id in any case, by which its result comes back."""
        begun = self._calls.get(piece.index)
        told = piece.id
        if begun is None:
            told = piece.id or new_id()
            begun = self._calls[piece.index] = _Begun(told)
        begun.name = begun.name or piece.name or ""
        begun.arguments.append(piece.arguments)
        return CallPart(piece.index, told, piece.name, piece.arguments)

    def _at_the_end(self) -> list[Piece]:
        """Calls in the order of their numbers. One that was cut off is none where an object is wanted, and shown as the
        text that there is."""
        if self._form == "pieces":
            return []
        parts: list[Piece] = []
        for index, begun in sorted(self._calls.items()):
            arguments = "".join(begun.arguments)
            if self._form == "objects":
                arguments = arguments.strip() or "{}"
                if not _is_object(arguments):
                    parts.append(Content(arguments))
                    continue
            parts.append(Call(index, begun.id, begun.name, arguments))
        return parts


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
