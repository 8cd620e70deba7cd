"""DeepSeek-V4 on the PyTorch engine: four residual streams and token ids cross a Seam, and nothing less will do.

Contexts are longer than the window, than a block of 128 tokens, and than the four rows of which sparse attention
chooses: shorter ones would agree by accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardline.model.torch_seam import ShardEnds
from shardline.wire.steps import LayoutTensor
from tests.support.torch_models import AUDITED_LAYERS, VOCAB, Route, chunked_logits, entry, equal, result, save_audited

pytestmark = pytest.mark.torch

TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, VOCAB, 300)]
CHUNKS = [TOKENS[:140], TOKENS[140:200], TOKENS[200:201], TOKENS[201:202], TOKENS[202:], [5], [60]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("deepseek_v4")
    return save_audited("deepseek_v4", folder), folder


@pytest.fixture(scope="module")
def whole(saved: tuple[Any, Path]) -> list[Any]:
    return Route(saved[1], layers=AUDITED_LAYERS).run(CHUNKS)


def test_one_shard_gives_the_logits_of_the_model(saved: tuple[Any, Path], whole: list[Any]) -> None:
    assert equal(whole, chunked_logits(saved[0], CHUNKS))


@pytest.mark.parametrize("cuts", [*((at,) for at in range(1, AUDITED_LAYERS)), (2, 5), tuple(range(1, 8))], ids=str)
def test_a_cut_changes_no_bit(saved: tuple[Any, Path], whole: list[Any], cuts: tuple[int, ...]) -> None:
    route = Route(saved[1], cuts, layers=AUDITED_LAYERS)
    assert equal(route.run(CHUNKS), whole)
    for shard in route.shards[:-1]:
        assert shard.describe().layout_out.tensors == (LayoutTensor("streams", "F32", (4, 32)),)
        assert not shard.describe().rollback


class Spoiled:
    """A route of two Shards, with something done to what crosses between them."""

    def __init__(self, folder: Path, cut: int, dtype: str | None = None) -> None:
        self.route = Route(folder, (cut,), layers=AUDITED_LAYERS, dtype=dtype)

    def run(self, rows: Any = lambda rows: rows, tokens: Any = lambda tokens: tokens) -> list[Any]:
        head, tail = self.route.shards
        head.open(0)
        tail.open(0)
        position, logits = 0, []
        for chunk in CHUNKS:
            (streams,) = result(head.run([entry(chunk, position)])).hidden
            given = np.frombuffer(streams, dtype="<f4").reshape(len(chunk), 4, 32)
            sent = np.ascontiguousarray(rows(given), dtype="<f4").tobytes()
            logits.append(result(tail.run([entry(tokens(chunk), position, (sent,))])).logits)
            position += len(chunk)
        head.close(0)
        tail.close(0)
        return logits


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_the_mean_of_the_streams_is_not_the_streams(saved: tuple[Any, Path], whole: list[Any], cut: int) -> None:
    route = Spoiled(saved[1], cut)
    assert equal(route.run(), whole)
    mean = route.run(lambda rows: np.broadcast_to(rows.mean(axis=1, keepdims=True), rows.shape))
    assert all(np.abs(a - b).max() > 1e-2 for a, b in zip(mean, whole, strict=True))


def test_streams_have_an_order(saved: tuple[Any, Path], whole: list[Any]) -> None:
    """A layout with the same bytes, read otherwise, is another one: a check of the width would not find it."""
    turned = Spoiled(saved[1], 4).run(lambda rows: rows[:, ::-1])
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(turned, whole, strict=True))


@pytest.mark.parametrize(("cut", "needed"), [(1, True), (2, True), (3, False), (5, False)])
def test_token_ids_are_needed_by_layers_that_route_by_them(
    saved: tuple[Any, Path], whole: list[Any], cut: int, needed: bool
) -> None:
    other = Spoiled(saved[1], cut).run(tokens=lambda tokens: [(token + 1) % VOCAB for token in tokens])
    assert equal(other, whole) is not needed


def test_a_context_goes_beyond_what_is_chosen(saved: tuple[Any, Path], whole: list[Any], tmp_path: Path) -> None:
    """With room for all rows of blocks the answer is another one: so the tests reach the sparse part."""
    save_audited("deepseek_v4", tmp_path, index_topk=512)
    other = Route(tmp_path, layers=AUDITED_LAYERS).run(CHUNKS)
    assert not np.array_equal(other[0], whole[0])
    short = [TOKENS[:12]]
    assert equal(Route(tmp_path, layers=AUDITED_LAYERS).run(short), Route(saved[1], layers=AUDITED_LAYERS).run(short))


def test_half_precision_streams_are_those_of_the_engine(saved: tuple[Any, Path]) -> None:
    whole = Route(saved[1], layers=AUDITED_LAYERS, dtype="bfloat16").run(CHUNKS)
    route = Route(saved[1], (3,), layers=AUDITED_LAYERS, dtype="bfloat16")
    assert equal(route.run(CHUNKS), whole)
    assert route.shards[0].describe().layout_out.tensors[0].dtype == "BF16"


def test_each_shard_holds_its_own_weights_only(saved: tuple[Any, Path]) -> None:
    sizes = sum(tensor.nbytes for tensor in saved[0].state_dict().values())
    parts = [s.describe().weight_bytes for s in Route(saved[1], range(1, 8), layers=AUDITED_LAYERS).shards]
    assert sum(parts) == sizes
    head = next(name for name, _ in saved[0].named_parameters() if "hc_head" in name)
    assert head, "what collapses the streams is of the tail"


def test_two_sessions_do_not_mix(saved: tuple[Any, Path], whole: list[Any]) -> None:
    route = Route(saved[1], (3,), layers=AUDITED_LAYERS)
    for shard in route.shards:
        shard.open(0)
        shard.open(1)
    position = 0
    for chunk, expected in zip(CHUNKS, whole, strict=True):
        answers: dict[int, Any] = {}
        for slot, tokens in ((0, chunk), (1, [(token + 7) % VOCAB for token in chunk])):
            hidden = None
            for shard in route.shards:
                output = result(shard.run([entry(tokens, position, hidden, slot=slot)]))
                hidden = output.hidden
            answers[slot] = np.array(output.logits)
        assert np.array_equal(answers[0], expected)
        assert not np.array_equal(answers[1], expected)
        position += len(chunk)


def test_hooks_forget_what_they_were_given(saved: tuple[Any, Path]) -> None:
    route = Route(saved[1], (3,), layers=AUDITED_LAYERS)
    route.run(CHUNKS[:2])
    ends: ShardEnds = route.shards[1]._shard.ends
    assert ends._given is None
    assert ends._last_output is None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
