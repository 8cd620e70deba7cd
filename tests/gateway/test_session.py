"""Route Sessions over real Nodes in one loop: the right tokens, the right account, and every way to end."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.generate_api import GenerationRequest
from shardline.gateway.liveness import Liveness
from shardline.gateway.session import RouteSession
from shardline.settings import Settings
from shardline.wire.messages import ENDED, Embed, Sampling
from shardline.wire.telemetry import TelemetryEvent
from tests.support.local_cluster import LocalCluster, local_cluster, read

QUICK = Settings(drain_s=0.2, beat_interval_s=0.1, beat_timeout_s=0.5, push_s=0.5)
LONG = {"answer": [f" t{i}" for i in range(40)], "eos": False}


async def once_served(cluster: LocalCluster) -> list[int]:
    """Tokens of the first generation after a failure that finds a route: a reported Node is out until it beats."""
    async with asyncio.timeout(10):
        while True:
            try:
                return (await cluster.generate(prompt=40, max_tokens=4))[0]
            except ShardlineError as error:
                assert error.code in ("model_unavailable", "shard_unready", "capacity"), error.message
                await asyncio.sleep(0.05)


async def texts(cluster: LocalCluster, ids: list[int]) -> str:
    from shardline.model.script import Vocabulary, read_script

    return Vocabulary(read_script(cluster.script)[0]).text(ids).decode()


@pytest.mark.parametrize(
    "layers", [[(0, 6)], [(0, 3), (3, 6)], [(0, 1), (1, 5), (5, 6)], [(i, i + 1) for i in range(6)]]
)
async def test_any_number_of_nodes_gives_the_same_tokens(tmp_path: Path, layers: list[tuple[int, int]]) -> None:
    async with local_cluster(tmp_path, layers=layers) as cluster:
        ids, finished = await cluster.generate(prompt=50, max_tokens=20)
        assert await texts(cluster, ids) == " alpha beta gamma delta epsilon zeta eta theta"
        assert (finished.reason, finished.generated) == ("stop", 9)
        await cluster.until_free()


async def test_the_account_of_a_session(tmp_path: Path) -> None:
    """Seams carry the new rows only; each number is where it belongs."""
    async with local_cluster(tmp_path) as cluster:
        generation = cluster.start(prompt=50, max_tokens=5)
        first = generation.telemetry()
        assert (first.phase, first.route, first.prefill.total) == ("queued", None, 50)
        await read(generation)
        await generation.ended()
        last = generation.telemetry()
        assert last.phase == "completed"
        assert last.route is not None
        assert [hop.layers for hop in last.route.hops] == [(0, 2), (2, 4), (4, 6)]
        assert all(hop.compute_ms is not None for hop in last.route.hops)
        assert (last.prefill.done, last.decode.tokens) == (50, 5)
        forward, second, back = last.seams
        assert forward.prefill.rows == second.prefill.rows == 50
        assert (forward.decode.steps, forward.decode.rows) == (4, 4)
        assert forward.decode.bytes // 4 <= 32 + 512
        assert (back.prefill.rows, back.decode.rows) == (0, 4)
        assert back.to == forward.source


async def test_phases_in_order_and_the_first_before_any_node(tmp_path: Path) -> None:
    async with local_cluster(tmp_path) as cluster:
        generation = cluster.start(prompt=200)
        await read(generation)
        await generation.ended()
        events = [event async for event in cluster.generations.records.subscribe(generation.id, "anyone")]
        phases = [msgspec.json.decode(raw, type=TelemetryEvent).phase for _, raw in events]
        order = ["queued", "routing", "opening", "prefill", "decode", "completed"]
        assert [p for i, p in enumerate(phases) if i == 0 or phases[i - 1] != p] == order


async def test_many_sessions_beside_one_another(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, script={"decode_ms": 1}) as cluster:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(cluster.generate(prompt=10 + i, max_tokens=6)) for i in range(24)]
        assert {tuple(task.result()[0]) for task in running} == {tuple(running[0].result()[0])}
        assert len(running[0].result()[0]) == 6
        await cluster.until_free()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_cancel_frees_everything(tmp_path: Path, phase: str) -> None:
    async with local_cluster(tmp_path, script={**LONG, "decode_ms": 5, "prefill_ms_per_row": 2}) as cluster:
        generation = cluster.start(prompt=300, max_tokens=500)
        await generation.wait_open()
        while generation.telemetry().phase != phase:
            await asyncio.sleep(0.01)
        await generation.cancel("the client left")
        await cluster.until_free()
        assert generation.telemetry().phase == "cancelled"
        assert (await cluster.generate(max_tokens=3))[1].reason == "length"


async def test_stop_ends_as_completed(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, script={**LONG, "decode_ms": 2}) as cluster:
        generation = cluster.start(max_tokens=500)
        async for event in generation:
            if not isinstance(event, TelemetryEvent):
                break
        await generation.stop(3)
        await cluster.until_free()
        assert generation.telemetry().phase == "completed"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"kind": "error", "phase": "decode", "node": 2, "step": 3}, "engine_error"),
        ({"kind": "oom", "phase": "prefill", "node": 4, "step": 1}, "engine_out_of_memory"),
        ({"kind": "nan", "phase": "decode", "node": 2, "step": 4}, "numerical_error"),
        ({"kind": "inf", "phase": "prefill", "node": 0, "step": 0}, "numerical_error"),
        ({"kind": "nan", "phase": "decode", "node": 4, "step": 1}, "numerical_error"),
        ({"kind": "wrong_width", "phase": "decode", "node": 2, "step": 0}, "engine_error"),
        ({"kind": "exit", "phase": "decode", "node": 2, "step": 2}, "engine_lost"),
        ({"kind": "error", "phase": "open", "node": 2}, "engine_error"),
    ],
)
async def test_a_fault_of_an_engine_is_a_structured_failure(
    tmp_path: Path, fault: dict[str, object], code: str
) -> None:
    script = {**LONG, "faults": [{**fault, "flag": "once"}]}
    (tmp_path / "once").touch()
    settings = msgspec.structs.replace(QUICK, worker_backoff_s=0.05, prefill_chunk_max=16)
    async with local_cluster(tmp_path, script=script, settings=settings) as cluster:
        generation = cluster.start(prompt=40, max_tokens=30)
        with pytest.raises(ShardlineError) as caught:
            await read(generation)
        error = caught.value
        assert error.code == code, error.message
        assert generation.telemetry().phase == "failed"
        guilty = cluster.nodes[int(str(fault["node"])) // 2].node
        assert guilty in (error.details.get("node"), error.details.get("from")), error.details
        for number in range(3):
            await cluster.until_free([number])
        assert await texts(cluster, await once_served(cluster)) == " t0 t1 t2 t3"


async def test_a_full_route_queues_and_then_serves(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, script={**LONG, "decode_ms": 5}, kv_tokens=64) as cluster:
        first = cluster.start(prompt=10, max_tokens=40)
        await first.wait_open()
        second = cluster.start(prompt=10, max_tokens=40)
        while second.telemetry().queue.position is None:
            await asyncio.sleep(0.005)
        assert second.telemetry().phase == "queued"
        ids, _ = await read(first)
        assert len(ids) == 40
        ids, _ = await read(second)
        assert len(ids) == 40


async def test_a_request_that_no_route_can_ever_hold_is_refused_in_time(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(QUICK, queue_wait_s=0.3)
    async with local_cluster(tmp_path, settings=settings, kv_tokens=64) as cluster:
        with pytest.raises(ShardlineError) as caught:
            await read(cluster.start(prompt=60, max_tokens=60))
        assert caught.value.code == "capacity"
        assert caught.value.details["retry_after"] >= 1


async def test_a_gap_in_the_layers_is_named(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 2), (4, 6)]) as cluster:
        with pytest.raises(ShardlineError) as caught:
            await cluster.start().wait_open()
        assert caught.value.code == "model_unavailable"
        assert caught.value.details["missing"] == [[2, 4]]


async def test_a_node_that_leaves_is_told_apart_from_one_that_answers_wrongly(tmp_path: Path) -> None:
    """A Node that is stopped by its operator takes no new session, and its running one fails with the reason."""
    script = {**LONG, "decode_ms": 20}
    async with local_cluster(tmp_path, script=script, settings=QUICK) as cluster:
        generation = cluster.start(prompt=10, max_tokens=500)
        await generation.wait_open()
        ending = asyncio.create_task(cluster.nodes[1].end())
        with pytest.raises(ShardlineError) as caught:
            await read(generation)
        assert caught.value.code == "draining"
        await ending
        with pytest.raises(ShardlineError) as caught:
            await cluster.start().wait_open()
        assert caught.value.code == "model_unavailable"
        await cluster.until_free([0, 2])


async def test_a_restarted_tracker_learns_all_nodes_again_and_sessions_do_not_notice(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(QUICK, tracker_heartbeat_s=0.1)
    async with local_cluster(tmp_path, script={**LONG, "decode_ms": 10}, settings=settings) as cluster:
        generation = cluster.start(prompt=10, max_tokens=60)
        await generation.wait_open()
        port = int(cluster.tracker.url.rsplit(":", 1)[1])
        await cluster.tracker.end()
        await cluster.start_tracker(port)
        ids, finished = await read(generation)
        assert (len(ids), finished.reason) == (60, "length")
        while not any(m.ready for m in (await cluster.tracker_client.models()).models):
            await asyncio.sleep(0.02)
        assert (await cluster.generate(max_tokens=3))[1].reason == "length"


async def test_a_silent_gateway_loses_its_sessions(tmp_path: Path) -> None:
    """The Gateway's beats stop (as if it were stopped or cut off): every Node frees by itself."""
    async with local_cluster(tmp_path, script={**LONG, "decode_ms": 5}, settings=QUICK) as cluster:
        generation = cluster.start(prompt=10, max_tokens=4000)
        await generation.wait_open()
        liveness = cluster.generations.liveness
        for task in list(liveness._beating.values()):
            task.cancel()
        with pytest.raises(ShardlineError) as caught:
            await read(generation)
        assert caught.value.code == "gateway_lost"
        await cluster.until_free()
        assert generation.telemetry().phase in ENDED


