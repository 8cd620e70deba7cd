"""Words as the name of a pre-tokenizer cuts them, and the classes of characters that it goes by."""

from __future__ import annotations

import unicodedata

import pytest

from shardline.errors import ShardlineError
from shardline.model.pre_tokenizers import FORMS, NAMES, PreTokenizer, pre_tokenizer
from shardline.model.unicode_classes import CHARACTERS, HAN, OTHER, SPACES, class_runs
from tests.support.vocabularies import mixed_strings

ALL = [pre_tokenizer(name) for name in sorted(FORMS)]


@pytest.mark.parametrize("pre", ALL, ids=[pre.name for pre in ALL])
def test_words_together_are_the_text(pre: PreTokenizer) -> None:
    assert pre.split("") == []
    for string in mixed_strings(300, 5, odd=True):
        words = pre.split(string)
        assert "".join(words) == string and "" not in words


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("", "Hello world 123456!", ["Hello", " world", " ", "123", "456", "!"]),
        ("gpt-2", "I'm here  now\n\n12 345", ["I", "'m", " here", " ", " now", "\n", "\n", "12", " 345"]),
        ("smollm", "in 2026", ["in", " ", "2", "0", "2", "6"]),
        ("llama-bpe", "DON'T 12345.\n\n x", ["DON", "'T", " ", "123", "45", ".\n\n", " x"]),
        ("qwen2", "a(b)12", ["a", "(b", ")", "1", "2"]),
        ("qwen35", "cafe\u0301s", ["cafe\u0301s"]),
        ("gpt-4o", "XMLHttpRequest's", ["XMLHttp", "Request's"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("deepseek-v3", "x1234你好y", ["x", "123", "4", "你好", "y"]),
        ("deepseek-llm", "a b\nc 12 ", ["a", " b", "\n", "c", " ", "12", " "]),
        ("kimi-k2", "你好world", ["你好", "world"]),
        ("superbpe", "1234567 and more", ["1", "234", "567", " and more"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("bloom", "a, b.", ["a", ",", " b", "."]),
        ("gemma4", "a▁b\n\nc", ["a▁b", "\n\n", "c"]),
    ],
)
def test_words(name: str, text: str, words: list[str]) -> None:
    assert pre_tokenizer(name).split(text) == words


def test_forms_differ() -> None:
    """No form is another one by mistake; two of them say the same in different words."""
    strings = mixed_strings(1_000, 6, odd=True)
    cut = {tuple(word for string in strings for word in pre.split(string)) for pre in ALL}
    assert len(cut) == len(FORMS) - 1


def test_an_unknown_name_is_refused() -> None:
    assert "whitespace" not in NAMES
    with pytest.raises(ShardlineError, match="telepathy") as caught:
        pre_tokenizer("telepathy")
    assert caught.value.code == "model_file_invalid"


def test_depth_is_that_of_the_longest_word() -> None:
    pre = pre_tokenizer("gpt-4o")
    assert pre.recursive and not pre_tokenizer("llama-bpe").recursive
    assert pre.depth("ab " * 100) < 10
    for unit in "a !1":
        assert pre.depth(unit * 5_000) in (5_000, 5_001)


def test_classes_are_those_of_the_database() -> None:
    """Every character that this Python's database knew before version 15.1 has the class of its category."""
    table = "".join(kind * (end - first) for first, end, kind in class_runs())
    assert len(table) == CHARACTERS
    newer = tuple(map(int, unicodedata.unidata_version.split("."))) > (15, 1, 0)
    for point, kind in enumerate(table):
        category = unicodedata.category(chr(point))
        expected = category[0] if category[0] in "LNMPS" else OTHER
        assert kind == expected or (category == "Cn" or newer), hex(point)
    assert all(table[ord(char)] == OTHER and char.isspace() for char in SPACES)
    assert all(first < last for first, last in HAN)
