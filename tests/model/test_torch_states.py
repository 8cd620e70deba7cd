"""Session states with no positions on the PyTorch engine: never taken back, forked and saved as a whole, replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from shardline.errors import ShardlineError
from shardline.formats.architectures import of_model_type
from shardline.formats.outline import outline_of_config
from shardline.formats.session_state import state_bytes
from tests.support.torch_models import (
    AUDITED,
    AUDITED_LAYERS,
    VOCAB,
    Route,
    chunked_logits,
    entry,
    equal,
    result,
    save_audited,
)

pytestmark = pytest.mark.torch

TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, VOCAB, 200)]
CHUNKS = [TOKENS[:70], TOKENS[70:131], TOKENS[131:132], TOKENS[132:], [5], [60]]
STATES = ("deepseek_v4", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.fixture(scope="module", params=list(AUDITED))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, save_audited(request.param, folder), folder


def feed(route: Route, slot: int, position: int, tokens: list[int]) -> Any:
    hidden = None
    for shard in route.shards:
        output = result(shard.run([entry(tokens, position, hidden, slot=slot)]))
        hidden = output.hidden
    return np.array(output.logits)


def test_one_shard_gives_the_logits_of_the_model(saved: tuple[str, Any, Path]) -> None:
    _, model, folder = saved
    assert equal(Route(folder, layers=AUDITED_LAYERS).run(CHUNKS), chunked_logits(model, CHUNKS))


@pytest.mark.parametrize("cuts", [*((at,) for at in range(1, AUDITED_LAYERS)), (2, 5), (4,)], ids=str)
def test_a_cut_changes_no_bit(saved: tuple[str, Any, Path], cuts: tuple[int, ...]) -> None:
    """Also where a Shard has recurrent layers alone, which count no tokens themselves."""
    whole = Route(saved[2], layers=AUDITED_LAYERS).run(CHUNKS)
    assert equal(Route(saved[2], cuts, layers=AUDITED_LAYERS).run(CHUNKS), whole)


def test_tokens_are_counted_by_every_shard(saved: tuple[str, Any, Path]) -> None:
    route = Route(saved[2], (2, 5), layers=AUDITED_LAYERS)
    route.open()
    for chunk, held in ((TOKENS[:20], 20), ([5], 21), ([5, 6], 23)):
        route.feed(chunk)
        assert [shard.kv_tokens(0) for shard in route.shards] == [held] * 3
    route.close()
    route.open()
    assert [shard.kv_tokens(0) for shard in route.shards] == [0] * 3


def test_a_state_is_not_taken_back(saved: tuple[str, Any, Path]) -> None:
    kind, _, folder = saved
    for shard in Route(folder, (2,), layers=AUDITED_LAYERS).shards:
        exact = of_model_type(kind).rollback == "exact"
        assert shard.describe().rollback is exact
    (shard,) = Route(folder, layers=AUDITED_LAYERS).shards
    shard.open(0)
    shard.run([entry(TOKENS[:20], 0)])
    shard.rollback(0, 20)
    if kind in STATES:
        for position in (19, 1, 0):
            with pytest.raises(ShardlineError, match="cannot be taken back") as caught:
                shard.rollback(0, position)
            assert caught.value.code == "rollback_unsupported"
    assert shard.kv_tokens(0) == 20


def test_a_slot_that_is_replayed_is_a_fresh_one(saved: tuple[str, Any, Path]) -> None:
    """Reset and replay, after another session has used the slot."""
    route = Route(saved[2], (3,), layers=AUDITED_LAYERS)
    first = route.run(CHUNKS)
    route.run([TOKENS[::-1]])
    assert equal(route.run(CHUNKS), first)


def test_a_fork_is_a_copy_of_all_of_it(saved: tuple[str, Any, Path]) -> None:
    kind, _, folder = saved
    route = Route(folder, (3,), layers=AUDITED_LAYERS)
    route.open()
    feed(route, 0, 0, TOKENS[:70])
    for shard in route.shards:
        if kind in STATES:
            with pytest.raises(ShardlineError, match="cannot be taken back"):
                shard.fork(0, 1, 69)
        shard.fork(0, 2, 70)
        assert shard.kv_tokens(2) == 70
    feed(route, 2, 70, [9, 9, 9, 9, 9])
    wanted = feed(route, 0, 70, TOKENS[70:90])
    for shard in route.shards:
        shard.close(2)
    route.close()
    route.open()
    feed(route, 0, 0, TOKENS[:70])
    for shard in route.shards:
        shard.fork(0, 3, 70)
        shard.close(0)
    assert np.array_equal(feed(route, 3, 70, TOKENS[70:90]), wanted)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 70, 130, 200])
def test_a_saved_slot_goes_on_where_it_was(saved: tuple[str, Any, Path], length: int) -> None:
    (shard,) = Route(saved[2], layers=AUDITED_LAYERS).shards
    shard.open(0)
    if length:
        result(shard.run([entry(TOKENS[:length], 0)]))
    state = shard.save(0)
    wanted = np.array(result(shard.run([entry([7, 8, 9], length)])).logits)
    shard.open(1)
    shard.restore(1, state)
    assert shard.kv_tokens(1) == length
    assert shard.save(1) == state
    assert np.array_equal(result(shard.run([entry([7, 8, 9], length, slot=1)])).logits, wanted)


def test_a_state_of_the_wrong_size_is_refused(saved: tuple[str, Any, Path]) -> None:
    (shard,) = Route(saved[2], layers=AUDITED_LAYERS).shards
    shard.open(0)
    result(shard.run([entry(TOKENS[:70], 0)]))
    state = shard.save(0)
    tensors = load_tensors(state)
    label = state[8 : 8 + int.from_bytes(state[:8], "little")].decode().split('"slot":"')[1].split('"')[0]
    for name in tensors:
        spoiled = {**tensors, name: tensors[name][..., :-1].contiguous()}
        with pytest.raises(ShardlineError) as caught:
            shard.restore(0, bytes(save_tensors(spoiled, {"slot": label})))
        assert caught.value.code == "snapshot_invalid"
    assert shard.kv_tokens(0) == 70


def test_the_planner_knows_what_a_session_keeps(saved: tuple[str, Any, Path]) -> None:
    """State of a long session, as planned and as it is: rows alike, states within what float types make of them."""
    _, model, folder = saved
    states = outline_of_config(model.config.to_dict(), "torch").states
    assert states is not None
    planned = state_bytes(states, 0, AUDITED_LAYERS, tokens=200, element_bytes=4)
    (shard,) = Route(folder, layers=AUDITED_LAYERS).shards
    shard.open(0)
    result(shard.run([entry(TOKENS, 0)]))
    held = sum(tensor.nbytes for tensor in load_tensors(shard.save(0)).values())
    assert held <= 1.1 * planned
    # Planned is the room of blocks that are not full yet, held what is in them.
    assert planned <= 2 * held


def test_what_is_set_aside_is_enough_at_any_length(saved: tuple[str, Any, Path]) -> None:
    """A Node lets sessions in by these two numbers: none of them may take more, however short or long it is."""
    kind, _, folder = saved
    parts = Route(folder, (2, 5), layers=AUDITED_LAYERS).shards
    (whole,) = Route(folder, layers=AUDITED_LAYERS).shards
    told = whole.describe()
    assert (told.state_bytes > 0) == (kind in STATES)
    assert told.state_bytes == sum(part.describe().state_bytes for part in parts)
    for slot, tokens in enumerate((1, 2, 5, 20, 131, 200)):
        whole.open(slot)
        result(whole.run([entry(TOKENS[:tokens], 0, slot=slot)]))
        held = sum(tensor.nbytes for tensor in load_tensors(whole.save(slot)).values())
        assert held <= told.state_bytes + tokens * told.kv_bytes_per_token, tokens
        whole.close(slot)
