"""Prefix reuse over real processes: what is prefilled, what is told, what is forgotten, and what stays exact."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from shardline.gateway.reuse import OFF
from tests.support.cluster import Cluster, Json, scripted_cluster, until, worker_pid
from tests.support.reuse import check_reuse, completed

pytestmark = pytest.mark.timeout(120)
TWO = ("0:3", "3:6")


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=count)


async def names(cluster: Cluster) -> list[str]:
    return [(await cluster.node_info(number))["id"] for number in range(len(cluster.nodes))]


async def cached(cluster: Cluster, numbers: list[int] | None = None) -> list[int]:
    """Kept tokens of each Node; what is exact of their KV is checked."""
    found = []
    for number in range(len(cluster.nodes)) if numbers is None else numbers:
        kv = await cluster.kv(number)
        assert kv["reserved_tokens"] + kv["cached_tokens"] <= kv["capacity_tokens"]
        found.append(kv["cached_tokens"])
    return found


@pytest.mark.parametrize("layers", [("0:6",), TWO, ("0:2", "2:4", "4:6")], ids=["1", "2", "3"])
async def test_the_second_turn_of_a_chat_prefills_only_the_rest(tmp_path: Path, layers: tuple[str, ...]) -> None:
    async with scripted_cluster(tmp_path, layers=layers, settings={"prefill_chunk_max": 32}) as cluster:
        first = tokens(100)
        one = await completed(cluster, first)
        check_reuse(one, 0, "nothing kept of this prompt")
        await cluster.until_free()
        assert await cached(cluster) == [96] * len(layers)
        second = [*first, *tokens(6, 1), *tokens(50, 2)]
        two = await completed(cluster, second)
        check_reuse(two, 96)
        await cluster.until_free()
        again = await completed(cluster, second)  # the identical prompt: the last token at least is computed
        check_reuse(again, 128)
        diverging = [*second[:70], *tokens(40, 3)]
        three = await completed(cluster, diverging)
        check_reuse(three, 64)
        # An answer of other rows would be `<wrong-rows>`.
        assert one["text"] == two["text"] == again["text"] == three["text"] == " alpha beta gamma delta epsilon zeta"
        await cluster.until_free()
        metrics = (await cluster.http.get(f"{cluster.gateway.url}/metrics")).text
        assert f"shardline_gateway_cached_tokens_total {96 + 128 + 64}.0" in metrics


async def test_one_key_never_has_anything_of_another(tmp_path: Path) -> None:
    keys = [name * 20 for name in "ab"]
    (tmp_path / "keys").write_text("\n".join(keys))
    arguments = ["--api-keys", str(tmp_path / "keys")]
    async with scripted_cluster(tmp_path, layers=TWO, gateway_arguments=arguments) as cluster:
        for key in keys:
            check_reuse(await completed(cluster, tokens(100), key=key), 0, "nothing kept of this prompt")
        for key in keys:
            check_reuse(await completed(cluster, tokens(100), key=key), 96)


async def test_what_was_cancelled_left_or_failed_leaves_nothing(tmp_path: Path) -> None:
    script = {"decode_ms": 20, "eos": False, "faults": [{"kind": "error", "phase": "decode", "contains": "!!!!"}]}
    async with scripted_cluster(tmp_path, layers=TWO, script=script) as cluster:
        for leave in ("delete", "disconnect"):
            async with cluster.streamed("hello " * 40, max_tokens=500) as stream:
                await stream.read_tokens(3)
                if leave == "delete":
                    url = f"{cluster.gateway.url}/v1/route-sessions/{stream.session_id}"
                    assert (await cluster.http.delete(url)).status_code == 200
            await cluster.until_free()
            assert await cached(cluster) == [0, 0]
        failed = await cluster.ask("hello " * 40 + "!!!!", max_tokens=20)
        assert failed.json()["error"]["code"] == "engine_error"
        await cluster.until_free()
        assert await cached(cluster) == [0, 0]
        # One that its own stop string ended did end well.
        answer = await cluster.ask("hello " * 40, max_tokens=50, stop=["gamma"])
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        await cluster.until_free()
        assert min(await cached(cluster)) >= 224


async def test_a_fresh_node_in_the_route_means_that_nobody_reuses_anything(tmp_path: Path) -> None:
    """A Node is lost between the opening of a session and the end of its prefill. The others keep what they had, and
    nothing of the session that failed; with a fresh Node in its place all prefill everything, once."""
    async with scripted_cluster(tmp_path, script={"prefill_ms_per_row": 1}) as cluster:
        prompt = tokens(100)
        await completed(cluster, prompt)
        await cluster.until_free()
        long = [*prompt, *tokens(1500, 1)]
        asking = asyncio.create_task(
            cluster.http.post(
                f"{cluster.gateway.url}/v1/completions", json={"model": cluster.model, "prompt": long, "max_tokens": 5}
            )
        )

        async def prefilling() -> bool:
            return int((await cluster.kv(0))["reserved_tokens"]) > 0

        await until(prefilling)
        cluster.nodes[1].signal(signal.SIGKILL)
        failed = await asking
        error = failed.json()["error"]
        assert (failed.status_code, error["code"], error["phase"]) == (502, "node_lost", "prefill")
        await cluster.until_free([0, 2])
        assert await cached(cluster, [0, 2]) == [96, 96]
        fresh = await cluster.start_node(
            str(tmp_path / "script.json"), "--engine", "scripted", "--layers", "2:4", "--inline"
        )
        await fresh.until("ready")
        head, tail, new = [(await cluster.node_info(number))["id"] for number in (0, 2, 3)]
        answer = await completed(cluster, prompt)
        check_reuse(answer, 0, f"Node {head} kept 96, Node {tail} kept 96, Node {new} none")
        check_reuse(await completed(cluster, prompt), 96)


async def test_an_engine_that_was_started_again_has_nothing(tmp_path: Path) -> None:
    settings = {"worker_backoff_s": 0.05}
    async with scripted_cluster(tmp_path, layers=TWO, inline=False, settings=settings) as cluster:
        prompt = tokens(100)
        await completed(cluster, prompt)
        check_reuse(await completed(cluster, prompt), 96)
        await cluster.until_free()
        before = worker_pid(await cluster.node_info(1))
        os.kill(before, signal.SIGKILL)

        async def ready_again() -> bool:
            info = await cluster.node_info(1)
            return info["shards"][0]["state"] == "ready" and info["health"]["pid"] != before

        await until(ready_again, 20)
        assert await cached(cluster) == [96, 0]
        head, tail = await names(cluster)

        async def routed() -> bool:  # the Tracker's word: the Gateway's list may be a second old
            return (await cluster.control("GET", f"{cluster.tracker.url}/readyz")).status_code == 200

        await until(routed, 10)
        check_reuse(await completed(cluster, prompt), 0, f"Node {head} kept 96, Node {tail} none")
        check_reuse(await completed(cluster, prompt), 96)


async def test_an_engine_that_cannot_go_back_is_named(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path, layers=TWO, script={"rollback": False}) as cluster:
        head, tail = await names(cluster)
        why = "; ".join(f"Node {name}: its engine cannot go back exactly" for name in (head, tail))
        for _ in range(2):
            check_reuse(await completed(cluster, tokens(100)), 0, why)
        assert await cached(cluster) == [0, 0]


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path, layers=TWO, settings={"prefix_sessions": 0}) as cluster:
        for _ in range(2):
            check_reuse(await completed(cluster, tokens(100)), 0, OFF)
        assert await cached(cluster) == [0, 0]


async def test_a_request_can_do_without(tmp_path: Path) -> None:
    """llama-server's `cache_prompt`: false reuses nothing, and leaves nothing."""
    async with scripted_cluster(tmp_path, layers=TWO) as cluster:
        check_reuse(await completed(cluster, tokens(100), cache_prompt=False), 0, OFF)
        await cluster.until_free()
        assert await cached(cluster) == [0, 0]
        check_reuse(await completed(cluster, tokens(100), cache_prompt=True), 0, "nothing kept of this prompt")
        check_reuse(await completed(cluster, tokens(100), cache_prompt=False), 0, OFF)
        check_reuse(await completed(cluster, tokens(100)), 96)


