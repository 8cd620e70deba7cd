"""Parts of a GGUF model in the llama.cpp engine, cut by the product, and a way to drive a chain of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardline.artifact.shard_files import ShardFiles
from shardline.cli.demo_model import demo_model
from shardline.formats.gguf_files import read_model
from shardline.model.backend import BackendEntry, BackendOutput, Buffer, ShardSpec
from shardline.model.llama_backend import LlamaBackend
from shardline.model.llama_shard import load

SMOLLM2 = demo_model()
LAYERS = 30
WIDTH = 576
CONTENT_ID = "mac1-" + "5" * 64
SIZES = {"kv_tokens": 4096, "rows": 512, "sessions": 9}


def spec(folder: Path, first: int, last: int, *, threads: int = 1, source: Path = SMOLLM2, **options: Any) -> ShardSpec:
    """The spec of Shard [first, last) of SmolLM2, whose files are made under `folder` at need."""
    given = {"content_id": CONTENT_ID, **SIZES, **options}
    if (first, last) != (0, LAYERS):
        model, files = read_model(source), ShardFiles(folder)
        given["shard_file"] = str(files.shard(model, CONTENT_ID, first, last))
        if first == 0 or last == LAYERS:
            given["vocabulary_file"] = str(files.vocabulary(model, CONTENT_ID))
    return ShardSpec(str(source), first, last, threads=threads, options=given)


def entry(
    tokens: Iterable[int],
    position: int,
    hidden: Sequence[Buffer] = (),
    *,
    slot: int = 0,
    want_output: bool = True,
) -> BackendEntry:
    ids = list(tokens)
    return BackendEntry(slot, position, len(ids), struct.pack(f"<{len(ids)}i", *ids), tuple(hidden), want_output)


def result(outputs: list[BackendOutput | Exception]) -> BackendOutput:
    (output,) = outputs
    if isinstance(output, Exception):
        raise output
    return output


def through(shards: Sequence[LlamaBackend], entries: Sequence[BackendEntry]) -> list[BackendOutput]:
    """What the last of a chain gives for `entries`; rows are copied between them, as they are on a wire. Raises what
    an entry failed with."""
    outputs: list[BackendOutput] = []
    for shard in shards:
        outputs = []
        for output in shard.run(entries):
            if isinstance(output, Exception):
                raise output
            outputs.append(BackendOutput(tuple(bytes(h) for h in output.hidden), output.logits))
        entries = [
            BackendEntry(e.slot, e.position, e.rows, e.tokens, o.hidden, e.want_output)
            for e, o in zip(entries, outputs, strict=True)
        ]
    return outputs


class Route:
    """A chain of Shards; rows are copied between them, as they are on a wire."""

    def __init__(self, folder: Path, cuts: Sequence[int] = (), **options: Any) -> None:
        self.shards = [load(spec(folder, a, b, **options)) for a, b in pairwise((0, *cuts, LAYERS))]

    def open(self, *slots: int) -> None:
        for shard in self.shards:
            for slot in slots:
                shard.close(slot)
                shard.open(slot)

    def run(self, entries: Sequence[BackendEntry]) -> list[np.ndarray | None]:
        """Copies of the logits of each entry, None where none are wanted."""
        outputs = through(self.shards, entries)
        return [None if o.logits is None else np.array(o.logits) for o in outputs]

    def close(self) -> None:
        for shard in self.shards:
            shard.unload()


def hidden_of(shard: LlamaBackend, entries: Sequence[BackendEntry]) -> list[bytes]:
    """Copies of the rows of each entry."""
    copies = []
    for output in shard.run(entries):
        if isinstance(output, Exception):
            raise output
        copies.append(bytes(output.hidden[0]))
    return copies
