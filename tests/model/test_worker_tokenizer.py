"""The engine worker tokenises two texts at a time: a tokenizer of a folder gives each thread what it asked for."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch


def test_two_threads_read_special_tokens_each_as_it_wants(tmp_path: Path) -> None:
    """How special tokens are read is a state of a tokenizer of the library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig

    from shardline.model.tokenizer import text_of_folder

    words = {"a": 0, "Ġ": 1, "<": 2, "x": 3, ">": 4}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<x>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    text = text_of_folder(tmp_path, LlamaConfig(), 6, 100)
    assert text is not None
    given = "a <x> " * 300
    expected = {True: [0, 1, 5, 1] * 300, False: [0, 1, 2, 3, 4, 1] * 300}
    wrong: list[bool] = []

    def read(parse_special: bool) -> None:
        for _ in range(200):
            if text.tokenize(given, add_special=False, parse_special=parse_special) != expected[parse_special]:
                wrong.append(parse_special)

    threads = [threading.Thread(target=read, args=(special,)) for special in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
