"""One Node without sockets, for a whole model or a part: sessions are opened and steps put in by hand."""

from __future__ import annotations

import asyncio
import random
import secrets
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from shardline.model.backend import ShardDescription
from shardline.model.engine import Engine
from shardline.node.host import ShardHost
from shardline.node.plan import KvRoom
from shardline.node.stream import SessionStream
from shardline.settings import Settings
from shardline.transport.carrier import Carrier
from shardline.wire.messages import OpenSession, StepAck, Ticket, TicketPeer
from shardline.wire.prefix import Prefix, digests_of, salt_of
from shardline.wire.steps import FLAG_LAST_CHUNK, FLAG_OUTPUT, FLAG_ROLLBACK, LANE_PREFILL, Entry, Step


@dataclass
class Lines:
    """What one session's stream said."""

    stream: SessionStream
    said: list[dict[str, Any]]

    async def until(self, event: str) -> dict[str, Any]:
        async with asyncio.timeout(5):
            while True:
                for line in self.said:
                    if line["event"] == event:
                        return line
                chunk = await self.stream.next_chunk()
                assert chunk is not None, self.said
                self.said += [msgspec.json.decode(line) for line in chunk.splitlines()]


@dataclass
class BareNode:
    host: ShardHost
    engine: Engine

    @property
    def shard(self) -> ShardDescription:
        assert self.host.description is not None
        return self.host.description

    def begin(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        key_id: str | None = "anyone",
        ticket: dict[str, Any] | None = None,
        **more: Any,
    ) -> tuple[bytes, Lines]:
        """`ticket`: what it says other than that this Node is the whole route."""
        key = secrets.token_bytes(16)
        me = TicketPeer(node="n-me", url="http://127.0.0.1:1")
        layout = {"layout_in": self.shard.layout_in.digest, "layout_out": self.shard.layout_out.digest}
        terms: dict[str, Any] = dict(id="t", route="r", gateway="g", node="n-me", hop=0, hops=1, content_id="c")
        terms |= dict(first=0, last=6, kv_tokens=len(prompt) + max_tokens, prefill_chunk=512, previous=None, next=me)
        terms |= ticket or {}
        salt = salt_of(key_id or "")
        prefix = None if key_id is None else Prefix(salt=salt, digests=digests_of(salt, packed(prompt)))
        request = OpenSession(
            ticket="", key=key.hex(), prompt_tokens=len(prompt), max_tokens=max_tokens, prefix=prefix, **layout, **more
        )
        return key, Lines(self.host.open(Ticket(**terms, **layout, not_after=0.0), request), [])

    def prefill(self, key: bytes, prompt: list[int], begin: int, *, back: bool = False) -> StepAck:
        flags = FLAG_LAST_CHUNK | FLAG_OUTPUT | (FLAG_ROLLBACK if back else 0)
        rows = len(prompt) - begin
        answer = self.host.accept(
            [Step(Entry(key, 0, begin, rows, 0, LANE_PREFILL, flags), packed(prompt[begin:]), ())]
        )
        assert isinstance(answer, StepAck)
        return answer

    async def run(self, prompt: list[int], max_tokens: int, **more: Any) -> tuple[int, Lines]:
        """A session from beginning to a good end: how many tokens it did not compute, and all that it said."""
        key, lines = self.begin(prompt, max_tokens, **more)
        had = (await lines.until("opened")).get("reusable_tokens") or 0
        assert self.prefill(key, prompt, had).rejected == []
        await lines.until("finished")
        assert not [line for line in lines.said if line["event"] == "failed"]
        self.host.sessions.close(key, keep=True)
        await lines.until("closed")
        return had, lines

    async def whole(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> int:
        """How many tokens such a session did not compute."""
        return (await self.run(prompt, max_tokens, **more))[0]

    def account(self) -> tuple[int, int, int]:
        """Reserved, cached, and all tokens that the engine holds; what must always be true of them is checked."""
        reserved, cached = self.host.sessions.ledger.reserved, self.host.sessions.prefixes.tokens
        assert reserved + cached <= self.host.sessions.ledger.capacity
        return reserved, cached, self.engine.kv()


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=count)


@asynccontextmanager
async def a_bare_node(
    engine: Engine, settings: Settings, *, capacity: int, carrier: Carrier | None = None
) -> AsyncIterator[BareNode]:
    """Stops the engine at the end. Without `carrier` nothing may be carried: one Node is the whole route."""

    async def probe(url: str) -> bool:
        return True

    try:
        async with asyncio.TaskGroup() as tasks:
            host = ShardHost(
                node_id="n-me",
                settings=settings,
                engine=engine,
                carrier=carrier,  # type: ignore[arg-type]
                probe=probe,
                kv_room=lambda shard: KvRoom(capacity, shard.slots),
                prefill_chunk=lambda times: 512,
                tasks=tasks,
            )
            running = tasks.create_task(host.run())
            await host.settled.wait()
            yield BareNode(host, engine)
            running.cancel()
            await host.drain()
            for task in asyncio.all_tasks():
                if task.get_coro().__qualname__.startswith("Sessions.watch"):  # type: ignore[union-attr]
                    task.cancel()
    finally:
        await engine.stop()
