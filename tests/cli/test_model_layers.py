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
    assert layer_count(tmp_path, "torch") == 7


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
