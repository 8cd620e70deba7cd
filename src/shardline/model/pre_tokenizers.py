r"""How a byte-pair vocabulary of a GGUF file cuts text into words: by the name in `tokenizer.ggml.pre`.

Owns the table of names and their splits, which follow llama.cpp (src/llama-vocab.cpp and src/unicode.cpp at commit
0c1e570), where every model's own splits were transcribed; and how a split is carried out. It merges nothing and knows
no token. Where llama.cpp differs from the model's first tokenizer, this differs with it: one model, one answer,
whichever engine serves it. Shown by tests/model/test_pre_tokenizers.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from types import MappingProxyType
from typing import Final

from shardline.errors import ShardlineError
from shardline.model.unicode_classes import HAN, SPACES, class_runs

# Most splits see a text in which each character beyond ASCII is replaced by one that stands for its class, as llama.cpp
# has it: so that a pattern means the same whatever Unicode version the pattern library knows.
_STANDS_FOR: Final = {"N": "\xd1", "L": "\xd2", "P": "\xd3", "M": "\xd4", "S": "\xd5", "O": "\xd0"}
_HAN_LETTER, _HAN_OTHER, _SPACE = "\xd6", "\xd7", "\v"

N: Final = r"0-9\xd1"
L: Final = r"A-Za-z\xd2"
M: Final = r"\xd4"
P: Final = r"!-#%-*,-/:-;?-@\[-\]_{}\xd3"
S: Final = r"$+<=>^`|~\xd5"
_UPPER, _LOWER = r"A-Z\xd2", r"a-z\xd2"
"""Beyond ASCII no case is told apart: every such letter is both."""

_ENDING = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_NEWLINES = r"\s*[\r\n]+"
_BLANKS = r"\s+(?!\S)|\s+"
_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"


@dataclass(frozen=True, slots=True)
class Split:
    """One pass over the pieces so far: what the pattern finds, and what lies between, become pieces of their own."""

    pattern: str
    sees: str = "classes"
    """classes: the text by classes of characters; han: the same with Han apart; characters: the text itself."""
    recursive: bool = True
    """llama.cpp matches it with std::regex, which calls itself for every character of a match."""


Find = Callable[[str, int, int], Iterator[tuple[int, int]]]
Cut = Callable[[str, int, int], Iterator[int]]
"""Gives the positions at which [first, last) of the text by classes is cut, where no pattern says it in linear time."""


def _digits_from_behind(text: str, first: int, last: int) -> Iterator[int]:
    """Groups of three digits, counted from the end of a number; what stands before it stays with the first group."""
    for number in _NUMBERS.finditer(text, first, last):
        begin, end = number.span()
        yield from range(end - (end - begin - 1) // 3 * 3, end + 1, 3)


def _thousands(text: str, first: int, last: int) -> Iterator[int]:
    """In front of every group of three ASCII digits, counted from the end of a number."""
    for number in _ASCII_NUMBERS.finditer(text, first, last):
        begin, end = number.span()
        yield from range(end - (end - begin) // 3 * 3, end, 3)


def _blanks_at_the_end(text: str, first: int, last: int) -> Iterator[int]:
    yield first + len(text[first:last].rstrip(_ASCII_BLANKS))


_ASCII_BLANKS = " \t\n\v\f\r"
_LONG_RUNS = re.compile(rf"\s{{256,}}|[{N}]{{256,}}", re.ASCII)
_NUMBERS = re.compile(f"[{N}]+")
_ASCII_NUMBERS = re.compile("[0-9]+")

_GPT2 = Split(rf"'(?:s|t|re|ve|m|ll|d)| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|{_BLANKS}", recursive=False)
_ONE_NUMBER = Split(f"[{N}]")
_THREE_NUMBERS = Split(f"[{N}]{{1,3}}")
_LINES = Split(r"[^\n]+|\n+", recursive=False)


def _words(numbers: str, *, letters: str = L, ending: str = f"{_ENDING}|", blanks: str = _BLANKS) -> Split:
    """The form that Llama 3 and Qwen share: a word may begin with one character that is no letter."""
    marks = letters.removeprefix(L)
    return Split(rf"{ending}[^\r\n{L}{N}]?[{letters}]+|{numbers}| ?[^\s{L}{marks}{N}]+[\r\n]*|{_NEWLINES}|{blanks}")


def _cased(numbers: str, *, marks: str = "", ending: str = f"(?:{_ENDING})?") -> Split:
    """The form of GPT-4o and Tekken: a capital begins a new word. Its ASCII letters are told apart by case only."""
    upper, lower = f"[{_UPPER}{marks}]", f"[{_LOWER}{marks}]"
    return Split(
        rf"[^\r\n{L}{N}]?{upper}*{lower}+{ending}|[^\r\n{L}{N}]?{upper}+{lower}*{ending}|{numbers}"
        rf"| ?[^\s{L}{N}]+[\r\n/]*|{_NEWLINES}|{_BLANKS}"
    )


def _caseless(numbers: str) -> Split:
    return Split(rf"[^\r\n{L}{N}]?[{L}{M}]+(?:{_ENDING})?|{numbers}| ?[^\s{L}{N}]+[\r\n/]*|{_NEWLINES}|{_BLANKS}")


def _marked_words(*, blanks: str = rf"[\r\n]*|{_NEWLINES}") -> Split:
    """The form of DeepSeek V3."""
    return Split(rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n{L}{P}{S}]?[{L}{M}]+| ?[{P}{S}]+{blanks}|{_BLANKS}")


_LLAMA3 = replace(_words(f"[{N}]{{1,3}}"), recursive=False)
_QWEN2 = replace(_words(f"[{N}]"), recursive=False)
_DEEPSEEK_CJK = Split(r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "characters")
_SENTENCE_WORDS = Split(r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", "characters")
_DEEPSEEK_LETTERS = (
    r"A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    r"\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    r"\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    r"\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    r"\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    r"\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    r"\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    r"\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_SPLITS: Final[Mapping[str, tuple[Split | Cut, ...]]] = MappingProxyType(
    {
        "default": (
            Split(rf"[{P}$+<=>^~|]+"),
            _GPT2,
            Split(f"[{N}]+"),
            Split("[0-9][0-9][0-9]"),
        ),
        "gpt-2": (_GPT2,),
        "starcoder": (_ONE_NUMBER, _GPT2),
        "falcon": (Split(rf"[{P}$+<=>^~|`]+"), _GPT2, Split("[0-9][0-9][0-9]")),
        "llama-bpe": (_LLAMA3,),
        "qwen2": (_QWEN2,),
        "qwen35": (replace(_words(f"[{N}]", letters=L + M), recursive=False),),
        "ufakzeka": (_words(f"[{N}]", ending=""),),
        "laguna": (_LINES, _QWEN2),
        "minicpm5": (_THREE_NUMBERS, _words(f"[{N}]+")),
        "jais-2": (
            _words(
                f"[{N}]{{1,3}}",
                blanks="|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s",
            ),
        ),
        "bailingmoe": (
            Split(rf"{_ENDING}|[^\r\n{L}{N}]?[{L}]+|[{N}]| ?[^\s{L}{N}]+[\r\n]*|\s*[\r\n]|{_BLANKS}"),
        ),
        "seed-coder": (
            Split(rf"{_ENDING}|[^\r\n{L}{N}]?[{L}]+|[{N}]| ?[^\s{L}{N}\r\n]+|{_NEWLINES}|{_BLANKS}"),
        ),
        "exaone-moe": (
            Split(
                rf"{_ENDING}|[^\r\n{L}{N}]?(?:[{L}][{M}]*(?: [{L}][{M}]*)*)+|[{N}]| ?[^\s{L}{N}]+[\r\n/]?"
                rf"|\s*[\r\n]|{_BLANKS}"
            ),
        ),
        "tekken": (_cased(f"[{N}]", ending=""),),
        "gpt-4o": (_cased(f"[{N}]{{1,3}}"),),
        "granite-embed-multi-97m": (_cased(f"[{N}]{{1,3}}", marks=M),),
        "tiny_aya": (_digits_from_behind, _caseless(f"[{N}]{{1,3}}")),
        "youtu": (
            Split(
                r"[\uac00-\ud7a3\u3131-\u318e]+"
                r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
                rf"|[\u3105-\u312f]+|{_CJK}",
                "characters",
            ),
            _caseless(f"[{N}]"),
        ),
        "deepseek-llm": (
            Split(r"[\r\n]", "characters"),
            Split(rf"\s?[{_DEEPSEEK_LETTERS}]+", "characters"),
            Split(r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", "characters"),
            _blanks_at_the_end,
            _DEEPSEEK_CJK,
            Split(f"[{N}]+"),
        ),
        "deepseek-coder": (
            Split(r"[\r\n]", "characters"),
            Split(rf"\s?[{L}]+"),
            Split(rf"\s?[{P}]+"),
            _DEEPSEEK_CJK,
            _ONE_NUMBER,
        ),
        "deepseek-v3": (_THREE_NUMBERS, Split(_CJK, "characters"), _marked_words()),
        "spark2_5": (_THREE_NUMBERS, Split(_CJK, "characters"), _marked_words(blanks=r"|[\r\n]"), _ONE_NUMBER),
        "afmoe": (
            _digits_from_behind,
            Split(
                r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
                r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
                "characters",
            ),
            _marked_words(),
        ),
        "bloom": (_SENTENCE_WORDS,),
        "viking": (_SENTENCE_WORDS, _ONE_NUMBER),
        "chameleon": (
            Split("<sentinel:[0-9]+>", "characters"),
            Split("IMGIMG[A-I]{1,4}Z", "characters"),
            Split(r"[\t\n]|    |  ", "characters"),
            _ONE_NUMBER,
            Split(rf"[{P}!-/:-@\[-`{{-~]"),
            _GPT2,
        ),
        "kimi-k2": (
            Split(
                rf"[\xd6\xd7]+|[^\r\n{L}\xd6{N}]?[{L}]+(?:{_ENDING})?|[{N}]{{1,3}}| ?[^\s{L}\xd6{N}]+[\r\n]*"
                rf"|{_NEWLINES}|{_BLANKS}",
                "han",
                recursive=False,
            ),
        ),
        "superbpe": (Split(f"[{N}]+"), _thousands),
        "gemma4": (_LINES,),
    }
)  # fmt: skip

_SAME: Final[Mapping[str, str]] = MappingProxyType(
    {
        name: first
        for first, names in {
            "gpt-2": "phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
            "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
            "starcoder": "refact command-r smollm codeshell exaone minerva-7b mellum2",
            "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe "
            "chatglm-bpe glm4 glm5",
            "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
            "gpt-4o": "llama4 kanana2 talkie minimax-m2",
            "tiny_aya": "cohere2moe",
            "bloom": "poro-chat gpt3-finnish",
            "bailingmoe": "bailingmoe2 llada-moe",
            "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
            "gemma4": "granite-embed-multi-311m sarvam-moe",
        }.items()
        for name in names.split()
    }
)

_WHOLE_WORDS_FIRST: Final = frozenset(
    {
        "minicpm5", "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano", "youtu", "glm4", "glm5", "tekken", "granite-embed-multi-97m",
    }
)  # fmt: skip
_BEGIN_WITH_BOS: Final = frozenset(
    {
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
        "tekken", "chameleon", "gemma4", "granite-embed-multi-311m",
    }
)  # fmt: skip
_NO_DEFAULT_BOS = frozenset({"chatglm-bpe", "glm4", "glm5"})
FORMS: Final = frozenset(_SPLITS)
NAMES: Final = FORMS | frozenset(_SAME)
"""All names that are known; `FORMS`: those of them that stand for splits of their own."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A step, compiled."""

    sees: str
    recursive: bool
    find: Find

    def found_in(self, text: str, ends: Sequence[int]) -> Iterator[tuple[int, int]]:
        """What the step finds in the pieces that end there."""
        return chain.from_iterable(map(self.find, repeat(text), chain([0], ends), ends))

    def cut(self, text: str, ends: Sequence[int]) -> list[int]:
        """The ends of the pieces, from those of the step before."""
        cuts: list[int] = []
        first = 0
        for last in ends:
            for begin, end in self.find(text, first, last):
                if begin > first:
                    cuts.append(begin)
                if end > begin:
                    cuts.append(end)
                first = end
            if first < last:
                cuts.append(last)
            first = last
        return cuts


