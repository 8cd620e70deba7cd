"""The tokenizer of a model and its text bundle: text to token ids, and the bytes of every token id.

Owns how a tokenizer is built from GGUF metadata or from a folder, always through transformers, so that ids are those
that transformers gives; and what of it a Gateway must know to turn tokens into text. Renders no chat template.
What a folder holds is never run as code. Shown by tests/model/test_tokenizer.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

from shardline.errors import ShardlineError
from shardline.formats.gguf import Array, GGUFHeader
from shardline.formats.safetensors import read_object
from shardline.formats.vocabulary import check_vocabulary
from shardline.wire.messages import TextBundle

END_TEXTS = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
        "<turn|>", "<|return|>", "<|call|>", "<EOT>", "<｜end▁of▁sentence｜>", "[EOT]", "</s>",
    }
)  # fmt: skip
"""Special tokens that end a generation wherever a vocabulary has them: models of chats write them at the end of a turn,
and files often name only one of theirs."""

FIM_TEXTS = {
    "prefix": ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    "suffix": ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    "middle": ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
}
_FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_FOLDER_LIMIT = 4 << 20
_CONTROL, _UNKNOWN = 3, 2


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's tokenizer with its text bundle. One thread: how special tokens are read is a state of `tokenizer`."""

    tokenizer: Tokenizer
    bundle: bytes
    """MessagePack of `TextBundle`."""
    digest: str
    """SHA-256 of `bundle`, in hex."""
    before: tuple[int, ...] | None
    """Ids that `add_special` puts in front (and `after` behind); None: the tokenizer has a template of its own."""
    after: tuple[int, ...] = ()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. `parse_special`: special tokens that stand in it are read as such, else as text."""
        self.tokenizer.encode_special_tokens = not parse_special
        own = self.before is None
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special and own).ids
        except (TypeError, UnicodeEncodeError):
            raise ShardlineError("invalid_value", "the text holds a lone surrogate, which is no character") from None
        if self.before is None or not add_special:
            return ids
        return [*self.before, *ids, *self.after]


def text_of_gguf(header: GGUFHeader, vocab_size: int, context_length: int) -> ModelText | None:
    """From GGUF metadata; None where the file has no vocabulary. `model_file_invalid` where it cannot be used."""
    if header.text("tokenizer.ggml.model", "no_vocab") in ("no_vocab", "none"):
        return None
    check_vocabulary(header)
    fields = _gguf_fields(header)
    architecture = header.text("general.architecture")
    try:
        tokenizer, _ = convert_gguf_tokenizer(architecture, fields)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _invalid(f"its tokenizer cannot be built: {error!s:.200}") from None
    tokenizer = _without_made_up_tokens(tokenizer, set(fields["tokens"]))
    types = fields.get("token_type", [])
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)} | _special_ids(tokenizer)
    named = {
        name: header.integer(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "fim_pre", "fim_suf", "fim_mid")
        if f"tokenizer.ggml.{name}_token_id" in header.kv
    }
    # A SentencePiece vocabulary that says nothing gets a BOS, as in the program that such files are made for.
    add_bos = header.boolean("tokenizer.ggml.add_bos_token", fields["tokenizer_type"] == "llama")
    add_eos = header.boolean("tokenizer.ggml.add_eos_token", False)
    template = header.text("tokenizer.chat_template", "")
    fim = {"prefix": named.get("fim_pre"), "suffix": named.get("fim_suf"), "middle": named.get("fim_mid")}
    return _model_text(
        tokenizer,
        vocab_size=vocab_size,
        special=special,
        ends=[named[name] for name in ("eos", "eot", "eom") if name in named],
        bos=named.get("bos"),
        eos=named.get("eos"),
        add_bos=add_bos and "bos" in named,
        chat_template=template or None,
        context_length=context_length,
        fim={name: token for name, token in fim.items() if token is not None},
        tokens=fields["tokens"],
        before=(named["bos"],) if add_bos and "bos" in named else (),
        after=(named["eos"],) if add_eos and "eos" in named else (),
    )


def _gguf_fields(header: GGUFHeader) -> dict[str, Any]:
    """The tokenizer's metadata under the names that transformers' converter wants."""
    fields: dict[str, Any] = {}
    for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items():
        key = f"tokenizer.{key}"
        value = header.kv.get(key)
        if value is None:
            continue
        if isinstance(value, Array):
            fields[name] = _strings(header, key) if value.kind == "string" else list(header.numbers(key))
        else:
            fields[name] = header.text(key) if isinstance(value, bytes) else value
    return fields


def _without_made_up_tokens(tokenizer: Tokenizer, known: set[str]) -> Tokenizer:
    """transformers adds the special tokens of its tokenizer class where a file has none of them. No model knows their
    ids, or has them for other tokens: text that looks like one must stay text."""
    if all(token.content in known for token in tokenizer.get_added_tokens_decoder().values()):
        return tokenizer
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in known]
    return Tokenizer.from_str(json.dumps(state))


def _strings(header: GGUFHeader, key: str) -> list[str]:
    values = header.strings(key)
    try:
        return [value.decode("utf-8") for value in values]
    except UnicodeDecodeError:
        raise _invalid(f"{key} holds bytes that are not UTF-8") from None


def text_of_folder(folder: Path, config: PreTrainedConfig, vocab_size: int, context_length: int) -> ModelText | None:
    """From the tokenizer files of a model folder; None where there are none."""
    if not any((folder / name).is_file() for name in _FOLDER_FILES):
        return None
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = Tokenizer.from_str(found.backend_tokenizer.to_str())
    except Exception as error:  # every way in which files of a stranger can fail to be a tokenizer
        raise _invalid(f"its tokenizer cannot be read: {type(error).__name__}: {error!s:.200}") from None
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
        special=_special_ids(tokenizer),
        ends=_folder_ends(folder, config, found.eos_token_id),
        bos=found.bos_token_id,
        eos=found.eos_token_id,
        add_bos=found.bos_token_id is not None and marked[: len(marked) - len(plain)][:1] == [found.bos_token_id],
        chat_template=template,
        context_length=context_length,
        fim={},
        before=None,
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
    special: set[int],
    ends: Iterable[int],
    bos: int | None,
    eos: int | None,
    add_bos: bool,
    chat_template: str | None,
    context_length: int,
    fim: dict[str, int],
    before: tuple[int, ...] | None,
    after: tuple[int, ...] = (),
    tokens: Sequence[str] = (),
) -> ModelText:
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocab_size, len(tokens), max(vocabulary.values(), default=-1) + 1)
    named = {text: token for text, token in vocabulary.items() if token in special}
    end_ids = {token for token in ends if 0 <= token < size} | {named[text] for text in END_TEXTS & named.keys()}
    bundle = TextBundle(
        pieces=pieces_of(tokenizer, size, tokens),
        special=sorted(token for token in special if token < size),
        eog=sorted(end_ids),
        bos=bos,
        eos=eos,
        add_bos=add_bos,
        chat_template=chat_template,
        context_length=context_length,
        fim=fim or _fim_of(vocabulary),
    )
    packed = msgspec.msgpack.encode(bundle)
    return ModelText(tokenizer, packed, hashlib.sha256(packed).hexdigest(), before, after)


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}


def _fim_of(vocabulary: dict[str, int]) -> dict[str, int] | None:
    """The three tokens for filling in the middle, if the vocabulary has all of them."""
    found = {
        part: next((vocabulary[text] for text in texts if text in vocabulary), None)
        for part, texts in FIM_TEXTS.items()
    }
    complete = {part: token for part, token in found.items() if token is not None}
    return complete if len(complete) == len(FIM_TEXTS) else None


def pieces_of(tokenizer: Tokenizer, size: int, tokens: Sequence[str] = ()) -> list[bytes]:
    """The bytes of token ids 0 to `size` - 1; an id that nothing is known of has none.

    `tokens`: the whole vocabulary by id, where it is known: of tokens that stand twice the tokenizer keeps one.
    `model_file_invalid` for a tokenizer whose tokens have no bytes of their own (whole words, with spaces made up).
    """
    # The state of the decoder alone: that of the whole tokenizer is megabytes.
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    added = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items()}
    if "ByteLevel" in kinds:
        alphabet: dict[int, str] = bytes_to_unicode()
        spell: Callable[[str], bytes] = _ByteLevel({char: byte for byte, char in alphabet.items()})
    elif "Metaspace" in kinds or any(_replaces_space(step) for step in steps):
        spell = _SentencePiece("ByteFallback" in kinds)
    else:
        raise _invalid(f"its tokens have no bytes of their own (decoder {decoder.get('type')})")
    pieces = [spell(text) for text in tokens] + [b""] * (size - len(tokens))
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        pieces[token] = added[token].encode() if token in added else spell(text)
    return pieces


def _replaces_space(step: dict[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("content") == " " and step.get("pattern") == {"String": "▁"}


class _ByteLevel:
    """Every character stands for one byte; what has other characters is meant as it is."""

    def __init__(self, byte_of: dict[str, int]) -> None:
        self._byte_of = byte_of

    def __call__(self, text: str) -> bytes:
        try:
            return bytes([self._byte_of[char] for char in text])
        except KeyError:
            return text.encode()


class _SentencePiece:
    """`▁` is a space, and with byte fallback `<0x0A>` is one byte."""

    def __init__(self, byte_fallback: bool) -> None:
        self._byte_fallback = byte_fallback

    def __call__(self, text: str) -> bytes:
        if self._byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        return text.replace("▁", " ").encode()


def _invalid(why: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"the model's text cannot be used: {why}")
