"""How many layers a model has, from its header alone; `up` shares them out among Nodes.

Owns only which reader is asked for which kind of model. Shown by tests/cli/test_model_layers.py.
"""

from __future__ import annotations

from pathlib import Path

CONFIG_LIMIT = 16 << 20


def layer_count(model: Path, engine: str) -> int:
    """Layers of the model at `model`. Raises `model_file_invalid` where they cannot be read."""
    if engine == "scripted":
        from shardline.model.script import read_script

        return read_script(model)[0].n_layers
    from shardline.formats.shape import shape_of_config, shape_of_gguf

    if model.is_dir():
        from shardline.formats.safetensors import read_object

        return shape_of_config(read_object(model / "config.json", CONFIG_LIMIT)).n_layers
    from shardline.formats.gguf_files import read_model

    return shape_of_gguf(read_model(model).header).n_layers