def _ready(step: Split | Cut) -> _Ready:
    if not isinstance(step, Split):
        function = step
        return _Ready("classes", False, lambda text, first, last: ((cut, cut) for cut in function(text, first, last)))
    matches = re.compile(step.pattern, re.ASCII).finditer
    return _Ready(step.sees, step.recursive, lambda text, first, last: map(re.Match.span, matches(text, first, last)))


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` says of a vocabulary."""

    name: str
    whole_words_first: bool
    """A word that is a token is that token, whatever the merges would make of it."""
    add_bos: bool
    """Where the file does not say whether a text begins with BOS."""
    default_bos: bool
    """A file that names no BOS has one by default."""
    spaces_as_marks: bool
    """The vocabulary is spelled as SentencePiece has it, `▁` for a space, and not by bytes."""
    whole_newlines: bool
    """A run of newlines that is a token is that token."""
    steps: tuple[_Ready, ...]
    tables: Mapping[str, Mapping[int, str] | str]

    def split(self, text: str) -> list[str]:
        """The words of `text`, in order; together they are `text`."""
        seen = self._seen(text)
        ends = [len(text)] if text else []
        for step in self.steps:
            ends = step.cut(seen[step.sees], ends)
        return [text[first:last] for first, last in zip([0, *ends], ends, strict=False)]

    @property
    def recursive(self) -> bool:
        return any(step.recursive for step in self.steps)

    def depth(self, text: str) -> int:
        """How many characters of `text` std::regex looks at in one attempt, at most: it calls itself for each."""
        seen = self._seen(text)
        ends = [len(text)] if text else []
        longest = 0
        for step in self.steps:
            if step.recursive:
                found = step.found_in(seen[step.sees], ends)
                longest = max(longest, max((end - begin for begin, end in found), default=0))
            ends = step.cut(seen[step.sees], ends)
        # Attempts that fail, and functions that stand for patterns, look at runs of these.
        for run in _LONG_RUNS.finditer(text.translate(self.tables.get("classes", {}))):
            longest = max(longest, run.end() - run.start())
        return longest

    def _seen(self, text: str) -> dict[str, str]:
        return {sees: text.translate(table) for sees, table in self.tables.items()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """By its name in a file ("" is "default"). `model_file_invalid` for a name that nobody knows: any splits that were
    not the model's would give other token ids than those that it learned."""
    name = name or "default"
    if name not in NAMES:
        raise ShardlineError(
            "model_file_invalid", f"the model's text cannot be used: its pre-tokenizer {name!r:.40} is unknown"
        )
    form = _SAME.get(name, name)
    steps = tuple(_ready(step) for step in _SPLITS[form])
    return PreTokenizer(
        name,
        whole_words_first=name in _WHOLE_WORDS_FIRST,
        add_bos=name in _BEGIN_WITH_BOS,
        default_bos=name not in _NO_DEFAULT_BOS,
        spaces_as_marks=form == "gemma4",
        whole_newlines=form == "gemma4" and name != "sarvam-moe",
        steps=steps,
        tables={sees: _table(sees) for sees in {step.sees for step in steps}},
    )


def _table(sees: str) -> Mapping[int, str] | str:
    """What each character stands for, by its code point."""
    spaces = {ord(char): _SPACE for char in SPACES if not char.isascii()}
    if sees == "characters":
        return spaces
    table = bytearray().join(_STANDS_FOR[kind].encode("latin-1") * (end - first) for first, end, kind in class_runs())
    table[:128] = range(128)
    if sees == "han":
        apart = bytes(ord(_HAN_LETTER if char == ord(_STANDS_FOR["L"]) else _HAN_OTHER) for char in range(256))
        for first, last in HAN:
            table[first : last + 1] = table[first : last + 1].translate(apart)
    for point, space in spaces.items():
        table[point] = ord(space)
    return table.decode("latin-1")
