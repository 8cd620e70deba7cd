"""Generations before, and around, their Route Sessions: announced, cancelled in any phase, refused, left by a fault."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.generate import RunningGeneration
from shardline.gateway.generate_api import GenerationRequest
from shardline.gateway.session import RouteSession
from shardline.gateway.verdicts import of_tracker
from shardline.settings import Settings
from shardline.wire.messages import Sampling
from shardline.wire.telemetry import TelemetryEvent
from tests.support.local_cluster import LocalCluster, local_cluster, read

QUICK = Settings(drain_s=0.2, beat_interval_s=0.1, beat_timeout_s=0.5, push_s=0.5)
LONG: dict[str, Any] = {"answer": [f" t{i}" for i in range(40)], "eos": False, "decode_ms": 5}


def request(cluster: LocalCluster, **fields: Any) -> GenerationRequest:
    facts: dict[str, Any] = {
        "model": cluster.model,
        "content_id": cluster.content_id,
        "prompt": [65] * 10,
        "max_tokens": 40,
        "sampling": Sampling(temperature=0),
        "stop": (),
        "key_id": "anyone",
    }
    return GenerationRequest(**{**facts, **fields})


async def refusal(generation: RunningGeneration) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        await read(generation)
    await generation.ended()
    return caught.value


def phases(cluster: LocalCluster, session: str) -> list[str]:
    record = cluster.generations.records.find(session)
    assert record is not None
    seen = [msgspec.json.decode(raw, type=TelemetryEvent).phase for _, raw in record.events_after(0)]
    return [phase for i, phase in enumerate(seen) if i == 0 or seen[i - 1] != phase]


async def test_the_cancel_of_a_queued_session_tells_that_it_is_cancelled(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, script=LONG, settings=QUICK, kv_tokens=64) as cluster:
        first = cluster.start(max_tokens=40)
        await first.wait_open()
        second = cluster.start(max_tokens=40)
        while second.telemetry().queue.position is None:
            await asyncio.sleep(0.005)
        records = cluster.generations.records
        await records.cancel(second.id, "anyone")
        view = records.get(second.id, "anyone")
        assert (view["phase"], view["queue"]["position"]) == ("cancelled", None)
        assert view["ended"] is not None
        assert (await refusal(second)).code == "cancelled"
        await records.cancel(first.id, "anyone")
        assert records.get(first.id, "anyone")["phase"] == "cancelled", "in decode as well"
        await cluster.until_free()


async def test_an_announced_session_can_be_cancelled_before_its_prompt_is_there(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)], script=LONG, settings=QUICK) as cluster:
        generations, records = cluster.generations, cluster.generations.records
        session = generations.announce(cluster.model, "anyone")
        await records.cancel(session, "anyone")
        assert records.get(session, "anyone")["phase"] == "cancelled"
        generation = generations.start(request(cluster, session=session))
        assert generation.id == session, "it is the same session, and no other one is begun"
        with pytest.raises(ShardlineError):
            await generation.wait_open()
        assert (await refusal(generation)).code == "cancelled"
        assert phases(cluster, session) == ["queued", "cancelled"]
        assert [view["id"] for view in records.list("anyone")] == [session]


async def test_a_withdrawn_session_is_counted_once(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)], settings=QUICK) as cluster:
        generations = cluster.generations
        refused, left = (generations.announce(cluster.model, "anyone") for _ in range(2))
        generations.withdraw(refused, ShardlineError("context_length_exceeded", "too long"))
        await generations.records.cancel(left, "anyone")
        generations.withdraw(left, None)
        assert (phases(cluster, refused), phases(cluster, left)) == (["queued", "failed"], ["queued", "cancelled"])
        text = generations._metrics.text(0).decode()
        ended = [line for line in text.splitlines() if line.startswith("shardline_gateway_sessions_ended_total{")]
        assert sorted(ended) == [
            'shardline_gateway_sessions_ended_total{code="",status="cancelled"} 1.0',
            'shardline_gateway_sessions_ended_total{code="context_length_exceeded",status="failed"} 1.0',
        ]


async def test_what_cannot_run_any_more_leaves_no_session_open(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)], settings=QUICK) as cluster:
        generations = cluster.generations
        session = generations.announce(cluster.model, "anyone")
        tasks, generations._tasks = generations._tasks, None
        with pytest.raises(ShardlineError) as caught:
            generations.start(request(cluster, session=session))
        assert caught.value.code == "draining"
        assert phases(cluster, session) == ["queued", "failed"]
        generations._tasks = tasks


async def test_a_failure_in_opening_does_not_look_like_a_return_to_the_queue(tmp_path: Path) -> None:
    script = {**LONG, "faults": [{"kind": "error", "phase": "open", "node": 2}]}
    async with local_cluster(tmp_path, script=script, settings=QUICK) as cluster:
        generation = cluster.start()
        assert (await refusal(generation)).code == "engine_error"
        assert phases(cluster, generation.id) == ["queued", "routing", "opening", "failed"]


async def test_a_model_is_named_as_the_client_named_it(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 2), (4, 6)], settings=QUICK) as cluster:
        error = await refusal(cluster.generations.start(request(cluster, name="my-model")))
        assert (error.code, error.details["missing"]) == ("model_unavailable", [[2, 4]])
        assert "my-model" in error.message and cluster.content_id not in error.message
        error = await refusal(cluster.generations.start(request(cluster)))
        assert cluster.model in error.message
        by_digest = await refusal(cluster.generations.start(request(cluster, name=cluster.content_id)))
        assert cluster.content_id in by_digest.message


async def test_a_model_that_is_gone_is_named_as_the_client_named_it(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[], settings=QUICK) as cluster:
        error = await refusal(cluster.generations.start(request(cluster, name="my-model")))
        assert error.code == "model_unavailable"
        assert "my-model" in error.message and cluster.content_id not in error.message


def test_every_word_of_the_tracker_that_a_client_hears_has_the_clients_name() -> None:
    for code in ("model_not_found", "model_unavailable", "capacity", "kv_exhausted"):
        told = of_tracker(ShardlineError(code, "'mac1-0' is full", free=3), asked="mac1-0", called="my-model")
        assert (told.code, told.message, told.details) == (code, "'my-model' is full", {"free": 3})
    hidden = of_tracker(ShardlineError("unauthorized", "mac1-0"), asked="mac1-0", called="my-model")
    assert hidden.code == "tracker_unreachable" and "mac1-0" not in hidden.message


async def test_a_fault_of_ours_leaves_no_node_under_watch(tmp_path: Path) -> None:
    """The group of a session's tasks breaks: its streams are cut, and nobody beats for it any more."""
    async with local_cluster(tmp_path, script={**LONG, "decode_ms": 20}, settings=QUICK) as cluster:
        generation = cluster.start(max_tokens=500)
        await generation.wait_open()
        session = generation._session
        assert session is not None

        async def broken() -> None:
            raise RuntimeError("a fault")

        session._tasks.create_task(broken())
        assert (await refusal(generation)).code == "internal"
        assert not cluster.generations.liveness._sessions
        await cluster.until_free()
        assert (await cluster.generate(max_tokens=3))[1].reason == "length"


async def test_the_last_answer_may_come_with_the_end_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = RouteSession._next_change

    async def late(session: RouteSession) -> None:
        await change(session)
        if session._record.phase == "opening" and all(line.opened for line in session._lines):
            raise TimeoutError

    monkeypatch.setattr(RouteSession, "_next_change", late)
    async with local_cluster(tmp_path, script=LONG, settings=QUICK) as cluster:
        assert (await cluster.generate(max_tokens=3))[1].reason == "length"
