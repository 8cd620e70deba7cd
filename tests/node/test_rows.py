"""Rows that are no numbers are seen, in each type; large finite ones pass."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.node.rows import all_finite
from shardline.wire.steps import LANE_DECODE, Entry, LayoutTensor, SeamLayout, Step

ENTRY = Entry(bytes(16), 0, 0, 1, 1, LANE_DECODE, 0)


def bf16(values: list[float]) -> bytes:
    return (np.array(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize(
    ("dtype", "encode"),
    [
        ("F64", lambda v: np.array(v, dtype=np.float64).tobytes()),
        ("F32", lambda v: np.array(v, dtype=np.float32).tobytes()),
        ("F16", lambda v: np.array(v, dtype=np.float16).tobytes()),
        ("BF16", bf16),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinities(dtype: str, encode: object, bad: float) -> None:
    layout = SeamLayout([LayoutTensor("hidden", dtype, (4,))])
    assert callable(encode)
    assert all_finite(Step(ENTRY, bytes(4), (encode([0.0, -1.5, 6e4, 3e-5]),)), layout)
    assert not all_finite(Step(ENTRY, bytes(4), (encode([0.0, bad, 1.0, 2.0]),)), layout)


def test_the_largest_numbers_are_numbers() -> None:
    layout = SeamLayout([LayoutTensor("hidden", "F32", (2,))])
    top = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max], dtype=np.float32)
    assert all_finite(Step(ENTRY, bytes(4), (top.tobytes(),)), layout)


def test_every_tensor_of_the_layout_is_looked_at_and_integers_pass() -> None:
    layout = SeamLayout([LayoutTensor("ids", "I32", (1,)), LayoutTensor("aux", "F16", (1,))])
    nan = np.array([np.nan], dtype=np.float16).tobytes()
    assert not all_finite(Step(ENTRY, bytes(4), (b"\xff\xff\xff\x7f", nan)), layout)
    assert all_finite(Step(ENTRY, bytes(4), (b"\xff\xff\xff\x7f", bytes(2))), layout)


@pytest.mark.parametrize("floats", [1, 576, 8192, 8193, 40_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_among_many_whether_they_are_few_or_not(floats: int, bad: float) -> None:
    layout = SeamLayout([LayoutTensor("hidden", "F32", (floats,))])
    rows = np.random.default_rng(floats).normal(size=floats).astype(np.float32)
    assert all_finite(Step(ENTRY, bytes(4), (rows.tobytes(),)), layout)
    for at in {0, floats // 2, floats - 1}:
        spoiled = rows.copy()
        spoiled[at] = bad
        assert not all_finite(Step(ENTRY, bytes(4), (spoiled.tobytes(),)), layout)
