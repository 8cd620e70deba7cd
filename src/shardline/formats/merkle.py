"""The Merkle tree of BitTorrent v2 (BEP 52): SHA-256, leaves of 16 KiB, one tree a file.

Owns the arithmetic: the pieces root that names a file, the layer of piece hashes, proofs of single blocks. A short
last block is hashed as it is; the tree is filled up to a power of two with leaves of 32 zero bytes. The root does
not depend on the piece length. No I/O but reading the stream that is passed in. Roots made by another implementation
of BEP 52 are in tests/formats/test_merkle.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shardline.errors import ShardlineError

BLOCK = 16 << 10
DEFAULT_PIECE = 1 << 20
_ZERO = bytes(32)


@runtime_checkable
class Readable(Protocol):
    """What an open binary file is here."""

    def read(self, size: int, /) -> bytes: ...


Source = Readable | Iterable[bytes]


@dataclass(frozen=True, slots=True)
class FileTree:
    """The hashes of one file, down to its pieces. Valid from birth: made by `hash_file` or `tree_of_layer`."""

    size: int
    piece_length: int
    root: bytes | None
    """The pieces root (32 bytes); None for an empty file, which has none."""
    layer: tuple[bytes, ...]
    """One hash a piece. A file of at most one piece has its root here (a .torrent has no layer for it)."""

    def piece_range(self, index: int) -> tuple[int, int]:
        """The bytes [start, end) of the file that piece `index` has; IndexError outside the file."""
        if not 0 <= index < len(self.layer):
            raise IndexError(f"piece {index} of {len(self.layer)}")
        start = index * self.piece_length
        return start, min(self.size, start + self.piece_length)

    def bytes_of(self, pieces: Collection[int]) -> int:
        """How many bytes these pieces of the file have together, each of them named once."""
        total = len(pieces) * self.piece_length
        if len(self.layer) - 1 in pieces:
            total -= len(self.layer) * self.piece_length - self.size
        return total

    def verify_piece(self, index: int, data: bytes | memoryview) -> bool:
        start, end = self.piece_range(index)
        return len(data) == end - start and _reduce(hash_blocks(data), self._leaves, _ZERO) == self.layer[index]

    def prove_block(self, block: int, piece: bytes | memoryview) -> list[bytes]:
        """The siblings that lead from `block` (its index in the file) up to the root.

        `piece` is the whole piece that holds the block. ShardlineError `invalid_value` where it is not that piece.
        """
        below = self.prove_in_piece(block, piece)
        index = block * BLOCK // self.piece_length
        return below + siblings(self.layer, index, _power_of_two(len(self.layer)), _subtree_of_zeros(self._leaves))

    def prove_in_piece(self, block: int, piece: bytes | memoryview) -> list[bytes]:
        """The siblings that lead from `block` only up to its piece, `proof_hashes` of them. Errors: `prove_block`'s."""
        index, within = divmod(block * BLOCK, self.piece_length)
        hashes = hash_blocks(piece) if 0 <= block * BLOCK < self.size else []
        start, end = self.piece_range(index) if hashes else (0, 0)
        if not hashes or len(piece) != end - start or _reduce(hashes, self._leaves, _ZERO) != self.layer[index]:
            raise ShardlineError("invalid_value", f"block {block} does not lie in this piece, or the piece is damaged")
        return siblings(hashes, within // BLOCK, self._leaves, _ZERO)

    def verify_in_piece(self, block: int, data: bytes | memoryview, proof: Sequence[bytes]) -> bool:
        """Whether `data` is block number `block` of this file, by the siblings that lead up to its piece."""
        if not 0 <= block * BLOCK < self.size or len(data) != min(BLOCK, self.size - block * BLOCK):
            return False
        index, within = divmod(block * BLOCK, self.piece_length)
        top = climb(hashlib.sha256(data).digest(), within // BLOCK, proof)
        return len(proof) == self.proof_hashes and top == self.layer[index]

    @property
    def proof_hashes(self) -> int:
        """Siblings between a block and its piece."""
        return self._leaves.bit_length() - 1

    @property
    def _leaves(self) -> int:
        """Leaves below one entry of the layer; of a file that is one piece, only as many as its blocks need."""
        if self.size <= self.piece_length:
            return _power_of_two(-(-self.size // BLOCK))
        return self.piece_length // BLOCK


def hash_blocks(data: bytes | memoryview) -> list[bytes]:
    """SHA-256 of each 16 KiB block; the last may be short."""
    view = memoryview(data)
    sha256 = hashlib.sha256
    return [sha256(view[i : i + BLOCK]).digest() for i in range(0, len(view), BLOCK)]


def hash_file(source: Source, piece_length: int = DEFAULT_PIECE) -> FileTree:
    """Read a file-like object, or chunks of any size, to the end. Memory: two pieces and 32 bytes for each piece."""
    check_piece_length(piece_length)
    size = 0
    leaves = piece_length // BLOCK
    layer: list[bytes] = []
    blocks: list[bytes] = []
    for piece in _pieces(source, piece_length):
        size += len(piece)
        blocks = hash_blocks(piece)
        layer.append(_reduce(blocks, leaves, _ZERO))
    if not layer:
        return FileTree(0, piece_length, None, ())
    if len(layer) == 1:
        layer = [_reduce(blocks, _power_of_two(len(blocks)), _ZERO)]
    return FileTree(size, piece_length, _root_of(layer, leaves), tuple(layer))


def tree_of_layer(size: int, piece_length: int, root: bytes | None, layer: Sequence[bytes]) -> FileTree:
    """A tree from hashes that somebody sent; ShardlineError `invalid_value` where they do not lead to `root`."""
    check_piece_length(piece_length)
    expected = -(-size // piece_length)
    if size < 0 or len(layer) != expected or any(len(h) != 32 for h in layer):
        raise ShardlineError("invalid_value", f"{len(layer)} piece hashes, expected {expected} of 32 bytes")
    if root != (_root_of(layer, piece_length // BLOCK) if layer else None):
        raise ShardlineError("invalid_value", "the piece hashes do not lead to the pieces root")
    return FileTree(size, piece_length, root, tuple(layer))


def pieces_root(source: Source) -> bytes | None:
    """The name of a file's content (32 bytes); None for an empty file."""
    return hash_file(source).root


def verify_block(root: bytes, size: int, block: int, data: bytes | memoryview, proof: Sequence[bytes]) -> bool:
    """Whether `data` is block number `block` of the file of `size` bytes with this pieces root."""
    blocks = -(-size // BLOCK)
    if not 0 <= block < blocks or len(data) != min(BLOCK, size - block * BLOCK):
        return False
    return len(proof) == _height(blocks) and climb(hashlib.sha256(data).digest(), block, proof) == root


def siblings(hashes: Sequence[bytes], index: int, width: int, pad: bytes) -> list[bytes]:
    """The sibling at each height from `hashes[index]` up to the top of a tree of `width` (a power of two) entries,
    filled up with `pad`."""
    row = list(hashes)
    path = []
    while width > 1:
        other = index ^ 1
        path.append(row[other] if other < len(row) else pad)
        row, pad = _parents(row, pad), _join(pad, pad)
        index >>= 1
        width >>= 1
    return path


def climb(digest: bytes, index: int, path: Sequence[bytes]) -> bytes:
    """The hash at the top, from an entry, its index, and its siblings."""
    for other in path:
        digest = _join(other, digest) if index & 1 else _join(digest, other)
        index >>= 1
    return digest


def check_piece_length(piece_length: int) -> None:
    if piece_length < BLOCK or piece_length & (piece_length - 1):
        raise ValueError(f"piece length {piece_length} is not a power of two of at least {BLOCK}")


def _join(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(left + right).digest()


def _parents(row: list[bytes], pad: bytes) -> list[bytes]:
    if len(row) % 2:
        row = [*row, pad]
    return [_join(row[i], row[i + 1]) for i in range(0, len(row), 2)]


def _reduce(row: Sequence[bytes], width: int, pad: bytes) -> bytes:
    """The top of a tree of `width` entries, of which the first are `row` and the others `pad`."""
    row = list(row)
    while width > 1:
        row, pad = _parents(row, pad), _join(pad, pad)
        width >>= 1
    return row[0]


def _root_of(layer: Sequence[bytes], leaves: int) -> bytes:
    return _reduce(layer, _power_of_two(len(layer)), _subtree_of_zeros(leaves))


def _subtree_of_zeros(leaves: int) -> bytes:
    top = _ZERO
    while leaves > 1:
        top = _join(top, top)
        leaves >>= 1
    return top


def _power_of_two(count: int) -> int:
    return 1 << _height(count)


def _height(count: int) -> int:
    return max(count - 1, 0).bit_length()


def _pieces(source: Source, piece_length: int) -> Iterator[bytes | memoryview]:
    """Cut what comes into pieces; only the last may be short."""
    held = bytearray()
    for chunk in _chunks(source, piece_length):
        held += chunk
        while len(held) >= piece_length:
            yield bytes(memoryview(held)[:piece_length])
            del held[:piece_length]
    if held:
        yield bytes(held)


def _chunks(source: Source, size: int) -> Iterator[bytes]:
    if isinstance(source, Readable):
        while chunk := source.read(size):
            yield chunk
    else:
        yield from source
