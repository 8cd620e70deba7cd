"""What an engine is told of its Shard, and the files that must be there before it loads.

Owns the Shard file and the vocabulary file of the llama.cpp engine: named at once, made (or found in the cache) when
the Node already answers. Other engines need none. Of an artifact of the store the pieces are brought first, and hashed
once more. The making is artifact/shard_files.py's. Shown by tests/node/test_engine_files.py and
tests/cluster/test_from_nothing.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from shardline.artifact.model_view import make_view
from shardline.artifact.shard_files import ShardFiles
from shardline.artifact.shard_room import bytes_beside
from shardline.artifact.stored_shard import check_pieces, stored_shard
from shardline.errors import ShardlineError
from shardline.formats.gguf_files import read_model
from shardline.model.backend import ShardSpec
from shardline.node.artifact_pieces import ArtifactPieces
from shardline.node.plan import ModelFacts, kv_reservation
from shardline.options import LLAMA_ENGINES, NodeOptions

_Progress = Callable[[int, int], None]
_Cancelled = Callable[[], bool]

FOLDER = "shards"
"""In the state folder."""
_ROUNDS = 3
"""So often pieces are fetched that were held and are found damaged; then the disk is to blame."""
_CALL_ROWS = 512
"""Most rows of an engine call: a prefill chunk, or a row of each session."""


class EngineFiles:
    """The files of one Shard."""

    def __init__(
        self, options: NodeOptions, facts: ModelFacts, first: int, last: int, pieces: ArtifactPieces | None = None
    ) -> None:
        """`pieces`: of an artifact of the store. Raises `memory_insufficient` where an engine that reserves its KV at
        the start would find too little."""
        self._pieces = pieces
        self._checked = False
        self._options = options
        self._facts = facts
        self._range = (first, last)
        self._cut = options.engine == "llama" and (first, last) != (0, facts.n_layers)
        self._has_text = first == 0 or last == facts.n_layers
        self._files = ShardFiles(options.state_dir / FOLDER)
        self._kv_tokens = kv_reservation(options, facts, first, last) if options.engine in LLAMA_ENGINES else None

    def spec(self) -> ShardSpec:
        """What the engine loads. Its files may not be there before `make` has returned."""
        options, (first, last) = self._options, self._range
        given: dict[str, Any] = {"content_id": self._facts.content_id}
        if self._kv_tokens is not None:
            given["kv_tokens"] = self._kv_tokens
            given["rows"] = max(_CALL_ROWS, options.settings.prefill_chunk_max)
        if options.engine == "llama-window" and options.settings.llama_window_library:
            given["library"] = options.settings.llama_window_library
        if self._cut:
            given["shard_file"] = str(self._files.shard_path(self._facts.content_id, first, last))
            if self._has_text:
                given["vocabulary_file"] = str(self._files.vocabulary_path(self._facts.content_id))
        return ShardSpec(
            model=str(self._facts.path),
            first=first,
            last=last,
            threads=options.threads,
            dtype=options.dtype,
            context_length=options.context_length,
            options=given,
        )

    async def make(self, progress: Callable[[int, int], None]) -> None:
        """Make what is missing; `progress` hears bytes done and in all, on this loop. Ends soon when cancelled.
        Errors: those of `ShardFiles.shard`, and of an artifact of the store those of `ArtifactPieces.bring`."""
        if self._pieces is not None:
            await self._make_stored(self._pieces, progress)
        elif self._cut:
            await _in_thread(self._make, progress)

    async def _make_stored(self, pieces: ArtifactPieces, progress: Callable[[int, int], None]) -> None:
        for left in reversed(range(_ROUNDS)):
            first_time = not self._checked
            try:
                # Headers first: they say how large the Shard file will be, and so whether it fits beside the pieces.
                await pieces.bring_headers()
                await pieces.bring(*self._range, await asyncio.to_thread(self._beside, pieces))
                if first_time:
                    await _in_thread(partial(self._check, pieces), self._verifying)
                await _in_thread(partial(self._make_from, pieces, first_time), progress)
                self._checked = True
                return
            except ShardlineError as error:
                # Pieces that were held were found damaged just now, and are not any more.
                if error.code != "artifact_incomplete" or not left:
                    raise

    def _beside(self, pieces: ArtifactPieces) -> int:
        """Room that the Shard file takes on the disk of the store, beside pieces that are yet to come."""
        artifact = pieces.artifact
        if not self._cut or not artifact.missing(artifact.wanted(*self._range)):
            return 0
        return bytes_beside(artifact, self._files, *self._range, vocabulary=self._has_text)

    def _verifying(self, done: int, total: int) -> None:
        self._options.announce("verifying", done=done, total=total)

    def _check(self, pieces: ArtifactPieces, progress: _Progress, cancelled: _Cancelled) -> None:
        check_pieces(pieces.artifact, *self._range, progress=progress, cancelled=cancelled)

    def _make_from(self, pieces: ArtifactPieces, checked: bool, progress: _Progress, cancelled: _Cancelled) -> None:
        make_view(pieces.artifact)
        if self._cut:
            stored_shard(
                pieces.artifact,
                self._files,
                *self._range,
                vocabulary=self._has_text,
                checked=checked,
                progress=progress,
                cancelled=cancelled,
            )

    def _make(self, progress: _Progress, cancelled: _Cancelled) -> None:
        model = read_model(self._facts.path)
        first, last = self._range
        self._files.shard(model, self._facts.content_id, first, last, progress=progress, cancelled=cancelled)
        if self._has_text:
            self._files.vocabulary(model, self._facts.content_id, cancelled=cancelled)


async def _in_thread(work: Callable[[_Progress, _Cancelled], None], progress: _Progress) -> None:
    """Do blocking `work`, which tells `progress` on this loop and is told when nobody waits for it any more."""
    loop, stop = asyncio.get_running_loop(), threading.Event()

    def heard(done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, done, total)

    try:
        await asyncio.to_thread(work, heard, stop.is_set)
    finally:
        stop.set()
