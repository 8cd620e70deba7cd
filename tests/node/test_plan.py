"""What a Node knows of its model before it loads it, and the KV that it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import ShardDescription
from shardline.node.plan import inspect_model, kv_capacity
from shardline.options import NodeOptions
from shardline.settings import Settings
from shardline.wire.messages import EngineInfo
from shardline.wire.steps import TOKENS_ONLY
from tests.support.gguf_models import small_model
from tests.support.gguf_writer import LLAMA, gguf_bytes, llama_tensors


def options(folder: Path, model: Path, engine: str = "torch", **more: Any) -> NodeOptions:
    return NodeOptions(
        settings=Settings(),
        tracker_url="http://127.0.0.1:1",
        model=str(model),
        engine=engine,
        host="127.0.0.1",
        port=0,
        credential="x" * 32,
        state_dir=folder,
        **more,
    )


def described(kv_bytes: int, weight_bytes: int = 0, kv_capacity: int | None = None) -> ShardDescription:
    engine = EngineInfo(backend="torch", engine_class="t", build="", dtype="", quantisation="", device="cpu", threads=1)
    return ShardDescription(
        model_name="m",
        content_id="mac1-0",
        first=0,
        last=1,
        n_layers=1,
        engine=engine,
        layout_in=TOKENS_ONLY,
        layout_out=TOKENS_ONLY,
        kv_bytes_per_token=kv_bytes,
        weight_bytes=weight_bytes,
        context_length=1024,
        vocab_size=10,
        rollback=False,
        kv_capacity_tokens=kv_capacity,
    )


def test_a_gguf_file(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(gguf_bytes(LLAMA, llama_tensors()))
    facts = inspect_model(options(tmp_path, model))
    assert facts.n_layers == len(facts.layer_bytes) > 0
    assert all(size > 0 for size in facts.layer_bytes)
    assert facts.content_id.startswith("mac1-")
    assert facts.kv_reserve_bytes > 0
    halved = inspect_model(options(tmp_path, model, dtype="bfloat16"))
    assert halved.layer_bytes == [size // 2 for size in facts.layer_bytes]


def test_where_llama_cpp_can_cut_is_told_and_kept_to(tmp_path: Path) -> None:
    model = small_model(tmp_path, "qwen3next", 8).paths[0]
    facts = inspect_model(options(tmp_path, model, "llama"))
    assert facts.legal_cuts == [4, 5, 6]
    assert facts.illegal_parts == [(4, 5), (4, 6), (5, 6)]
    inspect_model(options(tmp_path, model, "llama", first=4, last=8))
    with pytest.raises(ShardlineError) as caught:
        inspect_model(options(tmp_path, model, "llama", first=4, last=6))
    assert caught.value.code == "layers_invalid"
    assert inspect_model(options(tmp_path, model)).illegal_parts is None


def test_a_script(tmp_path: Path) -> None:
    model = tmp_path / "s.json"
    model.write_text(json.dumps({"model": "x", "n_layers": 5, "answer": ["a"]}))
    facts = inspect_model(options(tmp_path, model, "scripted"))
    assert (facts.name, facts.n_layers, len(facts.layer_bytes)) == ("x", 5, 5)


@pytest.mark.parametrize("content", [None, b"", b"<!DOCTYPE html>", b"{"])
@pytest.mark.parametrize("engine", ["torch", "scripted"])
def test_what_is_no_model_is_said_before_anything_starts(tmp_path: Path, content: bytes | None, engine: str) -> None:
    model = tmp_path / "model"
    if content is not None:
        model.write_bytes(content)
    with pytest.raises(ShardlineError) as caught:
        inspect_model(options(tmp_path, model, engine))
    assert caught.value.code == "model_file_invalid"


def test_another_artifact_than_the_expected_one(tmp_path: Path) -> None:
    model = tmp_path / "s.json"
    model.write_text(json.dumps({"model": "x", "n_layers": 5, "answer": ["a"]}))
    with pytest.raises(ShardlineError, match="expected the Model Artifact mac1-other"):
        inspect_model(options(tmp_path, model, "scripted", content_id="mac1-other"))


def test_kv_capacity(tmp_path: Path) -> None:
    assert kv_capacity(options(tmp_path, tmp_path, kv_tokens=77), described(100)) == 77
    assert kv_capacity(options(tmp_path, tmp_path), described(100, kv_capacity=55)) == 55
    limited = options(tmp_path, tmp_path, memory_bytes=3_000_000)
    assert kv_capacity(limited, described(1000, weight_bytes=1_000_000)) == 1000
    assert kv_capacity(options(tmp_path, tmp_path), described(1)) == 65_536
    with pytest.raises(ShardlineError) as caught:
        kv_capacity(limited, described(1000, weight_bytes=2_999_000))
    assert caught.value.code == "memory_insufficient"
