"""What a tail must have agreed to, and what it may then send: of sessions that want more than plain text.

Owns these checks of a Node's word, nothing of the session around them. A tail of an older version reads over what it
does not know of, and would answer another question. Pure. Shown by tests/gateway/test_agreed.py.
"""

from __future__ import annotations

import math
from array import array

from shardline.errors import ShardlineError
from shardline.wire.embedding import WIDTH_LIMIT
from shardline.wire.messages import Embed, Embedded, Opened, Sampling


def check_agreed(event: Opened, sampling: Sampling, embed: Embed | None, *, node: str) -> None:
    """`event`: of the tail. Raises `unsupported_parameter` where it does not do what it was asked for."""
    grammar = sampling.grammar
    if grammar is not None and not event.grammar:
        what = f"'{grammar.field}': Node {node} does not know of grammars: it runs an older version"
        raise ShardlineError("unsupported_parameter", what, param=grammar.field)
    if embed is None:
        return
    if event.pooling is None:
        raise ShardlineError(
            "unsupported_parameter", f"Node {node} does not know of embeddings: it runs an older version"
        )
    if embed.pooling not in (None, event.pooling):
        what = f"'pooling': Node {node} pools by {event.pooling}, not {embed.pooling}"
        raise ShardlineError("unsupported_parameter", what, param="pooling")


def check_embedded(event: Embedded, opened: Opened | None, embed: Embed | None) -> None:
    """`seam_invalid` for a vector that was not asked for, or is pooled in another way than agreed; `numerical_error`
    for values that are not finite."""
    if embed is None:
        raise ShardlineError("seam_invalid", "a vector, of a session that wants a text")
    if opened is None or event.pooling != opened.pooling:
        raise ShardlineError("seam_invalid", f"a vector pooled by {event.pooling}, which was not agreed")
    if not 0 < len(event.vector) <= 4 * WIDTH_LIMIT or len(event.vector) % 4:
        raise ShardlineError("seam_invalid", f"a vector of {len(event.vector)} bytes")
    if not all(map(math.isfinite, floats_of(event.vector))):
        raise ShardlineError("numerical_error", "a vector with values that are not finite")


def floats_of(vector: bytes) -> array[float]:
    """The numbers of a vector as it crosses: float32, little-endian."""
    values = array("f", vector)
    if array("H", [1]).tobytes() == b"\0\1":
        values.byteswap()
    return values
