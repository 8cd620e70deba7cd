"""Text of the llama.cpp engine: token ids by the library's own vocabulary, and the same text bundle as other engines.

Owns how one vocabulary of the library is asked: that of a whole model, or one loaded alone from a vocabulary file.
What the library would end the process for is refused by `check_text`, before it sees the file. Tokenising touches
nothing that changes and lets other threads run, so any thread may ask. Shown by tests/model/test_llama_text.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any, Final

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader
from shardline.formats.vocabulary import PREFIX, check_distinct, has_vocabulary
from shardline.model.gguf_vocabulary import GGUFText, Vocabulary, byte_alphabet, invalid, merges_of, read_text
from shardline.model.llama_library import LlamaLibrary
from shardline.model.merging import BytePairs
from shardline.model.pre_tokenizers import PreTokenizer

_ONLY_HERE: Final = frozenset({"t5", "rwkv", "plamo2", "hybriddna", "whitespace"})
"""Kinds of vocabularies that no other engine tokenises for: the bytes of their tokens are the library's too."""
_PIECE_BYTES: Final = 256
_TEXT_LIMIT: Final = 1 << 30
_SAFE_DEPTH: Final = 2048
"""Characters that one match of a pattern may look at: a stack of 8 MB holds some 10,000."""


class LlamaText:
    """A vocabulary of the library with its text bundle."""

    def __init__(self, library: LlamaLibrary, vocabulary: int, header: GGUFHeader, context_length: int) -> None:
        """`vocabulary` outlives this, and was made of a file with `header`. `model_file_invalid` where the metadata
        contradict themselves."""
        self._c: Any = library.c
        self._vocabulary = vocabulary
        count: int = self._c.llama_vocab_n_tokens(vocabulary)
        pieces = list(self._pieces(count)) if _kind(header) in _ONLY_HERE else None
        text = read_text(header, count, context_length, pieces=pieces)
        if text is None or count != len(text.vocabulary.tokens):
            raise invalid(f"llama.cpp reads {count} tokens of it")
        pre = text.vocabulary.pre
        self._own = _OwnWords(header, text.vocabulary, pre) if pre is not None and pre.recursive else None
        self.bundle = text.bundle
        """MessagePack of `TextBundle`."""
        self.digest = text.digest
        """SHA-256 of `bundle`, in hex."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. `parse_special`: special tokens that stand in it are read as such, else as text.
        `invalid_value` for a text that is no Unicode or too long."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise ShardlineError("invalid_value", "the text holds a lone surrogate, which is no character") from None
        if len(data) > _TEXT_LIMIT:
            raise ShardlineError("invalid_value", f"a text of {len(data)} bytes is over the limit of {_TEXT_LIMIT}")
        if self._own is not None and self._own.is_needed(text):
            return self._own.tokenize(text, add_special, parse_special)
        room = len(data) + 8
        while True:
            ids = (ctypes.c_int32 * room)()
            count = self._c.llama_tokenize(self._vocabulary, data, len(data), ids, room, add_special, parse_special)
            if count >= 0:
                return ids[:count]
            if -count <= room:
                raise ShardlineError("engine_error", "llama.cpp does not tokenise this text")
            room = -count

    def _pieces(self, count: int) -> Iterator[bytes]:
        room = _PIECE_BYTES
        buffer = ctypes.create_string_buffer(room)
        for token in range(count):
            length = self._c.llama_token_to_piece(self._vocabulary, token, buffer, room, 0, True)
            if length < 0:
                room = -length
                buffer = ctypes.create_string_buffer(room)
                length = self._c.llama_token_to_piece(self._vocabulary, token, buffer, room, 0, True)
            yield ctypes.string_at(buffer, length)


class _OwnWords:
    """The same ids without the library, for texts on which it would run out of stack and end the process: those with
    thousands of characters of one word, which only an attack or an accident has."""

    def __init__(self, header: GGUFHeader, vocabulary: Vocabulary, pre: PreTokenizer) -> None:
        self._header = header
        self._vocabulary = vocabulary
        self._pre = pre
        self._lock = threading.Lock()
        self._pairs: BytePairs | None = None

    def is_needed(self, text: str) -> bool:
        return len(text) > _SAFE_DEPTH and self._pre.depth(text) > _SAFE_DEPTH

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        pairs = self._merging()

        def merge(part: str) -> list[int]:
            return [token for word in self._pre.split(part) for token in pairs.encode(word)]

        return self._vocabulary.encode(text, merge, add_special=add_special, parse_special=parse_special)

    def _merging(self) -> BytePairs:
        with self._lock:
            if self._pairs is None:
                self._pairs = BytePairs(
                    self._vocabulary.ids,
                    merges_of(self._header),
                    {byte: char for char, byte in byte_alphabet().items()},
                    whole_first=self._pre.whole_words_first,
                )
            return self._pairs


def check_text(header: GGUFHeader) -> GGUFText | None:
    """To be asked before the library loads a file with such a header, also for its vocabulary alone.

    `model_file_invalid` for what ends the process inside the library, and for everything that other engines refuse.
    """
    if not has_vocabulary(header):
        return None
    check_distinct(header)
    return read_text(header, 0, 0, pieces=[] if _kind(header) in _ONLY_HERE else None)


def _kind(header: GGUFHeader) -> str:
    return header.text(PREFIX + "model", "no_vocab")
