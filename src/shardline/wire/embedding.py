"""What a session is opened with that wants a vector of its prompt instead of a text, and the event that brings it.

Owns these values; how rows become a vector is model/pooling.py's, what a client gets of it is the Gateway's. Pure.
Shown by tests/wire/test_embedding.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Pooling = Literal["mean", "last"]
"""Of the rows behind the final norm: the mean of all of the prompt, or the last one."""

WIDTH_LIMIT = 1 << 17
"""Most numbers of a vector: as base64 it still fits into one line of a session stream."""


class Embed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prompt is computed, nothing is generated. Such a session begins with no kept cache, and leaves none."""

    pooling: Pooling | None = None
    """Null: as the model's own files say; where they say nothing, `last`."""


class Embedded(msgspec.Struct, frozen=True, kw_only=True, tag="embedded", tag_field="event"):
    """From the tail, in place of tokens and `finished`: it has ended by itself."""

    pooling: Pooling
    vector: bytes
    """float32, little-endian, not normalised; base64 in JSON."""
