"""The Model Artifacts that a Tracker offers: bundles that its operator named, checked once, at the start.

Owns what follows from a manifest and is asked often: the pieces of each layer, and what an advertised set of pieces is
worth. Who has pieces is artifacts.py's. Loading blocks. Shown by tests/tracker/test_offers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardline.artifact.bundle import Bundle, TrustPolicy, load_bundle
from shardline.artifact.ranges import layer_pieces
from shardline.errors import ShardlineError
from shardline.wire.bitmap import HeldFile, Pieces
from shardline.wire.manifest import Manifest

OFFERS_LIMIT = 64

Held = Mapping[int, Pieces]
"""Pieces by file number; files without any are left out."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One artifact."""

    bundle: Bundle
    layers: tuple[Held, ...]
    """For each layer the pieces of a Shard of this layer alone; those of a longer Shard are these together."""
    quantisation: str
    """The tensor type with most bytes."""

    @staticmethod
    def of(bundle: Bundle) -> Offer:
        counts = [len(tree.layer) for tree in bundle.trees]
        layers = tuple(
            {file: Pieces.of(counts[file], numbers) for file, numbers in pieces.items()}
            for pieces in layer_pieces(bundle.manifest)
        )
        return Offer(bundle, layers, _main_type(bundle.manifest))

    @property
    def content_id(self) -> str:
        return self.bundle.manifest.content_id

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def held(self, files: Sequence[HeldFile]) -> dict[int, Pieces]:
        """What an advertisement says, by file number; `invalid_value` for what is not of this artifact."""
        numbers = {entry.pieces_root: number for number, entry in enumerate(self.bundle.manifest.files)}
        found: dict[int, Pieces] = {}
        for file in files:
            number = numbers.pop(file.root, None)
            if number is None:
                raise _wrong("a file in it is not of this artifact, or stands there twice")
            tree = self.bundle.trees[number]
            if file.piece_length != tree.piece_length:
                # What they are worth here would have to be worked out for each, at the Tracker's cost.
                raise _wrong(f"its pieces have {file.piece_length} bytes, those offered here {tree.piece_length}")
            pieces = file.in_pieces_of(tree.size, tree.piece_length)
            if pieces:
                found[number] = pieces
        return found

    def bytes_of(self, held: Held) -> int:
        """How many bytes these pieces have."""
        return sum(self.bundle.trees[number].bytes_of(pieces) for number, pieces in held.items())

    def servable(self, held: Held) -> list[tuple[int, int]]:
        """The longest layer ranges [first, last) of which all pieces are there, sorted (`ranges.servable`)."""
        layers = (layer for layer, needed in enumerate(self.layers) if covers(held, needed))
        return list(Pieces.of(self.n_layers, layers).runs())

    def shard(self, first: int, last: int) -> dict[int, Pieces]:
        """The pieces of Shard [first, last), which lies inside the model."""
        return union(self.layers[first:last])


def union(parts: Iterable[Held]) -> dict[int, Pieces]:
    """All of these together."""
    found: dict[int, Pieces] = {}
    for part in parts:
        for file, pieces in part.items():
            found[file] = found[file] | pieces if file in found else pieces
    return found


def covers(held: Held, needed: Held) -> bool:
    """Whether all of `needed` is in `held`."""
    return all(file in held and not pieces - held[file] for file, pieces in needed.items())


def load_offers(folders: Iterable[Path], policy: TrustPolicy) -> list[Offer]:
    """The artifacts in these folders. Blocking.

    Errors: those of `load_bundle`, with the folder named; `setting_invalid` for two that are the same, or too many.
    """
    found: dict[str, Offer] = {}
    for offer in _loaded(folders, policy):
        if offer.content_id in found:
            both = f"{found[offer.content_id].bundle.folder} and {offer.bundle.folder}"
            raise ShardlineError("setting_invalid", f"{both} describe the same artifact", param="artifact")
        found[offer.content_id] = offer
        if len(found) > OFFERS_LIMIT:
            raise ShardlineError("setting_invalid", f"at most {OFFERS_LIMIT} artifacts are offered", param="artifact")
    return list(found.values())


def _loaded(folders: Iterable[Path], policy: TrustPolicy) -> Iterator[Offer]:
    for folder in folders:
        try:
            yield Offer.of(load_bundle(folder, policy))
        except ShardlineError as error:
            raise ShardlineError(error.code, f"{folder}: {error.message}", advice=error.advice) from None


def _main_type(manifest: Manifest) -> str:
    sizes: dict[str, int] = {}
    for row in manifest.tensors:
        sizes[row.type] = sizes.get(row.type, 0) + row.nbytes
    return min(sizes, key=lambda kind: (-sizes[kind], kind))


def _wrong(why: str) -> ShardlineError:
    return ShardlineError("invalid_value", f"the advertisement is refused: {why}", param="files")
