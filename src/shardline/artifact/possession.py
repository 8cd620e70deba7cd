"""Proof that a Node has pieces: random blocks of 16 KiB, each with the hashes that lead up to its piece.

Owns the drawing, the answer and its check, so that Node and Tracker do the same. A check needs the hashes of the pieces
alone, not the file. What such a proof is worth, and what it does not prove, is in docs/artifacts.md. Pure, but for the
reader that is passed in. Shown by tests/artifact/test_possession.py.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from shardline.errors import ShardlineError
from shardline.formats.merkle import BLOCK, FileTree
from shardline.wire.artifacts import CHALLENGE_BLOCKS
from shardline.wire.bitmap import Pieces

NONCE_BYTES = 32
_HASH = 32


class PieceFile(Protocol):
    """One file of a stored artifact (`StoredFile`)."""

    @property
    def tree(self) -> FileTree: ...

    def read(self, start: int, end: int) -> bytes:
        """`artifact_incomplete` where [start, end) is not held."""
        ...


def drawn_blocks(
    trees: Sequence[FileTree], held: Mapping[int, Pieces], nonce: bytes, public_key: bytes, count: int
) -> list[tuple[int, int]]:
    """`count` blocks of the pieces in `held` (by file number), as (file, block): those that

        SHA-256(nonce, public_key, j as 4 bytes, big-endian) modulo the number of blocks

    names for j = 0, 1, …, counted through the pieces in order; fewer where one is named twice, [] where nothing is
    held. `nonce` and `public_key` (of the Node) have 32 bytes each: no two Nodes are asked for the same.
    """
    runs = [(file, *_blocks_of(trees[file], run)) for file in sorted(held) for run in held[file].runs()]
    ends = list(accumulate(end - first for _, first, end in runs))
    found: dict[tuple[int, int], None] = {}
    for j in range(count if ends else 0):
        digest = hashlib.sha256(nonce + public_key + j.to_bytes(4, "big")).digest()
        index = int.from_bytes(digest, "big") % ends[-1]
        at = bisect_right(ends, index)
        file, _, end = runs[at]
        found[file, end - (ends[at] - index)] = None
    return list(found)


def answer(files: Sequence[PieceFile], blocks: Sequence[tuple[int, int]]) -> bytes:
    """Each block's bytes and its sibling hashes up to its piece, from below, one after another, in the order asked.

    Reads and hashes a whole piece a block: blocks, call it in a thread. `invalid_value` for blocks that no file has,
    and for too many; `artifact_incomplete` where one is not held.
    """
    if len(blocks) > CHALLENGE_BLOCKS:
        raise ShardlineError(
            "invalid_value", f"{len(blocks)} blocks are asked for, at most {CHALLENGE_BLOCKS} are shown", param="blocks"
        )
    parts: list[bytes] = []
    for number, block in blocks:
        if not 0 <= number < len(files) or not 0 <= block * BLOCK < files[number].tree.size:
            raise ShardlineError("invalid_value", f"no file {number} with a block {block}", param="blocks")
        tree = files[number].tree
        start, end = tree.piece_range(block * BLOCK // tree.piece_length)
        piece = files[number].read(start, end)
        at = block * BLOCK - start
        parts.append(piece[at : at + BLOCK])
        parts.extend(tree.prove_in_piece(block, piece))
    return b"".join(parts)


def answer_bytes(trees: Sequence[FileTree], blocks: Sequence[tuple[int, int]]) -> int:
    """How long an answer is: no answer of another length is true."""
    return sum(_block_bytes(trees[file], block) + _HASH * trees[file].proof_hashes for file, block in blocks)


def is_true(trees: Sequence[FileTree], blocks: Sequence[tuple[int, int]], raw: bytes) -> bool:
    """Whether `raw` answers for all `blocks`, which lie in these files. 16 KiB and some hashes a block are hashed."""
    if len(raw) != answer_bytes(trees, blocks):
        return False
    view = memoryview(raw)
    at = 0
    for file, block in blocks:
        tree = trees[file]
        data = view[at : at + _block_bytes(tree, block)]
        at += len(data)
        proof = [bytes(view[i : i + _HASH]) for i in range(at, at + _HASH * tree.proof_hashes, _HASH)]
        at += _HASH * tree.proof_hashes
        if not tree.verify_in_piece(block, data, proof):
            return False
    return True


def _blocks_of(tree: FileTree, pieces: tuple[int, int]) -> tuple[int, int]:
    """The blocks [first, end) of the pieces [first, end)."""
    first, end = pieces
    in_piece = tree.piece_length // BLOCK
    return first * in_piece, min(end * in_piece, -(-tree.size // BLOCK))


def _block_bytes(tree: FileTree, block: int) -> int:
    return min(BLOCK, tree.size - block * BLOCK)
