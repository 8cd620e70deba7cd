"""The tokenizer of a model for the PyTorch engine: text to token ids, with the text bundle that belongs to it.

Owns how one is built. From a GGUF file: the ids that llama.cpp gives, merged by the tokenizers library in words cut as
the file's pre-tokenizer says; transformers' own reading of such files leaves that out. From a folder: always through
transformers, so that ids are its ids. Renders no chat template, and runs nothing of what a folder holds as code.
Shown by tests/model/test_tokenizer.py and test_pre_tokenizers.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedConfig

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader
from shardline.formats.safetensors import read_object
from shardline.formats.vocabulary import PREFIX
from shardline.model.gguf_vocabulary import (
    Vocabulary,
    end_texts,
    fim_of,
    invalid,
    merges_of,
    packed,
    read_text,
    spell_with_marks,
    spelling_by_bytes,
)
from shardline.model.merging import SentencePieces
from shardline.model.pre_tokenizers import PreTokenizer
from shardline.wire.messages import TextBundle

_FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_FOLDER_LIMIT = 4 << 20
_WORDS_A_CALL = 4096
"""Other threads go on between two calls."""


class _Encoder(Protocol):
    def __call__(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's tokenizer with its text bundle. Any thread may tokenise."""

    encode: _Encoder
    bundle: bytes
    """MessagePack of `TextBundle`."""
    digest: str
    """SHA-256 of `bundle`, in hex."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. `parse_special`: special tokens that stand in it are read as such, else as text."""
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise ShardlineError("invalid_value", "the text holds a lone surrogate, which is no character")
        return self.encode(text, add_special=add_special, parse_special=parse_special)


