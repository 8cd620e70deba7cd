"""Bytes of a Shard against the Shard files of real architectures: none of them copies a byte that was not fetched."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from shardline.artifact.creation import create_bundle
from shardline.artifact.ranges import shard_ranges
from shardline.errors import ShardlineError
from shardline.formats.gguf_files import read_model
from shardline.formats.shard_gguf import Copy, plan_shard
from tests.support.artifacts import CREATED
from tests.support.gguf_models import CONTENT_ID
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import RUNNABLE, TinyModel

# `lfm2` has its final norm under a name of the embedding; the others are a walk through the list.
SAMPLE = [model for number, model in enumerate(RUNNABLE) if number % 16 == 0 or model.architecture == "lfm2"]


@pytest.mark.llama
@pytest.mark.parametrize("model", SAMPLE, ids=lambda model: model.name)
def test_all_that_a_shard_file_copies_is_fetched(tmp_path: Path, model: TinyModel) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, path)
    read = read_model(path)
    manifest = create_bundle(path, tmp_path / "art", CREATED).manifest
    n_layers, planned = manifest.model.n_layers, 0
    for first, last in combinations(range(n_layers + 1), 2):
        if (first, last) == (0, n_layers):
            continue
        try:
            plan = plan_shard(read, first, last, content_id=CONTENT_ID)
        except ShardlineError as error:
            assert error.code in ("layers_invalid", "architecture_unsupported")
            continue
        planned += 1
        ranges = shard_ranges(manifest, first, last)
        for piece in plan.pieces:
            if isinstance(piece, Copy):
                end = piece.offset + piece.nbytes
                assert any(r.start <= piece.offset and end <= r.end for r in ranges), (first, last, piece)
    assert planned > 0
