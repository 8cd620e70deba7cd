"""Bytes of a Shard: enough for the files that llama.cpp is given, and no piece more than they touch."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from shardline.artifact.bundle import Bundle
from shardline.artifact.creation import create_bundle
from shardline.artifact.ranges import pieces_of, servable, shard_ranges
from shardline.errors import ShardlineError
from shardline.formats.layers import ByteRange
from shardline.formats.shard_gguf import Copy, plan_shard
from shardline.wire.manifest import Manifest
from tests.support.artifacts import CREATED, big_gguf, safetensors_folder, split_gguf
from tests.support.gguf_models import CONTENT_ID, small_model


def described(model: Path) -> Bundle:
    return create_bundle(model, model.parent / "art", CREATED)


def covered(wanted: tuple[int, int, int], ranges: list[ByteRange]) -> bool:
    file, start, end = wanted
    return any(r.file == file and r.start <= start and end <= r.end for r in ranges)


@pytest.mark.parametrize("architecture", ["llama", "gemma", "gpt2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_shard_file_needs_no_byte_more(tmp_path: Path, architecture: str, tied: bool) -> None:
    model = small_model(tmp_path, architecture, tied=tied)
    manifest = described(model.paths[0]).manifest
    for first, last in combinations(range(9), 2):
        if (first, last) == (0, 8):
            continue
        try:
            plan = plan_shard(model, first, last, content_id=CONTENT_ID)
        except ShardlineError as error:
            assert error.code in ("architecture_unsupported", "model_file_invalid")
            pytest.skip(f"{architecture} in this form is not cut: {error.message}")
        ranges = shard_ranges(manifest, first, last)
        for piece in plan.pieces:
            if isinstance(piece, Copy):
                assert covered((piece.file, piece.offset, piece.offset + piece.nbytes), ranges), (first, last, piece)


def test_ranges_hold_headers_and_the_layers_only(tmp_path: Path) -> None:
    path = big_gguf(tmp_path)
    manifest = described(path).manifest
    rows = {row.name: row for row in manifest.tensors}
    ranges = shard_ranges(manifest, 3, 4)
    assert ranges[0].start == 0
    assert covered((0, 0, manifest.files[0].data_offset), ranges)
    assert covered((0, rows["blk.3.attn_q.weight"].offset, rows["blk.3.attn_q.weight"].offset + 1), ranges)
    for name in ("token_embd.weight", "blk.2.ffn_up.weight", "blk.4.attn_q.weight"):
        assert not covered((0, rows[name].offset, rows[name].offset + 1), ranges), name
    head, tail = shard_ranges(manifest, 0, 1), shard_ranges(manifest, 7, 8)
    for place in (head, tail):
        assert covered((0, rows["token_embd.weight"].offset, rows["token_embd.weight"].offset + 1), place)


def test_all_layers_are_all_tensors(tmp_path: Path) -> None:
    manifest = described(split_gguf(tmp_path)[0]).manifest
    ranges = shard_ranges(manifest, 0, 8)
    for row in manifest.tensors:
        assert covered((row.file, row.offset, row.offset + row.nbytes), ranges)


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (0, 0), (2, 1), (0, 9), (9, 10)])
def test_ranges_outside_the_model(tmp_path: Path, first: int, last: int) -> None:
    with pytest.raises(ShardlineError) as caught:
        shard_ranges(described(big_gguf(tmp_path)).manifest, first, last)
    assert caught.value.code == "layers_invalid"


def test_pieces_of_ranges(tmp_path: Path) -> None:
    manifest = described(big_gguf(tmp_path)).manifest
    length = manifest.piece_length
    ranges = [ByteRange(0, 0, 1), ByteRange(0, length - 1, length + 1), ByteRange(0, 3 * length, 3 * length + 1)]
    assert pieces_of(manifest, ranges) == {0: [0, 1, 3]}


def everything(manifest: Manifest) -> dict[int, set[int]]:
    return {i: set(range(-(-entry.size // manifest.piece_length))) for i, entry in enumerate(manifest.files)}


def test_what_can_be_served(tmp_path: Path) -> None:
    """Layer 2 has a tensor of 1 MiB behind all others: without its last piece only that layer is lost."""
    manifest = described(big_gguf(tmp_path)).manifest
    held = everything(manifest)
    assert servable(manifest, held) == [(0, 8)]
    held[0].discard(2)
    assert servable(manifest, held) == [(0, 2), (3, 8)]
    held[0].discard(0)
    assert servable(manifest, held) == []
    assert servable(manifest, {}) == []


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_range_needs_is_what_its_layers_need(tmp_path: Path, tied: bool) -> None:
    """Any fetched range can be served, and lies inside one of the ranges that are said to be."""
    manifest = described(big_gguf(tmp_path, tied=tied)).manifest
    for first, last in combinations(range(9), 2):
        held = {file: set(pieces) for file, pieces in pieces_of(manifest, shard_ranges(manifest, first, last)).items()}
        assert any(a <= first and last <= b for a, b in servable(manifest, held)), (first, last)


def test_folders_too(tmp_path: Path) -> None:
    manifest = described(safetensors_folder(tmp_path / "model")).manifest
    assert servable(manifest, everything(manifest)) == [(0, 4)]
    assert {r.file for r in shard_ranges(manifest, 1, 2)} == {0, 1}
