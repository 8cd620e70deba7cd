"""`POST /v1/embeddings`: bytes in, checked values out, and vectors into the shape that was asked for.

Owns the fields, the normal form of inputs, and what becomes of a pooled vector: cut to `dimensions`, normalised,
written as numbers or base64. It computes no vector and knows no model. Pure. The list of fields is docs/api.md. Shown
by tests/gateway/test_embeddings_request.py.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import msgspec

from shardline.gateway.agreed import floats_of
from shardline.gateway.json_body import decode_body, refuse
from shardline.gateway.request_fields import INT64, NO_EFFECT, check_ranges, texts_or_ids, within
from shardline.wire.embedding import Pooling

Input = str | list[int]
INPUTS = 2048
"""Most inputs of a request; OpenAI's limit."""
_INT16 = 32760.0
"""What llama-server scales the largest value to."""


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """As OpenAI has it, `pooling` of ours and `embd_normalize` of llama-server. Null is as if absent."""

    model: str
    input: Annotated[str | list[str | int | list[int]], texts_or_ids(INPUTS, least=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, within(1, INT64 - 1)] = None
    pooling: Pooling | None = None
    embd_normalize: Literal[-1, 0, 1, 2] | None = None
    user: Annotated[str | None, NO_EFFECT] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsRequest:
    """Checked, but for what depends on the model."""

    model: str
    inputs: list[Input]
    base64: bool
    dimensions: int | None
    pooling: Pooling | None
    norm: int
    """As llama-server counts them: 2 Euclid, 1 the sum of magnitudes, 0 the largest one as int16, -1 none."""


def embeddings_request(body: bytes) -> EmbeddingsRequest:
    """Raises what docs/api.md says."""
    sent = decode_body(body, EmbeddingsBody)
    check_ranges(sent)
    return EmbeddingsRequest(
        model=sent.model,
        inputs=_inputs(sent.input),
        base64=sent.encoding_format == "base64",
        dimensions=sent.dimensions,
        pooling=sent.pooling,
        norm=2 if sent.embd_normalize is None else sent.embd_normalize,
    )


def _inputs(sent: str | list[str | int | list[int]]) -> list[Input]:
    if isinstance(sent, str):
        sent = [sent]
    kinds = {type(item) for item in sent}
    if kinds == {int}:
        return [cast(list[int], sent)]
    if len(kinds) > 1:
        refuse("input", "'input' must be a string, token ids, or a list of either, not a mixture")
    if not sent:
        refuse("input", "'input' must not be an empty list")
    if len(sent) > INPUTS:
        refuse("input", f"'input' has {len(sent)} inputs, at most {INPUTS} are taken")
    inputs = cast(list[Input], sent)
    for index, item in enumerate(inputs):
        if not item:
            refuse("input", f"'input' must not be empty{_at(index, inputs)}")
    return inputs


def check_ids(inputs: list[Input], vocab_size: int) -> None:
    """Refuse token ids that the model does not have."""
    for index, item in enumerate(inputs):
        if isinstance(item, list) and (min(item) < 0 or max(item) >= vocab_size):
            refuse("input", f"'input': token ids are 0 to {vocab_size - 1}{_at(index, inputs)}")


def _at(index: int, inputs: list[Input]) -> str:
    return f" (input {index})" if len(inputs) > 1 else ""


def shaped(vector: bytes, request: EmbeddingsRequest) -> array[float]:
    """A pooled vector (float32, little-endian) as it was asked for. `dimensions` keeps the first values, which are then
    normalised. Raises `invalid_value` where there are not so many."""
    values = floats_of(vector)
    wanted = request.dimensions
    if wanted is not None and wanted > len(values):
        refuse("dimensions", f"'dimensions': the vectors of the model have {len(values)}, not {wanted}")
    values = values[:wanted]
    length = _length(values, request.norm)
    return array("f", [value / length for value in values]) if length not in (0.0, 1.0) else values


def _length(values: array[float], norm: int) -> float:
    """What values are divided by; a vector of zeros stays one."""
    if norm < 0:
        return 1.0
    if norm == 0:
        return max(map(abs, values)) / _INT16
    return math.fsum(map(abs, values)) if norm == 1 else math.hypot(*values)


def written(values: array[float], *, base64: bool) -> msgspec.Raw:
    """As JSON: base64 of little-endian float32, or numbers that are these float32 exactly."""
    if not base64:
        return msgspec.Raw(("[" + ",".join([f"{value:.9g}" for value in values]) + "]").encode())
    if array("H", [1]).tobytes() == b"\0\1":
        values.byteswap()
    return msgspec.Raw(b'"' + b64encode(values.tobytes()) + b'"')
