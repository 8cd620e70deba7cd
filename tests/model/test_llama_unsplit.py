"""The unsplit measure computes what llama-cpp-python's own functions do, alone and several sequences in step."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.cli.demo_model import demo_model
from shardline.model.llama_unsplit import Unsplit
from tests.support.llama_plain import Plain

pytestmark = [pytest.mark.llama, pytest.mark.smollm2]
PROMPTS = [[1, 4093, 28, 732, 11], [198, 788, 260], list(range(1000, 1530))]
"""The last one is longer than a batch."""


def expected(prompt: list[int], tokens: int) -> int:
    """The last of `tokens` likeliest tokens."""
    plain = Plain(demo_model(), sequences=1, context=1024)
    try:
        position = 0
        given = prompt
        while True:
            for start in range(0, len(given), 512):
                chunk = given[start : start + 512]
                (logits,) = plain.run([(0, position, chunk, True)])
                position += len(chunk)
            assert logits is not None
            token = int(np.argmax(logits))
            tokens -= 1
            if not tokens:
                return token
            given = [token]
    finally:
        plain.close()


def test_the_tokens_are_those_of_the_library() -> None:
    model = Unsplit(demo_model(), threads=1, sequences=3, kv_tokens=1024)
    wanted = [expected(prompt, 6) for prompt in PROMPTS]
    try:
        for _ in range(2):  # the second request finds an empty cache
            alone = [model.generate([prompt], 6) for prompt in PROMPTS]
            assert [rates.last[0] for rates in alone] == wanted
            assert all(rates.steps == 5 and rates.first_s > 0 and rates.decode_s > 0 for rates in alone)
        assert len(model.generate(PROMPTS, 3).last) == 3
    finally:
        model.close()


def test_it_answers_a_request_a_line() -> None:
    command = [sys.executable, "-m", "shardline.model.llama_unsplit", str(demo_model()), "--threads", "1"]
    done = subprocess.run(
        [*command, "--sequences", "1", "--kv-tokens", "256"],
        input=json.dumps({"prompts": [[1, 2, 3]], "tokens": 2}) + "\n",
        capture_output=True,
        text=True,
        timeout=50,
    )
    facts, answer = map(json.loads, done.stdout.splitlines())
    assert facts["vocab_size"] == 49152 and "llama.cpp" in facts["build"]
    assert answer["steps"] == 1
