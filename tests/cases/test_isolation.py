"""Reported bugs of such servers, tried on a whole cluster: what one user said must never come out at another's.

The scripted engine keeps an honest cache of every session, and says `<wrong-rows>` where a row of another one, or of
an earlier one, got in. The same on PyTorch is in test_isolation_torch.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

from shardline.settings import Settings
from tests.support.api_cluster import COUNTING, ApiCluster, Json, api_cluster

CLIENTS = 16
ROUNDS = 3


async def test_sixteen_clients_with_markers_of_which_a_third_leaves(tmp_path: Path) -> None:
    """Each prompt has a marker of 16 characters, and its answer is made of that; there is room for six sessions. No
    answer holds another one's marker, and each equals that of the same prompt alone."""
    rng = random.Random(69)
    markers = [f"marker-{i:02d}-" + "".join(rng.choices("abcdefgh", k=6)) for i in range(CLIENTS)]
    rules = [{"contains": marker, "pieces": [marker[:5], marker[5:11], marker[11:]]} for marker in markers]
    script = {"answer": ["none"], "answers": rules, "decode_ms": 1, "prefill_ms_per_row": 0.05}
    settings = Settings(drain_s=0.5, prefill_chunk_max=16, queue_limit=100)
    prompt_tokens = len(f"Say {markers[0]} again.")
    async with api_cluster(
        tmp_path, layers=[(0, 2), (2, 4), (4, 6)], script=script, settings=settings, kv_tokens=6 * (prompt_tokens + 8)
    ) as cluster:

        async def ask(marker: str, *, leaves_s: float | None = None, stream: bool = False) -> str | None:
            prompt = f"Say {marker} again."
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(leaves_s):
                    if stream:
                        return (await cluster.read(prompt, max_tokens=8)).text
                    return await cluster.text(prompt, max_tokens=8)
            return None

        alone = [await ask(marker) for marker in markers]
        assert alone == markers
        for _ in range(ROUNDS):
            leavers = set(rng.sample(range(CLIENTS), CLIENTS // 3))
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(
                        ask(marker, leaves_s=rng.random() * 0.2 if i in leavers else None, stream=i % 2 == 0)
                    )
                    for i, marker in enumerate(markers)
                ]
            for i, task in enumerate(asked):
                answer = task.result()
                assert answer == markers[i] or (answer is None and i in leavers)
        await cluster.until_free()


async def fresh(folder: Path, *asked: Json) -> list[Json]:
    """Answers to `asked`, each on a cluster of its own that has served nothing before."""
    answers = []
    for number, fields in enumerate(asked):
        (folder / f"fresh{number}").mkdir()
        async with api_cluster(folder / f"fresh{number}", script=COUNTING) as cluster:
            answers.append((await cluster.answer(**fields))["choices"][0])
    return answers


async def test_nothing_is_left_of_the_last_request(tmp_path: Path) -> None:
    """Prompts of 28 and of 37 tokens one after the other, one of them twice, one after a cancelled one, and two in
    turn, token by token: each answer is that of a fresh cluster, log-probabilities included."""
    short: Json = {"prompt": "s" * 28, "max_tokens": 6, "logprobs": 3}
    long: Json = {"prompt": "l" * 37, "max_tokens": 6, "logprobs": 3}
    expected = await fresh(tmp_path, short, long)
    (tmp_path / "used").mkdir()
    async with api_cluster(tmp_path / "used", script={**COUNTING, "decode_ms": 2}) as cluster:
        for fields, right in ((short, 0), (long, 1), (short, 0), (short, 0), (long, 1)):
            assert (await cluster.answer(**fields))["choices"][0] == expected[right]
        async with cluster.streamed("x" * 50, max_tokens=500) as left:
            await left.read_tokens(3)
        assert (await cluster.answer(**long))["choices"][0] == expected[1]
        await in_turn(cluster, [short, long], expected)
        await cluster.until_free()


async def in_turn(cluster: ApiCluster, asked: list[Json], expected: list[Json]) -> None:
    """Both streams are open at once, and read one event each by turns."""
    async with cluster.streamed(**asked[0]) as a, cluster.streamed(**asked[1]) as b:
        going: list[Any] = [a, b]
        while going:
            going = [stream for stream in going if await stream.next() is not None]
    for stream, right in zip((a, b), expected, strict=True):
        assert (stream.text, stream.finish_reason) == (right["text"], right["finish_reason"])
        tops = [c["logprobs"]["token_logprobs"] for chunk in stream.chunks for c in chunk["choices"] if c["logprobs"]]
        assert [value for values in tops for value in values] == right["logprobs"]["token_logprobs"]
