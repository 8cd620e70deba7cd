"""The tiny models of the C++ test, one of each architecture that the patch can split."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardline.formats.cuts import WINDOWED
from shardline.model.llama_library import library
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import BY_NAME
from tests.support.window import deepseek4


def write_models(folder: Path) -> Path:
    """Anew each time: what is there may be of other definitions, or half written."""
    library()  # takes the log, which is long
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for architecture in sorted(WINDOWED):
        tiny = deepseek4() if architecture == "deepseek4" else BY_NAME[architecture]
        write_tiny_gguf(tiny, folder / f"{architecture}.gguf")
    return folder
