"""What an answer is made of once it has been read: content, reasoning and calls.

Owns the three values, and the ids of calls. Pure, but for the ids, which are random. Shown by
tests/gateway/test_reasoning.py.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass

from shardline.gateway.tools_styles import Called

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One whole call; `index` counts from 0 within an answer. `arguments`: a JSON object, as text."""

    index: int
    id: str
    name: str
    arguments: str


Part = Content | Reasoning | Call


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of a call, as the upstream of a composite Node streams it: `id` and `name` with its first one alone."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Piece = Part | CallPart
"""What may be told of an answer while it comes."""


def new_id() -> str:
    """Nine letters and digits: the one form that Mistral's templates take back."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class Parts:
    """Parts as they are found, neighbours of one kind joined."""

    def __init__(self) -> None:
        self._make_id = new_id
        self._found: list[Part] = []
        self.calls = 0

    def text(self, text: str, *, reasoning: bool) -> None:
        kind = Reasoning if reasoning else Content
        if not text:
            return
        last = self._found[-1] if self._found else None
        if isinstance(last, kind):
            self._found[-1] = kind(last.text + text)
        else:
            self._found.append(kind(text))

    def call(self, called: Called) -> None:
        self._found.append(Call(self.calls, called.id or self._make_id(), called.name, called.arguments))
        self.calls += 1

    def taken(self) -> list[Part]:
        """What was found since the last time."""
        found, self._found = self._found, []
        return found


class Reader(ABC):
    """The text of one answer, read as it comes. However it is cut into pieces, the parts say the same."""

    def __init__(self) -> None:
        self._held = ""
        """What came, and is not read yet."""
        self._parts = Parts()

    @property
    def calls(self) -> int:
        """How many calls were read."""
        return self._parts.calls

    @property
    @abstractmethod
    def thinking(self) -> bool:
        """What comes next is reasoning, as far as is known."""

    @abstractmethod
    def _advance(self, *, final: bool) -> None:
        """Read what can be told of what is held; `final`: no more comes."""

    def push(self, text: str) -> list[Part]:
        self._held += text
        self._advance(final=False)
        return self._parts.taken()

    def finish(self) -> list[Part]:
        """What was held back: the answer is over."""
        self._advance(final=True)
        return self._parts.taken()
