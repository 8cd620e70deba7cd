"""What crosses a Seam, as a model's files say it: named tensors, in the order in which they stand in a step document.

Owns the one place that turns measures of a model (width, residual streams, shared selections of attention) into a Seam
layout: the planner and the PyTorch engine both ask it, so that what is planned is what is sent. Token ids cross every
Seam beside it. Pure. Shown by tests/formats/test_seam.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.formats.gguf import GGUFHeader
from shardline.formats.layer_kinds import ArchitectureKeys, Flags, LayerKinds
from shardline.formats.shape import WIDTH_LIMIT, ConfigFields, ModelShape
from shardline.wire.steps import TOKENS_ONLY, LayoutTensor, SeamLayout

HIDDEN = "hidden"
STREAMS = "streams"
SELECTION = "selection"
TOKEN_ID_BYTES = 4
STREAMS_LIMIT = 64


@dataclass(frozen=True, slots=True)
class SeamShape:
    """What one row of hidden states is, and what must go beside it at some positions."""

    hidden_size: int
    streams: int = 1
    """Residual streams that every layer reads and writes; they are one only behind the last layer."""
    selected: int = 0
    """How many positions sparse attention selects for a row; 0 where no layer uses the selection of another one."""
    indexed: Flags | None = None
    """Layers that select for themselves; the others use the selection of the last of these before them."""

    def borrows(self, position: int) -> bool:
        """Whether the layer behind `position` needs the selection of a layer in front of it."""
        return self.indexed is not None and 0 < position < len(self.indexed) and not self.indexed[position]

    def layout(self, position: int, n_layers: int, dtype: str) -> SeamLayout:
        """The Seam between layers `position - 1` and `position`, rows in the safetensors dtype `dtype`.

        Selections are I32, the positions of the tokens in the session, filled up with -1.
        """
        if not 0 < position < n_layers:
            return TOKENS_ONLY
        plain = LayoutTensor(HIDDEN, dtype, (self.hidden_size,))
        rows = LayoutTensor(STREAMS, dtype, (self.streams, self.hidden_size)) if self.streams > 1 else plain
        if self.borrows(position):
            return SeamLayout([rows, LayoutTensor(SELECTION, "I32", (self.selected,))])
        return SeamLayout([rows])

    def row_bytes(self, position: int, n_layers: int, dtype: str) -> int:
        """Bytes that cross for one token, its id among them."""
        return self.layout(position, n_layers, dtype).row_bytes + TOKEN_ID_BYTES


def seam_of_gguf(header: GGUFHeader, shape: ModelShape, kinds: LayerKinds) -> SeamShape:
    """What crosses Seams of a GGUF model."""
    keys = ArchitectureKeys(header, shape)
    streams = keys.integer("hyper_connection.count", 1, STREAMS_LIMIT)
    return _seam(shape, streams, keys.integer("attention.indexer.top_k", 0), kinds)


def seam_of_config(config: Mapping[str, Any], shape: ModelShape, kinds: LayerKinds) -> SeamShape:
    """What crosses Seams of a model with this config.json."""
    fields = ConfigFields.of(config)
    streams = fields.get("hc_mult", STREAMS_LIMIT) or 1
    return _seam(shape, streams, fields.get("index_topk", WIDTH_LIMIT) or 0, kinds)


def _seam(shape: ModelShape, streams: int, selected: int, kinds: LayerKinds) -> SeamShape:
    shares = kinds.indexed is not None and not all(kinds.indexed) and selected > 0
    return SeamShape(shape.hidden_size, max(1, streams), selected if shares else 0, kinds.indexed if shares else None)
