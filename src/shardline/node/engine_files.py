"""What an engine is told of its Shard, and the files that must be there before it loads.

Owns the Shard file and the vocabulary file of the llama.cpp engine: named at once, made (or found in the cache) when
the Node already answers. Other engines need none. The making is artifact/shard_files.py's. Shown by
tests/node/test_engine_files.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardline.artifact.shard_files import ShardFiles
from shardline.formats.gguf_files import GGUFModel, read_model
from shardline.model.backend import ShardSpec
from shardline.node.plan import ModelFacts, kv_reservation
from shardline.options import NodeOptions

FOLDER = "shards"
"""In the state folder."""
_CALL_ROWS = 512
"""Most rows of an engine call: a prefill chunk, or a row of each session."""


class EngineFiles:
    """The files of one Shard."""

    def __init__(self, options: NodeOptions, facts: ModelFacts, first: int, last: int) -> None:
        """Raises `memory_insufficient` where an engine that reserves its KV at the start would find too little."""
        self._options = options
        self._facts = facts
        self._range = (first, last)
        self._cut = options.engine == "llama" and (first, last) != (0, facts.n_layers)
        self._has_text = first == 0 or last == facts.n_layers
        self._files = ShardFiles(options.state_dir / FOLDER)
        self._kv_tokens = kv_reservation(options, facts, first, last) if options.engine == "llama" else None

    def spec(self) -> ShardSpec:
        """What the engine loads. Its files may not be there before `make` has returned."""
        options, (first, last) = self._options, self._range
        given: dict[str, Any] = {"content_id": self._facts.content_id}
        if self._kv_tokens is not None:
            given["kv_tokens"] = self._kv_tokens
            given["rows"] = max(_CALL_ROWS, options.settings.prefill_chunk_max)
        if self._cut:
            given["shard_file"] = str(self._files.shard_path(self._facts.content_id, first, last))
            if self._has_text:
                given["vocabulary_file"] = str(self._files.vocabulary_path(self._facts.content_id))
        return ShardSpec(
            model=options.model,
            first=first,
            last=last,
            threads=options.threads,
            dtype=options.dtype,
            context_length=options.context_length,
            options=given,
        )

    async def make(self, progress: Callable[[int, int], None]) -> None:
        """Make what is missing; `progress` hears bytes done and in all, on this loop. Ends soon when cancelled.
        Errors: those of `ShardFiles.shard`."""
        if not self._cut:
            return
        loop, stop = asyncio.get_running_loop(), threading.Event()

        def heard(done: int, total: int) -> None:
            loop.call_soon_threadsafe(progress, done, total)

        try:
            await asyncio.to_thread(self._make, heard, stop.is_set)
        finally:
            stop.set()

    def _make(self, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        model: GGUFModel = read_model(Path(self._options.model))
        first, last = self._range
        self._files.shard(model, self._facts.content_id, first, last, progress=progress, cancelled=cancelled)
        if self._has_text:
            self._files.vocabulary(model, self._facts.content_id, cancelled=cancelled)
