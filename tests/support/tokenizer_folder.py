"""A tokenizer for tiny models, written into their folder as transformers has it."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 260


def save_tokenizer(folder: Path) -> None:
    """One token a byte, and four control tokens."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    names = ["<|begin|>", "<|end|>", "<|one|>", "<|two|>"]
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names[0], "eos_token": names[1]}
    settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