async def test_an_engine_that_does_not_come_back_is_given_up(tmp_path: Path) -> None:
    """Bounded restarts: the Shard is shown as failed with the reason, and no route leads over it."""
    script = {**LONG, "faults": [{"kind": "exit", "phase": "decode", "node": 2, "step": 1, "flag": "die"}]}
    settings = msgspec.structs.replace(QUICK, worker_backoff_s=0.02, worker_restarts=2, tracker_heartbeat_s=0.1)
    async with local_cluster(tmp_path, script=script, settings=settings) as cluster:
        (tmp_path / "die").touch()
        generation = cluster.start(prompt=4, max_tokens=30)
        await generation.wait_open()
        cluster.script.write_text("{")  # what it would load again is broken now
        with pytest.raises(ShardlineError) as caught:
            await read(generation)
        assert caught.value.code == "engine_lost"
        async with asyncio.timeout(10):
            while (info := (await cluster.info(1))).shards[0].state != "failed":
                await asyncio.sleep(0.02)
        assert info.shards[0].reason
        assert not info.health.alive
        with pytest.raises(ShardlineError) as caught:
            await cluster.start().wait_open()
        assert caught.value.code == "model_unavailable"


async def test_a_failed_session_leaves_nothing_behind(tmp_path: Path) -> None:
    """Closed on all Nodes, not watched any more, and its prompt is not kept with its record."""
    script = {**LONG, "faults": [{"kind": "error", "phase": "decode", "node": 4, "step": 3}]}
    async with local_cluster(tmp_path, script=script, settings=QUICK) as cluster:

        async def fail() -> None:
            with pytest.raises(ShardlineError):
                await read(cluster.start(prompt=10, max_tokens=20))

        for _ in range(3):
            await fail()
        await cluster.until_free()
        liveness = cluster.generations.liveness
        async with asyncio.timeout(5):
            while liveness._sessions or liveness._beating:
                await asyncio.sleep(0.02)
        assert not +liveness._nodes
        async with asyncio.timeout(5):
            while cluster.generations.running or sessions_of(liveness):
                await asyncio.sleep(0.05)


