"""Token ids that are those of transformers, and text bundles whose pieces put the text together again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig

from shardline.cli.demo_model import demo_model
from shardline.errors import ShardlineError
from shardline.formats.gguf import read_header
from shardline.model.tokenizer import text_of_folder, text_of_gguf
from shardline.wire.messages import TextBundle
from tests.support.gguf_writer import LLAMA, Typed, gguf_bytes
from tests.support.vocabularies import mixed_strings

pytestmark = pytest.mark.torch

FILE = demo_model()


def bundle_of(text) -> TextBundle:
    assert hashlib.sha256(text.bundle).hexdigest() == text.digest
    return msgspec.msgpack.decode(text.bundle, type=TextBundle)


@pytest.fixture(scope="module")
def smollm2():
    return text_of_gguf(read_header(FILE), 49152, 8192)


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


@pytest.mark.smollm2
def test_ids_are_those_of_the_models_own_tokenizer(smollm2, reference):
    """transformers leaves out what the file says of its pre-tokenizer: that digits stand alone."""
    strings = mixed_strings(10_000)
    assert len(set(strings)) > 9_000
    read = reference(strings).input_ids
    own = Tokenizer.from_str(reference.backend_tokenizer.to_str())
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    expected = [found.ids for found in own.encode_batch(strings)]
    for string, as_read, ids in zip(strings, read, expected, strict=True):
        assert smollm2.tokenize(string, add_special=True, parse_special=True) == ids, repr(string)
        if not any(char.isnumeric() for char in string):
            assert ids == as_read
    assert sum(ids != as_read for ids, as_read in zip(expected, read, strict=True)) > 1_000


@pytest.mark.smollm2
def test_pieces_put_the_text_together_again(smollm2):
    bundle = bundle_of(smollm2)
    for string in mixed_strings(2_000):
        for parse_special in (True, False):
            ids = smollm2.tokenize(string, add_special=False, parse_special=parse_special)
            assert b"".join(bundle.pieces[token] for token in ids) == string.encode()


@pytest.mark.smollm2
def test_special_tokens_are_text_unless_asked_for(smollm2):
    asked = smollm2.tokenize("<|im_start|>user", add_special=False, parse_special=True)
    plain = smollm2.tokenize("<|im_start|>user", add_special=False, parse_special=False)
    assert asked[0] == 1 and len(asked) == 2
    assert 1 not in plain and len(plain) > 4


@pytest.mark.smollm2
def test_the_bundle_of_a_chat_model(smollm2, reference):
    bundle = bundle_of(smollm2)
    assert len(bundle.pieces) == 49152
    assert (bundle.bos, bundle.eos, bundle.add_bos, bundle.context_length) == (1, 2, False, 8192)
    assert bundle.special == list(range(17))
    assert bundle.eog == [0, 2]  # <|endoftext|> and <|im_end|>
    assert bundle.chat_template == reference.chat_template
    assert bundle.fim is None
    assert text_of_gguf(read_header(FILE), 49152, 8192).bundle == smollm2.bundle
    assert text_of_gguf(read_header(FILE), 49152, 4096).digest != smollm2.digest


@pytest.mark.smollm2
def test_a_lone_surrogate_is_a_clients_fault(smollm2):
    with pytest.raises(ShardlineError) as caught:
        smollm2.tokenize("a\ud800b", add_special=False, parse_special=True)
    assert caught.value.code == "invalid_value"


SENTENCEPIECE = {
    **LLAMA,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "<|user|>", "é",
    ],
    "tokenizer.ggml.scores": Typed("f32", [0.0] * 259 + [-9.0, -2.0, -3.0, -1.0, -0.5, 0.0, -4.0]),
    "tokenizer.ggml.token_type": Typed("i32", [2, 3, 3] + [6] * 256 + [1, 1, 1, 1, 1, 3, 1]),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.fim_pre_token_id": 262,
    "tokenizer.ggml.fim_suf_token_id": 263,
    "tokenizer.ggml.fim_mid_token_id": 264,
}  # fmt: skip
del SENTENCEPIECE["tokenizer.ggml.merges"]


def gguf_text(keys, tmp_path, size=266):
    path = tmp_path / "tokens.gguf"
    path.write_bytes(gguf_bytes(keys))
    return text_of_gguf(read_header(path), size, 128), path


def test_a_sentencepiece_vocabulary(tmp_path):
    text, path = gguf_text(SENTENCEPIECE, tmp_path)
    bundle = bundle_of(text)
    assert bundle.pieces[262] == b" a" and bundle.pieces[259] == b" "
    assert bundle.pieces[3 + 0x0A] == b"\n" and bundle.pieces[3 + 0xC3] == b"\xc3"
    assert bundle.pieces[264] == b"<|user|>"
    assert bundle.special == [0, 1, 2, 264] and bundle.eog == [2]
    assert bundle.add_bos and (bundle.bos, bundle.eos) == (1, 2)
    assert bundle.fim == {"prefix": 262, "suffix": 263, "middle": 264}
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for string in ("a b ab", "ü\n", "", "é é"):
        assert text.tokenize(string, add_special=True, parse_special=True) == expected(string).input_ids
    # The space in front stands before every text, also one that begins with a space or behind a special token.
    for string, ids in ((" a", [1, 259, 262]), ("<|user|>a", [1, 264, 262]), ("a<|user|>", [1, 262, 264])):
        assert text.tokenize(string, add_special=True, parse_special=True) == ids
    for string in ("a b ab", "ü\n", "<|user|>", "", " a", "é é"):
        ids = text.tokenize(string, add_special=False, parse_special=True)
        assert b"".join(bundle.pieces[token] for token in ids).lstrip() == string.encode().lstrip()


def test_a_vocabulary_smaller_than_the_model(tmp_path):
    text, _ = gguf_text({**LLAMA, "tokenizer.ggml.add_bos_token": True}, tmp_path, size=12)
    bundle = bundle_of(text)
    assert bundle.pieces == [b"<s>", b"</s>", b"a", b"b", b"ab", b"c", b"d", b"e", b"", b"", b"", b""]
    assert text.tokenize("ab", add_special=True, parse_special=True) == [0, 4]
    assert text.tokenize("ab</s>", add_special=False, parse_special=True) == [4, 1]
    assert text.tokenize("ab<|endoftext|>", add_special=False, parse_special=True)[0] == 4
    assert max(text.tokenize("<|endoftext|>ab", add_special=False, parse_special=True)) < 8


def test_a_token_that_stands_twice(tmp_path):
    """Both ids have its bytes: the model may write either."""
    tokens = ["<s>", "</s>", "a", "b", "ab", "a", "d", "ab"]
    text, _ = gguf_text({**LLAMA, "tokenizer.ggml.tokens": tokens}, tmp_path, 8)
    assert bundle_of(text).pieces == [b"<s>", b"</s>", b"a", b"b", b"ab", b"a", b"d", b"ab"]


def test_a_file_without_a_tokenizer(tmp_path):
    keys = {key: value for key, value in LLAMA.items() if not key.startswith("tokenizer.")}
    assert gguf_text(keys, tmp_path)[0] is None
    assert gguf_text({**LLAMA, "tokenizer.ggml.model": "no_vocab"}, tmp_path)[0] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.model": "telepathy"},
        {"tokenizer.ggml.eos_token_id": 8},
        {"tokenizer.ggml.tokens": [b"\xff\xfe", *LLAMA["tokenizer.ggml.tokens"][1:]]},
        {"tokenizer.ggml.merges": ["a q", "nospace"]},
        {"tokenizer.ggml.bos_token_id": "one"},
    ],
    ids=str,
)
def test_tokenizers_that_cannot_be_built(changes, tmp_path):
    with pytest.raises(ShardlineError) as caught:
        gguf_text({**LLAMA, **changes}, tmp_path)
    assert caught.value.code == "model_file_invalid"


def save_byte_level(folder: Path, **config) -> Tokenizer:
    """A folder as a byte-level model has it: `tokenizer.json` with its own template around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate([*alphabet, "Ġa", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a"), ("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|begin|>", "<|end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": "{{ messages }}",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def test_a_folder(tmp_path):
    tokenizer = save_byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [255, 259]}))
    text = text_of_folder(tmp_path, LlamaConfig(eos_token_id=259), 264, 100)
    bundle = bundle_of(text)
    ids = {name: tokenizer.token_to_id(name) for name in ("<|begin|>", "<|end|>", "<think>", "<|fim_prefix|>")}
    assert (bundle.bos, bundle.eos, bundle.add_bos) == (ids["<|begin|>"], ids["<|end|>"], True)
    assert bundle.eog == sorted({255, 259})
    assert ids["<|end|>"] == 259
    assert bundle.special == list(range(258, 263)) and ids["<think>"] == 263
    assert bundle.chat_template == "{{ messages }}"
    assert bundle.fim == {"prefix": 260, "suffix": 261, "middle": 262}
    expected = AutoTokenizer.from_pretrained(tmp_path)
    for string in ("ab a", "<think>ü<|end|>", "a\n\t "):
        for special in (True, False):
            given = text.tokenize(string, add_special=special, parse_special=True)
            assert given == expected(string, add_special_tokens=special).input_ids
        ids = text.tokenize(string, add_special=False, parse_special=False)
        assert b"".join(bundle.pieces[token] for token in ids) == string.encode()
        assert 259 not in ids


def test_a_folder_without_a_tokenizer(tmp_path):
    assert text_of_folder(tmp_path, LlamaConfig(), 10, 100) is None


def test_a_folder_with_a_broken_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ShardlineError) as caught:
        text_of_folder(tmp_path, LlamaConfig(), 10, 100)
    assert caught.value.code == "model_file_invalid"


def test_code_in_the_folder_is_not_run(tmp_path):
    save_byte_level(tmp_path, auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ShardlineError) as caught:
        text_of_folder(tmp_path, LlamaConfig(), 264, 100)
    assert caught.value.code == "model_file_invalid"
    assert not (tmp_path / "ran").exists()


def test_words_that_have_no_bytes_of_their_own(tmp_path):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ShardlineError) as caught:
        text_of_folder(tmp_path, LlamaConfig(), 3, 100)
    assert caught.value.code == "model_file_invalid" and "WordPiece" in caught.value.message
