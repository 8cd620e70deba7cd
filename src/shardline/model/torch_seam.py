"""The ends of a cut model: what goes into its first layer and comes out of its last one, beside plain rows.

Owns the Seam layouts of a Shard and two hooks. A decoder of transformers begins with embedded rows, and makes residual
streams and shared selections of attention itself: behind a cut, the first layer is given those that crossed the Seam.
Which there are, formats/seam.py says. Shown by tests/model/test_torch_streams.py and test_torch_selection.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardline.formats.architectures import LlamaRules, of_model_type
from shardline.formats.layer_kinds import layer_kinds_of_config
from shardline.formats.seam import SELECTION, SeamShape, seam_of_config
from shardline.formats.shape import shape_of_config
from shardline.model.torch_build import Skeleton
from shardline.wire.steps import SeamLayout

SEAM_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TORCH_DTYPES = {"I32": torch.int32, **{name: dtype for dtype, name in SEAM_DTYPES.items()}}
_NOBODY = -1
"""In a selection, behind the last position."""


@dataclass(frozen=True, slots=True)
class ShardInput:
    """One step of one session, with a batch dimension of 1 in front of everything."""

    tokens: torch.Tensor
    """Int64, [1, rows]."""
    rows: tuple[torch.Tensor, ...] = ()
    """In the order of the layout: [1, rows, …]; none on the head."""


def seam_shape(skeleton: Skeleton) -> SeamShape:
    """What crosses Seams of this model: one row of its width, unless the table of architectures says more."""
    row = of_model_type(str(skeleton.config.model_type))
    rules = row.llama or LlamaRules()
    if row.layout == "hidden" and not rules.indexers:
        return SeamShape(int(skeleton.config.hidden_size))
    config = skeleton.config.to_dict()
    shape = shape_of_config(config)
    return seam_of_config(config, shape, layer_kinds_of_config(config, shape, rules))


class ShardEnds:
    """The ends of layers [first, last) of a cut model, with its hooks in place."""

    def __init__(self, skeleton: Skeleton, first: int, last: int) -> None:
        shape = seam_shape(skeleton)
        dtype = SEAM_DTYPES[skeleton.dtype]
        self.layout_in: SeamLayout = shape.layout(first, skeleton.n_layers, dtype)
        self.layout_out: SeamLayout = shape.layout(last, skeleton.n_layers, dtype)
        self.streams = shape.streams
        self._selected = shape.selected
        self._takes_streams = first > 0 and shape.streams > 1
        self._takes_selection = shape.borrows(first)
        self._gives_selection = shape.borrows(last)
        self._given: ShardInput | None = None
        self._last_output: Any = None
        if self._takes_streams:
            skeleton.decoder.set_submodule(skeleton.embedding_name, _NoRows(shape.hidden_size, skeleton.dtype))
        if self._takes_streams or self._takes_selection:
            skeleton.layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        if self._gives_selection:
            skeleton.layers[-1].register_forward_hook(self._leave)

    def arguments(self, given: ShardInput) -> dict[str, torch.Tensor]:
        """What the decoder is called with: it counts rows by it, whatever the first layer is given in the end."""
        self._given = given
        if not given.rows or self._takes_streams:
            return {"input_ids": given.tokens}
        return {"inputs_embeds": given.rows[0]}

    def forget(self) -> None:
        """A step has ended, however it did."""
        self._last_output = self._given = None

    def outputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of `layout_out`, of what the decoder returned."""
        if not self._gives_selection:
            return (rows,)
        selection = self._last_output[1]
        free = self._selected - selection.shape[-1]
        return rows, nn.functional.pad(selection, (0, free), value=_NOBODY)

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._given is None or not self._given.rows:
            return args, kwargs
        if self._takes_streams:
            args = (self._given.rows[0], *args[1:])
        if self._takes_selection:
            kwargs = {**kwargs, "prev_topk_indices": self._selection(kwargs["attention_mask"].shape[-1])}
        return args, kwargs

    def _selection(self, held: int) -> torch.Tensor:
        """As wide as the layer that made it had it: no wider than what the cache holds with the new rows."""
        given = self._given
        if given is None:
            raise RuntimeError("a selection is used outside of a step")
        selection = given.rows[1][..., : min(self._selected, held)]
        if selection.numel() and (int(selection.min()) < 0 or int(selection.max()) >= held):
            raise ValueError(f"a {SELECTION} names positions outside of the {held} that are held")
        return selection

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._last_output = output

    def embedded(self, tokens: torch.Tensor, embedding: nn.Module) -> torch.Tensor:
        """What must enter the first layer of a head: the embedded tokens, once for each stream."""
        rows: torch.Tensor = embedding(tokens)
        return rows if self.streams == 1 else rows.unsqueeze(2).expand(-1, -1, self.streams, -1)

    def random(self, skeleton: Skeleton, rows: int, seed: int) -> ShardInput:
        """Input of the right form, to watch the model with; what it selects are the first positions.

        A head is given embedded rows, in which whatever is done to them in front of the layers shows; where it makes
        streams of them and looks at token ids, it is given those.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, int(skeleton.config.vocab_size), (1, rows), generator=generator)
        if not self.layout_in.tensors:
            plain = torch.randn(1, rows, int(skeleton.config.hidden_size), generator=generator)
            return ShardInput(tokens, (plain.to(skeleton.dtype),) if self.streams == 1 else ())
        made = []
        for tensor in self.layout_in.tensors:
            if tensor.name == SELECTION:
                made.append(torch.arange(self._selected, dtype=torch.int32).expand(1, rows, -1))
            else:
                made.append(torch.randn(1, rows, *tensor.shape, generator=generator).to(skeleton.dtype))
        return ShardInput(tokens, tuple(made))


class _NoRows(nn.Module):
    """Stands for the embedding behind a cut where the decoder is called with token ids: rows that nobody reads."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width = width
        self._dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros((*tokens.shape, self._width), dtype=self._dtype)
