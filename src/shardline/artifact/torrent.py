"""The torrent of a Model Artifact: BitTorrent v2 only (BEP 52), its bytes given by the manifest and the piece hashes.

Owns the metainfo: one form, so that everybody who describes the same files under the same name gets the same bytes and
the same info-hash. Reading one is building it again and comparing. No trackers, no dates; web seeds as in BEP 19. No
I/O. Public clients accept it: tests/artifact/test_public_tools.py; the rest in tests/artifact/test_torrent.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardline.errors import ShardlineError
from shardline.formats import bencode
from shardline.formats.merkle import FileTree, tree_of_layer
from shardline.wire.manifest import FileEntry, Manifest

TORRENT_BYTES_LIMIT = 64 << 20
MIN_PIECE, MAX_PIECE = 256 << 10, 4 << 20
_PIECES_WANTED = 16_384


class Torrent(NamedTuple):
    """The bytes of a .torrent file and what names them."""

    raw: bytes
    info_hash: str
    """SHA-256 of the info dictionary in hex."""


def piece_length_for(total_bytes: int) -> int:
    """Bytes of a piece: about 16,384 pieces in all, from 256 KiB to 4 MiB, a power of two."""
    wanted = 1 << max(0, -(-total_bytes // _PIECES_WANTED) - 1).bit_length()
    return min(MAX_PIECE, max(MIN_PIECE, wanted))


def write_torrent(name: str, files: Sequence[tuple[str, FileTree]], *, webseeds: Sequence[str] = ()) -> Torrent:
    """The torrent of `files` (path in it, hashes), all of one piece length, none empty."""
    lengths = {tree.piece_length for _, tree in files}
    if len(lengths) != 1 or any(tree.root is None for _, tree in files):
        raise ValueError("files of one torrent have one piece length, and at least a byte")
    info: dict[bytes, Any] = {
        b"file tree": _file_tree(files),
        b"meta version": 2,
        b"name": name.encode(),
        b"piece length": lengths.pop(),
    }
    layers = {tree.root: b"".join(tree.layer) for _, tree in files if tree.root and len(tree.layer) > 1}
    document: dict[bytes, Any] = {b"info": info, b"piece layers": layers}
    if webseeds:
        document[b"url-list"] = [url.encode() for url in webseeds]
    return Torrent(bencode.encode(document), hashlib.sha256(bencode.encode(info)).hexdigest())


def read_torrent(raw: bytes, manifest: Manifest) -> tuple[FileTree, ...]:
    """The hashes of each file of `manifest`, in its order, from its torrent.

    Raises `artifact_invalid` unless these are exactly the bytes that the manifest asks for: each layer of piece hashes
    leads to the pieces root, and there is nothing else in it.
    """
    stated = manifest.transport.bittorrent
    limit = min(TORRENT_BYTES_LIMIT, _most_bytes(manifest))
    if len(raw) > limit:
        raise _bad(f"it has {len(raw)} bytes, at most {limit} are asked for")
    if hashlib.sha256(raw).hexdigest() != stated.torrent_sha256:
        raise _bad("its SHA-256 is not that of the manifest")
    try:
        document = bencode.decode(raw)
        layers = document.get(b"piece layers") if isinstance(document, dict) else None
        if not isinstance(layers, dict):
            raise _bad("it has no piece layers")
        trees = tuple(_tree(entry, stated.piece_length, layers) for entry in manifest.files)
    except ShardlineError as error:
        raise error if error.code == "artifact_invalid" else _bad(error.message) from None
    paths = [entry.path for entry in manifest.files]
    made = write_torrent(manifest.name, list(zip(paths, trees, strict=True)), webseeds=manifest.transport.webseeds)
    if made.raw != raw or made.info_hash != stated.info_hash_v2:
        raise _bad("names, sizes, piece length, web seeds or info-hash differ from the manifest")
    return trees


def _most_bytes(manifest: Manifest) -> int:
    """A bound on what the torrent of this manifest takes: nothing larger is taken apart."""
    length = manifest.piece_length
    pieces = sum(-(-entry.size // length) for entry in manifest.files)
    texts = [manifest.name, *manifest.transport.webseeds, *(entry.path for entry in manifest.files)]
    return 32 * pieces + sum(4 * len(text) + 256 for text in texts) + 1024


def _tree(entry: FileEntry, piece_length: int, layers: dict[bytes, bencode.Decoded]) -> FileTree:
    if entry.size <= piece_length:
        return tree_of_layer(entry.size, piece_length, entry.root, [entry.root])
    layer = layers.get(entry.root)
    if not isinstance(layer, bytes) or len(layer) % 32:
        raise _bad(f"it has no piece hashes of {entry.path}")
    return tree_of_layer(entry.size, piece_length, entry.root, [layer[i : i + 32] for i in range(0, len(layer), 32)])


def _file_tree(files: Sequence[tuple[str, FileTree]]) -> dict[bytes, Any]:
    top: dict[bytes, Any] = {}
    for path, tree in files:
        folder = top
        *parents, last = path.split("/")
        for parent in parents:
            folder = folder.setdefault(parent.encode(), {})
        folder[last.encode()] = {b"": {b"length": tree.size, b"pieces root": tree.root}}
    return top


def _bad(message: str) -> ShardlineError:
    return ShardlineError("artifact_invalid", f"model.torrent does not fit its manifest: {message}")
