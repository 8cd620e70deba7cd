"""Texts beside the engine: two at a time, a bounded queue, a limit for each, and no step that waits for one."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.model import channel, worker_texts
from shardline.model.backend import BackendEntry, ShardSpec, SlotSpec
from shardline.model.channel import Refused, Tokenize, frame
from shardline.model.engine import BatchResult
from shardline.model.worker_engine import WorkerEngine
from shardline.model.worker_texts import LANES, WAITING, TextLanes, answer_texts
from shardline.settings import Settings
from shardline.wire.messages import Sampling

SETTINGS = Settings(control_s=5.0, step_s=10.0)


class Tokenizer:
    """One id a character. A text that begins with `wait` is held until `go`; one that is `bad` is refused."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self, request: Tokenize) -> list[int]:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            if request.text.startswith("wait"):
                assert self.go.wait(10)
            if request.text == "bad":
                raise ShardlineError("text_unavailable", "no tokenizer", reason="none")
            if request.text == "worse":
                raise RuntimeError("a bug of the tokenizer")
            return [ord(c) for c in request.text]
        finally:
            with self._lock:
                self.running -= 1


class Stand:
    """Both ends of the lanes in one process."""

    def __init__(self, settings: Settings) -> None:
        self.tokenizer = Tokenizer()
        self.garbage: list[ShardlineError] = []
        pairs = [socket.socketpair() for _ in range(LANES)]
        self.lanes = TextLanes([ours for ours, _ in pairs], settings, self.garbage.append)
        self.threads = [
            threading.Thread(target=answer_texts, args=(theirs, self.tokenizer), daemon=True) for _, theirs in pairs
        ]
        self.ends = [theirs for _, theirs in pairs]
        for thread in self.threads:
            thread.start()

    async def ids(self, text: str) -> list[int]:
        return await self.lanes.tokenize(Tokenize(text, False, True))

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(5):
            while self.tokenizer.running != count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def stand(settings: Settings = SETTINGS) -> AsyncIterator[Stand]:
    made = Stand(settings)
    try:
        yield made
    finally:
        made.tokenizer.go.set()
        made.lanes.close()
        for thread in made.threads:
            await asyncio.to_thread(thread.join, 5)
            assert not thread.is_alive(), "a thread ends when the Node closes its end"
        for end in made.ends:
            end.close()


def failure(task: asyncio.Task[list[int]]) -> tuple[str, dict[str, Any]]:
    error = task.exception()
    assert isinstance(error, ShardlineError)
    return error.code, error.details


async def test_two_texts_at_a_time_and_the_rest_in_order() -> None:
    async with stand() as made, asyncio.TaskGroup() as tasks:
        texts = ["wait a", "wait b", "c", "d"]
        asked = [tasks.create_task(made.ids(text)) for text in texts]
        await made.until_running(LANES)
        assert not any(task.done() for task in asked)
        made.tokenizer.go.set()
        assert [await task for task in asked] == [[ord(c) for c in text] for text in texts]
        assert made.tokenizer.most == LANES


async def test_a_long_text_does_not_hold_up_the_short_ones_behind_it() -> None:
    async with stand() as made, asyncio.TaskGroup() as tasks:
        long = tasks.create_task(made.ids("wait"))
        await made.until_running(1)
        assert [await made.ids(text) for text in ("a", "b", "c")] == [[97], [98], [99]]
        assert not long.done()
        made.tokenizer.go.set()


async def test_large_texts_cross_whole() -> None:
    async with stand() as made:
        text = "x" * (3 << 20)
        assert await made.ids(text) == [120] * (3 << 20)


async def test_each_text_has_the_limit_for_itself_and_its_lane_comes_back() -> None:
    async with stand(Settings(control_s=0.15)) as made:
        asked = [asyncio.create_task(made.ids(text)) for text in ("wait 1", "wait 2", "behind")]
        await asyncio.wait(asked)
        assert [failure(task) for task in asked] == [("deadline", {"limit": "control"})] * 3
        made.tokenizer.go.set()
        await made.until_running(0)
        assert await made.ids("a") == [97]
        assert not made.garbage, "late answers are nobody's fault"


async def test_the_queue_is_bounded_and_who_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand() as made:
        asked = [asyncio.create_task(made.ids(f"wait {i}")) for i in range(LANES + WAITING)]
        await made.until_running(LANES)
        with pytest.raises(ShardlineError) as refused:
            await made.ids("one too many")
        assert refused.value.code == "queue_overflow"
        asked[-1].cancel()
        await asyncio.wait({asked[-1]})
        monkeypatch.setattr(worker_texts, "WAITING_BYTES", 10)
        with pytest.raises(ShardlineError) as heavy:
            await made.ids("many bytes wait")
        assert heavy.value.code == "queue_overflow"
        monkeypatch.undo()
        asked[-1] = asyncio.create_task(made.ids("a"))
        made.tokenizer.go.set()
        await asyncio.wait(asked)
        assert asked[0].result() == [ord(c) for c in "wait 0"]
        assert asked[-1].result() == [97]