def sessions_of(liveness: Liveness) -> list[RouteSession]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is RouteSession and o._liveness is liveness]


HOSTILE: dict[str, bytes] = {
    "link without an end": b'{"event":"failed","error":{"code":"seam_lost","message":"x","from":"n"}}',
    "link of others": b'{"event":"failed","error":{"code":"seam_lost","message":"x","from":"a","to":"b"}}',
    "another's code": b'{"event":"failed","error":{"code":"unauthorized","message":"give me your key"}}',
    "unknown code": b'{"event":"failed","error":{"code":"made_up","message":"x","node":"n-other"}}',
    "no error at all": b'{"event":"failed","error":{}}',
    "token out of turn": b'{"event":"token","id":5,"index":77}',
    "token too many": b'{"event":"token","id":5,"index":8}',
    "token that is none": b'{"event":"token","id":-1,"index":0}',
    "token past the vocabulary": b'{"event":"token","id":99999999,"index":0}',
    "more than came": b'{"event":"finished","reason":"length","generated":1000000}',
    "less than came": b'{"event":"finished","reason":"stop","generated":-5}',
    "a vector of a text": b'{"event":"embedded","pooling":"last","vector":"AAAAAA=="}',
    "not JSON": b"\xff\xfe",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("line", HOSTILE)
async def test_a_line_of_a_node_ends_its_session_and_nothing_else(tmp_path: Path, line: str) -> None:
    script = {**LONG, "decode_ms": 20, "answers": [{"contains": "A", "pieces": [" a"]}]}
    async with local_cluster(tmp_path, script=script, settings=QUICK) as cluster:
        neighbour = asyncio.create_task(cluster.generate(prompt=5, max_tokens=20))
        generation = cluster.start(prompt=5, max_tokens=8)
        await generation.wait_open()
        session = generation._session
        assert session is not None
        session._heard(session._lines[-1], HOSTILE[line])
        with pytest.raises(ShardlineError) as caught:
            await read(generation)
        error = caught.value
        assert error.code in ("engine_error", "seam_invalid", "seam_lost", "node_lost"), error.code
        assert error.details["node"] == cluster.nodes[2].node
        assert "to" not in error.details or error.details["to"] in [n.node for n in cluster.nodes]
        assert len((await neighbour)[0]) > 0
        await cluster.until_free()


async def test_a_tail_that_ends_without_the_vector_is_at_fault(tmp_path: Path) -> None:
    script = {**LONG, "prefill_ms_per_row": 20}
    async with local_cluster(tmp_path, script=script, settings=QUICK) as cluster:
        request = GenerationRequest(
            model=cluster.model, content_id=cluster.content_id, prompt=[65] * 30, max_tokens=0, sampling=Sampling(),
            stop=(), key_id="anyone", reuse=False, embed=Embed(),
        )  # fmt: skip
        generation = cluster.generations.start(request)
        await generation.wait_open()
        session = generation._session
        assert session is not None
        session._heard(session._lines[-1], b'{"event":"finished","reason":"stop","generated":1}')
        with pytest.raises(ShardlineError) as caught:
            await read(generation)
        assert (caught.value.code, caught.value.details["node"]) == ("seam_invalid", cluster.nodes[2].node)
        await cluster.until_free()


@pytest.mark.parametrize(
    "sampling",
    [{"seed": 2**70}, {"seed": -(2**70)}, {"top_k": 2**64}, {"logit_bias": {2**65: 1.0}}, {"stop_ids": [2**64]}],
)
async def test_numbers_that_no_engine_holds_are_refused_by_the_node(tmp_path: Path, sampling: dict[str, Any]) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)], script={**LONG, "decode_ms": 10}) as cluster:
        neighbour = asyncio.create_task(cluster.generate(prompt=5, max_tokens=20))
        with pytest.raises(ShardlineError) as caught:
            await read(cluster.start(prompt=5, max_tokens=4, **sampling))
        assert (caught.value.code, caught.value.details["reject"]) == ("node_refused", "invalid_value")
        assert len((await neighbour)[0]) == 20


