"""The list of models at the Gateway: when the Tracker is asked, and what is remembered of a model that is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.served_models import FRESH_S, REMEMBERED_S, ServedModels
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import ModelInfo, ModelList
from tests.support.gateway_stand import model

URL = "http://127.0.0.1:9"


class Tracker(TrackerClient):
    """What it lists is set by the test; everything else of it is not used."""

    def __init__(self) -> None:
        super().__init__(None, URL)  # type: ignore[arg-type]
        self.listed: list[ModelInfo] = []
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def models(self) -> ModelList:
        self.asked += 1
        answer = list(self.listed)
        await self.gate.wait()
        return ModelList(models=answer)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def named(name: str, **facts: Any) -> ModelInfo:
    return model(b"", "http://127.0.0.1:1", model=name, content_id=name * 8, **facts)


@pytest.fixture
def tracker() -> Tracker:
    return Tracker()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_one_question_a_second_however_many_ask(tracker: Tracker, clock: Clock) -> None:
    tracker.listed = [named("a")]
    served = ServedModels(tracker, clock)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(served.all())
    assert tracker.asked == 1
    clock.now += FRESH_S
    assert [m.model for m in await served.all()] == ["a"]
    assert tracker.asked == 1
    clock.now += 0.01
    await served.all()
    assert tracker.asked == 2


async def test_a_failure_makes_it_old_at_once(tracker: Tracker, clock: Clock) -> None:
    served = ServedModels(tracker, clock)
    await served.all()
    served.doubt()
    await served.all()
    assert tracker.asked == 2


async def test_the_report_of_a_failure_goes_first(tracker: Tracker, clock: Clock) -> None:
    tracker.listed = [named("a")]
    served = ServedModels(tracker, clock)
    heard = asyncio.Event()

    async def report() -> None:
        await heard.wait()
        tracker.listed = [named("a", ready=False, missing=[(0, 2)])]

    async with asyncio.TaskGroup() as tasks:
        served.doubt(tasks.create_task(report()))
        asking = tasks.create_task(served.all())
        await asyncio.sleep(0.01)
        assert not asking.done() and tracker.asked == 0
        heard.set()
    assert asking.result()[0].missing == [(0, 2)]


async def test_a_report_that_does_not_arrive_holds_nobody_up_for_long(
    tracker: Tracker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.gateway.served_models.FRESH_S", 0.05)
    served = ServedModels(tracker, clock)
    report = asyncio.create_task(asyncio.Event().wait())
    served.doubt(report)  # type: ignore[arg-type]
    async with asyncio.timeout(2):
        await served.all()
    report.cancel()
    await asyncio.wait({report})


async def test_an_answer_that_a_failure_overtook_is_not_kept(tracker: Tracker, clock: Clock) -> None:
    served = ServedModels(tracker, clock)
    tracker.gate.clear()
    asking = asyncio.create_task(served.all())
    while not tracker.asked:
        await asyncio.sleep(0)
    served.doubt()
    tracker.gate.set()
    await asking
    await served.all()
    assert tracker.asked == 2


async def test_a_model_that_is_gone_is_remembered_as_one_without_nodes(tracker: Tracker, clock: Clock) -> None:
    """As after a restart of the Tracker: the model is not unknown, it is missing, until its Nodes are back."""
    served = ServedModels(tracker, clock)
    tracker.listed = [named("a"), named("b")]
    await served.all()
    tracker.listed = [named("b")]
    clock.now += 2 * FRESH_S
    (b, a) = await served.all()
    assert (b.model, b.ready) == ("b", True)
    assert (a.model, a.ready, a.missing, a.head_nodes, a.text_nodes) == ("a", False, [(0, 4)], [], [])
    tracker.listed = [named("b"), named("a", ready=False, missing=[(2, 4)])]
    clock.now += 2 * FRESH_S
    assert [m.missing for m in await served.all()] == [[], [(2, 4)]]


@pytest.mark.parametrize(("model_name", "content_id"), [("a", "other"), ("other", "a" * 8)])
async def test_what_took_its_place_is_listed_alone(
    tracker: Tracker, clock: Clock, model_name: str, content_id: str
) -> None:
    """Another content under its name, or its content under another name: nothing is missing."""
    served = ServedModels(tracker, clock)
    tracker.listed = [named("a")]
    await served.all()
    tracker.listed = [msgspec.structs.replace(named("a"), model=model_name, content_id=content_id)]
    clock.now += 2 * FRESH_S
    assert await served.all() == tracker.listed


async def test_a_composite_model_is_remembered_once_it_has_served(tracker: Tracker, clock: Clock) -> None:
    """One that never was ready is a start that failed; what is remembered lacks no layers, as nobody knows them."""
    served = ServedModels(tracker, clock)
    for ready, wanted in ((False, []), (True, [("a", False, [])])):
        tracker.listed = [named("a", composite=True, n_layers=1, ready=ready)]
        await served.all()
        tracker.listed = []
        clock.now += 2 * FRESH_S
        assert [(m.model, m.ready, m.missing) for m in await served.all()] == wanted
        clock.now += 2 * FRESH_S


async def test_memory_has_an_end(tracker: Tracker, clock: Clock) -> None:
    served = ServedModels(tracker, clock)
    tracker.listed = [named("a")]
    await served.all()
    tracker.listed = []
    clock.now += REMEMBERED_S
    assert [m.model for m in await served.all()] == ["a"]
    clock.now += 2 * FRESH_S
    assert await served.all() == []


async def test_a_tracker_that_is_away_is_told(clock: Clock) -> None:
    class Away(Tracker):
        async def models(self) -> ModelList:
            raise ShardlineError("tracker_unreachable", "no answer")

    with pytest.raises(ShardlineError, match="no answer"):
        await ServedModels(Away(), clock).all()
