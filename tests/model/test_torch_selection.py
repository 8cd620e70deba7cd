"""GLM-5.2 on the PyTorch engine: where the next layer borrows a selection of attention, the selection crosses the Seam.

Contexts are longer than the eight tokens that are selected: up to there a selection is everything, and any would do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardline.errors import ShardlineError
from shardline.wire.steps import LayoutTensor
from tests.support.torch_models import AUDITED_LAYERS, VOCAB, Route, chunked_logits, entry, equal, result, save_audited

pytestmark = pytest.mark.torch

TOKENS = [int(token) for token in np.random.default_rng(2).integers(3, VOCAB, 80)]
CHUNKS = [TOKENS[:5], TOKENS[5:40], TOKENS[40:41], TOKENS[41:], [5], [60]]
ALIGNED = (1, 2, 6)
BORROWING = (3, 4, 5, 7)
SELECTION = LayoutTensor("selection", "I32", (8,))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("glm_moe_dsa")
    return save_audited("glm_moe_dsa", folder), folder


@pytest.fixture(scope="module")
def whole(saved: tuple[Any, Path]) -> list[Any]:
    return Route(saved[1], layers=AUDITED_LAYERS).run(CHUNKS)


def test_one_shard_gives_the_logits_of_the_model(saved: tuple[Any, Path], whole: list[Any]) -> None:
    assert equal(whole, chunked_logits(saved[0], CHUNKS))


@pytest.mark.parametrize("cut", ALIGNED)
def test_in_front_of_layers_that_select_one_row_crosses(saved: tuple[Any, Path], whole: list[Any], cut: int) -> None:
    route = Route(saved[1], (cut,), layers=AUDITED_LAYERS)
    assert route.shards[0].describe().layout_out.tensors == (LayoutTensor("hidden", "F32", (32,)),)
    assert equal(route.run(CHUNKS), whole)


@pytest.mark.parametrize("cut", BORROWING)
def test_in_front_of_layers_that_borrow_the_selection_crosses(
    saved: tuple[Any, Path], whole: list[Any], cut: int
) -> None:
    route = Route(saved[1], (cut,), layers=AUDITED_LAYERS)
    tensors = (LayoutTensor("hidden", "F32", (32,)), SELECTION)
    assert route.shards[0].describe().layout_out.tensors == tensors
    assert route.shards[1].describe().layout_in.tensors == tensors
    assert equal(route.run(CHUNKS), whole)


@pytest.mark.parametrize("cuts", [(2, 6), (3, 5), (4, 7), tuple(range(1, 8))], ids=str)
def test_several_cuts_change_no_bit(saved: tuple[Any, Path], whole: list[Any], cuts: tuple[int, ...]) -> None:
    """A Shard without a layer that selects hands on what it was given."""
    assert equal(Route(saved[1], cuts, layers=AUDITED_LAYERS).run(CHUNKS), whole)


def crossed(route: Route, change: Any) -> list[Any]:
    head, tail = route.shards
    head.open(0)
    tail.open(0)
    position, logits = 0, []
    try:
        for chunk in CHUNKS:
            rows, selection = result(head.run([entry(chunk, position)])).hidden
            given = np.frombuffer(selection, dtype="<i4").reshape(len(chunk), 8)
            position += len(chunk)
            sent = np.ascontiguousarray(change(given, position), dtype="<i4").tobytes()
            logits.append(result(tail.run([entry(chunk, position - len(chunk), (bytes(rows), sent))])).logits)
    finally:
        head.close(0)
        tail.close(0)
    return logits


def test_what_crosses_are_positions(saved: tuple[Any, Path]) -> None:
    seen = []

    def look(given: Any, held: int) -> Any:
        seen.append((given.min(axis=1), given.max(axis=1), held))
        return given

    crossed(Route(saved[1], (4,), layers=AUDITED_LAYERS), look)
    low, high, _ = seen[0]
    assert set(low) == {-1}, "five tokens fill no selection of eight"
    assert set(high) == {4}
    assert all(low.min() >= 0 and high.max() < held for low, high, held in seen[1:])


def test_another_selection_gives_another_answer(saved: tuple[Any, Path], whole: list[Any]) -> None:
    """The first tokens instead of the best ones: what a Shard would compute that made up its own."""
    route = Route(saved[1], (4,), layers=AUDITED_LAYERS)
    first = crossed(route, lambda given, held: np.broadcast_to(np.arange(8, dtype="<i4"), given.shape))
    assert np.array_equal(first[0], whole[0]), "up to eight tokens every selection is all of them"
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(first[1:], whole[1:], strict=True))


@pytest.mark.parametrize("position", [-1, 40, 1 << 30])
def test_positions_that_are_not_there_end_the_entry(saved: tuple[Any, Path], position: int) -> None:
    def spoil(given: Any, held: int) -> Any:
        spoiled = given.copy()
        spoiled[-1, 0] = position
        return spoiled

    with pytest.raises(ShardlineError, match="outside of the 5 that are held") as caught:
        crossed(Route(saved[1], (4,), layers=AUDITED_LAYERS), spoil)
    assert caught.value.code == "engine_error"


def test_it_goes_back_exactly(saved: tuple[Any, Path], whole: list[Any]) -> None:
    for cuts in ((2,), (4,)):
        route = Route(saved[1], cuts, layers=AUDITED_LAYERS)
        route.open()
        route.feed(TOKENS[:5])
        route.feed([*TOKENS[5:30], 9, 9, 9])
        for shard in route.shards:
            assert shard.describe().rollback
            shard.rollback(0, 5)
        route.position = 5
        answers = [route.feed(chunk) for chunk in CHUNKS[1:]]
        assert equal(answers, whole[1:])
        route.close()
