"""Slots of the llama.cpp engine: positions, rollback, saved states, and what the library's return codes lead to."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.model.llama_shard import load
from shardline.model.self_test import self_test
from tests.support.llama_route import LAYERS, WIDTH, Route, entry, hidden_of, result, spec

pytestmark = [pytest.mark.llama, pytest.mark.smollm2]

RNG = np.random.default_rng(2)
ROW = 4 * WIDTH


def rows(count: int) -> bytes:
    return RNG.standard_normal((count, WIDTH)).astype(np.float32).tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def shared(folder):
    shard = load(spec(folder, 10, 12))
    yield shard
    shard.unload()


@pytest.fixture
def middle(shared):
    """Layers [10, 12), nothing open."""
    yield shared
    for slot in range(20):
        shared.close(slot)


def refused(outputs, code):
    assert all(isinstance(output, ShardlineError) for output in outputs)
    assert [output.code for output in outputs] == [code] * len(outputs)
    return outputs[0].message


def test_rows_at_another_position_are_refused_and_change_nothing(middle):
    middle.open(0)
    given = rows(4)
    hidden_of(middle, [entry([1] * 4, 0, [given])])
    for position in (0, 3, 5):
        said = refused(middle.run([entry([1], position, [given[:ROW]])]), "engine_error")
        assert f"position {position}" in said
    assert middle.kv_tokens(0) == 4
    hidden_of(middle, [entry([1], 4, [given[:ROW]])])
    assert middle.kv_tokens(0) == 5


def test_an_empty_slot_begins_at_0(middle):
    """The library itself would take any position in an empty sequence."""
    middle.open(0)
    refused(middle.run([entry([1], 100, [rows(1)])]), "engine_error")
    assert middle.kv_tokens(0) == 0


def test_what_is_wrong_with_one_entry_harms_no_other(middle):
    middle.open(0)
    middle.open(1)
    middle.open(2)
    good, other = rows(1), rows(1)
    alone = hidden_of(middle, [entry([1], 0, [good])])
    outputs = middle.run(
        [
            entry([1], 7, [other], slot=1),
            entry([1], 0, [good], slot=2),
            entry([1], 0, [other], slot=9),
            entry([1, 2], 0, [other], slot=1),
        ]
    )
    assert [isinstance(output, ShardlineError) for output in outputs] == [True, False, True, True]
    assert bytes(outputs[1].hidden[0]) == alone[0]
    assert [middle.kv_tokens(slot) for slot in (0, 1, 2)] == [1, 0, 1]


def test_too_many_and_no_rows_are_refused_before_the_library_would_abort(middle):
    middle.open(0)
    for count in (0, 513):
        refused(middle.run([entry([1] * count, 0, [bytes(ROW * count)])]), "engine_error")


def test_a_buffer_is_never_smaller_than_a_call(folder):
    """The library would end the process for the first prompt that is."""
    shard = load(spec(folder, 10, 11, kv_tokens=10, rows=300))
    assert shard.describe().kv_capacity_tokens == 512
    shard.open(0)
    hidden_of(shard, [entry([1] * 300, 0, [rows(300)])])
    shard.unload()


def test_more_rows_than_one_call_takes_are_computed_in_several(folder):
    small = load(spec(folder, 10, 12, rows=16))
    large = load(spec(folder, 10, 12))
    given = [rows(n) for n in (10, 5, 9, 16, 1)]
    for shard in (small, large):
        for slot in range(5):
            shard.open(slot)
    entries = [entry([1] * (len(g) // ROW), 0, [g], slot=slot) for slot, g in enumerate(given)]
    together = hidden_of(small, entries)
    alone = [hidden_of(large, [e])[0] for e in entries]
    for a, b in zip(together, alone, strict=True):
        assert len(a) == len(b)
        np.testing.assert_allclose(np.frombuffer(a, np.float32), np.frombuffer(b, np.float32), rtol=0, atol=2e-3)
    small.unload()
    large.unload()


def test_rows_may_lie_anywhere(middle):
    """Read-only, writable, and where no float may be read from."""
    middle.open(0)
    given = rows(3)
    shifted = bytearray(1 + len(given))
    shifted[1:] = given
    answers = []
    for buffer in (given, bytearray(given), memoryview(shifted)[1:]):
        middle.close(0)
        middle.open(0)
        answers.append(hidden_of(middle, [entry([1] * 3, 0, [buffer])]))
    assert answers[0] == answers[1] == answers[2]


def test_slots_open_once_and_come_back(middle):
    for slot in range(9):
        middle.open(slot)
    with pytest.raises(ShardlineError, match="open already"):
        middle.open(3)
    with pytest.raises(ShardlineError) as caught:
        middle.open(9)
    assert caught.value.code == "capacity"
    hidden_of(middle, [entry([1], 0, [rows(1)], slot=3)])
    middle.close(3)
    middle.close(3)
    middle.open(9)
    assert middle.kv_tokens(9) == 0
    with pytest.raises(ShardlineError, match="not open"):
        middle.kv_tokens(3)


def test_rollback_is_exact(middle):
    middle.open(0)
    middle.open(1)
    prompt, wrong, right = rows(20), rows(7), rows(1)
    expected = hidden_of(middle, [entry([1] * 20, 0, [prompt])])
    expected += hidden_of(middle, [entry([1], 20, [right])])
    found = hidden_of(middle, [entry([1] * 20, 0, [prompt], slot=1)])
    hidden_of(middle, [entry([1] * 7, 20, [wrong], slot=1)])
    middle.rollback(1, 20)
    assert middle.kv_tokens(1) == 20
    found += hidden_of(middle, [entry([1], 20, [right], slot=1)])
    assert found == expected
    middle.rollback(1, 21)
    middle.rollback(1, 0)
    assert middle.kv_tokens(1) == 0
    with pytest.raises(ShardlineError) as caught:
        middle.rollback(1, 1)
    assert caught.value.code == "seam_gap"


def test_a_fork_goes_on_as_its_source_would_have(middle):
    """Of all of it, and of the first part; the source, and another fork, go on beside it."""
    prompt, end, new = rows(20), rows(5), rows(1)
    middle.open(0)
    hidden_of(middle, [entry([1] * 20, 0, [prompt])])
    expected_at_20 = hidden_of(middle, [entry([1], 20, [new])])
    middle.rollback(0, 20)
    hidden_of(middle, [entry([1] * 5, 20, [end])])
    middle.fork(0, 1, 20)
    middle.fork(0, 2, 25)
    assert [middle.kv_tokens(slot) for slot in (0, 1, 2)] == [25, 20, 25]
    assert hidden_of(middle, [entry([1], 20, [new], slot=1)]) == expected_at_20
    expected_at_25 = hidden_of(middle, [entry([1], 25, [new])])
    middle.close(0)
    assert hidden_of(middle, [entry([1], 25, [new], slot=2)]) == expected_at_25
    for source, tokens in ((1, 0), (1, 22), (0, 1)):
        with pytest.raises(ShardlineError):
            middle.fork(source, 7, tokens)
        with pytest.raises(ShardlineError, match="not open"):
            middle.kv_tokens(7)


def test_a_saved_slot_goes_on_exactly_here_and_in_another_process_life(folder, middle):
    other = load(spec(folder, 10, 12))
    middle.open(0)
    prompt, new = rows(30), rows(1)
    hidden_of(middle, [entry([1] * 30, 0, [prompt])])
    state = middle.save(0)
    assert state == middle.save(0)
    expected = hidden_of(middle, [entry([1], 30, [new])])
    middle.open(5)
    hidden_of(middle, [entry([1] * 3, 0, [rows(3)], slot=5)])
    other.open(4)
    for shard, slot in ((middle, 5), (other, 4)):
        shard.restore(slot, state)
        assert shard.kv_tokens(slot) == 30
        assert hidden_of(shard, [entry([1], 30, [new], slot=slot)]) == expected
    other.unload()


def test_a_state_of_another_shard_or_a_damaged_one_is_refused(folder, middle):
    """Layers [12, 14) have the same shapes: the library itself would take their state."""
    neighbour = load(spec(folder, 12, 14))
    neighbour.open(0)
    hidden_of(neighbour, [entry([1] * 6, 0, [rows(6)])])
    state = neighbour.save(0)
    neighbour.unload()
    middle.open(0)
    given = rows(2)
    hidden_of(middle, [entry([1] * 2, 0, [given])])
    own = middle.save(0)
    damaged = bytearray(own)
    damaged[-1] ^= 1
    for wrong in (state, bytes(damaged), own[:-1], own[:50], b"", own + b"x"):
        with pytest.raises(ShardlineError) as caught:
            middle.restore(0, wrong)
        assert caught.value.code == "snapshot_invalid"
        assert middle.kv_tokens(0) == 2, "what the slot held is still there"
    assert middle.save(0) == own


# ---- what the library returns --------------------------------------------------------------------------------------


def test_no_room_fails_the_entry_alone_and_changes_nothing(folder):
    """Never met by admitted sessions, whose tokens are counted; here nobody counts."""
    shard = load(spec(folder, 10, 12, kv_tokens=256, rows=200))
    assert shard.describe().kv_capacity_tokens == 256
    shard.open(0)
    shard.open(1)
    hidden_of(shard, [entry([1] * 200, 0, [rows(200)])])
    refused(shard.run([entry([1] * 57, 0, [rows(57)], slot=1)]), "engine_out_of_memory")
    assert [shard.kv_tokens(slot) for slot in (0, 1)] == [200, 0]
    hidden_of(shard, [entry([1] * 56, 0, [rows(56)], slot=1)])
    shard.close(0)
    hidden_of(shard, [entry([1] * 200, 56, [rows(200)], slot=1)])
    shard.unload()


def test_the_whole_kv_can_be_filled_in_any_order(folder):
    """Sessions of odd lengths come and go; whoever is counted in finds room, to the last token."""
    shard = load(spec(folder, 10, 11, kv_tokens=512))
    rng = np.random.default_rng(9)
    held: dict[int, int] = {}
    for _ in range(300):
        slot = int(rng.integers(0, 9))
        free = 512 - sum(held.values())
        if slot in held and rng.random() < 0.4:
            shard.close(slot)
            del held[slot]
        elif free:
            if slot not in held:
                shard.open(slot)
            count = min(free, int(rng.choice([1, 1, 1, 37, 64])))
            hidden_of(shard, [entry([1] * count, held.get(slot, 0), [bytes(ROW * count)], slot=slot)])
            held[slot] = held.get(slot, 0) + count
        assert {s: shard.kv_tokens(s) for s in held} == held
    shard.unload()


def test_an_aborted_batch_fails_its_sessions_and_a_second_one_loses_the_engine(folder):
    """Return code 2 in earnest: the library's own abort callback."""
    from llama_cpp import llama_cpp as lib

    shard = load(spec(folder, 10, 12))
    stop = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda data: abort)
    lib.llama_set_abort_callback(shard._context, ctypes.cast(stop, lib.ggml_abort_callback), None)
    for slot in range(3):
        shard.open(slot)
    given = rows(4)
    abort = False
    kept = hidden_of(shard, [entry([1] * 4, 0, [given], slot=2)])
    hidden_of(shard, [entry([1], 0, [rows(1)])])
    for code in ("engine_error", "engine_lost"):
        abort = True
        batch = [entry([1], shard.kv_tokens(slot), [given[:ROW]], slot=slot) for slot in (0, 1)]
        if code == "engine_lost":
            with pytest.raises(ShardlineError) as caught:
                shard.run(batch)
            assert caught.value.code == "engine_lost"
            break
        assert "aborted" in refused(shard.run(batch), code)
        assert [shard.kv_tokens(slot) for slot in (0, 1, 2)] == [0, 0, 4], "emptied; the others as they were"
        abort = False
        assert hidden_of(shard, [entry([1] * 4, 0, [given], slot=1)]) == kept, "one success in between counts anew"
        shard.close(1)
        shard.open(1)
        abort = True
        refused(shard.run([entry([1], 0, [given[:ROW]], slot=0)]), "engine_error")
    shard.unload()


