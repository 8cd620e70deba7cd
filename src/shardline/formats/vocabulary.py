"""The tokenizer part of GGUF metadata, checked as a whole, so that nothing of it fails only at the first request.

Owns the rules between its keys: equal lengths, ids inside the vocabulary, merges of two halves, kinds and splits that
somebody knows. Odd tokens (empty, equal, with NUL) are legal and stay as they are, but for llama.cpp, which takes no
two equal ones. It tokenises nothing.
Shown by tests/formats/test_vocabulary.py.
"""

from __future__ import annotations

from shardline.errors import ShardlineError
from shardline.formats.gguf import Array, GGUFHeader

PREFIX = "tokenizer.ggml."
_TOKENS = PREFIX + "tokens"
_MERGES = PREFIX + "merges"
KINDS = frozenset({"llama", "gpt2", "gemma4", "t5", "rwkv", "plamo2", "hybriddna", "whitespace"})
"""Values of `tokenizer.ggml.model` that an engine tokenises for; beside them `none` and `no_vocab`."""
PRE_TOKENIZERS = frozenset(
    {
        "a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe", "codeshell",
        "cohere2moe", "command-r", "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3",
        "default", "exaone", "exaone-moe", "exaone4", "f2llmv2", "falcon", "falcon-h1", "falcon3", "gemma4",
        "gigachat", "glm4", "glm5", "gpt-2", "gpt-4o", "gpt3-finnish", "granite-docling", "granite-embed-multi-311m",
        "granite-embed-multi-97m", "grok-2", "hunyuan", "hunyuan-dense", "hy_v4", "jais", "jais-2", "jina-de",
        "jina-es", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "joyai-llm", "kanana2",
        "kimi-k2", "kormo", "laguna", "lfm2", "llada-moe", "llama-bpe", "llama-v3", "llama3", "llama4", "megrez",
        "mellum", "mellum2", "midm-2.0", "minerva-7b", "minicpm5", "minimax-m2", "modern-bert", "mpt", "olmo",
        "phi-2", "pixtral", "poro-chat", "qwen2", "qwen35", "refact", "roberta-bpe", "sarvam-moe", "seed-coder",
        "smaug-bpe", "smollm", "solar-open", "spark2_5", "stablelm2", "starcoder", "superbpe", "talkie", "tekken",
        "tiny_aya", "trillion", "ufakzeka", "viking", "youtu",
    }
)  # fmt: skip
"""Values of `tokenizer.ggml.pre`: ways to split a text before pairs are merged (model/pre_tokenizers.py has them)."""
_BYTE_KINDS = frozenset({"llama", "gemma4"})
"""What no token has is spelled by tokens for single bytes."""
_NEEDED_IDS = frozenset({"bos", "eos", "eot", "eom"})
"""Ids that a generation depends on: outside the vocabulary they are defects, all others only warnings."""


def check_vocabulary(header: GGUFHeader) -> list[str]:
    """Check the tokenizer's keys and return warnings; `model_file_invalid`, naming the key, for a real defect."""
    count = len(_array(header, _TOKENS, strings=True))
    if count == 0:
        raise _bad(f"key {_TOKENS} is empty")
    kind = _check_kind(header)
    _check_tokens(header.strings(_TOKENS), bytes_needed=kind in _BYTE_KINDS)
    for key in (PREFIX + "scores", PREFIX + "token_type"):
        if key in header.kv and len(_array(header, key, strings=False)) != count:
            raise _bad(f"key {key} has {len(_array(header, key, strings=False))} entries for {count} tokens")
    _check_merges(header)
    warnings = _check_ids(header, count)
    for name in ("bos", "eos"):
        if header.boolean(f"{PREFIX}add_{name}_token", False) and f"{PREFIX}{name}_token_id" not in header.kv:
            raise _bad(f"key {PREFIX}add_{name}_token is true, but {PREFIX}{name}_token_id is missing")
    return warnings


def has_vocabulary(header: GGUFHeader) -> bool:
    """Whether the file has one at all."""
    return header.text(PREFIX + "model", "none") not in ("none", "no_vocab")


def _check_kind(header: GGUFHeader) -> str:
    kind = header.text(PREFIX + "model", "")
    if kind not in KINDS:
        raise _bad(f"key {PREFIX}model is {kind!r:.60}, for which no engine tokenises")
    pre = header.text(PREFIX + "pre", "")
    if kind == "gpt2" and pre and pre not in PRE_TOKENIZERS:
        # Any splits that were not the model's would give other token ids than those that it learned.
        raise _bad(f"key {PREFIX}pre is {pre!r:.60}, a pre-tokenizer that nobody knows")
    return kind


def check_distinct(header: GGUFHeader) -> None:
    """Refuse a token that stands twice, at which llama.cpp ends. As it reads them: cut at a NUL, and an empty one named
    by its number."""
    ids: dict[bytes, int] = {}
    for number, token in enumerate(header.strings(_TOKENS)):
        read = token.partition(b"\0")[0] or b"[EMPTY_%d]" % number
        other = ids.setdefault(read, number)
        if other != number:
            raise _bad(
                f"entries {other} and {number} of key {_TOKENS} are the same token, {read[:40]!r}, which llama.cpp does"
                " not take (the PyTorch engine does)"
            )


def _check_tokens(tokens: list[bytes], *, bytes_needed: bool) -> None:
    try:
        b"".join(tokens).decode()
    except UnicodeDecodeError:
        wrong = next(number for number, token in enumerate(tokens) if token.decode("utf-8", "ignore").encode() != token)
        raise _bad(f"entry {wrong} of key {_TOKENS} is not UTF-8: {tokens[wrong][:40]!r}") from None
    if bytes_needed and not {b"<0x%02X>" % byte for byte in range(256)}.issubset(tokens):
        raise _bad(f"key {_TOKENS} has no token for every byte")


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
