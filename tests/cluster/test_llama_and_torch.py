"""A route of llama.cpp and a route of PyTorch on the same weights: the same greedy tokens, the same token ids."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, model_cluster
from tests.support.decoded_model import write_decoded
from tests.support.greedy import EIGHT_BITS, F16_CACHE, answers, near_tie, prompts
from tests.support.vocabularies import mixed_strings

pytestmark = [pytest.mark.llama, pytest.mark.torch, pytest.mark.smollm2, pytest.mark.long, pytest.mark.timeout(1800)]
pytest.importorskip("llama_cpp")
pytest.importorskip("torch")

TOKENS = 64
STRINGS = 10_000
LAYERS = ["0:15", "15:30"]
NODE = ["--threads", "1", "--kv-tokens", "4096"]


async def both(stack: AsyncExitStack, folder: Path, model: Path) -> tuple[Cluster, Cluster]:
    clusters = []
    for engine in ("torch", "llama"):
        (folder / engine).mkdir()
        made = model_cluster(folder / engine, model, layers=LAYERS, engine=engine, node_arguments=NODE)
        clusters.append(await stack.enter_async_context(made))
    return clusters[0], clusters[1]


async def ids_of(cluster: Cluster, texts: list[str], *, parse_special: bool) -> list[list[int]]:
    """Of the head, by HTTP, a few at a time."""
    gate = asyncio.Semaphore(4)
    found: list[list[int]] = [[] for _ in texts]

    async def one(number: int) -> None:
        body: dict[str, Any] = {"text": texts[number], "add_special": False, "parse_special": parse_special}
        async with gate:
            answer = await cluster.control("POST", f"{cluster.nodes[0].url}/v1/tokenize", json=body)
        assert answer.status_code == 200, (texts[number], answer.text)
        found[number] = answer.json()["tokens"]

    async with asyncio.TaskGroup() as tasks:
        for number in range(len(texts)):
            tasks.create_task(one(number))
    return found


async def test_token_ids_by_http(tmp_path: Path) -> None:
    from shardline.cli.demo_model import demo_model

    texts = mixed_strings(STRINGS)
    async with AsyncExitStack() as stack:
        torch, llama = await both(stack, tmp_path, demo_model())
        for parse_special, some in ((True, texts), (False, texts[:1000])):
            theirs = await ids_of(torch, some, parse_special=parse_special)
            ours = await ids_of(llama, some, parse_special=parse_special)
            assert sum(map(len, ours)) > len(some)
            assert [t for t, a, b in zip(some, theirs, ours, strict=True) if a != b] == []


@pytest.mark.parametrize("weights", ["float32", "q4_1"])
async def test_greedy_tokens(tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of float32: the narrow rule. Of 4 bits: parted by nothing but what llama.cpp rounds."""
    from shardline.cli.demo_model import demo_model

    model, tie = demo_model(), EIGHT_BITS
    if weights == "float32":
        model, tie = write_decoded(model, tmp_path / "decoded.gguf"), F16_CACHE
    asked = prompts(10)
    async with AsyncExitStack() as stack:
        torch, llama = await both(stack, tmp_path, model)
        theirs = await answers(torch, asked, TOKENS, at_once=1)
        ours = await answers(llama, asked, TOKENS, at_once=1)
    ties = [said for a, b in zip(theirs, ours, strict=True) if (said := near_tie(a, b, tie)) is not None]
    steps = [len(a.tokens) for a in ours]
    with capsys.disabled():
        print(f"\n  {weights}: {steps} tokens; parted: {len(ties)}", *ties, sep="\n  ")
