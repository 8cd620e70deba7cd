"""Token ids and text bundles are the same, whichever engine serves a GGUF file."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("tokenizers")

from shardline.cli.demo_model import demo_model
from shardline.errors import ShardlineError
from shardline.formats.gguf import read_header
from shardline.formats.vocabulary import has_vocabulary
from shardline.model.llama_context import LlamaModel
from shardline.model.llama_library import library
from shardline.model.llama_text import LlamaText, check_text
from shardline.model.pre_tokenizers import FORMS, NAMES
from shardline.model.tokenizer import ModelText, text_of_gguf
from tests.support.gguf_writer import LLAMA, Typed, gguf_bytes
from tests.support.vocabularies import byte_pair_keys, marked_byte_pair_keys, mixed_strings, sentence_piece_keys

pytestmark = [pytest.mark.llama, pytest.mark.torch]

MARKED = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
BYTE_PAIRS = byte_pair_keys()
STRINGS = mixed_strings(300, 22, odd=True)


@contextmanager
def both(path: Path) -> Iterator[tuple[ModelText, LlamaText]]:
    """The text of a file as the PyTorch engine has it, and as the llama.cpp engine has it."""
    header = read_header(path)
    assert has_vocabulary(header)
    check_text(header)
    model = LlamaModel(library(), path, vocab_only=True)
    try:
        theirs = LlamaText(library(), model.vocabulary, header, 128)
        ours = text_of_gguf(header, 0, 128)
        assert ours is not None
        yield ours, theirs
    finally:
        model.close()


def written(tmp_path: Path, keys: dict[str, Any]) -> Path:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gguf_bytes(keys))
    return path


def assert_equal(ours: ModelText, theirs: LlamaText, strings: list[str]) -> None:
    for string in strings:
        for parse_special in (True, False):
            arguments = {"add_special": parse_special, "parse_special": parse_special}
            assert ours.tokenize(string, **arguments) == theirs.tokenize(string, **arguments), repr(string)
    assert (ours.bundle, ours.digest) == (theirs.bundle, theirs.digest)


@pytest.mark.smollm2
@pytest.mark.parametrize("some", [3_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_thousands_of_strings_on_smollm2(some: int) -> None:
    strings = mixed_strings(some) + mixed_strings(some // 5, 21, odd=True)
    assert len(set(strings)) > 1.1 * some
    with both(demo_model()) as (ours, theirs):
        assert_equal(ours, theirs, strings)


@pytest.mark.parametrize("name", sorted(NAMES.difference(MARKED)))
def test_pre_tokenizers(name: str, tmp_path: Path) -> None:
    with both(written(tmp_path, {**BYTE_PAIRS, "tokenizer.ggml.pre": name})) as (ours, theirs):
        assert_equal(ours, theirs, STRINGS[:: 1 if name in FORMS else 4])


@pytest.mark.parametrize(("model", "pre"), [("gemma4", "anything"), *[("gpt2", name) for name in MARKED]])
def test_byte_pairs_spelled_with_marks(model: str, pre: str, tmp_path: Path) -> None:
    with both(written(tmp_path, marked_byte_pair_keys(model, pre))) as (ours, theirs):
        assert_equal(ours, theirs, mixed_strings(400, 23, odd=True))


@pytest.mark.parametrize("changes", [{}, {"tokenizer.ggml.add_space_prefix": False}, {"general.name": "Phi-3 mini"}])
@pytest.mark.parametrize("equal_scores", [True, False])
@pytest.mark.parametrize("across_words", [True, False])
def test_sentence_piece(changes: dict[str, Any], equal_scores: bool, across_words: bool, tmp_path: Path) -> None:
    keys = sentence_piece_keys(equal_scores=equal_scores, across_words=across_words)
    with both(written(tmp_path, {**keys, **changes})) as (ours, theirs):
        assert_equal(ours, theirs, mixed_strings(200, 24, odd=True))


@pytest.mark.parametrize("name", ["", "smollm", "llama-bpe", "tekken"])
def test_what_stands_around_a_text(name: str, tmp_path: Path) -> None:
    for keys in ({}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}):
        changes = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        path = written(tmp_path, {**BYTE_PAIRS, "tokenizer.ggml.pre": name, **changes})
        with both(path) as (ours, theirs):
            assert_equal(ours, theirs, ["", "a", "<|im_end|>", "<tool> x"])


def test_tokens_that_a_file_marks_wrongly(tmp_path: Path) -> None:
    """Ends of a turn are control tokens whatever their type; those of Harmony are always parsed."""
    texts = [
        "<|im_end|>", "<|fim_prefix|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "</s>", "<eos>", "<PAD>",
        "<tool>", "<unused7>",
    ]  # fmt: skip
    kinds = [1, 1, 3, 3, 3, 3, 1, 1, 1, 4, 5]
    tokens = [*BYTE_PAIRS["tokenizer.ggml.tokens"][3:], *texts]
    types = [1] * (len(tokens) - len(texts)) + kinds
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": Typed("i32", types)}
    with both(written(tmp_path, {**BYTE_PAIRS, **keys})) as (ours, theirs):
        assert_equal(ours, theirs, [*texts, " ".join(texts), "a".join(texts)])


@pytest.mark.parametrize("name", ["gpt-4o", "deepseek-llm", "superbpe", "jais-2"])
def test_texts_that_would_end_the_process(name: str, tmp_path: Path) -> None:
    """Inside the library each of the long ones runs out of stack."""
    units = ["a", "é", " ", "!", "\n", "1", "a b ", "\t\n "]
    texts = [(unit * size)[:size] for unit in units for size in (2000, 2049, 30_000)]
    with both(written(tmp_path, {**BYTE_PAIRS, "tokenizer.ggml.pre": name})) as (ours, theirs):
        asked = threading.Thread(target=lambda: done.append(assert_equal(ours, theirs, texts)))
        done: list[None] = []
        asked.start()
        asked.join(60)
        assert done == [None]


def test_many_threads_at_once(tmp_path: Path) -> None:
    strings = mixed_strings(400, 25)
    with both(written(tmp_path, {**BYTE_PAIRS, "tokenizer.ggml.pre": "qwen2"})) as (ours, theirs):
        expected = [ours.tokenize(s, add_special=False, parse_special=True) for s in strings]
        with ThreadPoolExecutor(4) as pool:
            for text in (ours, theirs):
                found = [
                    list(pool.map(lambda s: text.tokenize(s, add_special=False, parse_special=True), strings))  # noqa: B023
                    for _ in range(2)
                ]
                assert found == [expected, expected]


def test_a_lone_surrogate_is_a_clients_fault(tmp_path: Path) -> None:
    with both(written(tmp_path, {**BYTE_PAIRS, "tokenizer.ggml.pre": "qwen2"})) as texts:
        for text in texts:
            with pytest.raises(ShardlineError) as caught:
                text.tokenize("a\ud800b", add_special=False, parse_special=True)
            assert caught.value.code == "invalid_value"


TOKENS = BYTE_PAIRS["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}, "the same token, b'a'"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a\0b"]}, "the same token, b'a'"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], b"\xff"]}, "not UTF-8"),
        ({"tokenizer.ggml.pre": "telepathy"}, "ggml.pre is 'telepathy'"),
        (
            {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.model": "bert"},
            "bert",
        ),
        ({"tokenizer.ggml.model": "llama"}, "no token for every byte"),
    ],
)
def test_files_that_would_end_the_process_are_refused_before(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    header = read_header(written(tmp_path, {**BYTE_PAIRS, **changes}))
    with pytest.raises(ShardlineError, match=words) as caught:
        check_text(header)
    assert caught.value.code == "model_file_invalid"


def test_a_file_without_a_vocabulary(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, {**LLAMA, "tokenizer.ggml.model": "none"}))
    assert not has_vocabulary(header) and check_text(header) is None


def test_no_library_of_another_engine_is_needed(tmp_path: Path) -> None:
    """The bundle is the same where only llama.cpp is installed."""
    path = written(tmp_path, {**BYTE_PAIRS, "tokenizer.ggml.pre": "qwen2"})
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'gguf'): sys.modules[name] = None\n"
        "from shardline.formats.gguf import read_header\n"
        "from shardline.model.gguf_vocabulary import read_text\n"
        "import shardline.model.llama_text\n"
        f"print(read_text(read_header({str(path)!r}), 0, 128).digest)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    ours = text_of_gguf(read_header(path), 0, 128)
    assert ours is not None and answer.stdout.strip() == ours.digest
