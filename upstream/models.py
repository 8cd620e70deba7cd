"""The tiny models of the C++ test, one of each architecture that the patch can split."""

from __future__ import annotations

from pathlib import Path

from shardline.formats.cuts import WINDOWED
from shardline.model.llama_library import library
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import BY_NAME
from tests.support.window import deepseek4


def write_models(folder: Path) -> Path:
    library()  # takes the log, which is long
    folder.mkdir(parents=True, exist_ok=True)
    for architecture in sorted(WINDOWED):
        path = folder / f"{architecture}.gguf"
        if not path.exists():
            write_tiny_gguf(deepseek4() if architecture == "deepseek4" else BY_NAME[architecture], path)
    return folder
