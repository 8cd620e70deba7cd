"""How many layers a model has, from its header alone; `up` shares them out among Nodes.

Owns the look into the three kinds of model that a command may name. Shown by tests/cli/test_model_layers.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from shardline.errors import ShardlineError


def layer_count(model: Path, engine: str) -> int:
    """Layers of the model at `model`. Raises `model_file_invalid` where it has none that can be read."""
    if engine == "scripted":
        return _positive(_json(model).get("n_layers", 4), model)
    if model.is_dir():
        config = _json(model / "config.json")
        text = config.get("text_config")
        return _positive((text if isinstance(text, dict) else config).get("num_hidden_layers"), model)
    from shardline.formats.gguf import read_header

    header = read_header(model)
    return _positive(header.integer(f"{header.text('general.architecture')}.block_count"), model)


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShardlineError("model_file_invalid", f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ShardlineError("model_file_invalid", f"{path} is not a JSON object")
    return value


def _positive(count: object, model: Path) -> int:
    if not isinstance(count, int) or count < 1:
        raise ShardlineError("model_file_invalid", f"{model} does not say how many layers it has")
    return count
