"""Which neighbours are merged first, and what becomes of what is no token."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

from shardline.model.merging import BytePairs, SentencePieces, symbols

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def pieces(scores: dict[str, float], text: str) -> list[str]:
    ids = BYTES | {token: 256 + i for i, token in enumerate(scores)}
    names = {token: text for text, token in ids.items()}
    return [names[token] for token in SentencePieces(ids, [0.0] * 256 + list(scores.values())).encode(text)]


def test_the_highest_score_is_merged_first() -> None:
    assert pieces({"a": 0, "b": 0, "c": 0, "ab": -2, "bc": -1}, "abc") == ["a", "bc"]
    assert pieces({"a": 0, "b": 0, "c": 0, "ab": -1, "bc": -2}, "abc") == ["ab", "c"]


def test_the_leftmost_of_equal_scores() -> None:
    scores = {"a": 0.0, "aa": -1.0, "aaa": -1.0, "aaaa": -5.0}
    assert pieces(scores, "aaaaa") == ["aaa", "aa"]


def test_what_is_no_token_becomes_bytes() -> None:
    assert pieces({"a": 0}, "aé") == ["a", "<0xC3>", "<0xA9>"]


def test_words_apart_or_not() -> None:
    """A token that holds a space inside is found, and then words are not cut apart."""
    scores = {"▁": -9.0, "a": -9.0, "▁a": -2.0, "a▁": -3.0, "a▁a": -1.0}
    assert pieces(scores, "▁a▁a") == ["▁a", "▁a"]
    assert pieces({**scores, "a▁": -1.5}, "▁a▁a") == ["▁", "a▁a"]


def pairs(merges: list[tuple[str, str]], word: str, whole_first: bool = False) -> list[str]:
    tokens = [*"abcd", *dict.fromkeys(left + right for left, right in merges), "abcd"]
    ids = {token: i for i, token in enumerate(tokens)}
    alphabet = {byte: chr(byte) for byte in range(256)}
    return [tokens[token] for token in BytePairs(ids, merges, alphabet, whole_first=whole_first).encode(word)]


def test_byte_pairs_by_rank() -> None:
    assert pairs([("b", "c"), ("a", "b"), ("a", "bc")], "abc") == ["abc"]
    assert pairs([("a", "b"), ("b", "c")], "abc") == ["ab", "c"]
    assert pairs([("b", "c"), ("a", "b")], "abcab") == ["a", "bc", "ab"]


def test_byte_pairs_of_whole_words_and_of_unknown_bytes() -> None:
    assert pairs([("a", "b")], "abcd") == ["ab", "c", "d"]
    assert pairs([("a", "b")], "abcd", whole_first=True) == ["abcd"]
    assert pairs([("a", "b")], "a?bab") == ["a", "b", "ab"]


def slowly(word: str, rank: Callable[[str, str], float | None]) -> list[str]:
    parts = list(word)
    while True:
        ranked = [(rank(a, b), i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [(order, i) for order, i in ranked if order is not None]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_as_the_slow_way() -> None:
    """Looking at all neighbours before every merge gives the same."""
    rng = random.Random(7)
    for _ in range(300):
        ranks: dict[tuple[str, str], float] = {}
        words = list("abc")
        for _ in range(12):
            pair = (rng.choice(words), rng.choice(words))
            ranks.setdefault(pair, float(rng.randint(0, 5)))
            words.append("".join(pair))
        word = "".join(rng.choices("abc", k=rng.randint(0, 30)))

        def rank(first: int, middle: int, last: int, word: str = word, ranks: dict = ranks) -> float | None:
            return ranks.get((word[first:middle], word[middle:last]))

        found = [word[first:last] for first, last in symbols(len(word), rank)]
        assert found == slowly(word, lambda a, b, ranks=ranks: ranks.get((a, b)))  # type: ignore[misc]
