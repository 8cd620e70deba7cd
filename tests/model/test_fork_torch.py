"""Forking a slot of the PyTorch engine: a copy of the first tokens, exact, with a life of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from shardline.errors import ShardlineError
from tests.support import torch_models
from tests.support.torch_models import Route, entry, result

pytestmark = pytest.mark.torch
PROMPT = [3, 7, 11, 19, 23, 29, 31, 37, 41, 43]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(kind)
    torch_models.save(torch_models.CONFIGS[kind](), path)
    return path


def feed(route: Route, slot: int, position: int, tokens: list[int]) -> np.ndarray:
    hidden = None
    output = None
    for shard in route.shards:
        output = result(shard.run([entry(tokens, position, hidden, slot=slot)]))
        hidden = output.hidden
    assert output is not None
    return np.array(output.logits)


@pytest.mark.parametrize("cuts", [(), (2,)], ids=["1", "2"])
def test_a_fork_computes_what_its_source_would(folder: Path, kind: str, cuts: tuple[int, ...]) -> None:
    route = Route(folder, cuts)
    route.open()
    prefix = 4  # inside of every window
    feed(route, 0, 0, PROMPT[:prefix])
    for shard in route.shards:
        shard.fork(0, 1, prefix)
        shard.fork(0, 2, prefix - 1)
        assert [shard.kv_tokens(slot) for slot in (0, 1, 2)] == [prefix, prefix, prefix - 1]
    other = feed(route, 1, prefix, [50])
    wanted = feed(route, 0, prefix, PROMPT[prefix : prefix + 2])
    for shard in route.shards:
        shard.fork(0, 3, prefix)
    assert np.array_equal(feed(route, 3, prefix, PROMPT[prefix : prefix + 2]), wanted)
    assert not np.array_equal(other, wanted)
    for shard in route.shards:
        shard.close(0)
    feed(route, 3, prefix + 2, [51])  # outlives its source


def test_what_is_not_there_is_refused_and_opens_nothing(folder: Path, kind: str) -> None:
    (shard,) = Route(folder).shards
    shard.open(0)
    result(shard.run([entry(PROMPT, 0)]))
    for source, target, tokens in ((0, 1, 11), (5, 1, 2), (0, 0, 2)):
        with pytest.raises(ShardlineError):
            shard.fork(source, target, tokens)
    if not shard.describe().rollback:
        with pytest.raises(ShardlineError) as caught:
            shard.fork(0, 1, 4)
        assert caught.value.code == "rollback_unsupported"
    shard.open(1)


def test_a_copy_of_all_of_it_is_exact_behind_a_window_too(folder: Path) -> None:
    route = Route(folder, (2,))
    route.open()
    feed(route, 0, 0, PROMPT)
    for shard in route.shards:
        shard.fork(0, 1, len(PROMPT))
        assert shard.kv_tokens(1) == len(PROMPT)
    feed(route, 1, len(PROMPT), [50, 51, 52])
    for shard in route.shards:
        shard.fork(0, 2, len(PROMPT))
    wanted = feed(route, 0, len(PROMPT), [60, 61])
    assert np.array_equal(feed(route, 2, len(PROMPT), [60, 61]), wanted)
