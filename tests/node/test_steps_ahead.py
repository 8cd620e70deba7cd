"""A Node whose engine takes its next decode step ahead says what one says that waits for the Node between steps."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, ShardSpec
from shardline.model.engine import Done, InlineEngine
from shardline.model.scripted import load_inline
from shardline.model.worker_engine import WorkerEngine
from shardline.settings import Settings
from shardline.wire.messages import Sampling, StepAck, TicketPeer
from shardline.wire.steps import FLAG_OUTPUT, LANE_DECODE, Entry, Step
from tests.support.bare_node import BareNode, a_bare_node, tokens
from tests.support.local_cluster import SCRIPT

CAPACITY = 4000
SETTINGS = Settings(prefix_share=1.0, worker_backoff_s=0.01)


class Watched(WorkerEngine):
    """Notes what it is given: of each batch its slots, and of which it was not told the token."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.batches: list[tuple[list[int], list[int], int]] = []
        self.under_way = 0

    def submit(self, entries: Sequence[BackendEntry], done: Done) -> None:
        self.batches.append(([e.slot for e in entries], [e.slot for e in entries if not e.tokens], self.under_way))
        self.under_way += 1

        def returned(result: Any) -> None:
            self.under_way -= 1
            done(result)

        super().submit(entries, returned)


def a_spec(folder: Path, *, last: int = 6, **script: Any) -> ShardSpec:
    path = folder / "script.json"
    path.write_bytes(msgspec.json.encode({**SCRIPT, "kv_capacity": CAPACITY, **script}))
    return ShardSpec(str(path), 0, last)


@asynccontextmanager
async def a_node(folder: Path, *, worker: bool = True, **script: Any) -> AsyncIterator[BareNode]:
    spec = a_spec(folder, **script)
    engine: Any = (
        Watched("scripted", spec, SETTINGS, inherited={})
        if worker
        else InlineEngine(lambda: load_inline(spec), SETTINGS)
    )
    async with a_bare_node(engine, SETTINGS, capacity=CAPACITY) as node:
        yield node


async def answer(node: BareNode, seed: int, max_tokens: int, *, pause_s: float = 0.0) -> list[Any]:
    """Token ids, and how it ended."""
    await asyncio.sleep(pause_s)
    prompt = tokens(20 + seed % 7, seed)
    _, lines = await node.run(prompt, max_tokens, key_id=None, sampling=Sampling(temperature=0.0))
    end = await lines.until("finished")
    spoken = [line for line in lines.said if line["event"] == "token"]
    said = [line["id"] for line in spoken]
    assert all(line["times"]["queue_ms"] >= 0 for line in spoken)
    events = [line["event"] for line in lines.said if line["event"] != "beat"]
    assert events[events.index("finished") :] == ["finished", "closed"]
    assert [line["index"] for line in lines.said if line["event"] == "token"] == list(range(len(said)))
    assert not [line for line in lines.said if line["event"] == "failed"]
    return [*said, end["reason"], end["generated"]]


async def test_sessions_that_come_and_go_say_what_they_say_without_it(tmp_path: Path) -> None:
    chance = random.Random(3)
    asked = [(seed, chance.choice([1, 2, 3, 9, 30]), chance.uniform(0, 0.3)) for seed in range(24)]
    async with a_node(tmp_path, worker=False) as node:
        alone = [await answer(node, seed, most) for seed, most, _ in asked]
    async with a_node(tmp_path, decode_ms=2) as node:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(node, seed, most, pause_s=at)) for seed, most, at in asked]
        beside = [task.result() for task in tasks]
        engine: Any = node.engine
        ahead = [batch for batch in engine.batches if batch[1]]
        assert node.account() == (0, 0, 0)
    assert beside == alone
    assert {len(said) for said in alone} > {3, 4}, "some end with their first token"
    assert len(ahead) > 20
    assert all(under_way == 1 for _, _, under_way in ahead)
    assert all(slots == untold for slots, untold, _ in ahead)
    assert max(len(slots) for slots, _, _ in ahead) > 2


