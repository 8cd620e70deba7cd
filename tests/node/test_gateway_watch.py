"""Which Gateways count as silent, and that a pause of this Node's own is held against nobody."""

from __future__ import annotations

from shardline.node.gateway_watch import GatewayWatch
from shardline.settings import Settings

SETTINGS = Settings(beat_interval_s=0.5, beat_timeout_s=2.5, late_timer_s=0.5)


def test_silence_is_told_once() -> None:
    watch = GatewayWatch(SETTINGS, 0.0)
    watch.opened("a", 0.0)
    watch.opened("b", 0.0)
    watch.beat("stranger", 0.1)
    for tick in range(1, 6):
        assert watch.silent(0.5 * tick, ["a", "b"]) == set()
        watch.beat("b", 0.5 * tick)
    assert watch.silent(3.0, ["a", "b"]) == {"a"}
    assert watch.silent(3.5, ["b"]) == set()
    assert watch.due == 4.0


def test_a_pause_of_our_own_gives_everybody_the_whole_time_again() -> None:
    watch = GatewayWatch(SETTINGS, 0.0)
    watch.opened("a", 0.0)
    assert watch.silent(30.0, ["a"]) == set()
    for tick in range(1, 6):
        assert watch.silent(30.0 + 0.5 * tick, ["a"]) == set()
    assert watch.silent(33.0, ["a"]) == {"a"}


def test_those_without_sessions_are_forgotten_when_there_are_many() -> None:
    watch = GatewayWatch(SETTINGS, 0.0)
    for number in range(100):
        watch.opened(f"g{number}", 0.1)
    assert watch.silent(0.5, ["g7"]) == set()
    watch.beat("g8", 3.0)  # unknown by now
    for tick in range(2, 7):
        found = watch.silent(0.5 * tick, ["g7"])
    assert found == {"g7"}
