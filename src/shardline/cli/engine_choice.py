"""Which engine computes a model, where nobody says: llama.cpp for a GGUF file where it is installed, else PyTorch.

Owns that choice, and how `up` shares layers out for each engine. Nothing of an engine is imported to find out.
Shown by tests/cli/test_engine_choice.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shardline.cli.model_layers import layer_count
from shardline.cli.values import split_evenly
from shardline.options import LLAMA_ENGINES

ENGINES = ("llama", "torch", "scripted", "llama-window")
ENGINE_HELP = (
    "What computes; `scripted` runs no model, for tests; `llama-window` needs a library that `make upstream` builds.  "
    "[default: llama for GGUF files where it is installed]"
)
_LLAMA_PACKAGE = "llama_cpp"


def engine_for(model: Path | None, asked: str | None) -> str:
    """The engine that was asked for, or the one that fits the model at `model`; of None, which nobody has seen yet,
    that of most: GGUF files."""
    if asked is not None:
        return asked
    if (model is None or model.is_file()) and importlib.util.find_spec(_LLAMA_PACKAGE) is not None:
        return "llama"
    return "torch"


def shared_out(model: Path, engine: str, nodes: int) -> list[tuple[int, int]]:
    """The most even ranges for `nodes` Nodes that `engine` can take. Raises `layers_invalid` where there are too many
    Nodes, `architecture_unsupported` where the engine runs the model only whole, `model_file_invalid`."""
    count = layer_count(model, engine)
    if engine not in LLAMA_ENGINES or nodes == 1:
        return split_evenly(count, nodes)
    from shardline.formats.cuts import cuts_for_window, cuts_of, even_cut
    from shardline.formats.gguf_files import read_model
    from shardline.formats.memory import weight_bytes

    found = read_model(model)
    cuts = cuts_of(found.header) if engine == "llama" else cuts_for_window(found.header)
    return even_cut(cuts, weight_bytes(found.tensors, cuts.n_layers), nodes)
