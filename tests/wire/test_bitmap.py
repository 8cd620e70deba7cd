"""Sets of pieces: bytes, runs, other piece lengths; and offers that are not believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.wire.bitmap import PIECE_LIMIT, HeldFile, Pieces

NUMBERS = st.integers(1, 70).flatmap(
    lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), max_size=count))
)


@given(NUMBERS)
def test_it_is_a_set(made: tuple[int, set[int]]) -> None:
    count, numbers = made
    pieces = Pieces.of(count, numbers)
    assert list(pieces) == sorted(numbers)
    assert len(pieces) == len(numbers)
    assert all((number in pieces) == (number in numbers) for number in range(-1, count + 1))
    assert Pieces.from_bytes(count, pieces.to_bytes()) == pieces
    assert set(Pieces.all(count) - pieces) == set(range(count)) - numbers


def test_bytes_are_as_bittorrent_has_them() -> None:
    assert Pieces.of(10, [0, 9]).to_bytes() == b"\x80\x40"


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\x80\x40\x00", b"\x80\x20"])
def test_other_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(ShardlineError, match="no set of 10 pieces"):
        Pieces.from_bytes(10, raw)


def test_runs() -> None:
    pieces = Pieces.of(12, [1, 2, 3, 7, 11])
    assert list(pieces.runs()) == [(1, 4), (7, 8), (11, 12)]
    assert pieces.first_run(2) == (1, 3)
    assert pieces.first_run(9) == (1, 4)
    assert Pieces(12).first_run(9) is None
    assert pieces.covers(1, 4)
    assert not pieces.covers(1, 5)


@given(NUMBERS, st.sampled_from([(1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]), st.integers(0, 3))
def test_other_lengths_hold_the_same_bytes(made: tuple[int, set[int]], lengths: tuple[int, int], short: int) -> None:
    """Of another length those pieces are held of which every byte is."""
    count, numbers = made
    length, other = lengths
    size = count * length - min(short, length - 1)
    held = {byte for piece in numbers for byte in range(piece * length, min(size, (piece + 1) * length))}
    expected = {
        piece for piece in range(-(-size // other)) if set(range(piece * other, min(size, (piece + 1) * other))) <= held
    }
    assert set(Pieces.of(count, numbers).regrouped(size, length, other)) == expected


@pytest.mark.parametrize("length", [0, -1, 1])
def test_an_offer_with_impossible_pieces_is_refused(length: int) -> None:
    size = PIECE_LIMIT + 1
    offer = HeldFile(root="00" * 32, size=size, piece_length=length, pieces=b"\xff" * (size // 8 + 1))
    with pytest.raises(ShardlineError, match="in pieces of"):
        offer.in_pieces_of(size, 1 << 14)


def test_an_offer_of_another_file_is_refused() -> None:
    with pytest.raises(ShardlineError, match="a file of 9 bytes"):
        HeldFile(root="00" * 32, size=9, piece_length=16, pieces=b"\x80").in_pieces_of(10, 16)
