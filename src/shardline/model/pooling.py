"""Vectors of prompts: what a model's files say of them, and the rows behind the final norm pooled chunk by chunk.

Owns which pooling counts, the reasons why there is none, and the running sum. Knows no engine: an engine gives the
rows that are asked for (`BackendEntry.embed_rows`). Normalising is the Gateway's. Shown by tests/model/test_pooling.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from shardline.errors import ShardlineError
from shardline.formats.gguf import GGUFHeader
from shardline.wire.embedding import WIDTH_LIMIT, Pooling

_POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
_DEFAULT: Pooling = "last"
"""Of a model that names none: behind causal attention only the last row has seen the whole text."""
POOLING_KEY = "pooling_type"
"""Below the architecture, in GGUF files. It says nothing of the layers."""
_WHOLE = "each of its rows sees the whole text, which is computed in chunks here"
_GGUF_POOLINGS = {-1: None, 0: None, 1: "mean", 2: "cls", 3: "last", 4: "rank"}


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Of a tail: the vectors that it can make of prompts."""

    width: int
    own: str | None = None
    """Pooling that the model's files name, which may be one that is not done here; None: they name none."""
    refusal: str | None = None
    """Why there are none of this model."""

    def pooling(self, asked: Pooling | None) -> Pooling:
        """How to pool. Raises `architecture_unsupported` where it cannot be done, `unsupported_parameter` where the
        model's own way cannot, and no other was asked for."""
        if self.refusal is not None:
            raise ShardlineError("architecture_unsupported", f"no embeddings of this model: {self.refusal}")
        if asked is not None:
            return asked
        own = _DEFAULT if self.own is None else self.own
        for pooling in _POOLINGS:
            if pooling == own:
                return pooling
        raise ShardlineError(
            "unsupported_parameter",
            f"'pooling': the model's own is {own}, which is not done here: name {' or '.join(_POOLINGS)}",
            param="pooling",
            advice=f"Send 'pooling' with one of these: {', '.join(_POOLINGS)}.",
        )


def pooling_of(embeddings: Embeddings | None, asked: Pooling | None) -> Pooling:
    """What `Embeddings.pooling` says; of an engine that has no vectors, `architecture_unsupported`."""
    return (embeddings or Embeddings(0, refusal="its engine makes none")).pooling(asked)


def embeddings_of_gguf(header: GGUFHeader, width: int, out_width: int) -> Embeddings:
    """`out_width`: of the vectors that the model's own graph would give."""
    architecture = header.text("general.architecture", "")
    number = header.integer(f"{architecture}.{POOLING_KEY}", 0)
    own = _GGUF_POOLINGS.get(number, f"type {number}")
    if not header.boolean(f"{architecture}.attention.causal", True):
        return Embeddings(width, own, _WHOLE)
    if out_width != width or any(name.startswith("dense_") for name in header.tensors):
        return Embeddings(width, own, "its vectors pass further layers behind the pooling")
    return _within_limit(Embeddings(width, own))


def embeddings_of_config(config: Any, width: int) -> Embeddings:
    """Of a safetensors folder, by its config.json, as transformers has read it. What `sentence-transformers` leaves
    beside a model is no part of a Model Artifact: two Nodes could differ in it, so it is not read."""
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        return Embeddings(width, None, _WHOLE)
    return _within_limit(Embeddings(width))


def _within_limit(embeddings: Embeddings) -> Embeddings:
    if embeddings.width <= WIDTH_LIMIT:
        return embeddings
    return Embeddings(embeddings.width, embeddings.own, f"its rows have {embeddings.width} values, too many")


class Pool:
    """The rows of one prompt on their way into one vector."""

    def __init__(self, pooling: Pooling, width: int, prompt_tokens: int) -> None:
        self.pooling = pooling
        self._width = width
        self._prompt_tokens = prompt_tokens
        self._seen = 0
        self._sum: npt.NDArray[np.float64] = np.zeros(width, np.float64)

    def rows_wanted(self, rows: int) -> int:
        """Of the next `rows` of the prompt, how many at their end must be given to `add`."""
        if self.pooling == "mean":
            return rows
        return 1 if self._seen + rows == self._prompt_tokens else 0

    def passed(self, rows: int) -> None:
        """So many rows were computed. `seam_invalid` where the prompt does not have them."""
        self._seen += rows
        if self._seen > self._prompt_tokens:
            raise ShardlineError("seam_invalid", f"rows behind the end of the prompt of {self._prompt_tokens}")

    def add(self, given: Any) -> None:
        """float32 rows, [n, width]; `engine_error` for others."""
        rows = np.asarray(given)
        if rows.ndim != 2 or rows.shape[1] != self._width or rows.dtype != np.float32:
            raise ShardlineError("engine_error", f"{rows.dtype} {rows.shape} to pool, expected rows of {self._width}")
        self._sum += rows.sum(axis=0, dtype=np.float64)

    def vector(self) -> bytes:
        """float32 little-endian, [width]; `numerical_error` where a value is not finite."""
        count = self._seen if self.pooling == "mean" else 1
        with np.errstate(over="ignore", invalid="ignore"):
            vector = (self._sum / count).astype("<f4")
        if not np.isfinite(vector).all():
            raise ShardlineError("numerical_error", "a vector with values that are not finite")
        return vector.tobytes()