async def test_a_refusal_and_a_fault_are_answers() -> None:
    async with stand() as made:
        with pytest.raises(ShardlineError) as refused:
            await made.ids("bad")
        assert (refused.value.code, refused.value.details) == ("text_unavailable", {"reason": "none"})
        with pytest.raises(ShardlineError) as fault:
            await made.ids("worse")
        assert fault.value.code == "engine_error"
        assert await made.ids("a") == [97]


async def test_what_passes_no_frame_is_refused_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen megabytes of text can be more token ids than a frame holds: that ends a request, not an engine."""
    async with stand() as made:
        monkeypatch.setattr(channel, "FRAME_LIMIT", 2000)
        for text in ("x" * 3000, "\u0644" * 900):  # the text itself; its ids, three bytes each
            with pytest.raises(ShardlineError) as refused:
                await made.ids(text)
            assert (refused.value.code, "too long" in refused.value.message) == ("invalid_value", True)
        assert await made.ids("a") == [97]
        with pytest.raises(ShardlineError) as surrogate:
            await made.ids("\ud800")
        assert surrogate.value.code == "invalid_value"


async def test_a_lost_worker_is_told_to_all_that_wait() -> None:
    async with stand() as made:
        asked = [asyncio.create_task(made.ids(f"wait {i}")) for i in range(4)]
        await made.until_running(LANES)
        made.lanes.fail(ShardlineError("engine_lost", "killed"))
        await asyncio.wait(asked)
        assert [failure(task) for task in asked] == [("engine_lost", {})] * 4


async def test_only_when_no_lane_is_left_is_the_worker_hung() -> None:
    async with stand() as made, asyncio.TaskGroup() as tasks:
        far = 1e12
        assert made.lanes.hung(far) is None
        tasks.create_task(made.ids("wait 1"))
        await made.until_running(1)
        assert made.lanes.hung(far) is None
        tasks.create_task(made.ids("wait 2"))
        await made.until_running(2)
        hung = made.lanes.hung(far)
        assert hung is not None
        assert (hung.code, hung.details) == ("deadline", {"limit": "step"})
        assert made.lanes.hung(0.0) is None
        made.tokenizer.go.set()


@pytest.mark.parametrize("data", [b"HTTP/1.1 200 OK\r\n\r\n", frame(Refused(channel.Fault("engine_error", "x")))])
async def test_what_no_worker_sends_is_reported(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    garbage: list[ShardlineError] = []
    lanes = TextLanes([ours], SETTINGS, garbage.append)
    theirs.sendall(data)
    async with asyncio.timeout(5):
        while not garbage:
            await asyncio.sleep(0.005)
    assert garbage[0].code == "engine_lost"
    lanes.close()
    theirs.close()


# ---- with a real worker --------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(spec: ShardSpec, settings: Settings) -> AsyncIterator[WorkerEngine]:
    engine = WorkerEngine("scripted", spec, settings, inherited={})
    try:
        await engine.start()
        await engine.open(0, SlotSpec(2, 10, Sampling(temperature=0.0)))
        yield engine
    finally:
        await engine.stop()


async def test_a_text_is_tokenised_while_a_batch_runs(
    spec: Callable[..., ShardSpec], entry: Callable[..., BackendEntry]
) -> None:
    made = spec(faults=[{"kind": "hang", "phase": "prefill", "flag": "now"}])
    flag = Path(made.model).parent / "now"
    async with running(made, Settings(worker_backoff_s=0.01)) as engine:
        flag.touch()
        results: list[BatchResult] = []
        engine.submit([entry(0, [1, 2])], results.append)
        async with asyncio.timeout(5):
            while flag.exists():
                await asyncio.sleep(0.01)
            assert await engine.tokenize("ab", add_special=False, parse_special=True)
        assert results == [], "the batch still runs"


async def test_batches_run_while_a_text_is_tokenised(
    spec: Callable[..., ShardSpec], entry: Callable[..., BackendEntry], submit: Callable[..., Any]
) -> None:
    async with running(spec(), Settings(control_s=60.0)) as engine, asyncio.TaskGroup() as tasks:
        long = tasks.create_task(engine.tokenize("x" * (1 << 20), add_special=False, parse_special=True))
        await asyncio.sleep(0)
        position = 2
        await submit(engine, entry(0, [1, 2]))
        for _ in range(3):
            await submit(engine, entry(position, [3]))
            position += 1
        assert not long.done(), "four engine calls, and the text is still being read"
        await long
