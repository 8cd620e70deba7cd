"""How many layers a model has, from its header alone; `up` shares them out among Nodes.

Owns only which reader is asked for which kind of model. Shown by tests/cli/test_model_layers.py.
"""

from __future__ import annotations

from pathlib import Path

from shardline.errors import ShardlineError

CONFIG_LIMIT = 16 << 20


def layer_count(model: Path, engine: str) -> int:
    """Layers of the model at `model`. Raises `model_file_invalid`, with its name, where they cannot be read."""
    try:
        return _counted(model, engine)
    except ShardlineError as error:
        if error.code != "model_file_invalid":
            raise
        message = error.message if model.name in error.message else f"{model.name or model}: {error.message}"
        advice = _advice(engine, error) if error.advice == error.fault.advice else error.advice
        raise ShardlineError(error.code, message, advice=advice, **error.details) from None


def _advice(engine: str, error: ShardlineError) -> str:
    if engine == "scripted":
        return "With --engine scripted a model is a script in JSON; leave the flag out to run a real model."
    if error.details.get("reason") == "damaged":
        return "The file is damaged or cut short: get it again, and compare its size with the original."
    return "Name a GGUF file, or a folder with config.json and safetensors files; docs/architectures.md says which run."


def _counted(model: Path, engine: str) -> int:
    if engine == "scripted":
        from shardline.model.script import read_script

        return read_script(model)[0].n_layers
    from shardline.formats.shape import shape_of_config, shape_of_gguf

    if model.is_dir():
        from shardline.formats.safetensors import read_object, weight_files

        weight_files(model)
        return shape_of_config(read_object(model / "config.json", CONFIG_LIMIT)).n_layers
    from shardline.formats.gguf_files import read_model

    return shape_of_gguf(read_model(model).header).n_layers
