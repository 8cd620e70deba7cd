"""The type table against the one of the `gguf` package."""

from __future__ import annotations

import pytest

from shardline.formats.ggml_types import BLOCK_TYPES, REMOVED_TYPES, TYPE_IDS

gguf = pytest.importorskip("gguf")


def test_table_equals_the_package_except_q8_1() -> None:
    theirs = {int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    ours = {number: tuple(block) for number, block in BLOCK_TYPES.items()}
    assert theirs.pop(9) == ("Q8_1", 32, 40)
    assert ours.pop(9) == ("Q8_1", 32, 36)
    assert ours == theirs


def test_no_number_is_both_known_and_removed() -> None:
    assert not BLOCK_TYPES.keys() & REMOVED_TYPES.keys()
    assert len(TYPE_IDS) == len(BLOCK_TYPES)
