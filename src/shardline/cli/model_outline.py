"""The outline of whatever describes a model: a GGUF file or its beginning, a manifest, a folder, a config.json alone.

Owns which reader is asked for what lies at a path. Weights are never read. Shown by tests/cli/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.errors import ShardlineError

if TYPE_CHECKING:
    from shardline.formats.gguf_files import GGUFModel
    from shardline.formats.outline import Engine, Outline

CONFIG_LIMIT = 16 << 20
_CONFIG = "config.json"
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says beside the model."""

    engine: Engine | None = None
    dtype: str | None = None
    size_bytes: int | None = None
    """Of the files of a build, where only a config.json describes the model."""
    dense_bits: float | None = None
    """What a number outside of routed experts takes in that build; None: as much as one inside."""


def read_gguf(path: Path) -> GGUFModel:
    """The headers of a whole GGUF model; `model_file_invalid` names the file."""
    from shardline.formats.gguf_files import read_model

    if path.is_dir():
        raise ShardlineError(
            "model_file_invalid",
            f"{path} is a folder: llama.cpp takes a GGUF file",
            advice="Give a .gguf file; of a split one, any part.",
        )
    try:
        return read_model(path)
    except ShardlineError as error:
        raise _named(error, path) from None


def _named(error: ShardlineError, path: Path) -> ShardlineError:
    if path.name in error.message:
        return error
    message = f"{path.name or path}: {error.message}"
    return ShardlineError(error.code, message, advice=error.advice, **error.details)


def read_outline(path: Path, wish: Wish) -> Outline:
    """Everything that planning needs of the model at `path`.

    Errors: `model_file_invalid`, naming the file; `artifact_invalid`; `architecture_unsupported`; `setting_invalid`
    for a wish that this kind of description has no use for.
    """
    try:
        return _read(path, wish)
    except ShardlineError as error:
        if error.code != "model_file_invalid":
            raise
        raise _named(error, path) from None


def _read(path: Path, wish: Wish) -> Outline:
    if path.is_dir():
        return _of_folder(path, wish)
    if path.suffix == ".json":
        return _of_json(path, wish)
    from shardline.formats.gguf_files import read_model
    from shardline.formats.outline import outline_of_gguf

    _check_stored(wish)
    return outline_of_gguf(read_model(path, beginnings=True), wish.engine or "llama")


def _of_folder(folder: Path, wish: Wish) -> Outline:
    if (folder / _MANIFEST).is_file():
        return _of_bundle(folder, wish)
    from shardline.formats.safetensors import read_folder

    if not (folder / _CONFIG).is_file() or any(folder.glob("*.safetensors")):
        found = read_folder(folder)
        return _of_config(found.config, wish, found.tensors)
    return _of_json(folder / _CONFIG, wish)


def _of_json(path: Path, wish: Wish) -> Outline:
    from shardline.formats.safetensors import read_object

    members = read_object(path, CONFIG_LIMIT)
    if str(members.get("schema", "")).startswith("shardline/model-artifact/"):
        return _of_manifest(path.read_bytes(), wish)
    return _of_config(members, wish, None)


def _of_bundle(folder: Path, wish: Wish) -> Outline:
    """The folder that describes a Model Artifact: its config.json is among the small files, if it has one."""
    from shardline.artifact.bundle import SMALL_FOLDER

    return _of_manifest((folder / _MANIFEST).read_bytes(), wish, folder / SMALL_FOLDER / _CONFIG)


def _of_manifest(raw: bytes, wish: Wish, config: Path | None = None) -> Outline:
    from shardline.formats.outline import outline_of_table
    from shardline.formats.shape import ModelShape
    from shardline.wire.manifest import decode_manifest

    manifest = decode_manifest(raw)
    tensors = {row.name: row for row in manifest.tensors}
    if manifest.format.container == "safetensors":
        from shardline.formats.safetensors import read_object

        if config is None or not config.is_file():
            raise ShardlineError(
                "model_file_invalid",
                "the manifest of a safetensors model does not say how its layers compute",
                advice="Name the folder of the artifact, with its small files, or the config.json of the model.",
            )
        return _of_config(read_object(config, CONFIG_LIMIT), wish, tensors)
    _check_stored(wish)
    model = manifest.model
    shape = ModelShape(
        architecture=model.architecture,
        n_layers=model.n_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        kv_heads=None,
        key_width=None,
        value_width=None,
    )
    return outline_of_table(shape, tensors, wish.engine or "llama")


def _of_config(config: Mapping[str, Any], wish: Wish, tensors: Mapping[str, Any] | None) -> Outline:
    from shardline.formats.outline import outline_of_build, outline_of_config

    engine = wish.engine or "torch"
    if tensors is not None:
        _check_stored(wish)
        return outline_of_config(config, engine, tensors=tensors, dtype=wish.dtype)
    if wish.size_bytes is not None:
        return outline_of_build(config, engine, wish.size_bytes, dense_bits=wish.dense_bits)
    return outline_of_config(config, engine, dtype=wish.dtype)


def _check_stored(wish: Wish) -> None:
    if wish.size_bytes is not None or wish.dense_bits is not None:
        raise ShardlineError(
            "setting_invalid",
            "this model has its tensors with it: how large they are is not asked for",
            param="size",
            advice="Leave --size and --dense-bits out: they are for a config.json alone.",
        )
