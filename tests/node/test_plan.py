"""What a Node knows of its model before it loads it, and the KV that it promises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import ShardDescription
from shardline.node.plan import KvRoom, inspect_model, kv_room
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


def test_kv_room(tmp_path: Path) -> None:
    assert kv_room(options(tmp_path, tmp_path, kv_tokens=77), described(100)) == KvRoom(77, None)
    assert kv_room(options(tmp_path, tmp_path), described(100, kv_capacity=55)) == KvRoom(55, None)
    limited = options(tmp_path, tmp_path, memory_bytes=3_000_000)
    assert kv_room(limited, described(1000, weight_bytes=1_000_000)) == KvRoom(1000, None)
    assert kv_room(options(tmp_path, tmp_path), described(1)).tokens == 65_536
    with pytest.raises(ShardlineError) as caught:
        kv_room(limited, described(1000, weight_bytes=2_999_000))
    assert caught.value.code == "memory_insufficient"


def test_fixed_states_have_room_before_tokens(tmp_path: Path) -> None:
    """A million bytes for caches, 60,000 of them for each session whatever it says."""
    limited = options(tmp_path, tmp_path, memory_bytes=2_000_000)
    shard = replace(described(100), state_bytes=60_000)
    room = kv_room(limited, shard)
    assert room == KvRoom(5_200, 8)
    assert room.slots is not None
    assert room.slots * shard.state_bytes + room.tokens * shard.kv_bytes_per_token <= 1_000_000
    assert kv_room(limited, replace(shard, slots=3)).slots == 3
    # The operator's own number of tokens leaves less, or more, for states; one session is let in in any case.
    assert kv_room(options(tmp_path, tmp_path, memory_bytes=2_000_000, kv_tokens=1_000), shard) == KvRoom(1_000, 15)
    assert kv_room(options(tmp_path, tmp_path, memory_bytes=2_000_000, kv_tokens=90_000), shard).slots == 1
    # A Shard whose layers are all recurrent keeps nothing by token.
    assert kv_room(limited, replace(described(0), state_bytes=60_000)) == KvRoom(65_536, 8)
    with pytest.raises(ShardlineError) as caught:
        kv_room(limited, replace(described(100), state_bytes=1_000_000))
    assert caught.value.code == "memory_insufficient" and "beside them" in caught.value.message


def test_states_are_read_from_the_header(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from shardline.model.llama_shard import SESSIONS_RECURRENT
    from shardline.node.plan import LLAMA_STATES
    from tests.support.tiny_gguf import write_tiny_gguf
    from tests.support.tiny_models import BY_NAME

    assert LLAMA_STATES == SESSIONS_RECURRENT
    facts = inspect_model(options(tmp_path, write_tiny_gguf(BY_NAME["qwen35"], tmp_path / "m.gguf"), "llama"))
    # Inner width 128 by a state of 32, and what a convolution still sees, in every layer but each fourth.
    assert len(facts.state_bytes) == facts.n_layers
    assert [size > 4 * 128 * 32 for size in facts.state_bytes] == [layer % 4 != 3 for layer in range(facts.n_layers)]
    assert [size for size in facts.state_bytes if size < 4 * 128 * 32] == [0] * (facts.n_layers // 4)
