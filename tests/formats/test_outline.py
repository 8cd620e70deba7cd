"""Outlines of one model from each description of it: they agree where they can, and say what they do not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.formats.outline import Outline, outline_of_build, outline_of_config, outline_of_gguf, outline_of_table
from shardline.formats.shape import ModelShape
from tests.support.gguf_models import small_model
from tests.support.gguf_writer import Tensor

MODELS = Path(__file__).parents[2] / "docs" / "audits" / "models"
KV = [
    Tensor(f"blk.{layer}.attn_{part}.weight", (32, 16), data=bytes(32 * 16 * 4)) for layer in range(4) for part in "kv"
]
EXPERTS = [Tensor("blk.1.ffn_gate_exps.weight", (32, 8, 4)), Tensor("blk.1.ffn_gate_shexp.weight", (32, 8))]


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return found


def table_of(model: Any, architecture: str) -> Outline:
    shape = ModelShape(architecture, 4, 32, 64, 128, None, None, None)
    return outline_of_table(shape, model.tensors, "llama")


def test_a_table_says_what_a_header_says_of_a_plain_model(tmp_path: Path) -> None:
    model = small_model(tmp_path, "llama", 4, extra=KV)
    header, table = outline_of_gguf(model, "llama"), table_of(model, "llama")
    assert table.weights == header.weights
    assert table.states == header.states
    assert table.seam == header.seam
    assert table.cuts.positions() == header.cuts.positions() == (1, 2, 3)


@pytest.mark.parametrize("architecture", ["smollm3", "gemma3", "glm-dsa", "qwen35"])
def test_a_table_does_not_know_where_other_models_are_cut(tmp_path: Path, architecture: str) -> None:
    table = table_of(small_model(tmp_path, "llama", 4, extra=KV), architecture)
    assert table.cuts.positions() == ()
    assert table.cuts.refusal is not None
    assert "in the header of its file" in table.cuts.refusal.message
    assert (table.states is None) == (architecture == "qwen35")


def test_a_table_without_keys_and_values_says_nothing_of_them(tmp_path: Path) -> None:
    assert table_of(small_model(tmp_path, "llama", 4), "llama").states is None


def test_chosen_experts_are_told_from_shared_ones(tmp_path: Path) -> None:
    keys = {"expert_count": 4, "expert_used_count": 1}
    outline = outline_of_gguf(small_model(tmp_path, "llama", 4, keys, extra=EXPERTS), "llama")
    assert outline.experts == (0, 4 * 32 * 8 * 4, 0, 0)
    assert outline.used == 0.25
    assert outline_of_gguf(small_model(tmp_path, "llama", 4), "llama").used == 0


def test_pytorch_computes_gguf_models_in_float32(tmp_path: Path) -> None:
    model = small_model(tmp_path, "llama", 4, extra=KV)
    outline = outline_of_gguf(model, "torch")
    assert (outline.kv_element_bytes, outline.seam_dtype) == (4, "F32")
    assert outline.cuts.positions() == (1, 2, 3)


def test_dtypes_of_a_config() -> None:
    plain = outline_of_config(config_of("ornith-9b"), "torch")
    wide = outline_of_config(config_of("ornith-9b"), "torch", dtype="float32")
    assert wide.size_bytes == 2 * plain.size_bytes
    assert (plain.seam_dtype, wide.seam_dtype) == ("BF16", "F32")
    assert (plain.kv_element_bytes, wide.kv_element_bytes) == (2, 4)
    assert not plain.quantised


def test_a_quantised_checkpoint_is_said_to_be_one() -> None:
    config = config_of("deepseek-v4-flash")
    assert outline_of_config(config, "torch").quantised
    assert not outline_of_config(config, "torch", dtype="bfloat16").quantised
    assert outline_of_config(config, "torch").size_bytes == pytest.approx(155.5e9, rel=0.01)
    assert outline_of_config(config, "torch", dtype="bfloat16").size_bytes == pytest.approx(568.7e9, rel=0.01)


def test_a_build_has_its_size() -> None:
    outline = outline_of_build(config_of("glm-5.2"), "llama", 239 * 10**9)
    assert outline.size_bytes == pytest.approx(239e9, rel=1e-6)
    with pytest.raises(ShardlineError, match="no room"):
        outline_of_build(config_of("ornith-9b"), "llama", 10**9, dense_bits=8.5)


def test_what_pytorch_refuses_is_not_cut_for_it(tmp_path: Path) -> None:
    model = small_model(tmp_path, "rwkv7", 4, {"attention.head_count_kv": None})
    cuts = outline_of_gguf(model, "torch").cuts
    assert cuts.positions() == ()
    assert cuts.part_reason(0, 4) is not None
    assert not cuts.runs_whole
