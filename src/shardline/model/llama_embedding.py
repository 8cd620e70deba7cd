"""Embedding rows looked up outside of llama.cpp: token ids in, the rows that its graph would have made out.

Owns the mapped matrix of a head's Shard file and its decoding by ggml's own routine for the tensor type, so that rows
are equal to the bit. Nothing is read before a row is wanted. Shown by tests/model/test_llama_embedding.py.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardline.errors import ShardlineError
from shardline.formats.ggml_types import BLOCK_TYPES
from shardline.model.llama_library import LlamaLibrary

_F32 = 0


class EmbeddingMatrix:
    """Rows of one matrix in a file."""

    def __init__(
        self, library: LlamaLibrary, path: Path, *, offset: int, type_id: int, rows: int, width: int, scale: float = 1.0
    ) -> None:
        """`model_file_invalid` where the file does not hold such a matrix."""
        if type_id not in BLOCK_TYPES:  # the library ends the process for a number that it does not know
            raise _invalid(path, f"tensor type {type_id} of its embedding matrix is unknown")
        traits = library.type_traits(type_id)
        if not traits.type_size or width % traits.blck_size or not (traits.to_float or type_id == _F32):
            raise _invalid(path, f"rows of {width} in tensor type {type_id} cannot be decoded")
        if offset < 0 or rows < 1:
            raise _invalid(path, f"an embedding matrix of {rows} rows at {offset}")
        self.rows, self.width = rows, width
        self.row_bytes = width // traits.blck_size * traits.type_size
        self.nbytes = rows * self.row_bytes
        self._decode = _copy if type_id == _F32 else traits.to_float
        self._scale = None if scale == 1.0 else np.float32(scale)
        try:
            with path.open("rb") as file:
                if file.seek(0, 2) < offset + self.nbytes:
                    raise _invalid(path, f"it ends before its embedding matrix of {self.nbytes} bytes at {offset}")
                start = offset - offset % mmap.ALLOCATIONGRANULARITY
                # Written by nobody: copy-on-write gives an address without the right to change the file.
                self._map = mmap.mmap(
                    file.fileno(), offset - start + self.nbytes, offset=start, access=mmap.ACCESS_COPY
                )
        except OSError as error:
            raise _invalid(path, error.strerror or type(error).__name__) from None
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + offset - start

    def look_up(self, ids: npt.NDArray[np.int32], target: npt.NDArray[np.float32]) -> None:
        """Write the rows of `ids` (int32) to `target`, [at least len(ids), width], C-contiguous float32. Ids lie inside
        the matrix: the caller has checked them."""
        address = target.ctypes.data
        step = 4 * self.width
        for token in ids.tolist():
            self._decode(self._base + token * self.row_bytes, address, self.width)
            address += step
        if self._scale is not None:
            target[: len(ids)] *= self._scale


def _copy(source: int, target: int, count: int) -> None:
    ctypes.memmove(target, source, 4 * count)


def _invalid(path: Path, why: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"{path.name!r:.200} is no usable Shard file: {why}", reason="damaged")
