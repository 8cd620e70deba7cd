"""Small made-up vocabularies in GGUF files, and strings on which splits, merges and special tokens differ.

Tokens reach across words wherever a split does not forbid it: a split that is missing or wrong shows in the ids.
"""

from __future__ import annotations

import random
import re
from typing import Any

from tests.support.gguf_writer import LLAMA, Typed

PARTS = [
    "def f(x):\n    return x ** 2 + 0x1F\n", "for (int i = 0; i < n; ++i) { a[i] += b; }",
    "SELECT * FROM t WHERE a='b';", "你好，世界", "吾輩は猫である。名前はまだ無い。", "안녕하세요",
    "Привет, мир", "مرحبا بالعالم", "नमस्ते", "สวัสดี", "Ελληνικά", "😀", "👩\u200d👩\u200d👧\u200d👦",
    "🏳️\u200d🌈", "🇩🇪", "é", "ﬁ", "Ⅷ", "½", "\u200b", "\ufeff", "\xa0", "\u3000", "\u2028", "\x00", "\x1b[31m",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<|im_", "<file_sep>", "<s>", "</s>",
    "[INST]", "1", "42", "007", "3.14159", "1,000,000", "1e-9", "٣", "२", " 12 345 ", "12'34", "0x7fff",
    "2026-11-29", " ", "  ", "   ", "    ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", " \n ", "\n    ",
    "        ", "Hello", " world", "I'm", "you'll", "DON'T", "isn't.", "naïve café", "ALLCAPS", "camelCase",
    "snake_case", "...", "--", "https://example.org/a?b=c&d=%20#e", "a@b.c", '{"k": [1, 2.5, null]}',
    "\\frac{1}{2}", "≠≤∑", "„Anführung“", "¿qué?", "\ufffd", "\ufffe", "\u0301", "e\u0301\u0302", "\ue000", "\u0378",
]  # fmt: skip
ODD_PARTS = [
    "'S", "'Ll", "\u017f'\u017f", "\u2019s", " 1234567", "12345678 9", "١٢٣٤٥", "１２３４", "ÀÉÎ", "ÀbcD", "XMLHttp",
    "ΑΒγδ", "\x85", "\u1680", "\u2003 \u2003", "\x1c\x1d", "\v\f", " \r\n\r\n ", "a\u0301\u0302", "ㄅㄆㄇ", "カタカナ",
    "々〆", "𠀀𠀁", "豈", "\ufada", "\U00011bc0\U00011bc1", "\U0001e4f1", "𝟙𝟚", "①②", "__init__", "$$$", "+=", "~`^|",
    "<sentinel:42>", "IMGIMGABCZ", "////", "\n/\n", "\U000e0001", "ລາວ", "ខ្មែរ", "မြန်မာ", "§", "€5", "ƻ", "Ǆ", "ʰ", "ª",
    "ß",
]  # fmt: skip


def mixed_strings(count: int, seed: int = 20, odd: bool = False) -> list[str]:
    """Strings of code, scripts, emoji, digits, special tokens and white space; `odd`: with characters of all planes."""
    rng = random.Random(seed)
    parts = PARTS + ODD_PARTS if odd else PARTS
    strings = list(parts)
    while len(strings) < count:
        text = rng.choice(["", " ", ""]).join(rng.choices(parts, k=rng.randint(2, 9)))
        if rng.random() < 0.2:
            text = text[rng.randint(0, len(text) // 2) : rng.randint(len(text) // 2, len(text))]
        if rng.random() < 0.1:
            text += "".join(chr(rng.choice([*range(32, 0xD800), *range(0xE000, 0x11000)])) for _ in range(3))
        if odd and rng.random() < 0.4:
            points = [rng.randrange(rng.choice([0x250, 0x3000, 0x20000, 0x110000])) for _ in range(4)]
            text += "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        strings.append(text)
    return strings[:count]


def byte_pair_keys(seed: int = 1) -> dict[str, Any]:
    """A byte-level vocabulary with three special tokens in front: `<|im_start|>`, `<|im_end|>` and, of the user's
    kind, `<tool>`."""
    rng = random.Random(seed)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    merges: dict[tuple[str, str], None] = {}
    for text in mixed_strings(600, seed, odd=True):
        spelled = "".join(spelling[byte] for byte in text.encode())
        for _ in range(2):
            first = rng.randrange(len(spelled)) if spelled else 0
            word = spelled[first : first + rng.randint(2, 5)]
            if "<|im_" not in word:
                merges.update({(word[:k], word[k]): None for k in range(1, len(word))})
    alphabet = list(spelling.values())
    words = list(dict.fromkeys(left + right for left, right in merges))
    rng.shuffle(pairs := list(merges))
    tokens = ["<|im_start|>", "<|im_end|>", "<tool>", *alphabet, *words]
    return {
        **LLAMA,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed("i32", [3, 3, 4] + [1] * (len(tokens) - 3)),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
    }


def sentence_piece_keys(*, equal_scores: bool, across_words: bool, seed: int = 1) -> dict[str, Any]:
    """A SentencePiece vocabulary. `equal_scores`: many tokens have the same; `across_words`: some hold a space that
    is not in front."""
    rng = random.Random(seed)
    texts = ["▁" + text.replace(" ", "▁").replace("\0", "") for text in mixed_strings(800, seed, odd=True)]
    characters = sorted({char for text in texts for char in text if ord(char) < 0x3000})
    words: set[str] = set()
    for text in texts:
        for _ in range(10):
            first = rng.randrange(len(text))
            word = text[first : first + rng.randint(2, 6)]
            words |= {word[:k] for k in range(2, len(word) + 1)} | {word[-2:]}
    kept = sorted(w for w in words if len(w) > 1 and (across_words or not re.search("[^▁]▁", w)))
    middle = list(dict.fromkeys([*rng.sample(characters, len(characters) * 3 // 4), *kept]))
    special = {"<unk>": 2, "<s>": 3, "</s>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    behind = {"<|im_start|>": 3, "<|endoftext|>": 3, "  x": 4}
    middle = [word for word in middle if word not in special | behind]
    tokens = [*special, *middle, *behind]
    scores = [float(rng.randint(-40, -1)) if equal_scores else -100 * rng.random() for _ in tokens]
    keys = {
        **LLAMA,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": Typed("f32", scores),
        "tokenizer.ggml.token_type": Typed("i32", [*special.values(), *[1] * len(middle), *behind.values()]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    del keys["tokenizer.ggml.merges"]
    return keys


def marked_byte_pair_keys(model: str, pre: str, seed: int = 1) -> dict[str, Any]:
    """Byte pairs spelled as SentencePiece has it, as Gemma 4."""
    rng = random.Random(seed)
    merges: dict[tuple[str, str], None] = {}
    texts = [text.replace(" ", "▁").replace("\0", "") for text in mixed_strings(800, seed, odd=True)]
    for text in texts:
        for line in text.split("\n"):
            first = rng.randrange(len(line)) if line else 0
            word = line[first : first + rng.randint(2, 5)]
            merges.update({(word[:k], word[k]): None for k in range(1, len(word))})
    parts = [part for pair in merges for part in (*pair, "".join(pair))]
    special = {"<pad>": 3, "<eos>": 3, "<bos>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    words = [word for word in dict.fromkeys([*parts, "\n", "\n\n", "\n\n\n", "a", "▁"]) if word not in special]
    tokens = [*special, *words, "<turn|>"]
    rng.shuffle(pairs := list(merges))
    return {
        **LLAMA,
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed("i32", [*special.values(), *[1] * (len(words) + 1)]),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
