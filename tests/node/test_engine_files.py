"""What an engine is told of its Shard, and the files that the Node makes for it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.demo_model import demo_model
from shardline.errors import ShardlineError
from shardline.formats.gguf import read_header
from shardline.node.engine_files import EngineFiles
from shardline.node.plan import inspect_model, kv_reservation
from shardline.options import NodeOptions
from shardline.settings import Settings

pytestmark = pytest.mark.smollm2


def options(tmp_path: Path, engine: str = "llama", **given: Any) -> NodeOptions:
    return NodeOptions(
        settings=given.pop("settings", Settings()),
        tracker_url="http://127.0.0.1:1",
        model=str(given.pop("model", demo_model())),
        engine=engine,
        host="127.0.0.1",
        port=0,
        credential="c",
        state_dir=tmp_path,
        **given,
    )


async def test_a_part_gets_its_file_and_a_head_and_a_tail_the_vocabulary(tmp_path: Path) -> None:
    given = options(tmp_path, threads=2, context_length=100)
    facts = inspect_model(given)
    for first, last, has_text in ((0, 10, True), (10, 20, False), (20, 30, True)):
        files = EngineFiles(given, facts, first, last)
        spec = files.spec()
        assert (spec.first, spec.last, spec.threads, spec.context_length) == (first, last, 2, 100)
        assert spec.options["content_id"] == facts.content_id
        assert ("vocabulary_file" in spec.options) == has_text
        done: list[int] = []
        totals: list[int] = []
        await files.make(lambda n, total, done=done, totals=totals: (done.append(n), totals.append(total)))
        await asyncio.sleep(0)
        header = read_header(spec.options["shard_file"])
        assert list(header.numbers("shardline.source.layers")) == [first, last, 30]
        assert done and done[-1] == totals[-1]
        if has_text:
            assert "tokenizer.ggml.tokens" in read_header(spec.options["vocabulary_file"]).kv
        made = os.stat(spec.options["shard_file"]).st_mtime_ns
        await files.make(lambda done, total: None)
        assert os.stat(spec.options["shard_file"]).st_mtime_ns == made, "from the cache"


async def test_the_whole_model_and_other_engines_need_no_files(tmp_path: Path) -> None:
    for engine, first, last in (("llama", 0, 30), ("torch", 0, 10)):
        given = options(tmp_path, engine)
        files = EngineFiles(given, inspect_model(given), first, last)
        assert "shard_file" not in files.spec().options
        assert ("kv_tokens" in files.spec().options) == (engine == "llama")
        await files.make(lambda done, total: None)
    assert not (tmp_path / "shards").exists()


def test_the_engine_takes_the_largest_chunk_that_the_settings_allow(tmp_path: Path) -> None:
    for chunk, rows in ((64, 512), (512, 512), (2048, 2048)):
        given = options(tmp_path, settings=Settings(prefill_chunk_max=chunk))
        assert EngineFiles(given, inspect_model(given), 0, 30).spec().options["rows"] == rows


async def test_a_range_that_cannot_be_cut_is_told(tmp_path: Path) -> None:
    given = options(tmp_path)
    files = EngineFiles(given, inspect_model(given), 5, 31)
    with pytest.raises(ShardlineError) as caught:
        await files.make(lambda done, total: None)
    assert caught.value.code == "layers_invalid"


def test_facts_are_those_of_what_llama_cpp_reads(tmp_path: Path) -> None:
    stored, decoded = inspect_model(options(tmp_path)), inspect_model(options(tmp_path, "torch"))
    assert sum(stored.layer_bytes) * 5 < sum(decoded.layer_bytes)
    assert stored.kv_bytes_per_token * 2 == decoded.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert stored.legal_cuts == list(range(1, 30)) and decoded.legal_cuts is None
    with pytest.raises(ShardlineError) as caught:
        inspect_model(options(tmp_path, model=tmp_path))
    assert caught.value.code == "model_file_invalid" and "--engine torch" in caught.value.advice


def test_how_much_kv_is_taken_at_once(tmp_path: Path) -> None:
    given = options(tmp_path)
    facts = inspect_model(given)
    assert kv_reservation(options(tmp_path, kv_tokens=77), facts, 0, 30) == 77
    most = kv_reservation(given, facts, 0, 30)
    assert most == 16_384, "two of the model's contexts"
    weights = sum(facts.layer_bytes)
    small = options(tmp_path, memory_bytes=weights + 4 * 1000 * facts.kv_bytes_per_token)
    assert kv_reservation(small, facts, 0, 30) == 1000
    half = options(tmp_path, memory_bytes=sum(facts.layer_bytes[:15]) + 4 * 1000 * facts.kv_bytes_per_token)
    assert kv_reservation(half, facts, 0, 15) == 2000
    with pytest.raises(ShardlineError) as caught:
        kv_reservation(options(tmp_path, memory_bytes=weights), facts, 0, 30)
    assert caught.value.code == "memory_insufficient" and "--kv-tokens" in caught.value.advice
