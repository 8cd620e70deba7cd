"""The arrays of one llama_decode call, kept and filled again: token ids, rows, positions, sequences, output marks.

Owns the memory that the library reads during a call. Everything that is the same in every call is written once. Refuses
to know slots: it is told sequences and positions. Shown by tests/model/test_llama_backend.py.
"""

from __future__ import annotations

import ctypes

import numpy as np

from shardline.model.backend import Buffer
from shardline.model.llama_library import Batch

_POSITIONS_MULTI = 4
_I32 = np.dtype("<i4")
_F32 = np.dtype("<f4")


class RowArrays:
    """Room for `rows` rows of the sequences below `sequences`. `multi`: rows have four positions each."""

    def __init__(
        self, *, rows: int, width: int, sequences: int, multi: bool, outputs: bool, beside: bool = False
    ) -> None:
        """`width`: of hidden rows, 0 where only tokens go in. `outputs`: mark every row as one; else none is, but for
        those named later. `beside`: token ids go in with hidden rows."""
        self._sections = _POSITIONS_MULTI if multi else 1
        self._positions = np.zeros(rows * self._sections, np.int32)
        self._ones = np.ones(rows, np.int32)
        self._ids = np.arange(sequences, dtype=np.int32)
        first: int = self._ids.ctypes.data
        self._id_addresses = [first + 4 * i for i in range(sequences)]
        self._sequences = np.zeros(rows, np.uint64)
        self._marks = np.full(rows, int(outputs), np.int8)
        self._marked: list[int] = []
        self.tokens = np.zeros(rows, _I32)
        self.hidden = np.zeros((rows, width), _F32)
        self._own_tokens: int = self.tokens.ctypes.data
        self._own_hidden: int = self.hidden.ctypes.data
        self._beside = beside
        self._batch = Batch(
            pos=self._positions.ctypes.data,
            n_seq_id=self._ones.ctypes.data,
            seq_id=self._sequences.ctypes.data,
            logits=self._marks.ctypes.data,
        )

    def place(self, start: int, rows: int, sequence: int, position: int) -> None:
        """Rows [start, start + rows) belong to `sequence` and stand at `position` and behind it."""
        if rows == 1:
            self._positions[start] = position
            self._sequences[start] = self._id_addresses[sequence]
            return
        self._positions[start : start + rows] = np.arange(position, position + rows, dtype=np.int32)
        self._sequences[start : start + rows] = self._id_addresses[sequence]

    def mark(self, row: int) -> None:
        """Logits are wanted of this row, in this call only."""
        self._marks[row] = 1
        self._marked.append(row)

    def unmark(self) -> None:
        for row in self._marked:
            self._marks[row] = 0
        self._marked.clear()

    def with_tokens(self, rows: int) -> Batch:
        """The batch of the first `rows` of `tokens`."""
        batch = self._batch
        batch.n_tokens = rows
        batch.token = self._own_tokens
        return batch

    def with_hidden(self, rows: int, address: int | None = None) -> Batch:
        """The batch of the first `rows` of `hidden`, or of those at `address`."""
        batch = self._batch
        batch.n_tokens = rows
        batch.embd = address or self._own_hidden
        if self._beside:
            batch.token = self._own_tokens
        if self._sections > 1:
            # Of text, the first three positions of a row are the same and the fourth is 0; one section of all rows
            # follows another.
            sections = self._positions[: rows * self._sections].reshape(self._sections, rows)
            sections[1:3] = sections[0]
            sections[3] = 0
        return batch


def address_of(buffer: Buffer) -> int | None:
    """Where a buffer of float32 lies; None where the library may not read floats from it as it lies."""
    try:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except TypeError:  # read-only: a slower way to the same address
        address = np.frombuffer(buffer, np.uint8).ctypes.data
    return None if address % 4 else address
