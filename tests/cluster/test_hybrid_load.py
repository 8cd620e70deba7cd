"""Sessions with recurrent layers under load, on llama.cpp over two Nodes: each says what it says alone.

The state of a recurrent layer cannot be taken back: a row that went in twice, or a state that stayed when its session
had left, would be in everything that follows. More sessions are asked for than an engine has states.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from tests.support.cluster import Cluster, Json, Stream, model_cluster
from tests.support.greedy import Answer, answer, near_tie

pytestmark = [pytest.mark.llama, pytest.mark.timeout(240)]
pytest.importorskip("llama_cpp")

TOKENS = 20
STATES = 8
"""Sessions that a Node of this engine serves at a time, where layers are recurrent."""
TIE = 0.01
"""Batches of other shapes differ in last bits: of float32 weights, and a cache of float16."""


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe"])
async def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    from tests.support.tiny_gguf import write_tiny_gguf
    from tests.support.tiny_models import BY_NAME

    folder = tmp_path_factory.mktemp(request.param)
    file = write_tiny_gguf(BY_NAME[request.param], folder / "tiny.gguf")
    node = ["--threads", "1", "--kv-tokens", "2048"]
    settings = {"prefill_chunk_max": 16, "beat_timeout_s": 10, "push_s": 10}
    async with model_cluster(
        folder, file, layers=["0:4", "4:8"], engine="llama", settings=settings, node_arguments=node
    ) as running:
        yield running


def prompts() -> list[list[int]]:
    """Of several chunks; some begin alike, and nothing of that is kept for the others."""
    rng = random.Random(5)
    common = [rng.randrange(4, 200) for _ in range(32)]
    ends = [[rng.randrange(4, 200) for _ in range(length)] for length in (1, 9, 20, 33, 50, 64)]
    return [common + end if number % 2 else end for number, end in enumerate(ends)]


async def alone(cluster: Cluster) -> list[Answer]:
    return [await answer(cluster, prompt, TOKENS, ignore_eos=True) for prompt in prompts()]


async def left(cluster: Cluster, prompt: list[int], after: int) -> None:
    """Ask, and leave in the middle of the answer."""
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 120, "ignore_eos": True, "stream": True}
    async with cluster.http.stream("POST", f"{cluster.gateway.url}/v1/completions", json=body) as response:
        stream = Stream(response)
        for _ in range(after):
            await stream.next()


async def records(cluster: Cluster) -> list[Json]:
    return list((await cluster.http.get(f"{cluster.gateway.url}/v1/route-sessions")).json()["sessions"])


async def test_many_at_once_say_what_each_says_alone(cluster: Cluster) -> None:
    before = await alone(cluster)
    known = {record["id"] for record in await records(cluster)}
    asked = prompts()
    async with asyncio.TaskGroup() as tasks:
        whole = []
        for number in range(4 * STATES):
            prompt = asked[number % len(asked)]
            if number % 3 == 2:
                tasks.create_task(left(cluster, prompt, 1 + number % 5))
            else:
                whole.append((number % len(asked), tasks.create_task(answer(cluster, prompt, TOKENS, ignore_eos=True))))
    for number, task in whole:
        near_tie(before[number], task.result(), TIE)
        assert len(task.result().tokens) == TOKENS
    await cluster.until_free()

    ended = [record for record in await records(cluster) if record["id"] not in known]
    assert {record["phase"] for record in ended} == {"completed", "cancelled"}
    done = [record for record in ended if record["phase"] == "completed"]
    assert len(done) == len(whole)
    for record in done:
        # Each row went through each Node once: the last token was made, and not computed on.
        rows = record["prefill"]["total"] + TOKENS - 1
        assert [hop["position"] for hop in record["route"]["hops"]] == [rows, rows]
        assert record["prefill"]["cached"] == 0

    # No state was left over: alone again, every number is what it was before, to the bit.
    assert await alone(cluster) == before


async def test_nothing_is_reused_and_it_is_said_why(cluster: Cluster) -> None:
    prompt = prompts()[5]
    first = await answer(cluster, prompt, 4, ignore_eos=True)
    assert await answer(cluster, prompt, 4, ignore_eos=True) == first
    told = (await records(cluster))[0]["prefill"]
    assert told["cached"] == 0 and "exactly" in told["reuse"]
    for number in range(2):
        kv = await cluster.kv(number)
        assert (kv["used_tokens"], kv["cached_tokens"], kv["sessions"]) == (0, 0, 0)