@pytest.mark.parametrize(
    ("code", "expected"), [(-1, "engine_error"), (-2, "engine_out_of_memory"), (-3, "engine_error")]
)
def test_other_codes_fail_the_sessions_of_the_call(monkeypatch, middle, code, expected):
    middle.open(0)
    middle.open(1)
    hidden_of(middle, [entry([1], 0, [rows(1)])])
    hidden_of(middle, [entry([1], 0, [rows(1)], slot=1)])
    with monkeypatch.context() as patch:
        patch.setattr(middle._c, "llama_decode", lambda context, batch: code)
        refused(middle.run([entry([1], 1, [rows(1)])]), expected)
    assert [middle.kv_tokens(slot) for slot in (0, 1)] == [1 if code == -1 else 0, 1]
    hidden_of(middle, [entry([1], 1, [rows(1)], slot=1)])


# ---- heads and tails -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def route(folder):
    route = Route(folder, (15,))
    yield route
    route.close()


def test_token_ids_outside_of_the_vocabulary_are_refused(route):
    head, tail = route.shards
    route.open(0)
    for wrong in (-1, 49152, 1 << 30):
        for tokens in ([wrong], [5, wrong, 5]):
            refused(head.run([entry(tokens, 0)]), "engine_error")
    assert head.kv_tokens(0) == 0
    route.open(1)
    good, wrong = head.run([entry([5], 0), entry([49152], 0, slot=1)])
    assert not isinstance(good, Exception) and isinstance(wrong, ShardlineError), "the other entry goes on"
    # On the tail, ids pass by.
    result(tail.run([entry([1 << 30], 0, [rows(1)])]))


