"""Drawing blocks, showing them, and every way of not showing them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.artifact.possession import answer, answer_bytes, drawn_blocks, is_true
from shardline.errors import ShardlineError
from shardline.formats.merkle import BLOCK, FileTree, hash_file
from shardline.wire.artifacts import CHALLENGE_BLOCKS
from shardline.wire.bitmap import Pieces

PIECE = 8 * BLOCK
KEY = bytes(range(32))
NONCE = bytes(32)


@dataclass(frozen=True)
class File:
    raw: bytes
    tree: FileTree

    def read(self, start: int, end: int) -> bytes:
        return self.raw[start:end]


def file_of(size: int, seed: int = 1) -> File:
    raw = random.Random(seed).randbytes(size)
    return File(raw, hash_file([raw], PIECE))


FILES = (file_of(5 * PIECE + 3 * BLOCK + 77, 1), file_of(2 * BLOCK + 5, 2), file_of(100, 3))
"""With a short last piece; of less than one piece; of less than one block."""
TREES = [file.tree for file in FILES]


def everything() -> dict[int, Pieces]:
    return {number: Pieces.all(len(tree.layer)) for number, tree in enumerate(TREES)}


def all_blocks() -> list[tuple[int, int]]:
    return [(number, block) for number, tree in enumerate(TREES) for block in range(-(-tree.size // BLOCK))]


def test_every_block_of_every_file_can_be_shown() -> None:
    blocks = all_blocks()
    raw = answer(FILES, blocks)
    assert len(blocks) == 44 + 3 + 1
    assert len(raw) == answer_bytes(TREES, blocks)
    assert is_true(TREES, blocks, raw)


def test_no_bit_of_an_answer_may_differ() -> None:
    blocks = [(0, 43), (1, 2), (2, 0)]
    raw = answer(FILES, blocks)
    # Each byte of short blocks and of hashes; a few of the long ones.
    for at in random.Random(5).sample(range(len(raw)), 200):
        changed = bytearray(raw)
        changed[at] ^= 1
        assert not is_true(TREES, blocks, bytes(changed))


@pytest.mark.parametrize(
    "change", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b"", lambda raw: raw * 2]
)
def test_an_answer_of_another_length_is_not_true(change: object) -> None:
    blocks = [(0, 7), (0, 8)]
    assert callable(change)
    assert not is_true(TREES, blocks, change(answer(FILES, blocks)))


def test_the_answer_for_other_blocks_is_not_true() -> None:
    assert not is_true(TREES, [(0, 9), (0, 8)], answer(FILES, [(0, 8), (0, 9)]))


def test_only_blocks_of_held_pieces_are_drawn_and_all_of_them_can_be() -> None:
    held = {0: Pieces.of(len(TREES[0].layer), [1, 2, 5]), 1: Pieces.all(1), 2: Pieces(1)}
    found: set[tuple[int, int]] = set()
    for seed in range(40):
        found |= set(drawn_blocks(TREES, held, bytes([seed]) * 32, KEY, CHALLENGE_BLOCKS))
    expected = {(0, b) for b in [*range(8, 24), *range(40, 44)]} | {(1, 0), (1, 1), (1, 2)}
    assert found == expected


def test_drawing_is_fixed_by_nonce_and_key() -> None:
    drawn = drawn_blocks(TREES, everything(), NONCE, KEY, 5)
    assert drawn == drawn_blocks(TREES, everything(), NONCE, KEY, 5)
    assert drawn != drawn_blocks(TREES, everything(), NONCE, bytes(32), 5)
    assert drawn != drawn_blocks(TREES, everything(), bytes([1]) * 32, KEY, 5)


def test_nothing_held_nothing_drawn() -> None:
    assert drawn_blocks(TREES, {0: Pieces(len(TREES[0].layer))}, NONCE, KEY, 20) == []
    assert drawn_blocks(TREES, {}, NONCE, KEY, 20) == []


@given(st.integers(1, 6 * PIECE), st.data())
def test_a_drawn_block_is_shown_for_any_size(size: int, data: st.DataObject) -> None:
    file = file_of(size)
    pieces = data.draw(st.sets(st.integers(0, len(file.tree.layer) - 1)))
    held = {0: Pieces.of(len(file.tree.layer), pieces)}
    blocks = drawn_blocks([file.tree], held, data.draw(st.binary(min_size=32, max_size=32)), KEY, 4)
    assert bool(blocks) == bool(pieces)
    assert {block * BLOCK // PIECE for _, block in blocks} <= pieces
    assert is_true([file.tree], blocks, answer([file], blocks))


@pytest.mark.parametrize("blocks", [[(3, 0)], [(-1, 0)], [(0, 44)], [(0, -1)], [(2, 1)], [(0, 0)] * 65])
def test_blocks_that_cannot_be_asked_for(blocks: Sequence[tuple[int, int]]) -> None:
    with pytest.raises(ShardlineError) as caught:
        answer(FILES, blocks)
    assert caught.value.code == "invalid_value"


def test_a_damaged_piece_is_not_shown() -> None:
    raw = bytearray(FILES[0].raw)
    raw[3 * PIECE + 5] ^= 1
    damaged = File(bytes(raw), FILES[0].tree)
    answer([damaged], [(0, 8)])
    with pytest.raises(ShardlineError) as caught:
        answer([damaged], [(0, 3 * 8 + 7)])
    assert caught.value.code == "invalid_value"


def test_what_is_missing_is_noticed_as_often_as_it_must_be() -> None:
    """20 blocks of a Node that lacks half: it passes once in a million."""
    size = 32 * PIECE
    file = file_of(size)
    lacking = File(file.raw[: size // 2] + bytes(size // 2), file.tree)
    held = {0: Pieces.all(32)}
    for seed in range(10):
        blocks = drawn_blocks([file.tree], held, bytes([seed]) * 32, KEY, 20)
        assert any(block * BLOCK >= size // 2 for _, block in blocks)
        with pytest.raises(ShardlineError):
            answer([lacking], blocks)
