"""What is said where the patched library is not there, is not patched, or cannot split a model. Needs no library."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from llama_cpp import llama_cpp

from shardline.errors import ShardlineError
from shardline.formats.cuts import WINDOWED, cuts_for_window
from shardline.formats.gguf_files import read_model
from shardline.model import backends
from shardline.model.backend import ShardSpec
from shardline.model.llama_window_library import window_library
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import BY_NAME, LAYERS
from tests.support.window import deepseek4
from upstream import patches

pytestmark = pytest.mark.llama


def test_a_library_that_is_not_built_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = write_tiny_gguf(deepseek4(), tmp_path / "deepseek4.gguf")
    options = {"library": str(tmp_path / "libllama.so")}
    with pytest.raises(ShardlineError, match="is not built") as caught:
        backends.load("llama-window", ShardSpec(str(path), 0, 4, options=options), lambda done, total: None)
    assert caught.value.code == "engine_unavailable"
    assert "make upstream" in caught.value.advice


def test_the_stock_library_is_not_taken_for_it() -> None:
    with pytest.raises(ShardlineError, match="without the patch") as caught:
        window_library(str(llama_cpp._lib._name))
    assert caught.value.code == "engine_unavailable"


def test_cuts_are_anywhere_in_the_architectures_of_the_patch(tmp_path: Path) -> None:
    model = read_model(write_tiny_gguf(deepseek4(), tmp_path / "deepseek4.gguf"))
    assert cuts_for_window(model.header).positions() == tuple(range(1, LAYERS))
    other = read_model(write_tiny_gguf(BY_NAME["qwen2"], tmp_path / "qwen2.gguf"))
    cuts = cuts_for_window(other.header)
    assert cuts.positions() == ()
    with pytest.raises(ShardlineError, match="loads qwen2 only whole") as caught:
        cuts.check_part(0, 4)
    assert caught.value.code == "architecture_unsupported"


def test_the_list_of_architectures_is_the_patchs_own() -> None:
    (added,) = [
        [line[1:].strip() for line in hunk.lines if line.startswith("+        case LLM_ARCH_")]
        for patch in patches.patches()
        for change in patches.read_patch(patch)
        if change.path == "src/llama-arch.cpp"
        for hunk in change.hunks
    ]
    assert {line.removeprefix("case LLM_ARCH_").rstrip(":").lower() for line in added} == WINDOWED
