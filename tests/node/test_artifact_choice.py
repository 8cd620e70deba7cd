"""Which artifact a Node without one takes."""

from __future__ import annotations

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.node.artifact_choice import chosen_offer, chosen_stored
from shardline.wire.artifacts import ArtifactInfo


def offer(name: str, served: list[int], *, offered: bool = True) -> ArtifactInfo:
    return ArtifactInfo(
        content_id=f"mac1-{name}",
        name=name,
        offered=offered,
        n_layers=len(served),
        coverage=[1] * len(served),
        served=served,
    )


def taken(offers: list[ArtifactInfo], asked: str | None = None) -> str | None:
    found = chosen_offer(offers, asked)
    return None if found is None else found.name


def test_the_only_one() -> None:
    assert taken([offer("a", [3, 3])]) == "a"
    assert taken([offer("a", [0, 0], offered=False), offer("b", [1, 1])]) == "b"
    assert taken([]) is None and taken([offer("a", [0], offered=False)]) is None


def test_what_the_cluster_lacks_most() -> None:
    assert taken([offer("a", [0, 1, 1]), offer("b", [0, 0, 1])]) == "b", "more layers that nobody serves"
    assert taken([offer("a", [2, 1]), offer("b", [0, 5])]) == "b", "missing layers come before few copies"
    assert taken([offer("a", [3, 2]), offer("b", [5, 1])]) == "b", "the fewest copies of a layer"
    assert taken([offer("b", [1]), offer("a", [1])]) == "a", "the same for every Node that asks"


def test_what_was_asked_for() -> None:
    offers = [offer("a", [0]), offer("b", [9])]
    assert taken(offers, "b") == taken(offers, "mac1-b") == "b"
    assert taken(offers, "c") is None
    twins = [offer("a", [0]), msgspec.structs.replace(offer("a", [0]), content_id="mac1-x")]
    with pytest.raises(ShardlineError, match="2 artifacts are called 'a'"):
        taken(twins, "a")
    assert taken(twins, "mac1-x") == "a"


def test_from_the_store_only_what_is_clear() -> None:
    both = [("mac1-a", "a"), ("mac1-b", "b")]
    assert chosen_stored(both, None) is None
    assert chosen_stored(both[:1], None) is not None
    named = chosen_stored(both, "b")
    assert named is not None and named.content_id == "mac1-b"
