"""Reading a call from the left, while its text still comes: what it is, that it is none, or that more must come first.

Owns the three answers, and JSON values whose end is looked for only in what is new. Whatever is decided on the
beginning of a text stays so, however it goes on: so it does not matter how the text is cut. Pure.
Shown by tests/gateway/test_tools_styles.py.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_PYTHON_DEPTH = 40
BLANK = " \t\r\n"
_OUTSIDE = re.compile(r"""["'{}()\[\]]""")
_INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in ('"', "'")}


class More(Exception):
    """What is there is the beginning of something."""


class No(Exception):
    """It is not what it could have been."""


class _End:
    """Where a value ends that began with a bracket: in JSON, or in Python, which has other quotes and brackets."""

    __slots__ = ("_at", "_depth", "_python", "_quote", "deepest", "end")

    def __init__(self, at: int, *, python: bool) -> None:
        self._at = at
        self._depth = 0
        self._python = python
        self._quote = ""
        self.deepest = 0
        self.end: int | None = None
        """The place behind it, once it is known."""

    def look(self, text: str) -> None:
        while self.end is None:
            found = (_INSIDE[self._quote] if self._quote else _OUTSIDE).search(text, self._at)
            if found is None:
                self._at = len(text)
                return
            sign, place = found[0], found.start()
            if sign == "\\" and place + 1 == len(text):
                self._at = place
                return
            self._at = place + (2 if sign == "\\" else 1)
            self._pass(sign)

    def _pass(self, sign: str) -> None:
        if sign == "\\" or (not self._python and sign in "'()"):
            return
        if sign in "\"'":
            self._quote = "" if self._quote else sign
            return
        self._depth += 1 if sign in "{[(" else -1
        self.deepest = max(self.deepest, self._depth)
        if self._depth == 0:
            self.end = self._at


class Scanner:
    """The text of one possible call. `feed` what comes, then read it again from the beginning: `at` is the place."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.final = False
        """Nothing more comes."""
        self._ends: dict[int, _End] = {}
        self._searched: dict[tuple[str, int], int] = {}

    def feed(self, text: str, *, final: bool) -> None:
        """`text`: all of it so far, the beginning as before."""
        self.text, self.final, self.at = text, final, 0

    @property
    def ended(self) -> bool:
        return self.final and self.at == len(self.text)

    def _wait(self) -> Exception:
        return No() if self.final else More()

    def maybe(self, literal: str) -> bool:
        """Pass `literal`, if it stands here."""
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        rest = self.text[self.at : self.at + len(literal)]
        if literal.startswith(rest) and not self.final:
            raise More
        return False

    def take(self, literal: str) -> None:
        if not self.maybe(literal):
            raise No

    def one_of(self, *literals: str) -> str:
        for literal in literals:
            if self.maybe(literal):
                return literal
        raise No

    def blank(self) -> None:
        """Pass blank space."""
        while self.at < len(self.text) and self.text[self.at] in BLANK:
            self.at += 1
        if self.at == len(self.text) and not self.final:
            raise More

    def until(self, literal: str, limit: int | None = None) -> str:
        """The text in front of the next `literal`, which is passed; at most `limit` characters, where given."""
        key = (literal, self.at)
        place = self.text.find(literal, self._searched.get(key, self.at))
        if place < 0:
            self._searched[key] = max(self.at, len(self.text) - len(literal) + 1)
            if limit is not None and len(self.text) - self.at > limit + len(literal):
                raise No
            raise self._wait()
        found = self.text[self.at : place]
        if limit is not None and len(found) > limit:
            raise No
        self.at = place + len(literal)
        return found

    def bracketed(self, *, python: bool = False) -> str:
        """What stands between a bracket here and the one that closes it, both included. In Python no deeper than its
        parser can safely go."""
        if self.at == len(self.text):
            raise self._wait()
        if self.text[self.at] not in "{[":
            raise No
        found = self._ends.setdefault(self.at, _End(self.at, python=python))
        found.look(self.text)
        if python and found.deepest > _PYTHON_DEPTH:
            raise No
        if found.end is None:
            raise self._wait()
        raw = self.text[self.at : found.end]
        self.at = found.end
        return raw

    def json_object(self) -> str:
        """A JSON object, as it is written."""
        raw = self.bracketed()
        as_object(raw)
        return raw


def as_object(raw: str) -> dict[str, Any]:
    """Raises `No` where `raw` is no JSON object."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise No from None


def begun(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
