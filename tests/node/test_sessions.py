"""The watch over Gateways: who is silent, and whom a pause of this Node itself is held against: nobody."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shardline.model.backend import ShardDescription, ShardSpec
from shardline.model.engine import InlineEngine
from shardline.model.scripted import load_inline
from shardline.node.sessions import Sessions
from shardline.node.stream import SessionStream
from shardline.settings import Settings
from shardline.wire.messages import OpenSession, Ticket, TicketPeer
from tests.support.local_cluster import SCRIPT

SETTINGS = Settings(beat_interval_s=0.5, beat_timeout_s=2.5, late_timer_s=0.5)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Watched:
    """Sessions of a Node whose clock is moved by hand."""

    sessions: Sessions
    shard: ShardDescription
    clock: Clock

    def open(self, gateway: str) -> SessionStream:
        me = TicketPeer(node="n-me", url="http://127.0.0.1:1")
        layout = {"layout_in": self.shard.layout_in.digest, "layout_out": self.shard.layout_out.digest}
        terms: dict[str, Any] = dict(id="t", route="r", gateway=gateway, node="n-me", hop=0, hops=1, content_id="c")
        terms |= dict(first=0, last=6, kv_tokens=20, prefill_chunk=16, previous=None, next=me, not_after=0.0)
        request = OpenSession(ticket="", key=secrets.token_hex(16), prompt_tokens=8, max_tokens=8, **layout)
        return self.sessions.open(Ticket(**terms, **layout), request, self.shard)

    def pass_time(self, seconds: float, *, heard: str = "") -> None:
        """Awake: the watch looks every half second, and `heard` beats in between."""
        for _ in range(round(seconds / SETTINGS.beat_interval_s)):
            self.clock.now += SETTINGS.beat_interval_s
            self.sessions.beat(heard)
            self.sessions.look()

    def stand_still(self, seconds: float) -> None:
        """As after SIGSTOP and SIGCONT: the first thing that happens is the timer, late."""
        self.clock.now += seconds
        self.sessions.look()


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[Watched]:
    path = folder / "script.json"
    path.write_bytes(msgspec.json.encode(SCRIPT))
    engine = InlineEngine(lambda: load_inline(ShardSpec(str(path), 0, 6)), SETTINGS)
    shard = await engine.start()
    clock = Clock()
    async with asyncio.TaskGroup() as tasks:
        sessions = Sessions(
            node_id="n-me", settings=SETTINGS, engine=engine, tasks=tasks, dropped=lambda slot: None, clock=clock
        )
        sessions.ledger.capacity = 1000
        yield Watched(sessions, shard, clock)
    await engine.stop()


async def events(stream: SessionStream) -> list[dict[str, Any]]:
    """All lines, up to the end of the stream."""
    lines = b""
    async with asyncio.timeout(2):
        while (chunk := await stream.next_chunk()) is not None:
            lines += chunk
    return [msgspec.json.decode(line) for line in lines.splitlines()]


async def test_a_gateway_that_fell_silent_loses_its_sessions_and_others_do_not(tmp_path: Path) -> None:
    async with watched(tmp_path) as node:
        lost, kept = node.open("g-silent"), node.open("g-alive")
        await asyncio.sleep(0)
        node.pass_time(2.5, heard="g-alive")
        assert len(node.sessions) == 2
        node.pass_time(0.5, heard="g-alive")
        (failed,) = [event for event in await events(lost) if event["event"] == "failed"]
        error = failed["error"]
        assert (error["code"], error["limit"], error["node"]) == ("gateway_lost", "heartbeat", "n-me")
        assert error["message"] == "Node n-me has heard nothing of the Gateway for 2.5 s"
        assert len(node.sessions) == 1 and not kept.ended


async def test_a_node_that_stood_still_blames_no_gateway_for_it(tmp_path: Path) -> None:
    """While it stood still no Gateway could reach it. Each has its whole time once more; only then it is silent."""
    async with watched(tmp_path) as node:
        stream = node.open("g")
        await asyncio.sleep(0)
        node.pass_time(2.0)
        node.stand_still(2.4)
        # The beats that waited are late, or were given up by their sender with the connections that carried them.
        node.pass_time(2.5)
        assert len(node.sessions) == 1 and not stream.ended
        node.pass_time(0.5)
        assert [event["error"]["code"] for event in await events(stream) if event["event"] == "failed"] == [
            "gateway_lost"
        ]


async def test_a_node_that_stood_still_again_and_again_blames_nobody_either(tmp_path: Path) -> None:
    async with watched(tmp_path) as node:
        stream = node.open("g")
        await asyncio.sleep(0)
        for _ in range(5):
            node.stand_still(1.5)
            node.pass_time(1.5)
        assert len(node.sessions) == 1 and not stream.ended
