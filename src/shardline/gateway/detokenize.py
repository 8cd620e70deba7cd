"""Token ids into text that may be shown: whole characters only, nothing of a stop string, no control tokens.

Owns the bytes between two characters, the text between "may begin a stop string" and "does not", and which tokens
belong to text that was shown. It does not end a generation: it says that a stop string has come. How tokens are
split into bytes never changes the text. Pure. Shown by tests/gateway/test_detokenize.py.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardline.errors import ShardlineError
from shardline.wire.messages import TextBundle, Token


class Vocabulary:
    """What the text of a token is. Made once a Model Artifact, shared by all its generations.

    `digest` names the text bundle; empty: it came from no Node.
    """

    def __init__(self, bundle: TextBundle, digest: str = "") -> None:
        self.bundle = bundle
        self.digest = digest
        self.size = len(bundle.pieces)
        self.longest_piece = max(map(len, bundle.pieces), default=1)
        """In bytes: a text of n bytes has at least n / longest_piece tokens."""
        self._hidden = frozenset(bundle.special) | frozenset(bundle.eog)

    @cached_property
    def controls(self) -> dict[bytes, int]:
        """Control tokens that end no answer, by their bytes."""
        return {self.piece(token): token for token in sorted({*self.bundle.special} - {*self.bundle.eog})}

    def shown(self, token: int) -> bytes:
        """The bytes that `token` adds to the text; none for control tokens. A foreign id is `engine_error`."""
        return b"" if token in self._hidden else self.piece(token)

    def piece(self, token: int) -> bytes:
        """The bytes of `token`, control tokens included."""
        if not 0 <= token < self.size:
            raise ShardlineError("engine_error", f"the tail sent token id {token}; the vocabulary has {self.size}")
        return self.bundle.pieces[token]

    def text(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.shown, tokens)).decode("utf-8", "replace")

    def control_text(self, token: int | None) -> str:
        """The text of BOS or EOS for a chat template; empty where the model has none."""
        return "" if token is None else self.piece(token).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token that stands in the text. `start`: where in the text (characters)."""

    token: Token
    start: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds: text that is safe to show, and the tokens whose text is now shown to its end."""

    text: str
    tokens: tuple[ShownToken, ...] = ()
    stopped: bool = False
    """A stop string is complete: this is the last text there is."""

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)

    def then(self, other: Delta) -> Delta:
        return Delta(self.text + other.text, self.tokens + other.tokens, other.stopped)


EMPTY = Delta("")


class TextStream:
    """The text of one choice. `push` every token, `finish` at the end, nothing after `stopped`.

    The text ends before the stop string that is complete first; of several that end at the same character, the
    longest counts. So the cut does not depend on how the text is cut into tokens.
    """

    def __init__(
        self, vocabulary: Vocabulary, stops: Sequence[str] = (), marks: Mapping[int, str] | None = None
    ) -> None:
        """`marks`: control tokens that stand in the text all the same, as what, for whoever reads calls out of it."""
        self._vocabulary = vocabulary
        self._marks = marks or {}
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._shown = 0
        """Characters given out; the text known so far has `_shown + len(_held)`."""
        self._waiting: deque[tuple[int, ShownToken]] = deque()
        """Tokens not given out yet, with the number of characters that must be shown before they are."""
        self.stopped = False
        self.stopped_by: str | None = None
        """The stop string that is complete."""

    def push(self, token: Token) -> Delta:
        start = self._shown + len(self._held)
        mark = self._marks.get(token.id)
        if mark is None:
            text = self._decoder.decode(self._vocabulary.shown(token.id))
        else:
            text = self._decoder.decode(b"", final=True) + mark
        # Bytes of a character that is not whole: the token is shown with that character, one further on.
        pending = 1 if self._decoder.getstate()[0] else 0
        self._waiting.append((start + len(text) + pending, ShownToken(token, start)))
        return self._advance(text)

    def finish(self) -> Delta:
        """All that is held back: the generation is over, and no stop string has come."""
        delta = self._advance(self._decoder.decode(b"", final=True))
        if self.stopped:
            return delta
        rest, self._held = self._held, ""
        self._shown += len(rest)
        tokens = tuple(shown for _, shown in self._waiting)
        self._waiting.clear()
        return delta.then(Delta(rest, tokens))

    def _advance(self, text: str) -> Delta:
        self._held += text
        match = self._first_stop()
        if match is not None:
            return self._stop(*match)
        keep = self._held_back()
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        self._shown += len(ready)
        tokens = []
        while self._waiting and self._waiting[0][0] <= self._shown:
            tokens.append(self._waiting.popleft()[1])
        return Delta(ready, tuple(tokens))

    def _stop(self, begin: int, end: int) -> Delta:
        text = self._held[:begin]
        self.stopped_by = self._held[begin:end]
        self._shown += begin
        self._held = ""
        tokens = tuple(shown for _, shown in self._waiting if shown.start < self._shown)
        self._waiting.clear()
        self.stopped = True
        return Delta(text, tokens, stopped=True)

    def _first_stop(self) -> tuple[int, int] | None:
        """Where in the held text the stop string begins, and ends, that is complete first."""
        best: tuple[int, int] | None = None  # end, begin: the earliest end, and of several there the longest
        for stop in self._stops:
            begin = self._held.find(stop)
            if begin >= 0:
                end = begin + len(stop)
                if best is None or (end, begin) < best:
                    best = (end, begin)
        return None if best is None else (best[1], best[0])

    def _held_back(self) -> int:
        """Characters at the end of the held text that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
