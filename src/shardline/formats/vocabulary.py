"""The tokenizer part of GGUF metadata, checked as a whole, so that nothing of it fails only at the first request.

Owns the rules between its keys: equal lengths, ids inside the vocabulary, merges of two halves. Odd tokens (empty,
equal, with NUL, not UTF-8) are legal bytes and stay as they are. It tokenises nothing.
Shown by tests/formats/test_vocabulary.py.
"""

from __future__ import annotations

from shardline.errors import ShardlineError
from shardline.formats.gguf import Array, GGUFHeader

PREFIX = "tokenizer.ggml."
_TOKENS = PREFIX + "tokens"
_MERGES = PREFIX + "merges"
_NEEDED_IDS = frozenset({"bos", "eos", "eot", "eom"})
"""Ids that a generation depends on: outside the vocabulary they are defects, all others only warnings."""


def check_vocabulary(header: GGUFHeader) -> list[str]:
    """Check the tokenizer's keys and return warnings; `model_file_invalid`, naming the key, for a real defect."""
    count = len(_array(header, _TOKENS, strings=True))
    if count == 0:
        raise _bad(f"key {_TOKENS} is empty")
    for key in (PREFIX + "scores", PREFIX + "token_type"):
        if key in header.kv and len(_array(header, key, strings=False)) != count:
            raise _bad(f"key {key} has {len(_array(header, key, strings=False))} entries for {count} tokens")
    _check_merges(header)
    warnings = _check_ids(header, count)
    for name in ("bos", "eos"):
        if header.boolean(f"{PREFIX}add_{name}_token", False) and f"{PREFIX}{name}_token_id" not in header.kv:
            raise _bad(f"key {PREFIX}add_{name}_token is true, but {PREFIX}{name}_token_id is missing")
    return warnings


def _check_ids(header: GGUFHeader, count: int) -> list[str]:
    warnings = []
    for key in header.kv:
        if not (key.startswith(PREFIX) and key.endswith("_token_id")):
            continue
        token = header.integer(key)
        if not 0 <= token < count:
            message = f"key {key} is {token}, but the vocabulary has {count} tokens"
            if key.removeprefix(PREFIX).removesuffix("_token_id") in _NEEDED_IDS:
                raise _bad(message)
            warnings.append(message)
    return warnings


def _check_merges(header: GGUFHeader) -> None:
    if _MERGES not in header.kv:
        if header.text(PREFIX + "model") == "gpt2":
            raise _bad(f"key {_MERGES} is missing: a gpt2 tokenizer needs it")
        return
    _array(header, _MERGES, strings=True)
    for index, merge in enumerate(header.strings(_MERGES)):
        # The first half may itself begin with a space, so the parting one is looked for behind the first byte.
        parting = merge.find(b" ", 1)
        if parting < 1 or parting == len(merge) - 1:
            raise _bad(f"entry {index} of key {_MERGES} is not two parts with a space between: {merge[:40]!r}")


def _array(header: GGUFHeader, key: str, *, strings: bool) -> Array:
    value = header.kv.get(key)
    if not isinstance(value, Array) or (value.kind == "string") is not strings:
        raise _bad(f"key {key} is not an array of {'strings' if strings else 'numbers'}")
    return value


def _bad(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"damaged GGUF file: {message}", reason="damaged")