async def test_the_engine_is_given_the_next_step_before_it_is_done_with_this_one(tmp_path: Path) -> None:
    async with a_node(tmp_path, decode_ms=20, answer=["alpha"] * 30) as node:
        await answer(node, 1, 8)
        engine: Any = node.engine
        prefill, first, *rest = engine.batches
        assert (prefill[1:], first[1:]) == (([], 0), ([], 0))
        assert rest and all(untold == slots and under_way == 1 for slots, untold, under_way in rest)


async def test_a_step_that_went_ahead_has_not_waited(tmp_path: Path) -> None:
    async with a_node(tmp_path, decode_ms=20, answer=["alpha"] * 30) as node:
        prompt = tokens(20)
        key, lines = node.begin(prompt, 8, sampling=Sampling(temperature=0.0))
        await lines.until("opened")
        node.prefill(key, prompt, 0)
        await lines.until("finished")
        waited = [line["times"]["queue_ms"] for line in lines.said if line["event"] == "token"]
        assert waited[2:] == [0.0] * 6


@pytest.mark.parametrize("most", [40, 60])
async def test_what_is_kept_of_an_answer_has_the_ids_that_were_said(tmp_path: Path, most: int) -> None:
    """Kept by its ids: a session that goes on behind the answer begins with it, and says what a fresh Node says."""
    script: dict[str, Any] = {"answer": [" alpha", " beta", " gamma"] * 40}
    async with a_node(tmp_path, worker=False, **script) as fresh:
        first, said = await longer(fresh, tokens(20), most)
        _, wanted = await longer(fresh, [*tokens(20), *said, 99], 6)
    async with a_node(tmp_path, **script) as node:
        first, said_too = await longer(node, tokens(20), most)
        assert (first, said_too) == (0, said)
        assert node.account()[:2] == (0, (20 + most - 1) // 32 * 32)
        had, found = await longer(node, [*tokens(20), *said, 99], 6)
        assert (had, found) == ((20 + most - 1) // 32 * 32, wanted)


async def longer(node: BareNode, prompt: list[int], most: int) -> tuple[int, list[int]]:
    """How much it did not compute, and what it said, to its length."""
    had, lines = await node.run(prompt, most, sampling=Sampling(temperature=0.0))
    assert (await lines.until("finished"))["reason"] == "length"
    return had, [line["id"] for line in lines.said if line["event"] == "token"]


async def test_a_prompt_takes_its_turn_between_the_steps_of_others(tmp_path: Path) -> None:
    """Nothing is taken ahead while a chunk waits: it begins when the two steps that the engine has are over."""
    async with a_node(tmp_path, decode_ms=10, answer=["alpha"] * 60) as node:
        long = asyncio.create_task(answer(node, 1, 40))
        engine: Any = node.engine
        async with asyncio.timeout(5):
            while len(engine.batches) < 8:
                await asyncio.sleep(0.005)
        before = len(engine.batches)
        await answer(node, 2, 3)
        new = [i for i, (slots, untold, _) in enumerate(engine.batches) if slots == [1] and not untold]
        assert before <= new[0] <= before + 3
        await long


@pytest.mark.parametrize("end", ["close", "kept", "fail", "kill"])
async def test_a_session_that_ends_in_mid_answer_leaves_the_others_and_no_cache(tmp_path: Path, end: str) -> None:
    async with a_node(tmp_path, decode_ms=5, answer=["alpha"] * 200) as node:
        prompt = tokens(40)
        begun = [node.begin(prompt, 150, sampling=Sampling(temperature=0.0)) for _ in range(2)]
        for key, lines in begun:
            await lines.until("opened")
            node.prefill(key, prompt, 0)
        (key, lines), (other, others) = begun
        for _, each in begun:
            await each.until("token")
        await asyncio.sleep(0.05)
        if end == "kill":
            pid = node.engine.health().pid
            assert pid is not None
            node.host.sessions.close(key)  # and waits for its calls
            os.kill(pid, signal.SIGKILL)
            assert (await others.until("failed"))["error"]["code"] == "engine_lost"
            for _, each in begun:
                await each.until("closed")
            assert node.host.sessions.all_freed
            async with asyncio.timeout(5):
                while node.host.state != "ready":
                    await asyncio.sleep(0.01)
        else:
            slot = node.host.sessions.find(key)
            assert slot is not None
            if end == "fail":
                node.host.sessions.fail(slot, ShardlineError("numerical_error", "as if"))
            else:
                node.host.sessions.close(key, keep=end == "kept")
            await lines.until("closed")
            assert (await others.until("finished"))["generated"] == 150
            node.host.sessions.close(other)
            await others.until("closed")
        reserved, cached, held = node.account()
        assert (reserved, cached) == (0, held)
        assert held % 32 == 0 and (held > 0) == (end == "kept")
        assert (await answer(node, 5, 4))[-1] == 4


class GoesBackSlowly(InlineEngine):
    """Its rollback waits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def rollback(self, slot: int, position: int) -> None:
        self.asked.set()
        await self.go_on.wait()
        await super().rollback(slot, position)

    def lose(self) -> None:
        self._lose(ShardlineError("engine_lost", "as if"))


@pytest.mark.parametrize("first", ["closed", "lost"])
async def test_an_engine_that_is_lost_while_a_closed_session_goes_back(tmp_path: Path, first: str) -> None:
    engine = GoesBackSlowly(lambda: load_inline(a_spec(tmp_path)), SETTINGS)
    async with a_bare_node(engine, SETTINGS, capacity=CAPACITY) as node:
        prompt = tokens(100)
        await node.whole(prompt)
        key, lines = node.begin(prompt)
        assert (await lines.until("opened"))["reusable_tokens"] == 96
        assert node.prefill(key, prompt, 32, back=True).rejected == []
        await engine.asked.wait()
        if first == "closed":
            node.host.sessions.close(key)
        engine.lose()
        engine.go_on.set()
        await lines.until("closed")
        assert node.host.sessions.all_freed
        assert node.host.sessions.ledger.reserved == 0


class Noting:
    """A carrier that delivers nothing, and an engine's `submit` beside it: what happened in which order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def push_now(self, hop_url: str, pieces: Sequence[Any], *, timeout_s: float, limit: str, done: Any) -> bool:
        self.order.append("push")
        return True

    async def push(self, hop_url: str, pieces: Sequence[Any], **limits: Any) -> StepAck:
        return StepAck()

    def watch(self, engine: Any) -> None:
        submit = engine.submit

        def noted(entries: Any, done: Any) -> None:
            self.order.append(f"engine {[e.slot for e in entries]}")
            submit(entries, done)

        engine.submit = noted


async def test_an_engine_begins_with_what_waits_before_the_last_rows_are_pushed(tmp_path: Path) -> None:
    """A push may lose its core to a neighbour that computes; the engine shall not wait for that."""
    engine = InlineEngine(lambda: load_inline(a_spec(tmp_path, last=3, decode_ms=20)), SETTINGS)
    noting = Noting()
    async with a_bare_node(engine, SETTINGS, capacity=CAPACITY, carrier=noting) as node:
        prompt, route = tokens(20), {"hops": 2, "last": 3, "next": TicketPeer(node="n-next", url="http://next")}
        begun = [node.begin(prompt, 9, key_id=None, ticket=route) for _ in range(2)]
        for key, lines in begun:
            await lines.until("opened")
            assert node.prefill(key, prompt, 0).rejected == []
        async with asyncio.timeout(5):
            while any(slot.running or slot.queue for slot in node.host.sessions):
                await asyncio.sleep(0.005)
        node.host._schedule.decoded(20.0)  # a row costs more than a hop: each session is a batch
        noting.watch(engine)
        for key, _ in begun:
            step = Step(Entry(key, 1, 20, 1, 0, LANE_DECODE, FLAG_OUTPUT), bytes(4), ())
            assert node.host.accept([step]) == StepAck()
        async with asyncio.timeout(5):
            while noting.order.count("push") < 2:
                await asyncio.sleep(0.005)
        assert noting.order == ["engine [0]", "engine [1]", "push", "push"]
