"""What the engine must do otherwise for some architectures: four positions a row, recurrent states, windows, taps."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.model import llama_shard
from tests.support.llama_route import entry, hidden_of
from tests.support.llama_tiny import TinyRoute
from tests.support.tiny_models import BY_NAME, WINDOW, TinyModel

pytestmark = pytest.mark.llama

CUTS = {
    "llama": (3, 6),
    "qwen2vl": (3, 6),
    "gemma3": (3, 6),
    "gpt-oss": (3, 6),
    "granite": (3, 6),
    "nemotron_h": (3, 6),
    "mamba": (3, 6),
    "falcon-h1": (3, 6),
    "qwen35": (4,),
    "kimi-linear": (2, 5),
    "plamo2": (2, 6),
}
RECURRENT = ["mamba", "falcon-h1", "qwen35"]


@pytest.mark.parametrize("name", CUTS)
def test_prompts_of_unequal_length_in_one_batch(tmp_path, name):
    """Where the library would compute them apart, a tap would see the last alone: the engine makes the calls itself."""
    answers = []
    for cuts in ((), CUTS[name]):
        route = TinyRoute(BY_NAME[name], tmp_path, cuts)
        route.open(0, 1, 2)
        answers.append(
            [
                route.run([(0, 0, (5, 6, 7, 8, 9, 10, 11)), (1, 0, (12, 13, 14)), (2, 0, (15, 16, 17))]),
                route.run([(1, 3, (18,)), (0, 7, (19,))]),
                route.run([(2, 3, (18, 19)), (0, 8, (20,)), (1, 4, (21,))]),
                route.run([(1, 5, (22,)), (2, 5, (23,))]),
            ]
        )
        route.close()
    for whole, cut in zip(*answers, strict=True):
        assert np.abs(whole - cut).max() == 0.0


@pytest.mark.parametrize(
    ("name", "tap", "cuts"),
    [("nemotron_h", "layer_end", (3, 6)), ("gpt-oss", "nextn", (3, 6)), ("mimo2", "nextn", (3,))],
)
def test_the_cheaper_taps_of_the_table_give_the_same(tmp_path, name, tap, cuts):
    answers = []
    for kind in ("sampler", tap):
        route = TinyRoute(BY_NAME[name], tmp_path, cuts, tap=kind)
        route.open(0, 1)
        answers.append(
            [
                route.run([(0, 0, (5, 6, 7, 8, 9))]),
                route.run([(0, 5, (10,))]),
                route.run([(1, 0, (5, 6))]),
                route.run([(0, 6, (11,)), (1, 2, (12,))]),
            ]
        )
        route.close()
    for a, b in zip(*answers, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("name", [*RECURRENT, "qwen2vl", "gemma3"])
def test_no_position_is_taken_twice(tmp_path, name):
    """The library itself takes a row again where rows have four positions, and its state would then hold it twice."""
    route = TinyRoute(BY_NAME[name], tmp_path, CUTS[name])
    head, *_ = route.shards
    route.open(0)
    expected = [hidden_of(head, [entry([5, 6, 7], 0)]), hidden_of(head, [entry([8], 3)])]
    for again in (entry([8], 3), entry([8], 2), entry([8], 9), entry([5, 6, 7], 0)):
        (refused,) = head.run([again])
        assert isinstance(refused, ShardlineError) and refused.code == "engine_error"
    _, twice = head.run([entry([9], 4), entry([9], 4)])
    assert isinstance(twice, ShardlineError) and "twice" in twice.message
    head.close(0)
    head.open(0)
    assert [hidden_of(head, [entry([5, 6, 7], 0)]), hidden_of(head, [entry([8], 3)])] == expected
    assert head.kv_tokens(0) == 4
    found = hidden_of(head, [entry([9], 4)])
    head.open(1)
    assert [hidden_of(head, [entry([5, 6, 7], 0, slot=1)]), hidden_of(head, [entry([8], 3, slot=1)])] == expected
    assert hidden_of(head, [entry([9], 4, slot=1)]) == found
    route.close()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_state_is_not_taken_back_but_saved_and_forked_whole(tmp_path, name):
    model = BY_NAME[name]
    route = TinyRoute(model, tmp_path, CUTS[model.name])
    head = route.shards[0]
    assert not head.describe().rollback
    head.open(0)
    hidden_of(head, [entry([5, 6, 7, 8, 9], 0)])
    with pytest.raises(ShardlineError) as caught:
        head.rollback(0, 4)
    assert caught.value.code == "rollback_unsupported"
    with pytest.raises(ShardlineError) as caught:
        head.fork(0, 1, 4)
    assert caught.value.code == "rollback_unsupported"
    head.rollback(0, 5)
    state = head.save(0)
    head.fork(0, 1, 5)
    head.open(2)
    head.restore(2, state)
    first, second, third = (hidden_of(head, [entry([10], 5, slot=slot)]) for slot in (0, 1, 2))
    assert first == second == third
    head.rollback(0, 0)
    assert head.kv_tokens(0) == 0
    route.close()


def test_a_window_is_taken_back_as_far_as_it_is_there(tmp_path):
    """And never further: what is not there must not be computed without."""
    model = BY_NAME["gemma3"]
    route = TinyRoute(model, tmp_path, CUTS[model.name], sessions=1, rows=8, kv_tokens=1024)
    middle = route.shards[1]
    assert not middle.describe().rollback
    width = model.keys["embedding_length"]
    given = np.random.default_rng(0).standard_normal((600, width)).astype(np.float32)
    middle.open(0)

    def feed(start: int, end: int) -> list[bytes]:
        found = []
        for at in range(start, end, 8):
            rows = given[at : min(at + 8, end)]
            found += hidden_of(middle, [entry([1] * len(rows), at, [rows.tobytes()])])
        return found

    feed(0, 12)
    expected = feed(12, 13)
    feed(13, 16)
    middle.rollback(0, 12)
    assert feed(12, 13) == expected
    feed(13, 600)
    with pytest.raises(ShardlineError) as caught:
        middle.rollback(0, 100)
    assert caught.value.code == "rollback_unsupported"
    assert middle.kv_tokens(0) == 600
    middle.rollback(0, 600 - WINDOW)
    route.close()


def test_with_a_full_window_cache_any_rollback_is_exact(tmp_path):
    model = BY_NAME["gemma3"]
    route = TinyRoute(model, tmp_path, CUTS[model.name], swa_full=True)
    middle = route.shards[1]
    assert middle.describe().rollback
    middle.open(0)
    given = np.random.default_rng(0).standard_normal((60, model.keys["embedding_length"])).astype(np.float32)
    expected = hidden_of(middle, [entry([1] * 20, 0, [given[:20].tobytes()])])
    expected = hidden_of(middle, [entry([1], 20, [given[20:21].tobytes()])])
    hidden_of(middle, [entry([1] * 39, 21, [given[21:].tobytes()])])
    middle.rollback(0, 20)
    assert hidden_of(middle, [entry([1], 20, [given[20:21].tobytes()])]) == expected
    route.close()


@pytest.mark.parametrize("cuts", [(), (3, 6)])
def test_forks_of_long_prefixes_leave_room_for_others(tmp_path, cuts):
    """The cells of a window that two sequences hold and both have passed are never used again by the library."""
    route = TinyRoute(BY_NAME["gemma3"], tmp_path, cuts, kv_tokens=1024)
    prompts = [tuple((7 * n + index) % 200 + 4 for index in range(120)) for n in range(2)]
    wanted = []
    route.open(0, 1)
    for slot, prompt in enumerate(prompts):
        for first in (0, 60):
            route.run([(slot, first, prompt[first : first + 60])])
        for shard in route.shards:
            shard.fork(slot, 2 + slot, 120)
        wanted.append(route.run([(slot, 120, (9,))]))
    route.open(4)
    for first in (0, 60):
        route.run([(4, first, prompts[0][first : first + 60])])
    assert [shard.kv_tokens(slot) for shard in route.shards for slot in (2, 3, 4)] == [120] * 3 * len(route.shards)
    for slot in (0, 1):
        assert np.abs(route.run([(2 + slot, 120, (9,))]) - wanted[slot]).max() < 2e-3
    route.close()


def test_rotation_that_follows_the_size_of_the_buffer_is_part_of_the_engine_class(tmp_path):
    """phi3 has factors for short and for long contexts, and the library chooses by the cells of all sequences: parts
    that chose otherwise must not meet in a route."""
    classes = {}
    for size in (256, 512):
        answers = []
        for cuts in ((), (3, 6)):
            route = TinyRoute(BY_NAME["phi3"], tmp_path, cuts, kv_tokens=size)
            classes.setdefault(size, set()).update(shard.describe().engine.engine_class for shard in route.shards)
            route.open(0)
            answers.append(route.run([(0, 0, tuple(range(5, 45)))]))
            route.close()
        assert np.array_equal(*answers)
    assert [name.rpartition("/")[2] for size in (256, 512) for name in classes[size]] == ["rope-short", "rope-long"]


def test_sparse_attention_has_one_session_at_a_time(tmp_path, monkeypatch):
    """For several the library would compute dense attention, and say so in its log alone."""
    model = BY_NAME["minimax-m3"]
    with pytest.raises(ShardlineError) as caught:
        TinyRoute(model, tmp_path)
    assert (caught.value.code, caught.value.param) == ("setting_invalid", "sessions")
    answers = []
    for cuts in ((), (3, 6)):
        route = TinyRoute(model, tmp_path, cuts, sessions=None)
        assert [shard.describe().slots for shard in route.shards] == [1] * len(route.shards)
        for _ in range(2):
            route.open(0)
            answers.append([route.run([(0, 0, tuple(range(5, 45)))]), route.run([(0, 40, (9,))])])
            for shard in route.shards:
                shard.close(0)
        route.close()
    for prefill, decode in answers[1:]:
        assert np.array_equal(prefill, answers[0][0]) and np.array_equal(decode, answers[0][1])
    monkeypatch.setattr(llama_shard.Making, "_sessions", lambda making: 2)
    dense = TinyRoute(model, tmp_path, sessions=None)
    dense.open(0)
    assert np.abs(dense.run([(0, 0, tuple(range(5, 45)))]) - answers[0][0]).max() > 1e-3
    dense.close()


@pytest.mark.parametrize(
    ("architecture", "keys", "reason"),
    [
        ("dream", {}, "keeps nothing"),
        ("llada", {}, "keeps nothing"),
        ("t5", {"attention.relative_buckets_count": 8, "decoder_start_token_id": 0}, "has an encoder"),
    ],
)
def test_models_that_do_not_write_token_by_token_are_refused(tmp_path, architecture, keys, reason):
    """The library would end the process at the first text."""
    with pytest.raises(ShardlineError, match=reason) as caught:
        TinyRoute(TinyModel(architecture, architecture, keys), tmp_path)
    assert caught.value.code == "architecture_unsupported"