@pytest.mark.long
async def test_a_thousand_sessions_in_little_room(tmp_path: Path) -> None:
    """Sixteen clients, prompts that begin alike, room for about four. Each engine refuses what does not fit;
    every answer is right, and at the end every Node holds what it says and nothing else."""
    chance = random.Random(3)
    stems = [tokens(chance.randrange(40, 200), seed) for seed in range(10)]
    script = {"kv_capacity": 1000}
    settings = {"prefix_share": 0.6, "queue_limit": 100}
    async with scripted_cluster(tmp_path, layers=TWO, script=script, settings=settings) as cluster:
        left = [1000]
        reused = [0]

        async def client(number: int) -> None:
            while left[0] > 0:
                left[0] -= 1
                prompt = [*chance.choice(stems), *tokens(chance.randrange(1, 40), left[0])]
                body = {"model": cluster.model, "prompt": prompt, "max_tokens": 3, "temperature": 0}
                answer = await cluster.http.post(f"{cluster.gateway.url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == " alpha beta gamma"
                reused[0] += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        async with asyncio.TaskGroup() as clients:
            for number in range(16):
                clients.create_task(client(number))
        await cluster.until_free()
        assert all(0 < count <= 600 for count in await cached(cluster))
        assert reused[0] > 10_000, reused


async def test_a_follow_up_goes_where_its_beginning_is_kept(tmp_path: Path) -> None:
    """Two equal routes: the first conversation holds the one that comes first while the second begins. A
    prefill costs so much that what a busy machine adds to measured times does not count."""
    script = {"decode_ms": 5, "prefill_ms_per_row": 12, "eos": False, "answer": ["x"] * 100}
    layers = ("0:3", "3:6", "0:3", "3:6")
    async with scripted_cluster(tmp_path, layers=layers, script=script) as cluster:
        one, two = tokens(100), tokens(100, 1)
        first = asyncio.create_task(completed(cluster, one, count=80))

        async def running() -> bool:
            sessions = (await cluster.http.get(f"{cluster.gateway.url}/v1/route-sessions")).json()["sessions"]
            return [session["phase"] for session in sessions] == ["decode"]

        await until(running, 10)
        second = await completed(cluster, two, count=20)
        taken = {"one": hops(await first), "two": hops(second)}
        assert taken["one"] != taken["two"]
        # At once, before a heartbeat has told that the last one ended.
        for turn, cached_tokens in enumerate((96, 96, 128)):
            for name, prompt, seed in (("two", two, 3), ("one", one, 4)):
                answer = await completed(cluster, prompt, count=1)
                assert hops(answer) == taken[name], turn
                check_reuse(answer, cached_tokens)
                prompt += tokens(40, seed + turn)
        await cluster.until_free()


def hops(answer: Json) -> set[str]:
    return {hop["node"] for hop in answer["record"]["route"]["hops"]}
