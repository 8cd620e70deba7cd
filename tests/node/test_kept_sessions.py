"""Sessions that end well leave their caches; they give way exactly, are taken over, and end with their engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.model.backend import ShardSpec
from shardline.model.engine import InlineEngine
from shardline.model.scripted import load_inline
from shardline.settings import Settings
from shardline.wire.messages import Embed
from shardline.wire.steps import FLAG_LAST_CHUNK, FLAG_ROLLBACK, LANE_PREFILL, Entry, Step
from tests.support.bare_node import BareNode, a_bare_node, packed, tokens
from tests.support.local_cluster import SCRIPT

CAPACITY = 400


@asynccontextmanager
async def a_node(
    folder: Path, *, capacity: int = CAPACITY, slots: int | None = None, **script: Any
) -> AsyncIterator[BareNode]:
    """Its engine refuses any row above `capacity`, and any slot above `slots`."""
    settings = Settings(prefix_share=script.pop("share", 1.0), prefix_sessions=script.pop("count", 1000))
    path = folder / "script.json"
    path.write_bytes(msgspec.json.encode({**SCRIPT, "kv_capacity": capacity, **script}))
    opened: set[int] = set()

    def load() -> Any:
        backend = load_inline(ShardSpec(str(path), 0, 6))
        opened.clear()
        describe, open_one, fork, close = backend.describe, backend.open, backend.fork, backend.close

        def count(slot: int) -> None:
            if slots is not None and len(opened) >= slots:
                raise ShardlineError("capacity", "no sequence is free")
            opened.add(slot)

        def open_counted(slot: int) -> None:
            count(slot)
            open_one(slot)

        def fork_counted(source: int, target: int, tokens: int) -> None:
            count(target)
            fork(source, target, tokens)

        def close_counted(slot: int) -> None:
            opened.discard(slot)
            close(slot)

        backend.describe = lambda: replace(describe(), slots=slots)  # type: ignore[method-assign]
        backend.open, backend.fork, backend.close = open_counted, fork_counted, close_counted  # type: ignore[method-assign]
        return backend

    async with a_bare_node(InlineEngine(load, settings), settings, capacity=capacity) as node:
        yield node


async def test_a_session_that_ended_well_is_reused_and_others_are_not(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        prompt = tokens(100)
        assert await node.whole(prompt) == 0
        assert node.account() == (0, 96, 96)  # whole blocks, and the engine holds nothing else
        assert await node.whole(prompt) == 96
        assert await node.whole(prompt, key_id="somebody else") == 0
        assert await node.whole(prompt, key_id=None) == 0  # asks for nothing, leaves nothing
        assert node.account() == (0, 192, 192)


async def test_a_vector_begins_with_nothing_kept_and_leaves_nothing_whatever_its_gateway_asks(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        prompt = tokens(100)
        await node.whole(prompt)
        for wanted in (prompt, tokens(100, seed=1)):
            key, lines = node.begin(wanted, 0, embed=Embed())
            assert (await lines.until("opened"))["reusable_tokens"] == 0
            node.prefill(key, wanted, 0)
            await lines.until("embedded")
            node.host.sessions.close(key, keep=True)
            await lines.until("closed")
        assert node.account() == (0, 96, 96)
        assert await node.whole(prompt) == 96


@pytest.mark.parametrize("end", ["close", "fail", "unopened"])
async def test_what_did_not_end_well_leaves_nothing(tmp_path: Path, end: str) -> None:
    async with a_node(tmp_path) as node:
        key, lines = node.begin(tokens(100))
        if end != "unopened":
            await lines.until("opened")
            node.prefill(key, tokens(100), 0)
            await lines.until("token")
        if end == "fail":
            slot = node.host.sessions.find(key)
            assert slot is not None
            node.host.sessions.fail(slot, ShardlineError("numerical_error", "as if"))
        node.host.sessions.close(key)
        await lines.until("closed")
        assert node.account() == (0, 0, 0)


async def test_a_prompt_that_leaves_in_the_middle_of_a_block_has_what_lies_before_it(tmp_path: Path) -> None:
    async with a_node(tmp_path, capacity=1000) as node:
        prompt = tokens(150)
        await node.whole(prompt)
        other = [*prompt[:77], *tokens(60, seed=5)]
        assert await node.whole(other) == 64
        assert await node.whole(prompt) == 128
        assert await node.whole(other) == 128


async def test_a_node_that_has_more_than_the_others_goes_back(tmp_path: Path) -> None:
    """The first chunk begins below what was forked; what is kept then is what was computed last."""
    async with a_node(tmp_path) as node:
        prompt = tokens(120)
        await node.whole(prompt)
        for begin in (32, 0):
            key, lines = node.begin(prompt)
            assert (await lines.until("opened"))["reusable_tokens"] == 96
            (reject,) = node.prefill(key, prompt, begin).rejected
            assert reject.code == "seam_gap"  # not without the flag
            assert node.prefill(key, prompt, begin, back=True).rejected == []
            await lines.until("finished")
            node.host.sessions.close(key, keep=True)
            await lines.until("closed")
        assert node.account() == (0, 96, 96)
        assert [line for line in lines.said if line["event"] == "token"]


async def test_a_rollback_that_was_accepted_and_not_computed_is_not_kept_as_if_it_had_been(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        prompt = tokens(120)
        await node.whole(prompt)
        key, lines = node.begin(prompt)
        await lines.until("opened")
        slot = node.host.sessions.find(key)
        assert slot is not None
        slot.computed_end = 96  # as if it had computed what it began with
        other = tokens(120, seed=9)
        slot.accept(
            Step(Entry(key, 0, 0, 120, 0, LANE_PREFILL, FLAG_LAST_CHUNK | FLAG_ROLLBACK), packed(other), ()), 0, 0
        )
        node.host.sessions.close(key, keep=True)
        await lines.until("closed")
        assert await node.whole(other) == 0  # the engine never saw it
        assert await node.whole(prompt) == 96


async def test_what_is_kept_gives_way_oldest_first_and_only_as_much_as_needed(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        for seed in range(3):
            await node.whole(tokens(100, seed))
        assert node.account()[1] == 288
        assert await node.whole(tokens(170, 9)) == 0  # 174 of 400: two of the three must go … and one more is kept
        assert await node.whole(tokens(100, 2)) == 96
        assert await node.whole(tokens(100, 0)) == 0


async def test_where_its_own_source_is_in_the_way_a_session_takes_it_over(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        prompt = tokens(200)
        await node.whole(prompt)
        key, lines = node.begin([*prompt, *tokens(150, 3)], max_tokens=40)
        assert (await lines.until("opened"))["reusable_tokens"] == 192
        assert node.account() == (390, 0, 192)
        node.prefill(key, [*prompt, *tokens(150, 3)], 192)
        await lines.until("finished")
        node.host.sessions.close(key, keep=True)
        await lines.until("closed")
        assert node.account() == (0, 352, 352)


async def test_what_can_never_fit_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        await node.whole(tokens(100))
        with pytest.raises(ShardlineError) as caught:
            node.begin(tokens(500))
        assert caught.value.code == "kv_exhausted"
        assert node.account() == (0, 96, 96)


async def test_sequence_ids_are_bounded_too(tmp_path: Path) -> None:
    """The engine has three: what is kept gives its own up, and the last one is taken over."""
    async with a_node(tmp_path, capacity=4000, slots=3) as node:
        for seed in range(5):
            assert await node.whole(tokens(40, seed)) == 0
        assert len(node.host.sessions.prefixes) == 3
        opened = []
        for seed in (4, 4, 8):
            key, lines = node.begin(tokens(40, seed))
            opened.append((key, lines, (await lines.until("opened"))["reusable_tokens"]))
        assert [had for _, _, had in opened] == [32, 32, 0]
        assert len(node.host.sessions.prefixes) == 0
        with pytest.raises(ShardlineError) as caught:
            node.begin(tokens(40, 1))
        assert caught.value.code == "capacity"
        for key, lines, _ in opened:
            node.host.sessions.close(key)
            await lines.until("closed")


async def test_an_engine_that_lost_a_cache_is_asked_for_an_empty_slot(tmp_path: Path) -> None:
    async with a_node(tmp_path) as node:
        await node.whole(tokens(100))
        (kept,) = node.host.sessions.prefixes
        await node.engine.close(kept.number)
        key, lines = node.begin(tokens(100))
        opened = await lines.until("opened")
        assert (opened["reusable_tokens"], opened["unused"]) == (0, "lost")
        node.prefill(key, tokens(100), 0)
        await lines.until("finished")
        node.host.sessions.close(key, keep=True)
        await lines.until("closed")
        assert node.account() == (0, 96, 96)


async def test_an_engine_that_cannot_go_back_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    async with a_node(tmp_path, rollback=False) as node:
        for _ in range(2):
            key, lines = node.begin(tokens(100))
            opened = await lines.until("opened")
            assert (opened["reusable_tokens"], opened["unused"]) == (0, "engine")
            # The flag is for those of the route that have more: it is no reason to refuse a step that does not go back.
            assert node.prefill(key, tokens(100), 0, back=True).rejected == []
            await lines.until("finished")
            node.host.sessions.close(key, keep=True)
            await lines.until("closed")
            assert node.account() == (0, 0, 0)


async def test_a_node_that_is_told_to_keep_nothing(tmp_path: Path) -> None:
    async with a_node(tmp_path, count=0) as node:
        await node.whole(tokens(100))
        _, lines = node.begin(tokens(100))
        opened = await lines.until("opened")
        assert (opened["reusable_tokens"], opened["unused"]) == (0, "off")


async def test_the_loss_of_the_engine_is_the_loss_of_all_that_is_kept(tmp_path: Path) -> None:
    async with a_node(tmp_path, faults=[{"kind": "exit", "phase": "prefill", "contains": "!!!!"}]) as node:
        await node.whole(tokens(100))
        bad = [*tokens(100), *node_text(node, "!!!!")]
        key, lines = node.begin(bad)
        had = (await lines.until("opened"))["reusable_tokens"]
        node.prefill(key, bad, had)
        assert (await lines.until("failed"))["error"]["code"] == "engine_lost"
        await lines.until("closed")
        assert node.account()[:2] == (0, 0)
        async with asyncio.timeout(10):
            while node.host.state != "ready":
                await asyncio.sleep(0.02)
        assert await node.whole(tokens(100)) == 0
        assert node.account() == (0, 96, 96)


def node_text(node: BareNode, text: str) -> list[int]:
    generator = node.engine._generator
    assert generator is not None
    return generator.backend.tokenize(text, add_special=False, parse_special=False)


async def test_a_thousand_sessions_under_pressure(tmp_path: Path) -> None:
    """Four at a time, prompts that begin alike in many ways, room for a few, seven sequences. The engine refuses any
    row that does not fit, so a wrong account fails a session; at the end the engine holds what the account says."""
    chance = random.Random(7)
    stems = [tokens(chance.randrange(20, 130), seed) for seed in range(12)]
    reused = [0]
    async with a_node(tmp_path, capacity=900, slots=7, share=0.8, answer=["a", "b", "c"]) as node:

        async def client(number: int) -> None:
            for turn in range(250):
                prompt = [*chance.choice(stems), *tokens(chance.randrange(1, 60), number * 1000 + turn)]
                while True:
                    try:
                        key, lines = node.begin(prompt, chance.randrange(1, 20))
                        break
                    except ShardlineError as error:
                        assert error.code in ("kv_exhausted", "capacity")
                        await asyncio.sleep(0)
                node.account()
                opened = await lines.until("opened")
                assert "unused" not in opened
                had = opened["reusable_tokens"]
                reused[0] += had
                ending = chance.random()
                if ending < 0.1:
                    node.host.sessions.close(key)  # left before its prompt came
                    await lines.until("closed")
                    continue
                back = had >= 32 and ending < 0.3
                assert node.prefill(key, prompt, had - 32 if back else had, back=back).rejected == []
                await lines.until("token" if ending < 0.5 else "finished")
                said = [x["error"] for x in lines.said if x["event"] == "failed"]
                assert not said, said
                node.host.sessions.close(key, keep=ending > 0.4)
                await lines.until("closed")
                node.account()

        async with asyncio.TaskGroup() as clients:
            for number in range(4):
                clients.create_task(client(number))
        reserved, cached, held = node.account()
        assert (reserved, held) == (0, cached)
        assert reused[0] > 5_000, reused
