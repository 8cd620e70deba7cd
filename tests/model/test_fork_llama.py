"""Forking a sequence of llama.cpp: shared cells, exact logits, no trace left behind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry
from tests.support.llama_route import Route, entry

pytestmark = [pytest.mark.llama, pytest.mark.smollm2, pytest.mark.timeout(180)]
RNG = np.random.default_rng(12)
PREFIX, REST, OTHER = ([int(t) for t in RNG.integers(3, 49152, n)] for n in (64, 23, 40))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), marks=pytest.mark.long, id="1"),
        pytest.param((15,), id="2"),
        pytest.param((10, 20), marks=pytest.mark.long, id="3"),
    ],
)
def route(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    """512 cells: what is forked and not shared does not fit."""
    made = Route(tmp_path_factory.mktemp("shards"), request.param, kv_tokens=512, sessions=4)
    yield made
    made.close()


def run(route: Route, slot: int, position: int, tokens: list[int]) -> np.ndarray:
    given: list[BackendEntry] = [entry(tokens, position, slot=slot)]
    (logits,) = route.run(given)
    assert logits is not None
    return logits


def drop(route: Route, *slots: int) -> None:
    for shard in route.shards:
        for slot in slots:
            shard.close(slot)


def test_a_fork_goes_on_as_if_it_had_computed_the_prefix_itself(route: Route) -> None:
    route.open(0)
    run(route, 0, 0, PREFIX)
    wanted = [run(route, 0, 64, REST)] + [run(route, 0, 87 + i, [REST[i]]) for i in range(4)]
    for shard in route.shards:
        shard.fork(0, 1, 64)
        assert (shard.kv_tokens(0), shard.kv_tokens(1)) == (91, 64)
    found = [run(route, 1, 64, REST)] + [run(route, 1, 87 + i, [REST[i]]) for i in range(4)]
    for a, b in zip(wanted, found, strict=True):
        # The same rows lie in other cells, and kernels add in the order of cells.
        assert int(a.argmax()) == int(b.argmax())
        assert float(np.abs(a - b).max()) < 1e-3
    drop(route, 0, 1)


def test_the_source_is_as_it_was_whatever_the_fork_does(route: Route) -> None:
    route.open(0)
    run(route, 0, 0, PREFIX)
    for shard in route.shards:
        shard.fork(0, 1, 64)
    run(route, 1, 64, OTHER)
    for shard in route.shards:
        shard.rollback(1, 32)
    run(route, 1, 32, OTHER)
    drop(route, 1)
    after = run(route, 0, 64, REST)
    drop(route, 0)
    route.open(0)
    run(route, 0, 0, PREFIX)
    assert np.array_equal(after, run(route, 0, 64, REST))
    drop(route, 0)


def test_a_fork_outlives_its_source_and_cells_are_shared(route: Route) -> None:
    """400 tokens twice would be more than the 512 cells; as one they leave room for 112 more."""
    long = [int(t) for t in RNG.integers(3, 49152, 400)]
    route.open(0)
    run(route, 0, 0, long)
    for shard in route.shards:
        shard.fork(0, 1, 384)
    run(route, 1, 384, OTHER)
    drop(route, 0)
    run(route, 1, 424, REST)
    assert [shard.kv_tokens(1) for shard in route.shards] == [447] * len(route.shards)
    drop(route, 1)
    route.open(0)
    run(route, 0, 0, long)  # no cell was left behind
    drop(route, 0)


def test_what_cannot_be_forked_is_refused_and_opens_nothing(route: Route) -> None:
    route.open(0)
    run(route, 0, 0, PREFIX)
    for shard in route.shards:
        for source, tokens, code in ((0, 65, "seam_gap"), (0, 0, "seam_gap"), (7, 1, "engine_error")):
            with pytest.raises(ShardlineError) as caught:
                shard.fork(source, 1, tokens)
            assert caught.value.code == code
        shard.open(1)  # it is free
        with pytest.raises(ShardlineError):
            shard.fork(0, 1, 32)
        shard.close(1)
        for slot in (1, 2, 3):
            shard.fork(0, slot, 32)
        with pytest.raises(ShardlineError) as caught:
            shard.fork(0, 4, 32)
        assert caught.value.code == "capacity"
    drop(route, 0, 1, 2, 3)
