"""The vocabulary of a GGUF file as llama.cpp reads it, and the text bundle that comes of it, for every engine alike.

Owns which tokens are parsed out of a text before all else, which of them are control tokens, what stands around a
text, and the bytes of each token. Merges nothing, and imports no library of an engine: the same bundle leaves an
engine that has transformers and one that has not. Where a file leaves something open, the answer is that of llama.cpp
at commit 0c1e570 (src/llama-vocab.cpp). Shown by tests/model/test_tokenizer.py and test_llama_text.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader
from shardline.formats.vocabulary import PREFIX, check_vocabulary, has_vocabulary
from shardline.model.pre_tokenizers import PreTokenizer, pre_tokenizer
from shardline.wire.messages import TextBundle

BYTE_PAIRS: Final = frozenset({"gpt2", "gemma4"})
SENTENCE_PIECE: Final = "llama"

END_TEXTS: Final = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
        "<turn|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>",
        "[EOT]", "[EOS]", "</s>", "<eos>", "<end_of_utterance>", "<|tool_response>", "[e~[",
    }
)  # fmt: skip
"""Special tokens that end a generation wherever a vocabulary has them: models of chats write them at the end of a turn,
and files often name only one of theirs. llama.cpp takes each for a control token, whatever the file says."""

FIM_TEXTS: Final[Mapping[str, tuple[str, ...]]] = {
    "prefix": (
        "<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "suffix": (
        "<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "middle": (
        "<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
}  # fmt: skip
_CONTROL_TEXTS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("eot",): (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
        "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    ),
    ("fim_pre", "prefix"): FIM_TEXTS["prefix"],
    ("fim_suf", "suffix"): FIM_TEXTS["suffix"],
    ("fim_mid", "middle"): FIM_TEXTS["middle"],
    ("fim_pad",): ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("fim_rep",): ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("fim_sep",): ("<|file_sep|>",),
}  # fmt: skip
"""Where a file does not name a token for one of these uses, one with such a text is it, and a control token."""
_ALWAYS_PARSED: Final = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_C_SPACES = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is found in a text before anything is merged."""

    text: str
    id: int
    control: bool
    """Only where the caller asks for special tokens; else it is text."""
    strip_left: bool = False
    strip_right: bool = False
    """White space on this side of it belongs to no token."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a file says of its text. Of tokens that stand twice the later id counts."""

    kind: str
    """`tokenizer.ggml.model`."""
    pre: PreTokenizer | None
    """Of byte-pair vocabularies."""
    tokens: tuple[str, ...]
    ids: Mapping[str, int]
    special: tuple[SpecialToken, ...]
    """The longest first: they are looked for in this order."""
    control: frozenset[int]
    """Never shown as text."""
    before: tuple[int, ...]
    after: tuple[int, ...]
    """What stands around a text to which special tokens are added."""
    space_in_front: bool
    """SentencePiece: a text begins with a space that is not there."""

    def encode(
        self, text: str, merge: Callable[[str], list[int]], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Token ids of `text`; `merge` gives those of the text between special tokens."""
        ids = list(self.before) if add_special else []
        space = " " if self.space_in_front else ""
        for part in self.parts(text, parse_special=parse_special):
            if isinstance(part, int):
                ids.append(part)
                space = " " if self.space_in_front else ""
            else:
                ids += merge(space + part)
                space = ""
        return ids + list(self.after) if add_special else ids

    def parts(self, text: str, *, parse_special: bool) -> list[str | int]:
        """`text` as text (never empty) and ids of special tokens."""
        parts: list[str | int] = [text] if text else []
        for token in self.special:
            if (parse_special or not token.control) and token.text in text:
                parts = [piece for part in parts for piece in _apart(part, token)]
        return parts


def _apart(part: str | int, token: SpecialToken) -> list[str | int]:
    if isinstance(part, int) or token.text not in part:
        return [part]
    pieces: list[str | int] = []
    texts = part.split(token.text)
    for index, text in enumerate(texts):
        if index:
            pieces.append(token.id)
            text = text.lstrip(_C_SPACES) if token.strip_right else text
        if token.strip_left and index < len(texts) - 1:
            text = text.rstrip(_C_SPACES)
        if text:
            pieces.append(text)
    return pieces


@dataclass(frozen=True, slots=True)
class GGUFText:
    """A vocabulary with its text bundle."""

    vocabulary: Vocabulary
    bundle: bytes
    """MessagePack of `TextBundle`."""
    digest: str
    """SHA-256 of `bundle`, in hex."""


def read_text(
    header: GGUFHeader, vocab_size: int, context_length: int, *, pieces: Sequence[bytes] | None = None
) -> GGUFText | None:
    """From GGUF metadata; None where the file has no vocabulary. `model_file_invalid` where it cannot be used: for a
    defect, an unknown pre-tokenizer, or a kind of vocabulary of which only llama.cpp makes right ids. An engine that
    tokenises with llama.cpp gives the `pieces` of such a kind, the bytes of each token."""
    if not has_vocabulary(header):
        return None
    kind = header.text(PREFIX + "model")
    if pieces is None and kind not in BYTE_PAIRS and kind != SENTENCE_PIECE:
        raise invalid(f"this engine cannot tokenise for a vocabulary of the kind {kind!r:.40}")
    check_vocabulary(header)
    tokens = tuple(_tokens(header))
    ids = {text: token for token, text in enumerate(tokens)}
    pre = _pre_tokenizer(header, kind)
    marks = _Marks.of(header, ids, len(tokens))
    with_marks = pre.spaces_as_marks if pre is not None else kind == SENTENCE_PIECE
    if with_marks and not all(f"<0x{byte:02X}>" in ids for byte in range(256)):
        raise invalid("it has no token for every byte")
    bos, eos, before, after = _around(header, kind, pre, len(tokens))
    vocabulary = Vocabulary(
        kind,
        pre,
        tokens,
        ids,
        special=_special(header, tokens, marks),
        control=marks.control | marks.hidden,
        before=before,
        after=after,
        space_in_front=kind == SENTENCE_PIECE and header.boolean(PREFIX + "add_space_prefix", True),
    )
    if pieces is None:
        spell = spell_with_marks if with_marks else spelling_by_bytes()
        literal = marks.control | marks.user
        pieces = [text.encode() if token in literal else spell(text) for token, text in enumerate(tokens)]
    return _with_bundle(header, vocabulary, pieces, bos, eos, vocab_size, context_length)


def _tokens(header: GGUFHeader) -> Iterable[str]:
    for token, raw in enumerate(header.strings(PREFIX + "tokens")):
        # Behind a NUL llama.cpp sees nothing.
        yield raw.partition(b"\0")[0].decode() or f"[EMPTY_{token}]"


def _pre_tokenizer(header: GGUFHeader, kind: str) -> PreTokenizer | None:
    if kind == "gemma4":
        return pre_tokenizer("gemma4")
    return pre_tokenizer(header.text(PREFIX + "pre", "")) if kind in BYTE_PAIRS else None


@dataclass(frozen=True, slots=True)
class _Marks:
    """Token ids by what they are."""

    control: frozenset[int]
    """Control tokens, and the one for what is unknown."""
    user: frozenset[int]
    """Parsed out of every text, and shown as they are."""
    hidden: frozenset[int]
    """Control tokens by the file's own word; never shown, even where llama.cpp parses them out of every text."""

    @classmethod
    def of(cls, header: GGUFHeader, ids: Mapping[str, int], count: int) -> _Marks:
        key = PREFIX + "token_type"
        types = list(header.numbers(key)) if key in header.kv else [_NORMAL] * count
        hidden = {token for token, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
        control = set(hidden)
        for uses, texts in _CONTROL_TEXTS.items():
            found = sorted(ids[text] for text in texts if text in ids)
            if found and not any(f"{PREFIX}{use}_token_id" in header.kv for use in uses):
                control.add(found[0])
        control |= {ids[text] for text in END_TEXTS if text in ids}
        shown = {ids[text] for text in _ALWAYS_PARSED | _texts_that_end_no_turn(ids) if text in ids}
        user = {token for token, kind in enumerate(types) if kind == _USER} - control | shown
        plain: set[int] = set()
        if "</s>" in ids and ids.keys() & {"<|tool_response>", "<|plamo:eos|>"}:
            plain.add(ids["</s>"])
        return cls(frozenset(control - shown - plain), frozenset(user - plain), frozenset(hidden - plain))


def _texts_that_end_no_turn(texts: Container[str]) -> frozenset[str]:
    """Vocabularies with several ends (a call of a tool, a return) use `<|end|>` between the parts of one turn."""
    call = "<|call|>" in texts or "<|calls|>" in texts
    return frozenset({"<|end|>"}) if call and ("<|return|>" in texts or "<|flush|>" in texts) else frozenset()


def end_texts(texts: Container[str]) -> frozenset[str]:
    """The texts that end a generation in a vocabulary that has `texts`."""
    odd = {"</s>"} if "<|tool_response>" in texts or "<|plamo:eos|>" in texts else set()
    return END_TEXTS - _texts_that_end_no_turn(texts) - odd


def _special(header: GGUFHeader, tokens: Sequence[str], marks: _Marks) -> tuple[SpecialToken, ...]:
    name = header.text("general.name", "").lower()
    after = {tokens[token] for token in marks.control | marks.user} if "phi-3" in name or "phi3" in name else set()
    before: set[str] = set()
    pre, architecture = header.text(PREFIX + "pre", ""), header.text("general.architecture", "")
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")
    ):
        before, after = {"<mask>"}, set()
    elif after:
        after = (after | {"</s>"}) - {"<unk>", "<s>", "<|endoftext|>"}
    elif "modern-bert" in name:
        before = {"[MASK]"}
    special = [
        SpecialToken(tokens[token], token, token in marks.control, tokens[token] in before, tokens[token] in after)
        for token in sorted(marks.control | marks.user)
    ]
    return tuple(sorted(special, key=lambda token: -len(token.text.encode())))


def _around(
    header: GGUFHeader, kind: str, pre: PreTokenizer | None, count: int
) -> tuple[int | None, int | None, tuple[int, ...], tuple[int, ...]]:
    """BOS and EOS as the bundle names them, and the ids in front of and behind a text with special tokens."""
    named = {name: header.integer(f"{PREFIX}{name}_token_id", -1) for name in ("bos", "eos")}
    add_bos = header.boolean(PREFIX + "add_bos_token", pre.add_bos if pre is not None else kind == SENTENCE_PIECE)
    if pre is not None and pre.whole_newlines:
        add_bos = True  # Files of this kind say false, and mean a chat template that writes it.
    add_eos = header.boolean(PREFIX + "add_eos_token", False)
    default = {SENTENCE_PIECE: (1, 2), "gpt2": (11, 11)}.get(kind, (-1, -1))
    bos = named["bos"] if named["bos"] >= 0 or not add_bos else default[0]
    eos = named["eos"] if named["eos"] >= 0 or not add_eos else default[1]
    if pre is not None and not pre.default_bos and named["bos"] < 0:
        bos = -1
    if (add_bos and not 0 <= bos < count) or (add_eos and not 0 <= eos < count):
        raise invalid("it adds a token around texts, and names none")
    return (
        bos if bos >= 0 else None,
        eos if eos >= 0 else None,
        (bos,) if add_bos else (),
        (eos,) if add_eos else (),
    )


def _with_bundle(
    header: GGUFHeader,
    vocabulary: Vocabulary,
    pieces: Sequence[bytes],
    bos: int | None,
    eos: int | None,
    vocab_size: int,
    context_length: int,
) -> GGUFText:
    size = max(vocab_size, len(vocabulary.tokens))
    ids = vocabulary.ids
    ends = {
        header.integer(f"{PREFIX}{name}_token_id")
        for name in ("eos", "eot", "eom")
        if f"{PREFIX}{name}_token_id" in header.kv
    }
    ends |= {ids[text] for text in end_texts(ids) if text in ids}
    bundle = TextBundle(
        pieces=[*pieces, *[b""] * (size - len(pieces))],
        special=sorted(vocabulary.control),
        eog=sorted(ends),
        bos=bos,
        eos=eos,
        add_bos=bool(vocabulary.before),
        chat_template=header.text("tokenizer.chat_template", "") or None,
        context_length=context_length,
        fim=_named_fim(header) or fim_of(ids),
    )
    return GGUFText(vocabulary, *packed(bundle))


def _named_fim(header: GGUFHeader) -> dict[str, int]:
    keys = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
    return {
        part: header.integer(f"{PREFIX}{name}_token_id")
        for part, name in keys.items()
        if f"{PREFIX}{name}_token_id" in header.kv
    }


def fim_of(ids: Mapping[str, int]) -> dict[str, int] | None:
    """The three tokens for filling in the middle, if a vocabulary has all of them."""
    found = {part: next((ids[text] for text in texts if text in ids), None) for part, texts in FIM_TEXTS.items()}
    complete = {part: token for part, token in found.items() if token is not None}
    return complete if len(complete) == len(FIM_TEXTS) else None


def merges_of(header: GGUFHeader) -> list[tuple[str, str]]:
    """The pairs of a byte-pair vocabulary, best first; of equal ones the first counts."""
    pairs: dict[tuple[str, str], None] = {}
    for raw in header.strings(PREFIX + "merges"):
        parting = raw.find(b" ", 1)
        pairs.setdefault((raw[:parting].decode(errors="replace"), raw[parting + 1 :].decode(errors="replace")))
    return list(pairs)


def packed(bundle: TextBundle) -> tuple[bytes, str]:
    """The bytes of a bundle, and their digest."""
    data = msgspec.msgpack.encode(bundle)
    return data, hashlib.sha256(data).hexdigest()


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as byte-level vocabularies spell bytes: printable ones of Latin 1 are themselves, the others
    follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def spelling_by_bytes() -> Callable[[str], bytes]:
    """The bytes of a token of a byte-level vocabulary."""
    alphabet = byte_alphabet()

    def spell(text: str) -> bytes:
        """Every character stands for one byte; what has other characters is meant as it is."""
        try:
            return bytes([alphabet[char] for char in text])
        except KeyError:
            return text.encode()

    return spell


def spell_with_marks(text: str, *, byte_fallback: bool = True) -> bytes:
    """`▁` is a space, and with byte fallback `<0x0A>` is one byte."""
    if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("▁", " ").encode()


def invalid(why: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"the model's text cannot be used: {why}")
