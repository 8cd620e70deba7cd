"""Layers of each kind of model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.cli.model_layers import layer_count
from shardline.errors import ShardlineError


def test_a_script_and_a_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"model": "m", "n_layers": 5, "answer": ["a"]}))
    assert layer_count(script, "scripted") == 5
    config = {"model_type": "llama", "num_hidden_layers": 7, "hidden_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert layer_count(tmp_path, "torch") == 7


@pytest.mark.parametrize("files", [[], ["config.json"], ["config.json", "b.gguf", "a.gguf"]])
def test_a_folder_without_a_model(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ShardlineError, match="there is no model in the folder") as refused:
        layer_count(tmp_path, "torch")
    wanted = (
        f"Name the GGUF file in it: {tmp_path / 'a.gguf'}" if "a.gguf" in files else "Name a GGUF file, or a folder"
    )
    assert wanted in refused.value.advice


@pytest.mark.smollm2
def test_a_gguf_file() -> None:
    from shardline.cli.demo_model import demo_model

    assert layer_count(demo_model(), "torch") == 30


@pytest.mark.parametrize("engine", ["torch", "scripted"])
def test_what_is_no_model_is_said(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "page.gguf"
    file.write_text("<!DOCTYPE html><html>")
    with pytest.raises(ShardlineError) as refused:
        layer_count(file, engine)
    assert refused.value.code == "model_file_invalid"
    assert "page.gguf: " in refused.value.message
    assert ("--engine scripted" if engine == "scripted" else "Name a GGUF file") in refused.value.advice
