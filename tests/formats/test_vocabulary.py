"""The tokenizer's keys of GGUF files: odd tokens are legal, real defects are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.gguf import parse_header
from shardline.formats.vocabulary import PRE_TOKENIZERS, check_distinct, check_vocabulary
from shardline.model.pre_tokenizers import NAMES
from tests.support.gguf_writer import LLAMA, Typed, gguf_bytes

P = "tokenizer.ggml."


def check(keys: dict[str, Any]) -> list[str]:
    data = gguf_bytes({key: value for key, value in {**LLAMA, **keys}.items() if value is not None})
    return check_vocabulary(parse_header(data, len(data)))


def test_a_right_vocabulary_has_no_warnings() -> None:
    assert check({}) == []
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = {P + "scores": [0.0] * 258, P + "token_type": None, P + "merges": None}
    assert check({P + "tokens": tokens, **scores, P + "add_bos_token": True, P + "model": "llama"}) == []


def test_odd_tokens_are_legal() -> None:
    tokens = ["\u00e9", b"a\x00b", b"", b"same", b"same", b" ", b"\n", b"x"]
    assert check({P + "tokens": tokens}) == []


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["a", "b", "c", "b"], "entries 1 and 3 of key tokenizer.ggml.tokens are the same token, b'b'"),
        (["a", b"b\0x", b"b\0y"], "entries 1 and 2"),
        (["a", "[EMPTY_2]", ""], "entries 1 and 2"),
        (["a", "[EMPTY_1]", ""], None),
    ],
)
def test_equal_tokens_are_named_for_the_engine_that_does_not_take_them(tokens: list[Any], words: str | None) -> None:
    data = gguf_bytes({**LLAMA, P + "tokens": tokens})
    header = parse_header(data, len(data))
    if words is None:
        check_distinct(header)
        return
    with pytest.raises(ShardlineError, match=words) as caught:
        check_distinct(header)
    assert caught.value.code == "model_file_invalid"


def test_pre_tokenizers_are_those_that_engines_have() -> None:
    assert PRE_TOKENIZERS == NAMES
    for name in ("", *PRE_TOKENIZERS):
        assert check({P + "pre": name}) == []


def test_merges_with_spaces_in_their_halves() -> None:
    assert check({P + "merges": ["  a", "a  ", "\u0120 t", "a b c"]}) == []


DEFECTS: list[tuple[dict[str, Any], str]] = [
    ({P + "tokens": None}, "tokens is not an array"),
    ({P + "tokens": Typed("string", [])}, "tokens is empty"),
    ({P + "tokens": [1, 2]}, "tokens is not an array of strings"),
    ({P + "tokens": ["a", b"b\xff", *"cdefgh"]}, "entry 1 of key tokenizer.ggml.tokens is not UTF-8"),
    ({P + "model": "telepathy"}, "ggml.model is 'telepathy', for which no engine tokenises"),
    ({P + "model": "bert"}, "ggml.model is 'bert'"),
    ({P + "pre": "telepathy"}, "ggml.pre is 'telepathy', a pre-tokenizer that nobody knows"),
    ({P + "pre": 5}, "ggml.pre is the int 5"),
    ({P + "model": "llama", P + "merges": None}, "ggml.tokens has no token for every byte"),
    ({P + "scores": [0.0] * 7}, "scores has 7 entries for 8 tokens"),
    ({P + "token_type": Typed("i32", [1] * 9)}, "token_type has 9 entries for 8 tokens"),
    ({P + "token_type": ["1"] * 8}, "token_type is not an array of numbers"),
    ({P + "eos_token_id": 2**32 - 1}, "eos_token_id is 4294967295, but the vocabulary has 8 tokens"),
    ({P + "eos_token_id": 8}, "eos_token_id is 8"),
    ({P + "bos_token_id": Typed("i32", -1)}, "bos_token_id is -1"),
    ({P + "eot_token_id": 99}, "eot_token_id is 99"),
    ({P + "eos_token_id": "1"}, "eos_token_id is the string '1'"),
    ({P + "bos_token_id": None, P + "add_bos_token": True}, "add_bos_token is true, but .*bos_token_id is missing"),
    ({P + "add_bos_token": 1}, "add_bos_token is the int 1"),
    ({P + "merges": ["a b", "ab"]}, "entry 1 of key .*merges"),
    ({P + "merges": [" b"]}, "entry 0 of key .*merges"),
    ({P + "merges": ["a "]}, "entry 0 of key .*merges"),
    ({P + "merges": [""]}, "entry 0 of key .*merges"),
    ({P + "merges": None}, "merges is missing"),
    ({P + "merges": [1]}, "merges is not an array of strings"),
]


@pytest.mark.parametrize(("keys", "words"), DEFECTS, ids=[words for _, words in DEFECTS])
def test_defects_are_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ShardlineError, match=words) as caught:
        check(keys)
    assert caught.value.code == "model_file_invalid"


def test_an_id_that_nothing_depends_on_is_a_warning() -> None:
    assert check({P + "padding_token_id": 2**32 - 1}) == [
        f"key {P}padding_token_id is 4294967295, but the vocabulary has 8 tokens"
    ]
