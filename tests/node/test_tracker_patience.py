"""A Tracker that is away is asked until it answers; why it is waited for is told once for each reason."""

from __future__ import annotations

import pytest

from shardline.errors import ShardlineError
from shardline.node.tracker_patience import answered
from shardline.options import StartPhase


class Tracker:
    """Raises what it is given, one after the other, then answers."""

    def __init__(self, *faults: ShardlineError) -> None:
        self.faults = list(faults)

    async def ask(self) -> str:
        if self.faults:
            raise self.faults.pop(0)
        return "here"


class Announced:
    """Keeps what is announced."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, str | int]]] = []

    def __call__(self, phase: StartPhase, /, **facts: str | int) -> None:
        self.heard.append((phase, facts))


def away(why: str) -> ShardlineError:
    return ShardlineError("tracker_unreachable", why)


async def test_it_is_asked_until_it_answers_and_each_reason_is_told_once() -> None:
    tracker, announced = Tracker(away("refused"), away("refused"), away("silent"), away("refused")), Announced()
    assert await answered(tracker.ask, announced, pause_s=0.0, command="shardline serve") == "here"
    assert announced.heard == [("waiting", {"reason": reason}) for reason in ("refused", "silent", "refused")]


async def test_what_waiting_does_not_cure_is_raised_at_once() -> None:
    tracker, announced = Tracker(away("refused"), ShardlineError("artifact_unavailable", "nobody has it")), Announced()
    with pytest.raises(ShardlineError, match="nobody has it"):
        await answered(tracker.ask, announced, pause_s=0.0, command="shardline serve")
    assert len(announced.heard) == 1
