"""Sets of pieces, as one bit each: what is held, wanted, offered; and the message that says so.

Owns the sets, their bytes (high bit first, as BitTorrent sends them) and what a set is worth in pieces of another
length. It does not know where the pieces are. Pure. Shown by tests/wire/test_bitmap.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import msgspec

from shardline.errors import ShardlineError

PIECE_LIMIT = 1 << 20
"""Pieces of one file that are believed to exist, whatever a message says."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Some of the pieces 0 … count - 1. Also a container, for `ranges.servable`."""

    count: int
    bits: int = 0
    """Bit i is piece i."""

    @staticmethod
    def of(count: int, numbers: Iterable[int]) -> Pieces:
        """IndexError for a number outside."""
        marks = bytearray(-(-count // 8))
        for number in numbers:
            if not 0 <= number < count:
                raise IndexError(f"piece {number} of {count}")
            marks[number >> 3] |= 1 << (number & 7)
        return Pieces(count, int.from_bytes(marks, "little"))

    @staticmethod
    def span(count: int, first: int, end: int) -> Pieces:
        """The pieces [first, end)."""
        if not 0 <= first <= end <= count:
            raise IndexError(f"pieces {first} to {end} of {count}")
        return Pieces(count, (1 << end) - (1 << first))

    @staticmethod
    def all(count: int) -> Pieces:
        return Pieces(count, (1 << count) - 1)

    @staticmethod
    def from_bytes(count: int, raw: bytes) -> Pieces:
        """What `to_bytes` made; `invalid_value` for another length, or bits behind the last piece."""
        bits = int.from_bytes(raw.translate(_REVERSED), "little")
        if len(raw) != -(-count // 8) or bits >> count:
            raise ShardlineError("invalid_value", f"{len(raw)} bytes are no set of {count} pieces")
        return Pieces(count, bits)

    def to_bytes(self) -> bytes:
        """One bit a piece; the first piece is the high bit of the first byte."""
        return self.bits.to_bytes(-(-self.count // 8), "little").translate(_REVERSED)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and 0 <= number < self.count and bool(self.bits >> number & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __iter__(self) -> Iterator[int]:
        for first, end in self.runs():
            yield from range(first, end)

    def __or__(self, other: Pieces) -> Pieces:
        return Pieces(self.count, self.bits | self._same(other))

    def __and__(self, other: Pieces) -> Pieces:
        return Pieces(self.count, self.bits & self._same(other))

    def __sub__(self, other: Pieces) -> Pieces:
        return Pieces(self.count, self.bits & ~self._same(other))

    def runs(self) -> Iterator[tuple[int, int]]:
        """The longest ranges [first, end) without a gap, sorted."""
        # As text, lowest bit first: one pass, however many runs somebody makes.
        digits = f"{self.bits:b}"[::-1]
        first = digits.find("1")
        while first >= 0:
            end = digits.find("0", first)
            if end < 0:
                end = len(digits)
            yield first, end
            first = digits.find("1", end)

    def first_run(self, most: int) -> tuple[int, int] | None:
        """The first pieces in a row, [first, end), at most `most`; None where there is no piece."""
        if not self.bits:
            return None
        first = (self.bits & -self.bits).bit_length() - 1
        return first, first + min(most, _ones(self.bits >> first))

    def covers(self, first: int, end: int) -> bool:
        """Whether all pieces of [first, end) are here."""
        wanted = (1 << end) - (1 << first)
        return self.bits & wanted == wanted

    def regrouped(self, size: int, length: int, other_length: int) -> Pieces:
        """The pieces of `other_length` bytes, of the same file of `size` bytes, that lie in these of `length` bytes."""
        count = -(-size // other_length)
        spans = []
        for first, end in self.runs():
            start, stop = first * length, min(size, end * length)
            spans.append(range(-(-start // other_length), stop // other_length if stop < size else count))
        return Pieces.of(count, chain.from_iterable(spans))

    def _same(self, other: Pieces) -> int:
        if other.count != self.count:
            raise ValueError(f"sets of {self.count} and of {other.count} pieces")
        return other.bits


class HeldFile(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody has of one file of a Model Artifact."""

    root: str
    """`bt2_pieces_root` in hex: names the file, whatever it is called."""
    size: int
    piece_length: int
    """Of the pieces here; the receiver's may have another."""
    pieces: bytes
    """`Pieces.to_bytes`."""

    def in_pieces_of(self, size: int, piece_length: int) -> Pieces:
        """The same in pieces of the receiver's length; `invalid_value` where it is about another file."""
        length = self.piece_length
        if self.size != size or length < 1 or -(-size // length) > PIECE_LIMIT:
            raise ShardlineError("invalid_value", f"a file of {self.size} bytes, in pieces of {length}")
        held = Pieces.from_bytes(-(-size // length), self.pieces)
        return held if length == piece_length else held.regrouped(size, length, piece_length)


class HeldPieces(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/pieces/CONTENT_ID`."""

    content_id: str
    files: tuple[HeldFile, ...]


def _ones(bits: int) -> int:
    """How many of the lowest bits are set in a row."""
    return (~bits & (bits + 1)).bit_length() - 1


_REVERSED = bytes(int(f"{value:08b}"[::-1], 2) for value in range(256))
