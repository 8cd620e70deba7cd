"""A Model Artifact that a Tracker offers, and Nodes that have some of it, say so, and show it, or lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardline.artifact.bundle import Bundle
from shardline.artifact.possession import answer
from shardline.errors import ShardlineError
from shardline.formats.merkle import FileTree
from shardline.tracker.offers import Offer
from shardline.wire.artifacts import ADVERTISEMENT_DOMAIN, Advertisement, Challenge
from shardline.wire.bitmap import HeldFile, Pieces
from shardline.wire.tickets import sign
from tests.support.stores import described, layered_model
from tests.tracker.cluster_values import SigningNode

LAYERS = 8
LAYER_BYTES = 1 << 19
"""Two pieces."""


@dataclass(frozen=True)
class Offered:
    """The artifact, and the bytes of its one file."""

    model: Path
    bundle: Bundle

    @staticmethod
    def made(folder: Path, **changes: Any) -> Offered:
        model = layered_model(folder / "model", layers=LAYERS, layer_bytes=LAYER_BYTES, **changes)
        return Offered(model, described(model, folder / "bundle"))

    @cached_property
    def offer(self) -> Offer:
        return Offer.of(self.bundle)

    @property
    def content_id(self) -> str:
        return self.bundle.manifest.content_id

    @property
    def tree(self) -> FileTree:
        return self.bundle.trees[0]

    @property
    def count(self) -> int:
        return len(self.tree.layer)

    def files(self, pieces: Pieces | None = None) -> list[HeldFile]:
        """What somebody says who has these pieces; all, if not said."""
        held = Pieces.all(self.count) if pieces is None else pieces
        entry = self.bundle.manifest.files[0]
        return [
            HeldFile(
                root=entry.pieces_root,
                size=entry.size,
                piece_length=self.tree.piece_length,
                pieces=held.to_bytes(),
            )
        ]

    def layers(self, first: int, last: int) -> Pieces:
        return self.offer.shard(first, last)[0]


class HeldHere:
    """A file of which some pieces are there; a hole is not readable."""

    def __init__(self, offered: Offered, pieces: Pieces) -> None:
        self.tree = offered.tree
        self._raw = offered.model.read_bytes()
        self._pieces = pieces

    def read(self, start: int, end: int) -> bytes:
        length = self.tree.piece_length
        if not self._pieces.covers(start // length, -(-end // length)):
            raise ShardlineError("artifact_incomplete", "not held")
        return self._raw[start:end]


class Holders:
    """Who really has what, by the URL at which the Tracker asks; its `Ask`."""

    def __init__(self, offered: Offered) -> None:
        self.offered = offered
        self.held: dict[str, Pieces] = {}
        self.asked: list[tuple[str, Sequence[tuple[int, int]]]] = []
        self.fault: Mapping[str, Exception] = {}

    async def ask(self, url: str, challenge: Challenge, size: int) -> bytes:
        self.asked.append((url, challenge.blocks))
        if url in self.fault:
            raise self.fault[url]
        assert challenge.content_id == self.offered.content_id
        raw = answer([HeldHere(self.offered, self.held[url])], challenge.blocks)
        assert len(raw) == size
        return raw


def advertisement(node: SigningNode, offered: Offered, now: float, **changes: Any) -> Advertisement:
    """Of everything, for a minute from `now` (Unix seconds), which is its number too."""
    values: dict[str, Any] = dict(
        node=node.id,
        content_id=offered.content_id,
        sequence=round(now * 1000),
        expires=now + 60.0,
        files=offered.files(),
    )
    return Advertisement(**{**values, **changes})


def statement(node: SigningNode, said: Advertisement, domain: str = ADVERTISEMENT_DOMAIN) -> str:
    return sign(node.key, domain, said)
