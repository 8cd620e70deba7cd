"""Stores with an artifact of some pieces, and sources that are good, bad, slow or gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardline.artifact.bundle import Bundle, TrustPolicy
from shardline.artifact.creation import Description, create_bundle
from shardline.artifact.piece_writer import PieceWriter
from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError
from shardline.wire.bitmap import Pieces
from tests.support.gguf_models import small_model
from tests.support.gguf_writer import Tensor

ANYBODY = TrustPolicy(allow_unsigned=True)
LAYER_BYTES = 1 << 20


def layered_model(folder: Path, *, layers: int = 8, layer_bytes: int = LAYER_BYTES) -> Path:
    """A GGUF file with a large tensor in each layer, of bytes that do not repeat."""
    folder.mkdir(parents=True, exist_ok=True)
    made = random.Random(7)
    extra = [
        Tensor(f"blk.{layer}.ffn_up.weight", (32, layer_bytes // 128), data=made.randbytes(layer_bytes))
        for layer in range(layers)
    ]
    return small_model(folder, layers=layers, extra=extra).paths[0]


def content_of(path: Path) -> bytes:
    return path.read_bytes()


def size_of(path: Path) -> int:
    return path.stat().st_size


def described(model: Path, folder: Path, webseeds: tuple[str, ...] = ()) -> Bundle:
    return create_bundle(model, folder, Description(created="2026-01-31T12:00:00Z", webseeds=webseeds))


def filled(artifact: StoredArtifact, model: Path, pieces: Mapping[int, Iterable[int]] | None = None) -> None:
    """Put pieces (all, if not said) of the model's one file into the store."""
    file = artifact.files[0]
    raw = model.read_bytes()
    writer = PieceWriter(artifact)
    for piece in range(file.count) if pieces is None else pieces[0]:
        start, end = file.tree.piece_range(piece)
        assert writer.put(0, piece, raw[start:end]) == []
    writer.finish()


def store_at(folder: Path, reserve_bytes: int = 0) -> Store:
    return Store(folder, reserve_bytes=reserve_bytes)


class FileSource:
    """Gives what lies in a file, without a network. `wrong`: pieces whose first byte it changes."""

    def __init__(
        self,
        path: Path,
        *,
        name: str = "good",
        wrong: Iterable[int] = (),
        piece_length: int = 1 << 18,
        has: Pieces | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.name = name
        self.asked: list[tuple[int, int]] = []
        self._raw = path.read_bytes()
        self._wrong = frozenset(wrong)
        self._length = piece_length
        self._has = has
        self._delay_s = delay_s

    async def offer(self) -> Mapping[int, Pieces] | None:
        return None if self._has is None else {0: self._has}

    async def read(self, number: int, start: int, into: memoryview) -> None:
        end = start + len(into)
        self.asked.append((start, end))
        await asyncio.sleep(self._delay_s)
        into[:] = self._raw[start:end]
        for piece in self._wrong:
            at = piece * self._length
            if start <= at < end:
                into[at - start] ^= 1


class DeadSource:
    """Answers nothing."""

    name = "dead"

    async def offer(self) -> None:
        return None

    async def read(self, number: int, start: int, into: memoryview) -> None:
        raise ShardlineError("source_failed", "no connection")
