"""Shard files of a real model in stock llama.cpp: they load, and a chain of them computes what the whole model does."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from shardline.artifact.shard_files import ShardFiles
from shardline.cli.demo_model import demo_model
from shardline.formats.architectures import llama_rules, of_gguf
from shardline.formats.gguf_files import read_model
from tests.support.gguf_models import CONTENT_ID

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama.cpp is not installed"),
]

VOCABULARY_ONLY = """
import ctypes, sys
import llama_cpp.llama_cpp as C
params = C.llama_model_default_params()
params.vocab_only = True
silent = C.llama_log_callback(lambda *_: None)
C.llama_log_set(silent, ctypes.c_void_p(0))
model = C.llama_model_load_from_file(sys.argv[1].encode(), params)
vocabulary = C.llama_model_get_vocab(model)
ids = (C.llama_token * 16)()
count = C.llama_tokenize(vocabulary, b"Hello world", 11, ids, 16, False, True)
print(C.llama_vocab_n_tokens(vocabulary), list(ids)[:count])
"""


@pytest.mark.parametrize("edges", [(0, 10, 20, 30), (0, 1, 29, 30), (0, 15, 30)], ids=str)
def test_a_chain_of_parts_gives_the_logits_of_the_whole(tmp_path: Path, edges: tuple[int, ...]) -> None:
    model = read_model(demo_model())
    files = ShardFiles(tmp_path)
    parts = [str(files.shard(model, CONTENT_ID, a, b)) for a, b in pairwise(edges)]
    residual = llama_rules(of_gguf("llama")).residual
    command = [sys.executable, "-m", "tests.support.llama_chain", str(demo_model()), residual, *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["largest"] > 1
    assert answer["difference"] == 0.0


def test_the_vocabulary_file_tokenises(tmp_path: Path) -> None:
    path = ShardFiles(tmp_path).vocabulary(read_model(demo_model()), CONTENT_ID)
    assert path.stat().st_size < 2 << 20
    answers = {
        subprocess.run(
            [sys.executable, "-c", VOCABULARY_ONLY, str(file)], capture_output=True, text=True, timeout=50, check=True
        ).stdout
        for file in (path, demo_model())
    }
    assert answers == {"49152 [19556, 905]\n"}