def test_a_tail_gives_logits_where_they_are_wanted_and_nothing_else(route):
    _, tail = route.shards
    route.open(0, 1, 2)
    given = rows(3)
    outputs = tail.run(
        [
            entry([1] * 3, 0, [given], slot=slot, want_output=wanted)
            for slot, wanted in ((0, True), (1, False), (2, True))
        ]
    )
    assert [o.logits is None for o in outputs] == [False, True, False]
    assert all(o.hidden == () for o in outputs)
    assert outputs[0].logits.dtype == np.float32 and outputs[0].logits.shape == (49152,)
    assert np.array_equal(outputs[0].logits, outputs[2].logits)
    refused(tail.run([entry([1], 0, [given[:ROW]])]), "engine_error")
    assert tail.run([entry([1], 3, [given[:ROW]], want_output=False)])[0].logits is None


def test_tokenising_runs_beside_computing(route):
    """Threads that tokenise, while the main thread decodes; everybody gets what they would get alone."""
    head, _ = route.shards
    texts = [f"Text {i}: {'words and 12345 numbers ' * (i % 7)}" for i in range(40)]
    alone = [head.tokenize(t, add_special=True, parse_special=True) for t in texts]
    found: dict[int, list[list[int]]] = {}

    def tokenise(number: int) -> None:
        found[number] = [head.tokenize(t, add_special=True, parse_special=True) for t in texts]

    threads = [threading.Thread(target=tokenise, args=(n,)) for n in range(3)]
    route.open(0)
    for thread in threads:
        thread.start()
    for position in range(30):
        result(head.run([entry([7], position)]))
    for thread in threads:
        thread.join(20)
    assert list(found.values()) == [alone] * 3


def test_the_self_test_passes_on_every_part_and_leaves_nothing(route, middle):
    for shard in (*route.shards, middle):
        times = self_test(shard)
        assert times.decode_ms > 0 and times.prefill_ms_per_row > 0
        with pytest.raises(ShardlineError, match="not open"):
            shard.kv_tokens(1 << 30)


def test_the_self_test_passes_on_the_whole(folder):
    shard = load(spec(folder, 0, LAYERS))
    assert self_test(shard).decode_ms > 0
    shard.unload()
