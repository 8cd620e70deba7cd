"""Which bytes of a Model Artifact make a Shard, which pieces these are, and which Shards a set of pieces can serve.

Owns that one derivation, from the manifest alone: headers of all files, the tensors of the layers, and what head and
tail need beside them. It never stands in the manifest. Pure. That the Shard files of llama.cpp need no byte more is
shown by tests/artifact/test_ranges.py and test_ranges_llama.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain

from shardline.formats.layers import ByteRange, byte_ranges, check_range, is_tied, place_of, shard_tensors
from shardline.wire.bitmap import Pieces
from shardline.wire.manifest import Manifest, TensorRow


def shard_ranges(manifest: Manifest, first: int, last: int) -> list[ByteRange]:
    """The bytes that Shard [first, last) needs, sorted, neighbours joined; `layers_invalid` outside the model.

    The headers of all files are among them, so that the readers of formats/ work on files with holes.
    """
    check_range(first, last, manifest.model.n_layers)
    rows = {row.name: row for row in manifest.tensors}
    names = shard_tensors(rows, first, last, n_layers=manifest.model.n_layers, tied=is_tied(rows))
    taken = {name: rows[name] for name in names} | {row.name: row for row in _vectors(manifest)}
    alignment = manifest.format.alignment or 1
    return _joined(chain(_headers(manifest), byte_ranges(taken.values(), alignment=alignment)))


def pieces_of(manifest: Manifest, ranges: Iterable[ByteRange]) -> dict[int, list[int]]:
    """The pieces that hold these bytes: sorted piece numbers by file number. Pieces never reach over two files."""
    pieces: dict[int, set[int]] = {}
    length = manifest.piece_length
    for file, start, end in ranges:
        pieces.setdefault(file, set()).update(range(start // length, -(-end // length)))
    return {file: sorted(found) for file, found in sorted(pieces.items())}


def servable(manifest: Manifest, held: Mapping[int, Container[int]]) -> list[tuple[int, int]]:
    """The longest layer ranges [first, last) of which all pieces are held, sorted.

    `held`: piece numbers by file number. Any range inside one of them can be served too, except that the head needs
    layer 0 and the tail the last one. [] where not even the headers are whole.
    """
    layers = (layer for layer, needed in enumerate(layer_pieces(manifest)) if _is_held(needed, held))
    return list(Pieces.of(manifest.model.n_layers, layers).runs())


def layer_pieces(manifest: Manifest) -> Iterable[dict[int, list[int]]]:
    """The pieces of each Shard of one layer, by file number: those of a longer Shard are these together."""
    n_layers = manifest.model.n_layers
    of_layer: list[list[TensorRow]] = [[] for _ in range(n_layers)]
    others: list[TensorRow] = []
    for row in manifest.tensors:
        place = place_of(row.name)
        if not isinstance(place, int):
            others.append(row)
        elif place < n_layers:
            of_layer[place].append(row)
    tied = is_tied(row.name for row in manifest.tensors)
    for layer, own in enumerate(of_layer):
        rows = {row.name: row for row in [*own, *others]}
        names = shard_tensors(rows, layer, layer + 1, n_layers=n_layers, tied=tied)
        taken = {name: rows[name] for name in names} | {row.name: row for row in _vectors(manifest)}
        yield pieces_of(manifest, chain(_headers(manifest), byte_ranges(taken.values())))


def _is_held(needed: Mapping[int, Sequence[int]], held: Mapping[int, Container[int]]) -> bool:
    return all(piece in held.get(file, ()) for file, pieces in needed.items() for piece in pieces)


def _headers(manifest: Manifest) -> Iterable[ByteRange]:
    return (ByteRange(number, 0, entry.data_offset) for number, entry in enumerate(manifest.files))


def _vectors(manifest: Manifest) -> Iterable[TensorRow]:
    """Norms and biases of head and tail: no GGUF file is loaded without its final norm, wherever it was cut, and some
    architectures have it under a name of the embedding."""
    if manifest.format.container == "gguf":
        yield from (
            row for row in manifest.tensors if len(row.shape) == 1 and place_of(row.name) in ("output", "embedding")
        )


def _joined(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    joined: list[ByteRange] = []
    for found in sorted(ranges):
        if joined and joined[-1].file == found.file and found.start <= joined[-1].end:
            joined[-1] = joined[-1]._replace(end=max(joined[-1].end, found.end))
        elif found.end > found.start:
            joined.append(found)
    return joined