def text_of_gguf(header: GGUFHeader, vocab_size: int, context_length: int) -> ModelText | None:
    """From GGUF metadata; None where the file has no vocabulary. `model_file_invalid` where it cannot be used."""
    text = read_text(header, vocab_size, context_length)
    if text is None:
        return None
    vocabulary = text.vocabulary
    merge: Callable[[str], list[int]]
    if vocabulary.pre is None:
        key = PREFIX + "scores"
        scores = list(header.numbers(key)) if key in header.kv else [0.0] * len(vocabulary.tokens)
        pieces = SentencePieces(vocabulary.ids, scores)

        def merge(part: str) -> list[int]:
            return pieces.encode(part.replace(" ", "▁"))
    else:
        merge = _BytePairs(header, vocabulary, vocabulary.pre).encode

    def encode(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return vocabulary.encode(text, merge, add_special=add_special, parse_special=parse_special)

    return ModelText(encode, text.bundle, text.digest)


class _BytePairs:
    """Words by the pre-tokenizer, merged by the tokenizers library."""

    def __init__(self, header: GGUFHeader, vocabulary: Vocabulary, pre: PreTokenizer) -> None:
        self._ids = vocabulary.ids
        self._pre = pre
        self._nothing = len(vocabulary.tokens)
        # The library drops a character that it does not know before it merges, and so makes neighbours of others: it
        # gets a token that stands for those and is taken out behind.
        nothing = "�" * (1 + max(map(len, vocabulary.tokens)))
        with_marks = pre.spaces_as_marks
        try:
            merging = models.BPE(
                {**vocabulary.ids, nothing: self._nothing},
                merges_of(header),
                unk_token=nothing,
                fuse_unk=False,
                byte_fallback=with_marks,
                ignore_merges=pre.whole_words_first,
            )
        except Exception as error:  # the library raises this bare
            raise invalid(f"its tokenizer cannot be built: {error!s:.200}") from None
        self._tokenizer = Tokenizer(merging)
        if not with_marks:
            self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def encode(self, text: str) -> list[int]:
        words = self._pre.split(text.replace(" ", "▁") if self._pre.spaces_as_marks else text)
        if not self._pre.whole_newlines:
            return self._merged(words)
        ids: list[int] = []
        for word in words:
            whole = self._ids.get(word) if word.startswith("\n") else None
            ids += [whole] if whole is not None else self._merged([word])
        return ids

    def _merged(self, words: list[str]) -> list[int]:
        ids: list[int] = []
        for first in range(0, len(words), _WORDS_A_CALL):
            call = words[first : first + _WORDS_A_CALL]
            ids += self._tokenizer.encode(call, is_pretokenized=True, add_special_tokens=False).ids
        return [token for token in ids if token != self._nothing]


def text_of_folder(folder: Path, config: PreTrainedConfig, vocab_size: int, context_length: int) -> ModelText | None:
    """From the tokenizer files of a model folder; None where there are none."""
    if not any((folder / name).is_file() for name in _FOLDER_FILES):
        return None
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = Tokenizer.from_str(found.backend_tokenizer.to_str())
    except Exception as error:  # every way in which files of a stranger can fail to be a tokenizer
        raise invalid(f"its tokenizer cannot be read: {type(error).__name__}: {error!s:.200}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    marked = tokenizer.encode("a", add_special_tokens=True).ids
    template = found.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return _model_text(
        tokenizer,
        vocab_size=vocab_size,
        ends=_folder_ends(folder, config, found.eos_token_id),
        bos=found.bos_token_id,
        eos=found.eos_token_id,
        add_bos=found.bos_token_id is not None and marked[: len(marked) - len(plain)][:1] == [found.bos_token_id],
        chat_template=template,
        context_length=context_length,
    )


def _folder_ends(folder: Path, config: PreTrainedConfig, eos: int | None) -> list[int]:
    """End-of-generation ids of `generation_config.json`, the configuration and the tokenizer."""
    path = folder / "generation_config.json"
    generation = read_object(path, _FOLDER_LIMIT).get("eos_token_id") if path.is_file() else None
    ids: list[int] = []
    for value in (generation, config.get_text_config().eos_token_id, eos):
        ids.extend(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
    return ids


def _model_text(
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    ends: Iterable[int],
    bos: int | None,
    eos: int | None,
    add_bos: bool,
    chat_template: str | None,
    context_length: int,
) -> ModelText:
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocab_size, max(vocabulary.values(), default=-1) + 1)
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    named = {text: token for text, token in vocabulary.items() if token in special}
    end_ids = {token for token in ends if 0 <= token < size} | {
        named[text] for text in end_texts(named) if text in named
    }
    bundle = TextBundle(
        pieces=pieces_of(tokenizer, size),
        special=sorted(token for token in special if token < size),
        eog=sorted(end_ids),
        bos=bos,
        eos=eos,
        add_bos=add_bos,
        chat_template=chat_template,
        context_length=context_length,
        fim=fim_of(vocabulary),
    )

    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True

    def encode(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids: list[int] = (tokenizer if parse_special else plain).encode(text, add_special_tokens=add_special).ids
        return ids

    return ModelText(encode, *packed(bundle))


def pieces_of(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """The bytes of token ids 0 to `size` - 1; an id that nothing is known of has none.

    `model_file_invalid` for a tokenizer whose tokens have no bytes of their own (whole words, with spaces made up).
    """
    # The state of the decoder alone: that of the whole tokenizer is megabytes.
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    added = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items()}
    if "ByteLevel" in kinds:
        spell: Callable[[str], bytes] = spelling_by_bytes()
    elif "Metaspace" in kinds or any(_replaces_space(step) for step in steps):
        spell = partial(spell_with_marks, byte_fallback="ByteFallback" in kinds)
    else:
        raise invalid(f"its tokens have no bytes of their own (decoder {decoder.get('type')})")
    pieces = [b""] * size
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        pieces[token] = added[token].encode() if token in added else spell(text)
    return pieces


def _replaces_space(step: dict[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("content") == " " and step.get("pattern") == {"String": "▁"}
