"""What stands in for hidden rows and attention in the scripted engine: digests as rows, and chains of them as caches.

Owns the two value types, nothing of scripts, slots or faults (scripted.py). Shown by tests/model/test_scripted.py.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardline.errors import ShardlineError
from shardline.model.backend import Buffer
from shardline.wire.steps import SeamLayout

Bytes2D = npt.NDArray[np.uint8]

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1"}
"""safetensors dtype -> numpy dtype of the same width (bfloat16 as its bits)."""
_PLACE = struct.Struct("<iI")


class RowCode:
    """Digests to rows of a Seam layout and back. An element is one byte of the digest as a number, which every dtype
    holds exactly; elements beyond the digest are derived from it, so that no bit of a row is free."""

    def __init__(self, layout: SeamLayout) -> None:
        self.layout = layout
        self._widths = [int(np.prod(t.shape)) for t in layout.tensors]
        self.digest_bytes = min(16, sum(self._widths))
        self._filler = sum(self._widths) - self.digest_bytes

    def rows(self, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        elements = np.frombuffer(b"".join(self._elements(d) for d in digests), dtype=np.uint8)
        return self._tensors(elements.reshape(len(digests), -1))

    @property
    def width(self) -> int:
        """Elements of a row."""
        return sum(self._widths)

    def values(self, digests: Sequence[bytes]) -> npt.NDArray[np.float32]:
        """What stands for rows behind a final norm: float32 of -1 to 1, [len(digests), width]."""
        elements = np.frombuffer(b"".join(self._elements(d) for d in digests), dtype=np.uint8)
        return elements.reshape(len(digests), -1).astype(np.float32) / np.float32(127.5) - np.float32(1)

    def _elements(self, digest: bytes) -> bytes:
        return digest + hashlib.shake_128(digest).digest(self._filler) if self._filler else digest

    def _tensors(self, elements: Bytes2D) -> tuple[bytes, ...]:
        out = []
        start = 0
        for tensor, width in zip(self.layout.tensors, self._widths, strict=True):
            part = elements[:, start : start + width]
            start += width
            if tensor.dtype == "BF16":
                out.append((part.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
            else:
                out.append(part.astype(NUMPY[tensor.dtype]).tobytes())
        return tuple(out)

    def digests(self, hidden: Sequence[Buffer], rows: int) -> list[bytes]:
        """What the rows carry; a row that is none of ours becomes the hash of its bytes, which fits nowhere."""
        parts = []
        raw = [np.frombuffer(b, dtype=np.uint8).reshape(rows, -1) for b in hidden]
        for tensor, data in zip(self.layout.tensors, raw, strict=True):
            values = np.ascontiguousarray(data).view(NUMPY[tensor.dtype])
            if tensor.dtype == "BF16":
                values = (values.astype("<u4") << 16).view("<f4")
            with np.errstate(invalid="ignore"):
                parts.append(values.astype(np.int64).astype(np.uint8))
        elements = np.concatenate(parts, axis=1)
        found = [elements[i, : self.digest_bytes].tobytes() for i in range(rows)]
        wanted = [np.frombuffer(b, dtype=np.uint8).reshape(rows, -1) for b in self.rows(found)]
        intact = np.logical_and.reduce([(w == r).all(axis=1) for w, r in zip(wanted, raw, strict=True)])
        for i in np.flatnonzero(~intact):
            damaged = b"".join(r[i].tobytes() for r in raw)
            found[i] = hashlib.blake2b(damaged, digest_size=self.digest_bytes, person=b"damaged row").digest()
        return found


class LayerChain:
    """The hash chains of layers [first, last): what stands in for their attention and their cache."""

    def __init__(self, first: int, last: int, digest_bytes: int) -> None:
        self.first = first
        self._size = digest_bytes
        self._layers: list[list[bytes]] = [[] for _ in range(first, last)]

    def __len__(self) -> int:
        return len(self._layers[0])

    def embed(self, token: int, position: int) -> bytes:
        return hashlib.blake2b(_PLACE.pack(token, position), digest_size=self._size, person=b"embedding").digest()

    def step(self, row: bytes) -> bytes:
        """One row through all layers, each of which remembers it."""
        position = len(self)
        for number, seen in enumerate(self._layers, self.first):
            before = seen[-1] if seen else b""
            row = hashlib.blake2b(_PLACE.pack(number, position) + row + before, digest_size=self._size).digest()
            seen.append(row)
        return row

    def rollback(self, position: int) -> None:
        for seen in self._layers:
            del seen[position:]

    def take(self, other: LayerChain, position: int) -> None:
        """Become what `other`, of the same layers, was at `position`."""
        self._layers = [seen[:position] for seen in other.state()]

    def state(self) -> list[list[bytes]]:
        return self._layers

    def restore(self, layers: list[list[bytes]]) -> None:
        if len(layers) != len(self._layers) or len({len(seen) for seen in layers}) != 1:
            raise ShardlineError("engine_error", "the saved state is of another layer range")
        self._layers = layers
