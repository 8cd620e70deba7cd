"""Merging of symbols into tokens as llama.cpp does it, in plain Python: SentencePiece by scores, byte pairs by ranks.

Owns the two orders of merging, and what becomes of symbols that are no token. SentencePiece is done here for every
text, because merge lists that libraries derive from scores decide between equal scores in another way; byte pairs only
where a library cannot be asked. Cuts no words and parses no special token. Shown by tests/model/test_merging.py.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

_KEPT_WORDS = 16_384
_KEPT_CHARACTERS = 64

Rank = Callable[[int, int, int], float | None]
"""Of a pair of neighbours [first, middle) and [middle, last): the lowest is merged first; None: never."""


def symbols(length: int, rank: Rank) -> Iterator[tuple[int, int]]:
    """[first, last) of what is left of `length` characters when nothing can be merged; of equal ranks the leftmost is
    merged first."""
    ends = list(range(1, length + 1))  # Of the symbol that begins here; its own begin where it was merged away.
    before = list(range(-1, length - 1))
    pairs: list[tuple[float, int, int, int]] = []

    def propose(first: int, middle: int) -> None:
        if first >= 0 and middle < length:
            order = rank(first, middle, ends[middle])
            if order is not None:
                heapq.heappush(pairs, (order, first, middle, ends[middle]))

    for middle in range(1, length):
        propose(middle - 1, middle)
    while pairs:
        _, first, middle, last = heapq.heappop(pairs)
        if ends[first] != middle or ends[middle] != last:
            continue
        ends[first], ends[middle] = last, middle
        if last < length:
            before[last] = first
        propose(before[first], first)
        propose(first, last)
    first = 0
    while first < length:
        yield first, ends[first]
        first = ends[first]


class SentencePieces:
    """Token ids of a text in which `▁` stands for a space. The vocabulary has a token `<0x00>` to `<0xFF>` for every
    byte."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float]) -> None:
        self._ids = ids
        self._scores = scores
        self._bytes = [ids[f"<0x{byte:02X}>"] for byte in range(256)]
        # Nothing is ever merged across the begin of a word, but behind those characters that have a space behind them
        # in a token.
        joined = {char for text in ids for char in re.findall("[^▁](?=▁)", text)}
        self._begin = re.compile(f"(?<=[^▁{re.escape(''.join(sorted(joined)))}])(?=▁)")
        self._kept: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._begin.split(text):
            ids += self._word(word)
        return ids

    def _word(self, word: str) -> list[int]:
        known = self._kept.get(word)
        if known is None:
            known = self._merged(word)
            if len(word) <= _KEPT_CHARACTERS:
                if len(self._kept) >= _KEPT_WORDS:
                    self._kept.clear()
                self._kept[word] = known
        return known

    def _merged(self, word: str) -> list[int]:
        ids, scores = self._ids, self._scores

        def rank(first: int, middle: int, last: int) -> float | None:
            token = ids.get(word[first:last])
            return None if token is None else -scores[token]

        tokens: list[int] = []
        for first, last in symbols(len(word), rank):
            text = word[first:last]
            token = ids.get(text)
            tokens += [token] if token is not None else [self._bytes[byte] for byte in text.encode()]
        return tokens


class BytePairs:
    """Token ids of one word of a byte-level vocabulary, spelled as the vocabulary spells it."""

    def __init__(
        self,
        ids: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        alphabet: Mapping[int, str],
        *,
        whole_first: bool,
    ) -> None:
        """`merges`: the best first. `alphabet`: the character of every byte. `whole_first`: a word that is a token is
        that token, whatever the merges would make of it."""
        self._ids = ids
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
        self._alphabet = alphabet
        self._whole_first = whole_first

    def encode(self, word: str) -> list[int]:
        word = "".join([self._alphabet[byte] for byte in word.encode()])
        whole = self._ids.get(word) if self._whole_first else None
        if whole is not None:
            return [whole]
        tokens: list[int] = []
        for first, last in symbols(len(word), lambda f, m, e: self._ranks.get((word[f:m], word[m:e]))):
            token = self._ids.get(word[first:last])
            if token is not None:
                tokens.append(token)
            else:
                tokens += [self._ids[char] for char in word[first:last] if char.isascii() and char in self._ids]
        return tokens
