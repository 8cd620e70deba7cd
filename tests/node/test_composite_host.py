"""The sessions of a composite Node, without the cluster around them: every way to end one frees the upstream."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.node.composite import Composite, CompositeHost
from shardline.node.stream import SessionStream
from shardline.node.upstream import Upstream, UpstreamPlace, upstream_client
from shardline.settings import Settings
from shardline.transport.http_client import HttpClient
from shardline.wire.composite import UpstreamCall
from shardline.wire.messages import OpenSession, Ticket, TicketPeer
from tests.support.api_cluster import until
from tests.support.upstreams import MODEL, Reply, StubUpstream, delta, said, sse

SETTINGS = Settings(beat_interval_s=0.05, beat_timeout_s=0.25, prefill_chunk_s=5, step_s=5, drain_s=0.2)
HANGING = Reply(sse(delta(content="a")), then="hang")


@asynccontextmanager
async def hosted(settings: Settings = SETTINGS) -> AsyncIterator[tuple[CompositeHost, StubUpstream, HttpClient]]:
    """A host in front of a stub, which has passed its test."""
    stub = StubUpstream()
    await stub.start()
    client = upstream_client(settings, "sk-1", None)
    upstream = Upstream(UpstreamPlace(url=stub.url, model=MODEL), client, settings, secret="sk-1")
    made: asyncio.Future[CompositeHost] = asyncio.get_running_loop().create_future()

    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            composite = Composite(model=MODEL, content_id="name1-0", places=2)
            host = CompositeHost(node_id="n-1", composite=composite, upstream=upstream, settings=settings, tasks=tasks)
            made.set_result(host)
            await host.run()

    living = asyncio.create_task(live())
    try:
        host = await made
        await asyncio.wait_for(host.settled.wait(), 5)
        stub.asked.clear()
        yield host, stub, client
    finally:
        living.cancel()
        await asyncio.wait({living})
        await client.aclose()
        await stub.die()


def open_session(
    host: CompositeHost, *, max_tokens: int = 16, key: bytes | None = None, kv_tokens: int = 4096
) -> SessionStream:
    ticket = Ticket(
        id="t", route="r-1", gateway="g-1", node="n-1", hop=0, hops=1, content_id="name1-0", first=0, last=1,
        kv_tokens=kv_tokens, prefill_chunk=1, previous=None, next=TicketPeer(node="n-1", url="http://x"), layout_in="",
        layout_out="", not_after=0,
    )  # fmt: skip
    call = UpstreamCall(kind="chat", fields={"messages": [], "max_tokens": max_tokens})
    request = OpenSession(
        ticket="", key=(key or secrets.token_bytes(16)).hex(), prompt_tokens=0, max_tokens=max_tokens,
        layout_in="", layout_out="", call=call,
    )  # fmt: skip
    return host.open(ticket, request)


async def heard(stream: SessionStream) -> list[Any]:
    """All that it says, to its end; beats left out."""
    events: list[Any] = []
    async with asyncio.timeout(5):
        while (chunk := await stream.next_chunk()) is not None:
            events += [json.loads(line) for line in chunk.splitlines()]
    return [event for event in events if event["event"] != "beat"]


async def is_free(host: CompositeHost, stub: StubUpstream, client: HttpClient) -> None:
    await asyncio.wait_for(stub.asked[-1].left.wait(), 2)

    async def free() -> bool:
        return len(host) == host.ledger.reserved == client.connections == 0

    await until(free, 2)


async def test_a_gateway_that_falls_silent_in_mid_answer() -> None:
    async with hosted() as (host, stub, client):
        stub.replies.append(HANGING)
        *before, failed, closed = await heard(open_session(host))
        assert [event["event"] for event in before] == ["opened", "taken", "text"]
        assert failed["error"]["code"] == "gateway_lost" and closed["event"] == "closed"
        await is_free(host, stub, client)
        assert host.state == "ready", "nobody holds it against the upstream"


async def test_a_gateway_that_does_not_read() -> None:
    async with hosted() as (host, stub, client):
        stub.replies.append(Reply(sse(*[delta(content="a")] * 2_000), then="hang"))
        stream = open_session(host, max_tokens=1)

        async def ended() -> bool:
            host.beat("g-1")
            return len(host) == 0

        await until(ended, 3)
        assert stream.overflowed
        await is_free(host, stub, client)


async def test_closing_frees_it_in_each_phase() -> None:
    async with hosted() as (host, stub, client):
        for body in (b"", b": nothing yet\n\n", sse(delta(content="a")), said("a")):
            stub.replies.append(Reply(body, then="hang"))
            seen, key = len(stub.asked) + 1, secrets.token_bytes(16)
            stream = open_session(host, key=key)

            async def there(seen: int = seen) -> bool:
                return len(stub.asked) == seen

            await until(there)
            assert host.close(key) and not host.close(key)
            assert (await heard(stream))[-1]["event"] == "closed"
            await is_free(host, stub, client)


async def test_places_are_contexts_of_this_upstream() -> None:
    """Another Node of the same name has a shorter context, and tickets are for that."""
    async with hosted() as (host, stub, _):
        stub.replies.extend([HANGING, HANGING])
        keys = [secrets.token_bytes(16), secrets.token_bytes(16)]
        for key in keys:
            open_session(host, key=key, kv_tokens=100)
        with pytest.raises(ShardlineError) as full:
            open_session(host, kv_tokens=100)
        assert (full.value.code, host.ledger.reserved) == ("kv_exhausted", 2 * 4096)
        for key in keys:
            assert host.close(key)
        assert host.ledger.reserved == 0


async def test_a_key_that_is_not_taken_any_more_takes_it_out_of_routes() -> None:
    async with hosted() as (host, stub, _):
        refused = Reply(b'{"error": {"message": "bad key sk-1"}}', 401, "application/json")
        stub.replies.append(refused)
        failed = (await heard(open_session(host)))[-2]
        assert failed["error"]["code"] == "setting_invalid" and "sk-1" not in json.dumps(failed)
        assert host.state == "ready", "the server itself takes it"
        stub.models_status = 401

        async def is_out() -> bool:
            return host.state == "loading"

        await until(is_out)
        assert "key" in (host.reason or "") and host.losses == 1
        with pytest.raises(ShardlineError, match="loading"):
            open_session(host)
        stub.models_status = 200

        async def is_back() -> bool:
            return host.state == "ready"

        await until(is_back)


async def test_a_busy_server_keeps_its_sessions() -> None:
    """A look that is refused for want of room says nothing about the answers that run."""
    async with hosted(Settings(drain_s=0.2)) as (host, stub, _):
        stub.replies.extend([HANGING, Reply(sse(delta(content="a")), then="break")])
        running = open_session(host)

        async def is_asked() -> bool:
            return len(stub.asked) == 1

        await until(is_asked)
        stub.models_status, looks = 503, stub.looks
        assert (await heard(open_session(host)))[-2]["error"]["code"] == "engine_lost"

        async def has_looked() -> bool:
            return stub.looks > looks

        await until(has_looked)
        await asyncio.sleep(0.05)
        assert (host.state, len(host), running.ended) == ("ready", 1, False)


async def test_a_test_that_does_not_end() -> None:
    settings = Settings(prefill_chunk_s=0.1, step_s=0.05)
    stub = StubUpstream()
    stub.usual = Reply(sse(delta(content="a")), then="drip")
    await stub.start()
    client = upstream_client(settings, None, None)
    try:
        with pytest.raises(ShardlineError) as late:
            await Upstream(UpstreamPlace(url=stub.url, model=MODEL), client, settings).test()
        assert (late.value.code, late.value.details["limit"]) == ("deadline", "step")
        await asyncio.wait_for(stub.asked[-1].left.wait(), 1)
    finally:
        await client.aclose()
        await stub.die()
