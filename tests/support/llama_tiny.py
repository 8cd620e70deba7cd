"""Tiny models of any architecture in the llama.cpp engine, whole or cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardline.artifact.shard_files import ShardFiles
from shardline.formats.gguf_files import read_model
from shardline.model.backend import ShardSpec
from shardline.model.llama_backend import LlamaBackend
from shardline.model.llama_shard import load
from tests.support.llama_route import CONTENT_ID, entry, through
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModel

SIZES = {"kv_tokens": 256, "rows": 64, "sessions": 5}


class TinyRoute:
    """A chain of Shards of one tiny model; `cuts` are the positions between them."""

    def __init__(self, model: TinyModel, folder: Path, cuts: Sequence[int] = (), **options: Any) -> None:
        self.path = folder / f"{model.name}.gguf".replace(" ", "-")
        if not self.path.exists():
            write_tiny_gguf(model, self.path)
        self.layers = model.layers
        self.shards = [self._load(folder, a, b, options) for a, b in pairwise((0, *cuts, model.layers))]

    def _load(self, folder: Path, first: int, last: int, options: dict[str, Any]) -> LlamaBackend:
        given = {"content_id": CONTENT_ID, **SIZES, **options}
        if (first, last) != (0, self.layers):
            files = ShardFiles(folder / self.path.stem)
            given["shard_file"] = str(files.shard(read_model(self.path), CONTENT_ID, first, last))
        return load(ShardSpec(str(self.path), first, last, threads=1, options=given))

    def open(self, *slots: int) -> None:
        for shard in self.shards:
            for slot in slots:
                shard.open(slot)

    def run(self, call: Sequence[tuple[int, int, Sequence[int]]]) -> np.ndarray:
        """(slot, position, tokens) for each entry; the logits of each one's last row, [entries, vocabulary]."""
        entries = [entry(tokens, position, slot=slot) for slot, position, tokens in call]
        outputs = through(self.shards, entries)
        return np.stack([np.array(o.logits) for o in outputs])

    def close(self) -> None:
        for shard in self.shards:
            shard.unload()
