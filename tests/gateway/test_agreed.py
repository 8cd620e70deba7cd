"""What a tail must have agreed to before a session begins, and which vectors of it are taken."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.agreed import check_agreed, check_embedded, floats_of
from shardline.wire.embedding import WIDTH_LIMIT
from shardline.wire.messages import Embed, Embedded, Grammar, Opened, Sampling

GRAMMAR = Sampling(grammar=Grammar(kind="regex", text="a", field="regex"))


def opened(**fields: Any) -> Opened:
    return Opened(node="n-1", kv_reserved=10, **fields)


def test_a_tail_that_does_what_is_asked_passes() -> None:
    check_agreed(opened(), Sampling(), None, node="n-1")
    check_agreed(opened(grammar=True), GRAMMAR, None, node="n-1")
    for asked in (None, "mean"):
        check_agreed(opened(pooling="mean"), Sampling(), Embed(pooling=asked), node="n-1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "sampling", "embed", "param"),
    [
        (opened(), GRAMMAR, None, "regex"),
        (opened(), Sampling(), Embed(), None),
        (opened(pooling="last"), Sampling(), Embed(pooling="mean"), "pooling"),
    ],
    ids=["grammar", "embeddings", "another pooling"],
)
def test_one_of_an_older_version_is_not_used(event: Opened, sampling: Sampling, embed: Any, param: str | None) -> None:
    with pytest.raises(ShardlineError) as refused:
        check_agreed(event, sampling, embed, node="n-1")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
    assert "n-1" in refused.value.message


def test_a_vector_is_what_was_agreed_or_is_not_taken() -> None:
    good = struct.pack("<2f", 1.5, -2.0)
    check_embedded(Embedded(pooling="mean", vector=good), opened(pooling="mean"), Embed())
    assert list(floats_of(good)) == [1.5, -2.0]
    for vector, answer, code in (
        (good, opened(pooling="last"), "seam_invalid"),
        (good, opened(), "seam_invalid"),
        (good, None, "seam_invalid"),
        (b"", opened(pooling="mean"), "seam_invalid"),
        (good[:-1], opened(pooling="mean"), "seam_invalid"),
        (bytes(4 * WIDTH_LIMIT + 4), opened(pooling="mean"), "seam_invalid"),
        (struct.pack("<2f", 1.0, float("nan")), opened(pooling="mean"), "numerical_error"),
        (struct.pack("<2f", float("inf"), 0.0), opened(pooling="mean"), "numerical_error"),
    ):
        with pytest.raises(ShardlineError) as refused:
            check_embedded(Embedded(pooling="mean", vector=vector), answer, Embed())
        assert refused.value.code == code
    with pytest.raises(ShardlineError) as refused:  # whatever it agreed to by itself
        check_embedded(Embedded(pooling="mean", vector=good), opened(pooling="mean"), None)
    assert refused.value.code == "seam_invalid"