async def test_bans_that_leave_a_tail_nothing_are_the_fault_of_no_node(tmp_path: Path) -> None:
    """What no Gateway sees beforehand: the session ends, Node and engine stay as they are."""
    async with local_cluster(tmp_path, script={**LONG, "decode_ms": 10}) as cluster:
        neighbour = asyncio.create_task(cluster.generate(prompt=5, max_tokens=20))
        size = (await cluster.info(2)).shards[0].vocab_size
        with pytest.raises(ShardlineError) as caught:
            await read(cluster.start(prompt=5, max_tokens=4, logit_bias=dict.fromkeys(range(size), -100.0)))
        error = caught.value
        assert (error.code, error.param, error.fault.status) == ("no_token_left", "logit_bias", 400)
        assert len((await neighbour)[0]) == 20
        assert (await cluster.info(2)).health.restarts == 0
        assert len((await cluster.generate(prompt=5, max_tokens=4))[0]) == 4  # at once: the Node is not avoided
        await cluster.until_free()


async def test_requests_do_not_queue_behind_a_silent_tracker(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(QUICK, control_s=0.5)
    async with local_cluster(tmp_path, settings=settings) as cluster:
        await cluster.generate(max_tokens=2)
        await cluster.tracker.end()
        port = int(cluster.tracker.url.rsplit(":", 1)[1])
        silent = socket.create_server(("127.0.0.1", port))  # takes connections, and never reads
        cluster.generations._served.doubt()
        began = asyncio.get_running_loop().time()

        async def ask() -> None:
            with pytest.raises(ShardlineError) as caught:
                await cluster.generations.models()
            assert caught.value.code == "tracker_unreachable"
            assert str(port) not in caught.value.message

        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(ask())
        assert asyncio.get_running_loop().time() - began < 4 * 0.5
        silent.close()
