"""Headers that lie: whatever stands in the metadata, cutting ends with a plan that can be read, or an error by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.formats.architectures import ROWS
from shardline.formats.cuts import cuts_of, even_cut
from shardline.formats.gguf import parse_header
from shardline.formats.gguf_files import read_model
from shardline.formats.memory import weight_bytes
from shardline.formats.shard_gguf import plan_shard, plan_vocabulary
from tests.support.gguf_models import CONTENT_ID, metadata, small_model, tensors
from tests.support.gguf_writer import Tensor, Typed, gguf_bytes

ALLOWED = {"model_file_invalid", "architecture_unsupported", "layers_invalid"}
NAMES = sorted({name for row in ROWS for name in row.gguf})
KEYS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.indexer.types",
    "attention.key_length",
    "attention.recurrent_layers",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "block_count",
    "context_length",
    "embedding_length",
    "embedding_length_per_layer_input",
    "embedding_scale",
    "expert_gating_func",
    "feed_forward_length",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "residual_scale",
    "rope.dimension_count",
    "rope.dimension_sections",
    "vocab_size",
)
LAYERS = 4

values = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 5, 8, 32, 64, 511, 4096, 1 << 24, (1 << 32) - 1]),
    st.sampled_from([Typed("u64", (1 << 64) - 1), Typed("i32", -1), Typed("i64", -(1 << 63)), Typed("u8", 4)]),
    st.sampled_from([0.0, -1.5, float("nan"), float("inf"), 3.4e38, Typed("f64", 1e300)]),
    st.booleans(),
    st.sampled_from(["", "none", b"\xff\x00"]),
    st.lists(st.sampled_from([0, 1, 2, 4, (1 << 32) - 1]), max_size=6),
    st.lists(st.booleans(), min_size=LAYERS, max_size=LAYERS),
    st.lists(st.sampled_from([0, 2]), min_size=LAYERS, max_size=LAYERS),
    st.just([float("nan")] * LAYERS),
    st.just(["a"] * LAYERS),
    st.none(),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(KEYS), values, max_size=5))
def test_any_metadata_gives_a_plan_or_an_error_by_name(architecture: str, keys: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = small_model(Path(folder), architecture, LAYERS, keys)
            cuts = cuts_of(model.header)
            even_cut(cuts, weight_bytes(model.tensors, cuts.n_layers), min(2, cuts.n_layers))
        except ShardlineError as error:
            assert error.code in ALLOWED
            return
    for first, last in ((0, 2), (2, 4), (1, 3)):
        try:
            plan = plan_shard(model, first, last, content_id=CONTENT_ID)
        except ShardlineError as error:
            assert error.code in ALLOWED
            continue
        header = parse_header(plan.header, plan.nbytes)
        assert header.integer(f"{architecture}.block_count") == last - first


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss", "jamba", "deepseek2"])
@pytest.mark.parametrize("layers", [513, 4096])
def test_very_many_layers_are_refused_at_once(tmp_path: Path, architecture: str, layers: int) -> None:
    keys = metadata(architecture, layers, {"attention.head_count_kv": [0, 2] * (layers // 2) + [0] * (layers % 2)})
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, tensors(1)))
    cuts = cuts_of(read_model(path).header)
    assert cuts.refusal is not None
    assert "512 is the limit" in cuts.refusal.message
    assert [span for span, _ in cuts.illegal()] == [(1, layers)]


def test_more_layers_than_any_file_has_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata("llama", 1_000_000), tensors(1)))
    with pytest.raises(ShardlineError, match=r"llama\.block_count is 1000000"):
        cuts_of(read_model(path).header)


def test_a_scale_beyond_32_bits(tmp_path: Path) -> None:
    model = small_model(tmp_path, "granite", keys={"embedding_scale": Typed("f64", 1e300)})
    with pytest.raises(ShardlineError, match=r"granite\.embedding_scale is 1e\+300") as caught:
        plan_shard(model, 0, 4, content_id=CONTENT_ID)
    assert caught.value.code == "model_file_invalid"


def test_a_tensor_that_no_rule_knows_goes_into_every_part(tmp_path: Path) -> None:
    """llama.cpp decides what to make of it, as it does for the whole model."""
    model = small_model(tmp_path, extra=[Tensor("strange.weight", (4,))])
    for first, last in ((0, 4), (4, 8)):
        plan = plan_shard(model, first, last, content_id=CONTENT_ID)
        assert "strange.weight" in parse_header(plan.header, plan.nbytes).tensors


def test_a_vocabulary_of_odd_tokens_is_copied_byte_by_byte(tmp_path: Path) -> None:
    keys = metadata("llama", 2)
    keys["tokenizer.ggml.tokens"] = ["\u00ff".encode(), b"a\x00b", b"", b"", b"\xf0\x9f\x90\xa2"]
    keys["tokenizer.ggml.token_type"] = Typed("i32", [1, 4, 1, 5, 77])
    keys["tokenizer.ggml.padding_token_id"] = (1 << 32) - 1
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys, tensors(2)))
    model = read_model(path)
    plan = plan_vocabulary(model)
    header = parse_header(plan.header, plan.nbytes)
    assert header.strings("tokenizer.ggml.tokens") == keys["tokenizer.ggml.tokens"]
    assert header.kv == model.header.kv
