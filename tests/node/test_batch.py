"""Which steps ride together: fairness between lanes, and ring groups instead of lockstep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardline.node.batch import Measured, Waiting, choose, decode_cap

COMPUTE_BOUND = Measured(decode_ms=10.0, hop_ms=0.3)
HOP_BOUND = Measured(decode_ms=0.2, hop_ms=5.0)


def waiting(slot: int, order: float, route: str = "r", hops: int = 2) -> Waiting:
    return Waiting(slot, order, route, hops)


def test_nothing_waits() -> None:
    assert choose([], [], last_lane="decode", cap=decode_cap({}, {}, HOP_BOUND)) is None


def test_lanes_take_turns_while_both_have_work() -> None:
    decode, prefill = [waiting(0, 1.0)], [waiting(1, 0.5)]
    after_decode = choose(decode, prefill, last_lane="decode", cap=decode_cap({}, {}, HOP_BOUND))
    after_prefill = choose(decode, prefill, last_lane="prefill", cap=decode_cap({}, {}, HOP_BOUND))
    assert after_decode is not None and after_decode.lane == "prefill"
    assert after_prefill is not None and after_prefill.lane == "decode"


def test_one_prefill_chunk_a_call_oldest_first() -> None:
    choice = choose(
        [],
        [waiting(3, 2.0), waiting(1, 1.0)],
        last_lane="prefill",
        cap=decode_cap({}, {}, HOP_BOUND),
    )
    assert choice is not None and choice.slots == (1,)


def test_decode_is_cut_into_as_many_groups_as_hops_while_computing_is_dear() -> None:
    assert decode_cap({"r": 8}, {"r": 2}, COMPUTE_BOUND) == 4
    assert decode_cap({"r": 7}, {"r": 3}, COMPUTE_BOUND) == 3
    assert decode_cap({"r": 8}, {"r": 2}, HOP_BOUND) == 8
    assert decode_cap({"a": 3, "b": 4}, {"a": 1, "b": 4}, COMPUTE_BOUND) == 4
    assert decode_cap({}, {}, COMPUTE_BOUND) == 1


def test_far_hops_are_hidden_by_more_groups() -> None:
    """8 sessions over 2 Nodes, 12.5 ms apart: 46 ms of computing are cut so that a batch is back when its turn is."""
    assert decode_cap({"r": 8}, {"r": 2}, Measured(decode_ms=5.75, hop_ms=25.0)) == 2
    assert decode_cap({"r": 8}, {"r": 2}, Measured(decode_ms=5.75, hop_ms=1.0)) == 4
    assert decode_cap({"r": 8}, {"r": 2}, Measured(decode_ms=0.625, hop_ms=25.0)) == 8
    assert decode_cap({"r": 8}, {"r": 4}, Measured(decode_ms=5.0, hop_ms=25.0)) == 1


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.integers(1, 6))
def test_the_oldest_row_always_rides(orders: list[float], hops: int) -> None:
    decode = [waiting(i, order, hops=hops) for i, order in enumerate(orders)]
    choice = choose(
        decode,
        [],
        last_lane="decode",
        cap=decode_cap({"r": len(decode)}, {"r": hops}, COMPUTE_BOUND),
    )
    assert choice is not None
    oldest = min(decode, key=lambda w: (w.order, w.slot)).slot
    assert choice.slots[0] == oldest
    assert len(choice.slots) == -(-len(decode) // hops)
