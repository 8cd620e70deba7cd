"""Text bundles: checked, shared, kept; and prompts that become token ids at the head Node."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.gateway.text import TextStore
from shardline.settings import Settings
from shardline.transport.bodies import send_body
from shardline.transport.http_client import HttpClient
from shardline.transport.http_server import serve
from shardline.wire.messages import ModelInfo, Peer
from tests.support.gateway_stand import BOS, HeadNode, Stand, bundle, model

RAW = msgspec.msgpack.encode(bundle(add_bos=True))
SETTINGS = Settings(control_s=2.0, connect_s=0.5, text_s=2.0)
Answer = Callable[[Scope, Receive, Send], Awaitable[None]]


class Bench:
    """A text store, and Nodes for it."""

    def __init__(self, stack: AsyncExitStack, cache_dir: Path) -> None:
        self.stack = stack
        self.cache_dir = cache_dir
        self.stand = Stand()
        self.client = HttpClient(SETTINGS)

    async def node(self, answer: Answer | None = None) -> Peer:
        server = await serve(answer or HeadNode(RAW, self.stand), settings=SETTINGS, lifespan="off")
        self.stack.push_async_callback(server.stop, 0.1)
        return Peer(node="n-1", url=server.url)

    async def store(self) -> TextStore:
        return await self.stack.enter_async_context(TextStore(self.cache_dir, self.client, SETTINGS))

    @property
    def fetched(self) -> int:
        return sum(path.startswith("/v1/text/") for path in self.stand.asked_of_node)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        made = Bench(stack, tmp_path / "text")
        stack.push_async_callback(made.client.aclose)
        stack.push_async_callback(made.stand.http.aclose)
        yield made


def served(*peers: Peer, **facts: Any) -> ModelInfo:
    return model(RAW, "", text_nodes=list(peers), head_nodes=list(peers), **facts)


DEAD = Peer(node="n-dead", url="http://127.0.0.1:9")


async def test_fetched_once_then_from_memory_then_from_disk(bench: Bench) -> None:
    node = await bench.node()
    store = await bench.store()
    first = await store.vocabulary(served(node))
    assert await store.vocabulary(served(node)) is first
    assert first.piece(BOS) == b"<s>" and first.bundle.add_bos
    another = await bench.store()
    assert (await another.vocabulary(served(DEAD))).bundle == first.bundle
    assert bench.fetched == 1
    assert [path.name for path in bench.cache_dir.iterdir()] == [hashlib.sha256(RAW).hexdigest()]


async def test_many_at_once_share_one_fetch(bench: Bench) -> None:
    node = await bench.node()
    store = await bench.store()
    async with asyncio.TaskGroup() as tasks:
        jobs = [tasks.create_task(store.vocabulary(served(node))) for _ in range(20)]
    assert len({id(job.result()) for job in jobs}) == 1
    assert bench.fetched == 1


async def test_who_leaves_does_not_take_the_fetch_from_the_others(bench: Bench) -> None:
    gate = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        await send_body(send, 200, RAW)

    node = await bench.node(slow)
    store = await bench.store()
    leaver = asyncio.create_task(store.vocabulary(served(node)))
    stayer = asyncio.create_task(store.vocabulary(served(node)))
    await asyncio.sleep(0.02)
    leaver.cancel()
    gate.set()
    assert (await stayer).size == len(bundle().pieces)


async def test_the_next_node_is_asked(bench: Bench) -> None:
    node = await bench.node()
    store = await bench.store()
    assert (await store.vocabulary(served(DEAD, node))).size
    vocabulary = await store.vocabulary(served(DEAD))
    assert await store.tokenize(served(DEAD, node), vocabulary, "ab", add_special=False, param="prompt") == [97, 98]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        RAW + b"x",
        msgspec.msgpack.encode({"pieces": 5}),
        msgspec.msgpack.encode(msgspec.structs.replace(bundle(), eog=[10**6])),
        msgspec.msgpack.encode(msgspec.structs.replace(bundle(), pieces=[])),
    ],
)
async def test_a_bundle_that_is_not_what_it_says_is_not_taken(bench: Bench, raw: bytes) -> None:
    async def lies(scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, raw)

    liar = await bench.node(lies)
    store = await bench.store()
    announced = hashlib.sha256(raw).hexdigest() if raw and raw != RAW + b"x" else hashlib.sha256(RAW).hexdigest()
    with pytest.raises(ShardlineError) as caught:
        await store.vocabulary(served(liar, text_digest=announced))
    assert caught.value.code == "text_unavailable"
    # A failure is not kept.
    honest = await bench.node()
    assert (await store.vocabulary(served(liar, honest))).size


async def test_heads_that_are_gone_are_missing_layers(bench: Bench) -> None:
    """The Tracker waits for their heartbeats still."""
    store = await bench.store()
    vocabulary = await store.vocabulary(served(await bench.node()))
    gone = served(
        msgspec.structs.replace(DEAD, layers=(0, 9)), msgspec.structs.replace(DEAD, node="n-too", layers=(0, 4))
    )
    with pytest.raises(ShardlineError) as caught:
        await store.tokenize(gone, vocabulary, "a", add_special=True, param="prompt")
    error = caught.value
    assert (error.code, error.param, error.details["missing"]) == ("model_unavailable", "model", [[0, 4]])
    assert error.details["node"] == "n-dead" and error.details["retry_after"] >= 1
    assert "n-dead (no connection)" in error.message and "127.0.0.1" not in error.message
    fresh = TextStore(bench.cache_dir / "none", bench.client, SETTINGS)
    async with fresh:
        with pytest.raises(ShardlineError) as caught:
            await fresh.vocabulary(served(DEAD))
    assert caught.value.code == "model_unavailable"


@pytest.mark.parametrize("code", ["engine_lost", "shard_unready"])
async def test_a_head_whose_engine_starts_again_says_when_to_come(bench: Bench, code: str) -> None:
    async def starting(scope: Scope, receive: Receive, send: Send) -> None:
        error = ShardlineError(code, "the worker ended")
        await send_body(send, 503, msgspec.json.encode({"error": error.body()}))

    store = await bench.store()
    vocabulary = await store.vocabulary(served(await bench.node()))
    with pytest.raises(ShardlineError) as caught:
        await store.tokenize(served(DEAD, await bench.node(starting)), vocabulary, "a", add_special=True, param="p")
    assert (caught.value.code, caught.value.details["retry_after"]) == ("shard_unready", 2)


async def test_a_silent_head_may_only_be_slow(bench: Bench) -> None:
    async def hangs(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    quick = TextStore(bench.cache_dir, bench.client, msgspec.structs.replace(SETTINGS, control_s=0.1))
    async with quick:
        vocabulary = await quick.vocabulary(served(await bench.node()))
        with pytest.raises(ShardlineError) as caught:
            await quick.tokenize(served(await bench.node(hangs)), vocabulary, "a", add_special=True, param="prompt")
    assert caught.value.code == "text_unavailable" and caught.value.details["retry_after"] >= 1


@pytest.mark.parametrize("digest", [None, "", "../../etc/passwd", "A" * 64, "a" * 63])
async def test_a_digest_is_never_a_path(bench: Bench, digest: str | None) -> None:
    store = await bench.store()
    with pytest.raises(ShardlineError) as caught:
        await store.vocabulary(served(await bench.node(), text_digest=digest))
    assert caught.value.code == "text_unavailable"


async def test_a_damaged_copy_is_replaced(bench: Bench) -> None:
    bench.cache_dir.mkdir()
    path = bench.cache_dir / hashlib.sha256(RAW).hexdigest()
    path.write_bytes(RAW[:-1] + b"x")
    store = await bench.store()
    assert (await store.vocabulary(served(await bench.node()))).size
    assert path.read_bytes() == RAW


async def test_a_folder_that_cannot_be_written_is_no_obstacle(bench: Bench) -> None:
    bench.cache_dir.write_text("a file where the folder should be")
    store = await bench.store()
    assert (await store.vocabulary(served(await bench.node()))).size


async def test_closing_ends_a_fetch(bench: Bench) -> None:
    async def hangs(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.Event().wait()

    node = await bench.node(hangs)
    async with TextStore(bench.cache_dir, bench.client, SETTINGS) as store:
        waiting = asyncio.create_task(store.vocabulary(served(node)))
        await asyncio.sleep(0.02)
    with pytest.raises(ShardlineError) as caught:
        await waiting
    assert caught.value.code == "draining"


async def test_special_tokens_around_a_prompt_and_never_two_bos(bench: Bench) -> None:
    node = await bench.node()
    store = await bench.store()
    vocabulary = await store.vocabulary(served(node))

    async def tokens(text: str, add_special: bool) -> list[int]:
        return await store.tokenize(served(node), vocabulary, text, add_special=add_special, param="prompt")

    assert await tokens("a", True) == [BOS, 97]
    assert await tokens("a", False) == [97]
    assert await tokens("<s>a", True) == [BOS, 97]
    assert await tokens("<s>a", False) == [BOS, 97]
    assert await tokens("", True) == [BOS]


async def test_a_text_that_cannot_fit_reaches_no_node(bench: Bench) -> None:
    node = await bench.node()
    store = await bench.store()
    vocabulary = await store.vocabulary(served(node))
    longest = vocabulary.longest_piece
    with pytest.raises(ShardlineError) as caught:
        await store.tokenize(
            served(node, context_length=64), vocabulary, "a" * (64 * longest + 1), add_special=True, param="messages"
        )
    error = caught.value
    assert (error.code, error.param, error.details["prompt_tokens"]) == ("context_length_exceeded", "messages", 65)
    assert "/v1/tokenize" not in bench.stand.asked_of_node


async def test_token_ids_that_are_none_are_not_taken(bench: Bench) -> None:
    async def lies(scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, b'{"tokens":[5,100000]}')

    store = await bench.store()
    vocabulary = await store.vocabulary(served(await bench.node()))
    with pytest.raises(ShardlineError) as caught:
        await store.tokenize(served(await bench.node(lies)), vocabulary, "a", add_special=True, param="prompt")
    assert caught.value.code == "text_unavailable"
