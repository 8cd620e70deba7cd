"""Are received rows numbers? One cheap reduction over the exponent bits, for each float type that can cross a Seam.

A value is infinite or NaN exactly when all its exponent bits are set (IEEE 754, bfloat16 alike), so integers decide
and no sum can overflow by itself. The few float32 of a decode step are summed up first: squares are not negative, so
a sum that is finite has only finite terms, and that takes one call where integers take three. Shown by
tests/node/test_rows.py.
"""

from __future__ import annotations

import math

import numpy as np

from shardline.wire.steps import SeamLayout, Step

_EXPONENT: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "F64": (np.uint64, 0x7FF0 << 48),
    "F32": (np.uint32, 0x7F80 << 16),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""Without the sign, all that is not finite is at least this, and all that is finite is below."""
_FEW_BYTES = 4 * 8192
"""BLAS shares larger sums out among threads, which nobody wants here."""


def all_finite(step: Step, layout: SeamLayout) -> bool:
    """Whether every float of `step.hidden` is finite; integer tensors always are."""
    for buffer, tensor in zip(step.hidden, layout.tensors, strict=True):
        if tensor.dtype == "F32" and memoryview(buffer).nbytes <= _FEW_BYTES:
            values = np.frombuffer(buffer, dtype=np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                if math.isfinite(values.dot(values)):
                    continue
        spec = _EXPONENT.get(tensor.dtype)
        if spec is None:
            continue
        kind, mask = spec
        bits = np.frombuffer(buffer, dtype=kind)
        # The shift drops the sign.
        if int((bits << kind(1)).max(initial=0)) >= mask << 1:
            return False
    return True
