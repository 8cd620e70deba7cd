"""The one stream of the page: what comes first, what changes, whose sessions, and when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.cluster_view import ClusterView
from shardline.gateway.keys import ApiKey, unknown_key
from shardline.gateway.live import Joining, Live
from shardline.gateway.sse import EventResponse
from shardline.settings import Settings
from shardline.telemetry.records import Records
from tests.gateway.test_cluster_view import Answers
from tests.gateway.test_node_logs import Nodes

Event = tuple[str, Any]


class Reader:
    """The other end of a stream: `send` of an application, and its events as they come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = False
        self.over = False
        """Whether the application had returned, or failed, before its reader went."""
        self.stalled = False
        self._news = asyncio.Event()

    async def send(self, message: Any) -> None:
        if self.stalled:
            await asyncio.Event().wait()
        if message["type"] == "http.response.body":
            self.ended = not message["more_body"]
            for block in message["body"].decode().split("\n\n"):
                if block:
                    name, data = block.split("\n")
                    self.events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        self._news.set()

    async def until(self, name: str, count: int = 1) -> list[Any]:
        """What the events of this name say, once so many are there."""
        async with asyncio.timeout(5):
            while len(found := [value for event, value in self.events if event == name]) < count:
                self._news.clear()
                await self._news.wait()
        return found


class Stand:
    def __init__(self) -> None:
        self.settings = Settings(client_stall_s=0.2)
        self.records = Records(self.settings)
        self.answers = Answers()
        self.nodes = Nodes("n-1")
        self.keys: dict[str, ApiKey] = {}
        self.live = Live(
            records=self.records,
            cluster=ClusterView(self.answers, self.answers.models),
            logs=self.nodes.logs,
            settings=self.settings,
            version="1",
            gateway="g-1",
            joining=Joining(tracker="http://127.0.0.1:7070", keys=False, is_local=True),
        )

    def _key(self, key_id: str) -> ApiKey:
        if key_id not in self.keys:
            raise unknown_key()
        return self.keys[key_id]

    @asynccontextmanager
    async def reading(self, key_id: str) -> AsyncIterator[Reader]:
        reader = Reader()
        response = EventResponse(reader.send, stall_s=self.settings.client_stall_s)
        self.keys.setdefault(key_id, ApiKey(name=key_id, digest=""))
        task = asyncio.create_task(self.live.follow(lambda: self._key(key_id), response))
        try:
            yield reader
        finally:
            reader.over = task.done()
            task.cancel()
            await asyncio.wait({task})


async def test_hello_then_all_that_is_known() -> None:
    stand = Stand()
    stand.records.new(key_id="mine", model="m", prompt_tokens=3)
    async with stand.reading("mine") as reader:
        (hello,) = await reader.until("hello")
        assert (hello["gateway"], hello["key"], hello["joining"]["tracker"]) == ("g-1", "mine", "http://127.0.0.1:7070")
        ((session,),) = await reader.until("sessions")
        assert (session["phase"], session["phases"]) == ("queued", [["queued", 0.0]])
        for part in ("tracker", "models", "nodes", "artifacts", "routes"):
            await reader.until(part)
        assert reader.events[0][0] == "hello"


async def test_changes_come_together_and_only_those_of_the_key() -> None:
    stand = Stand()
    async with stand.reading("mine") as reader:
        await reader.until("sessions")
        mine = stand.records.new(key_id="mine", model="m", prompt_tokens=3)
        other = stand.records.new(key_id="other", model="m", prompt_tokens=3)
        for record in (mine, other):
            record.enter("prefill")
            record.enter("cancelled")
        last = (await reader.until("sessions", 2))[-1]
        assert [(view["id"], view["phase"]) for view in last] == [(mine.id, "cancelled")]
        assert [phase for phase, _ in last[0]["phases"]] == ["queued", "prefill", "cancelled"]
        said = json.dumps(reader.events)
        assert mine.id in said and other.id not in said


async def test_parts_come_again_only_when_they_changed() -> None:
    stand = Stand()
    async with stand.reading("mine") as reader:
        await reader.until("tracker", 3)
        assert len(await reader.until("nodes")) > 1  # when it was last heard changes
        assert len(await reader.until("models")) == 1


async def test_the_stream_ends_with_the_gateway() -> None:
    stand = Stand()
    async with stand.reading("mine") as reader:
        await reader.until("nodes")
        stand.live.close()
        async with asyncio.timeout(5):
            while not reader.ended:
                await asyncio.sleep(0.01)


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    stand = Stand()
    reader = Reader()
    reader.stalled = True
    with pytest.raises(ShardlineError) as caught:
        await stand.live.follow(lambda: ApiKey(name="mine", digest=""), EventResponse(reader.send, stall_s=0.05))
    assert caught.value.code == "slow_client"


async def test_log_lines_come_once_and_to_whoever_may_look() -> None:
    stand = Stand()
    stand.nodes.write("n-1", "one", "two")
    async with stand.reading("mine") as reader:
        (event,) = await reader.until("log")
    assert event["node"] == "n-1" and [line["text"] for line in event["lines"]] == ["one", "two"]


async def test_a_key_without_the_scope_sees_models_and_its_own_sessions() -> None:
    stand = Stand()
    stand.nodes.write("n-1", "not for everybody")
    stand.keys["mine"] = ApiKey(name="mine", digest="", scopes=("generate",))
    async with stand.reading("mine") as reader:
        (hello,) = await reader.until("hello")
        assert hello["scopes"] == ["generate"]
        await reader.until("sessions")
        await reader.until("tracker", 2)
        assert {name for name, _ in reader.events} == {"hello", "sessions", "tracker", "models"}


async def test_a_key_that_is_revoked_hears_no_more() -> None:
    stand = Stand()
    async with stand.reading("mine") as reader:
        await reader.until("tracker")
        del stand.keys["mine"]
        before = asyncio.all_tasks()
        async with asyncio.timeout(5):
            while len(asyncio.all_tasks()) >= len(before):
                await asyncio.sleep(0.02)
    assert reader.over and not reader.ended  # broken off, which no reader takes for an end


async def test_nothing_is_asked_while_nobody_looks() -> None:
    stand = Stand()
    before = asyncio.all_tasks()
    async with stand.reading("mine") as reader:
        await reader.until("nodes")
        assert asyncio.all_tasks() > before
    assert asyncio.all_tasks() == before
    asked = len(stand.answers.asked)
    stand.records.new(key_id="mine", model="m", prompt_tokens=3)
    await asyncio.sleep(0)
    assert len(stand.answers.asked) == asked
