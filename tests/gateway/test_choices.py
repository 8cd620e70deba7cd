"""Several generations into one line of events; whatever happens, none is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.choices import Added, Choice, Ended, Events, opened, running
from shardline.gateway.detokenize import TextStream, Vocabulary
from shardline.gateway.generate_api import GenerationRequest
from shardline.wire.messages import Sampling
from tests.support.gateway_stand import Act, Fail, Open, Pause, Refuse, ScriptedGeneration, Stand, Wait, bundle, say

VOCABULARY = Vocabulary(bundle())
LOST = ShardlineError("node_lost", "gone", node="n-1")


def choices(*scripts: Sequence[Act], stops: tuple[str, ...] = (), max_tokens: int = 100) -> list[Choice]:
    request = GenerationRequest(
        content_id="mac1-0",
        model="m",
        prompt=[1, 2],
        max_tokens=max_tokens,
        sampling=Sampling(),
        stop=stops,
        key_id="k",
    )
    stand = Stand()
    return [
        Choice(index, ScriptedGeneration(stand, request, acts, index), TextStream(VOCABULARY, stops))
        for index, acts in enumerate(scripts)
    ]


def scripted(choice: Choice) -> ScriptedGeneration:
    assert isinstance(choice.generation, ScriptedGeneration)
    return choice.generation


async def collect(events: Events, count: int) -> tuple[list[str], list[Ended]]:
    texts = [""] * count
    ends: list[Ended] = []
    while len(ends) < count:
        batch = await events.batch(5)
        assert batch is not None
        for event in batch.happened:
            if isinstance(event, Added):
                texts[event.index] += event.delta.text
            else:
                ends.append(event)
    return texts, ends


async def test_each_choice_keeps_its_own_text() -> None:
    made = choices(say(b"a", b"b"), say(b"c"), say())
    async with running(made, limit_s=1) as events:
        texts, ends = await collect(events, 3)
    assert texts == ["ab", "c", ""]
    assert sorted(end.index for end in ends) == [0, 1, 2]
    assert [choice.generated for choice in made] == [2, 1, 0]
    assert all(scripted(choice).cancelled is None for choice in made)


async def test_a_stop_string_ends_the_generation_and_counts_to_its_last_token() -> None:
    (made,) = choices(say(b"x", b"E", b"N", b"D", b"y", b"z"), stops=("END",))
    async with running([made], limit_s=1) as events:
        texts, ends = await collect(events, 1)
    assert (texts, ends[0].reason, made.generated) == (["x"], "stop", 4)
    assert scripted(made).stopped and scripted(made).cancelled is None


@pytest.mark.parametrize(
    ("pieces", "stops", "limit", "reason"),
    [
        ((b"a", b"b", b"c"), (), 1, "length"),
        ((b"a", b"b"), (), 3, "stop"),
        ((b"a", b"b"), ("b",), 2, "stop"),
        ((b"a", b"\xe6"), ("\ufffd",), 2, "stop"),
        ((b"a", b"<"), ("<>",), 2, "length"),
    ],
)
async def test_reasons(pieces: tuple[bytes, ...], stops: tuple[str, ...], limit: int, reason: str) -> None:
    made = choices(say(*pieces), stops=stops, max_tokens=limit)
    async with running(made, limit_s=1) as events:
        _, ends = await collect(events, 1)
    assert ends[0].reason == reason


async def test_a_failure_comes_behind_the_text_and_the_others_are_cancelled() -> None:
    hung = asyncio.Event()
    made = choices([*say(b"a", b"b"), Fail(LOST)], [*say(b"c"), Wait(hung)])
    texts = [""] * 2
    with pytest.raises(ShardlineError) as caught:
        async with running(made, limit_s=1) as events:
            while True:
                batch = await events.batch(5)
                for event in batch.happened if batch else ():
                    if isinstance(event, Added):
                        texts[event.index] += event.delta.text
    assert caught.value is LOST
    assert texts == ["ab", "c"]
    assert scripted(made[1]).cancelled is not None


async def test_a_foreign_token_fails_the_choice() -> None:
    (made,) = choices(say(b"a", 9999))
    with pytest.raises(ShardlineError) as caught:
        async with running([made], limit_s=1) as events:
            await collect(events, 1)
    assert caught.value.code == "engine_error"
    assert scripted(made).cancelled is not None


async def test_a_fault_of_ours_comes_out_as_itself() -> None:
    made = choices([*say(b"a"), Fail(ZeroDivisionError())])
    with pytest.raises(ZeroDivisionError):
        async with running(made, limit_s=1) as events:
            await collect(events, 1)


async def test_leaving_cancels_all_that_run() -> None:
    hung = asyncio.Event()
    made = choices([Wait(hung)], [Open(), Wait(hung)], say(b"a"))

    async def client() -> None:
        async with running(made, limit_s=1) as events:
            while True:
                await events.batch(5)

    task = asyncio.create_task(client())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [scripted(choice).cancelled is not None for choice in made] == [True, True, False]


async def test_a_generation_that_does_not_close_is_left_after_the_limit() -> None:
    class Stubborn(ScriptedGeneration):
        async def cancel(self, reason: str) -> None:
            await asyncio.Event().wait()

    (made,) = choices([Wait(asyncio.Event())])
    made.generation = Stubborn(Stand(), scripted(made).request, [Wait(asyncio.Event())], 0)
    async with asyncio.timeout(5):
        async with running([made], limit_s=0.02):
            pass


async def test_telemetry_that_nobody_took_is_replaced() -> None:
    made = choices([Open(), *[Pause()] * 3, *say(b"a")])
    async with running(made, limit_s=1) as events:
        await asyncio.sleep(0.02)
        batch = await events.batch(1)
    assert batch is not None
    assert batch.telemetry[0].phase == "prefill"
    assert [type(event) for event in batch.happened] == [Added, Ended]


async def test_silence() -> None:
    async with running(choices([Open(), Wait(asyncio.Event())]), limit_s=1) as events:
        assert await events.batch(1) is not None
        while await events.batch(0.01) is not None:
            pass


async def test_opened_waits_for_all_and_raises_the_first_refusal() -> None:
    gate = asyncio.Event()
    made = choices([Wait(gate), Open()], [Open()])
    async with running(made, limit_s=1):
        assert not await opened(made, within_s=0.02)
        gate.set()
        assert await opened(made, within_s=5)
    refused = choices([Wait(asyncio.Event()), Open()], [Refuse(ShardlineError("queue_full", "full"))])
    async with running(refused, limit_s=1):
        with pytest.raises(ShardlineError) as caught:
            await opened(refused, within_s=5)
    assert caught.value.code == "queue_full"
