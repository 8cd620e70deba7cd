"""Text of the llama.cpp engine: token ids by the library's own vocabulary, and the same text bundle as other engines.

Owns how one vocabulary of the library is asked: that of a whole model, or one loaded alone from a vocabulary file.
What the library would end the process for is refused by `check_text`, before it sees the file. Tokenising touches
nothing that changes and lets other threads run, so any thread may ask. Shown by tests/model/test_llama_text.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Final

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader
from shardline.formats.vocabulary import PREFIX
from shardline.model.gguf_vocabulary import GGUFText, invalid, read_text
from shardline.model.llama_library import LlamaLibrary

_ONLY_HERE: Final = frozenset({"t5", "rwkv", "plamo2", "hybriddna", "whitespace"})
"""Kinds of vocabularies that no other engine tokenises for: the bytes of their tokens are the library's too."""
_PIECE_BYTES: Final = 256
_TEXT_LIMIT: Final = 1 << 30


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
            yield buffer[:length]


def has_text(header: GGUFHeader) -> bool:
    """Whether the file has a vocabulary."""
    return _kind(header) not in ("no_vocab", "none")


def check_text(header: GGUFHeader) -> GGUFText | None:
    """To be asked before the library loads a file with such a header, also for its vocabulary alone.

    `model_file_invalid` for what ends the process inside the library, and for everything that other engines refuse.
    """
    if not has_text(header):
        return None
    tokens = [text or b"[EMPTY_%d]" % token for token, text in enumerate(header.strings(PREFIX + "tokens"))]
    if len(set(tokens)) != len(tokens):
        raise invalid("a token stands in it twice, which llama.cpp does not take (the PyTorch engine does)")
    return read_text(header, 0, 0, pieces=[] if _kind(header) in _ONLY_HERE else None)


def _kind(header: GGUFHeader) -> str:
    return header.text(PREFIX + "model", "no_vocab")
