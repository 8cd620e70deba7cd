"""Hot KV State of the PyTorch engine: counted in the cache, rolled back exactly or refused, saved to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from shardline.errors import ShardlineError
from shardline.model.torch_cache import RoomyLayer
from tests.support.torch_models import CONFIGS, LAYERS, WINDOW, Route, entry, result, save

pytestmark = pytest.mark.torch
PROMPT = [5, 7, 11, 13, 17]
LONG = [*range(3, 23)]
SLIDING = ["gemma3_text", "mistral", "gpt_oss"]


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "mistral", "gpt_oss", "deepseek_v3"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save(CONFIGS[request.param](), folder)
    return request.param, folder


def refused(code, call, *arguments):
    with pytest.raises(ShardlineError) as caught:
        call(*arguments)
    assert caught.value.code == code
    return caught.value.message


def test_tokens_are_counted_by_the_cache(model):
    _, folder = model
    route = Route(folder, (1,))
    route.open()
    assert [shard.kv_tokens(0) for shard in route.shards] == [0, 0]
    for chunk, expected in ((LONG, 20), ([5], 21), ([5, 6], 23)):
        route.feed(chunk)
        assert [shard.kv_tokens(0) for shard in route.shards] == [expected, expected]


def test_a_slot_that_is_opened_again_is_empty(model):
    _, folder = model
    route = Route(folder)
    first = route.run([LONG])
    route.open()
    assert route.shards[0].kv_tokens(0) == 0
    assert np.array_equal(route.feed(LONG), first[0])


def test_room_behind_a_cache_is_used_and_bounded():
    """What is held is what was put in, at every length; memory is a view of at most an eighth and two blocks more."""
    layer = RoomyLayer()
    parts = [torch.randn(1, 2, rows, 4) for rows in (1, 1, 40, 1, 300, *[1] * 60)]
    memory = set()
    for number in range(1, len(parts) + 1):
        keys, values = layer.update(parts[number - 1], -parts[number - 1])
        whole = torch.cat(parts[:number], dim=2)
        assert torch.equal(keys, whole) and torch.equal(values, -whole)
        assert layer.get_seq_length() == whole.shape[2]
        memory.add(keys.data_ptr())
        assert keys.untyped_storage().nbytes() <= (whole.nbytes * 9) // 8 + 64 * 2 * 4 * 4
    assert len(memory) < 6


def test_bytes_a_token_are_those_of_the_cache(model):
    kind, folder = model
    (shard,) = Route(folder).shards
    if kind == "deepseek_v3":
        return  # it keeps other tensors than keys and values of all heads; how large is transformers' affair
    config = CONFIGS[kind]()
    assert shard.describe().kv_bytes_per_token == LAYERS * 2 * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.parametrize("back_to", [0, 3, 5])
def test_a_rollback_leaves_nothing_behind(model, back_to):
    """Within the window every rollback is exact: going on from there gives the bits of a session that never went on."""
    _, folder = model
    route = Route(folder, (2,))
    straight = route.run([PROMPT[:3], PROMPT[3:], [40, 41]])
    route.open()
    route.feed(PROMPT[:3])
    route.feed(PROMPT[3:])
    route.feed([9, 10])
    for shard in route.shards:
        shard.rollback(0, back_to)
        assert shard.kv_tokens(0) == back_to
    route.position = back_to
    if back_to == 0:
        route.feed(PROMPT[:3])
    if back_to < 5:
        route.feed(PROMPT[3:])
    assert np.array_equal(route.feed([40, 41]), straight[-1])


def test_a_rollback_beyond_a_window_that_moved_on(model):
    kind, folder = model
    route = Route(folder)
    (shard,) = route.shards
    route.open()
    straight = route.feed(LONG)
    shard.rollback(0, len(LONG))  # drops nothing
    if kind in SLIDING:
        assert not shard.describe().rollback
        message = refused("rollback_unsupported", shard.rollback, 0, len(LONG) - 1)
        assert f"window of {WINDOW}" in message
        assert shard.kv_tokens(0) == len(LONG)
    else:
        assert shard.describe().rollback
        shard.rollback(0, len(LONG) - 2)
        assert shard.kv_tokens(0) == len(LONG) - 2
        route.position = len(LONG) - 2
        np.testing.assert_allclose(route.feed(LONG[-2:]), straight, atol=1e-4)


def test_a_rollback_to_where_nothing_was(model):
    _, folder = model
    route = Route(folder)
    route.open()
    route.feed(PROMPT)
    refused("rollback_unsupported", route.shards[0].rollback, 0, 6)
    refused("rollback_unsupported", route.shards[0].rollback, 0, -1)
    refused("engine_error", route.shards[0].rollback, 5, 0)
    assert route.shards[0].kv_tokens(0) == 5


@pytest.mark.parametrize("prompt", [[], PROMPT, LONG], ids=len)
def test_a_saved_slot_goes_on_as_if_nothing_had_been(model, prompt):
    _, folder = model
    route = Route(folder, (2,), options={"content_id": "mac1-0"})
    route.open()
    if prompt:
        route.feed(prompt)
    states = [shard.save(0) for shard in route.shards]
    straight = [route.feed(chunk) for chunk in ([50, 51, 52], [53])]
    other = Route(folder, (2,), options={"content_id": "mac1-0"})
    for shard, state in zip(other.shards, states, strict=True):
        shard.open(3)
        shard.restore(3, state)
        assert shard.kv_tokens(3) == len(prompt)
        assert shard.save(3) == state
    for expected, chunk, position in zip(straight, ([50, 51, 52], [53]), (len(prompt), len(prompt) + 3), strict=True):
        hidden = None
        for shard in other.shards:
            output = result(shard.run([entry(chunk, position, hidden, slot=3)]))
            hidden = output.hidden
        assert np.array_equal(output.logits, expected)


def test_a_state_is_refused_where_it_does_not_belong(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    here = Route(tmp_path, (2,), options={"content_id": "mac1-0"})
    here.run([])
    here.open()
    here.feed(PROMPT)
    state = here.shards[0].save(0)
    strangers = [
        here.shards[1],
        *Route(tmp_path, (2,), options={"content_id": "mac1-1"}).shards[:1],
        *Route(tmp_path, (2,), options={"content_id": "mac1-0"}, dtype="bfloat16").shards[:1],
    ]
    for shard in strangers:
        shard.close(0)
        shard.open(0)
        assert "another Shard" in refused("snapshot_invalid", shard.restore, 0, state)
        assert shard.kv_tokens(0) == 0
    refused("engine_error", here.shards[0].restore, 9, state)


def test_a_damaged_state_is_refused(tmp_path):
    save(CONFIGS["llama"](), tmp_path)
    route = Route(tmp_path)
    (shard,) = route.shards
    route.open()
    route.feed(PROMPT)
    state = shard.save(0)
    tensors = load_tensors(state)
    owner = shard._identity()

    def written(tensors=tensors, label=f"shardline-slot-1 5 {owner}"):
        return save_tensors(tensors, {"slot": label})

    assert written() == state
    cases = [
        b"",
        b"garbage" * 10,
        state[:-1],
        state + b"x",
        written(label=f"shardline-slot-1 6 {owner}"),
        written(label=f"shardline-slot-1 -5 {owner}"),
        written(label=f"shardline-slot-1 five {owner}"),
        written(label=f"shardline-slot-2 5 {owner}"),
        written(label=""),
        save_tensors(tensors),
        written({name: tensor for name, tensor in tensors.items() if name != "1.keys"}),
        written(tensors | {"9.keys": tensors["1.keys"].clone()}),
        written(tensors | {"1.keys": tensors["1.keys"].double()}),
        written(tensors | {"1.keys": tensors["1.keys"][:, :, 1:].contiguous()}),
    ]
    for case in cases:
        refused("snapshot_invalid", shard.restore, 0, case)
        assert shard.kv_tokens(0) == 5
    shard.restore(0, state)
