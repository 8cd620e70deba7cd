"""Marks of a model's answers (`<tool_call>`, `<|channel|>` …) as they stand in text, and in grammars.

Owns the difference between a mark that is a control token of the vocabulary, which no text can be mistaken for, and one
that is plain text. A control mark is written between two lone surrogates, which no UTF-8 holds. Pure.
Shown by tests/gateway/test_tools_styles.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from shardline.gateway.detokenize import Vocabulary

_CONTROL = re.compile("\udc00([^\udc01]*)\udc01")
_SPLIT = re.compile("(\udc00[^\udc01]*\udc01)")


class Marks:
    """The marks that one way of calling tools knows, as the vocabulary of one model has them."""

    def __init__(self, vocabulary: Vocabulary, known: Iterable[str]) -> None:
        controls = vocabulary.controls
        self._ids = {mark: controls[piece] for mark in known if (piece := mark.encode()) in controls}
        self.shown = {token: _wrapped(mark) for mark, token in self._ids.items()}
        """Control tokens that a text stream shows, as what."""

    def __call__(self, mark: str) -> str:
        """How `mark` stands in the text."""
        return _wrapped(mark) if mark in self._ids else mark

    def lark(self, text: str) -> str:
        """`text`, with marks in it as `self(mark)` gives them, as a sequence of a Lark grammar."""
        pieces = []
        for piece in _SPLIT.split(text):
            control = _CONTROL.fullmatch(piece)
            if control:
                pieces.append(f"<[{self._ids[control[1]]}]>")
            elif piece:
                pieces.append(json.dumps(piece, ensure_ascii=False))
        return " ".join(pieces)


def without_controls(text: str) -> str:
    """`text` as a client may see it: control tokens are never shown."""
    return _CONTROL.sub("", text)


def _wrapped(mark: str) -> str:
    return f"\udc00{mark}\udc01"
