"""The vectors of one request as they come: alike, and not more of them than fit into an answer."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.embeddings import VALUES, Embedding
from shardline.gateway.embeddings_request import INPUTS, embeddings_request
from shardline.wire.embedding import WIDTH_LIMIT, Embedded

FOUR = bytes(16)


def embedding(inputs: int = 3, more: bytes = b"") -> Embedding:
    model: Any = None
    request = embeddings_request(b'{"model": "m", "input": "x"' + more + b"}")
    return Embedding(request, model, "key", [[1]] * inputs, None)


def test_vectors_of_one_request_are_alike() -> None:
    taken = embedding()
    taken.take(0, Embedded(pooling="mean", vector=FOUR))
    taken.take(2, Embedded(pooling="mean", vector=FOUR))
    for other in (Embedded(pooling="last", vector=FOUR), Embedded(pooling="mean", vector=FOUR[4:])):
        with pytest.raises(ShardlineError) as refused:
            taken.take(1, other)
        assert refused.value.code == "seam_invalid"
    assert (taken.tokens, taken.pooling, sorted(taken.vectors)) == (2, "mean", [0, 2])


def test_an_answer_has_a_limit_which_the_first_vector_tells() -> None:
    wide = Embedded(pooling="last", vector=bytes(4 * WIDTH_LIMIT))
    most = VALUES // WIDTH_LIMIT
    embedding(most).take(0, wide)
    with pytest.raises(ShardlineError) as refused:
        embedding(most + 1).take(0, wide)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "input")
    embedding(INPUTS, b', "dimensions": 256').take(0, wide)
    embedding(INPUTS).take(0, Embedded(pooling="last", vector=bytes(4 * 16384)))
