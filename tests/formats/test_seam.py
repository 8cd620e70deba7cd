"""Seam layouts of models whose files say that more than one row crosses, or something beside it."""

from __future__ import annotations

import json
from pathlib import Path

from shardline.formats.outline import outline_of_config
from shardline.formats.seam import SeamShape
from shardline.wire.steps import TOKENS_ONLY, LayoutTensor

MODELS = Path(__file__).parents[2] / "docs" / "audits" / "models"


def seam_of(name: str) -> SeamShape:
    seam = outline_of_config(json.loads((MODELS / f"{name}.json").read_text()), "torch").seam
    assert seam is not None
    return seam


def test_four_streams() -> None:
    seam = seam_of("deepseek-v4-flash")
    assert seam.layout(20, 43, "F16").tensors == (LayoutTensor("streams", "F16", (4, 4096)),)
    assert [seam.row_bytes(20, 43, dtype) - 4 for dtype in ("BF16", "F16", "F32")] == [32_768, 32_768, 65_536]


def test_a_selection_crosses_where_the_next_layer_borrows_it() -> None:
    seam = seam_of("glm-5.2")
    plain, more = seam.layout(6, 78, "BF16"), seam.layout(7, 78, "BF16")
    assert plain.tensors == (LayoutTensor("hidden", "BF16", (6144,)),)
    assert more.tensors == (*plain.tensors, LayoutTensor("selection", "I32", (2048,)))
    assert (plain.row_bytes, more.row_bytes) == (12_288, 12_288 + 8_192)
    plain_at = [p for p in range(1, 78) if seam.layout(p, 78, "BF16") == plain]
    assert plain_at == [1, 2, *range(6, 78, 4)]


def test_bytes_of_a_row_and_its_token_id() -> None:
    assert SeamShape(576).row_bytes(1, 2, "F32") == 2304 + 4
    assert SeamShape(7168, streams=4).row_bytes(1, 2, "BF16") == 4 * 7168 * 2 + 4


def test_one_row() -> None:
    for name, width in (("ornith-9b", 4096), ("ornith-35b-a3b", 2048), ("ornith-397b-a17b", 4096)):
        assert seam_of(name).layout(4, 32, "BF16").row_bytes == 2 * width
    assert seam_of("ornith-9b").layout(0, 32, "F32") == TOKENS_ONLY
    assert seam_of("ornith-9b").layout(32, 32, "F32") == TOKENS_ONLY
