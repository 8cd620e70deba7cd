"""The cluster as it is looked at: how often the Tracker is asked, and what is shown while it does not answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.cluster_view import ClusterView
from shardline.wire.artifacts import ArtifactInfo, ArtifactList
from shardline.wire.messages import ModelInfo

MODEL = ModelInfo(
    model="m",
    content_id="c",
    engine_class="e",
    n_layers=4,
    context_length=64,
    vocab_size=8,
    text_digest=None,
    text_nodes=[],
    head_nodes=[],
    ready=True,
    missing=[],
    kv_capacity_tokens=64,
)


class Answers:
    """Answers like a Tracker, from memory; `refuses` names the error that it answers instead."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.served = [MODEL]
        self.refuses: dict[str, str] = {}

    async def _answer(self, name: str, value: Any) -> Any:
        self.asked.append(name)
        await asyncio.sleep(0)
        if name in self.refuses:
            raise ShardlineError(self.refuses[name], "no answer")
        return value

    async def models(self) -> list[ModelInfo]:
        return list(await self._answer("models", self.served))

    async def nodes(self) -> dict[str, Any]:
        node = {"id": "n-1", "pid": 7, "limits": {}, "state": "ready", "last_seen_s": len(self.asked)}
        return dict(await self._answer("nodes", {"nodes": [node]}))

    async def artifacts(self) -> ArtifactList:
        info = ArtifactInfo(content_id="c", name="m", offered=False, n_layers=4, coverage=[0] * 4, served=[1] * 4)
        answer: ArtifactList = await self._answer("artifacts", ArtifactList(artifacts=[info]))
        return answer

    async def explain(self, model: str) -> dict[str, Any]:
        return dict(await self._answer(f"explain {model}", {"model": model}))


def view_of(answers: Answers) -> tuple[ClusterView, list[float]]:
    now = [100.0]
    return ClusterView(answers, answers.models, lambda: now[0]), now


async def test_all_who_look_within_a_second_share_one_question() -> None:
    answers = Answers()
    view, now = view_of(answers)
    async with asyncio.TaskGroup() as group:
        looks = [group.create_task(view.look()) for _ in range(5)]
    assert len({look.result()["nodes"] for look in looks}) == 1
    now[0] += 0.9
    await view.look()
    assert sorted(answers.asked) == ["artifacts", "explain m", "models", "nodes"]
    now[0] += 0.1
    await view.look()
    assert sorted(answers.asked) == sorted(["artifacts", "models", "nodes"] * 2 + ["explain m"])


async def test_routes_are_explained_for_the_models_that_are_known_and_less_often() -> None:
    answers = Answers()
    view, now = view_of(answers)
    for _ in range(8):
        await view.look()
        now[0] += 1.0
    assert answers.asked.count("explain m") == 3
    assert json.loads((await view.look())["routes"]) == [{"model": "m"}]


async def test_what_is_for_the_gateway_only_stays_there() -> None:
    view, _ = view_of(Answers())
    shown = await view.look()
    (node,) = json.loads(shown["nodes"])
    assert (node["id"], node["state"]) == ("n-1", "ready")
    assert not {"pid", "limits"} & set(node)
    (model,) = json.loads(shown["models"])
    assert not {"text_nodes", "head_nodes"} & set(model)


async def test_a_silent_tracker_is_told_and_what_was_known_stays() -> None:
    answers = Answers()
    view, now = view_of(answers)
    before = await view.look()
    answers.refuses = dict.fromkeys(["models", "nodes", "artifacts", "explain m"], "tracker_unreachable")
    now[0] += 5
    shown = await view.look()
    assert shown["nodes"] == before["nodes"]
    tracker = json.loads(shown["tracker"])
    assert tracker["error"]["code"] == "tracker_unreachable"
    assert tracker["answered"] == json.loads(before["tracker"])["answered"]
    answers.refuses = {}
    now[0] += 5
    shown = await view.look()
    assert json.loads(shown["tracker"])["error"] is None
    assert shown["nodes"] != before["nodes"]


async def test_a_tracker_that_knows_of_no_artifacts_is_not_out_of_order() -> None:
    answers = Answers()
    answers.refuses = {"artifacts": "not_found", "explain m": "model_not_found"}
    view, now = view_of(answers)
    await view.look()
    now[0] += 5
    shown = await view.look()
    assert (shown["artifacts"], shown["routes"]) == (b"null", b"[]")
    assert json.loads(shown["tracker"])["error"] is None


async def test_the_first_look_knows_the_routes_of_the_models_that_it_knows() -> None:
    view, _ = view_of(Answers())
    shown = await view.look()
    assert [model["model"] for model in json.loads(shown["models"])] == ["m"]
    assert json.loads(shown["routes"]) == [{"model": "m"}]


async def test_before_the_models_are_known_nothing_is_said_of_routes() -> None:
    answers = Answers()
    answers.refuses = {"models": "tracker_unreachable"}
    view, now = view_of(answers)
    assert (await view.look())["routes"] == b"null"
    now[0] += 0.5
    assert json.loads((await view.look())["tracker"])["error"]["code"] == "tracker_unreachable"
    answers.refuses = {}
    now[0] += 0.5
    assert json.loads((await view.look())["routes"]) == [{"model": "m"}]


@pytest.mark.parametrize("change", [{"ready": False}, {"model": "other"}])
async def test_models_that_are_others_or_whole_since_are_explained_at_once(change: dict[str, Any]) -> None:
    answers = Answers()
    answers.served = []
    view, now = view_of(answers)
    assert (await view.look())["routes"] == b"[]"
    for served in ([MODEL], [msgspec.structs.replace(MODEL, **change)], [MODEL]):
        answers.served = served
        answers.asked.clear()
        now[0] += 1.0
        assert json.loads((await view.look())["routes"]) == [{"model": served[0].model}]
        assert f"explain {served[0].model}" in answers.asked
