"""Models that llama.cpp tells by their number of layers, and files of which much is filling: their parts compute right.

Tiny models with random weights, whole and in parts, in stock llama.cpp in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardline.artifact.shard_files import ShardFiles
from shardline.formats.architectures import llama_rules, of_gguf
from shardline.formats.gguf_files import read_model
from tests.support.gguf_models import CONTENT_ID

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama.cpp is not installed")


def distance(folder: Path, architecture: str, keys: dict[str, Any], edges: tuple[int, ...]) -> float:
    """Largest difference of logits between the whole and the chain of parts, over the largest logit."""
    from tests.support.tiny_gguf import write_tiny_gguf
    from tests.support.tiny_models import TinyModel

    path = write_tiny_gguf(TinyModel("tiny", architecture, keys, layers=edges[-1]), folder / "tiny.gguf")
    files, model = ShardFiles(folder), read_model(path)
    parts = [str(files.shard(model, CONTENT_ID, a, b)) for a, b in pairwise(edges)]
    residual = llama_rules(of_gguf(architecture)).residual
    command = [sys.executable, "-m", "tests.support.llama_chain", str(path), residual, *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer["largest"] > 0.1
    result: float = answer["difference"] / answer["largest"]
    return result


@pytest.mark.parametrize("layers", [27, 30])
def test_a_deepseek_is_lite_by_its_number_of_layers(tmp_path: Path, layers: int) -> None:
    from tests.support.tiny_models import DENSE_LEAD, MLA

    assert distance(tmp_path, "deepseek2", DENSE_LEAD | MLA, (0, 9, 18, layers)) == 0.0


def test_the_scale_of_the_large_gemma_is_that_of_the_whole(tmp_path: Path) -> None:
    """The factor of the scale in this model is 0.8: a part without it would be far off."""
    keys = {
        "embedding_length": 96,
        "attention.sliding_window": 4,
        "attention.key_length": 16,
        "attention.value_length": 16,
    }
    assert 0 < distance(tmp_path, "gemma3", keys, (0, 31, 62)) < 1e-3


def test_a_tail_loads_with_an_embedding_of_one_bit_an_element(tmp_path: Path) -> None:
    assert distance(tmp_path, "internlm2", {"embedding_length": 128}, (0, 3, 6, 8)) == 0.0
