"""Tiny models of the audited architectures over real HTTP: one Node against two and three, to the bit.

Each Node is a process with the PyTorch engine. Prompts are longer than windows and than what sparse attention selects:
a Seam that lost something would show in the numbers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, Json
from tests.support.tokenizer_folder import VOCAB, save_tokenizer

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
pytest.importorskip("torch")

TOKENS = 12
ROUTES: dict[str, tuple[tuple[str, ...], ...]] = {
    # Cuts in front of, between and behind layers that route by token id.
    "deepseek_v4": (("0:8",), ("0:2", "2:8"), ("0:1", "1:5", "5:8")),
    # Cuts that a selection has to cross, and one that it has not.
    "glm_moe_dsa": (("0:8",), ("0:4", "4:8"), ("0:2", "2:5", "5:8")),
    # Cuts that leave Shards with recurrent layers alone.
    "qwen3_5_moe_text": (("0:8",), ("0:3", "3:8"), ("0:2", "2:4", "4:8")),
}


@pytest.fixture(
    scope="module",
    params=["deepseek_v4", *(pytest.param(kind, marks=pytest.mark.long) for kind in ROUTES if kind != "deepseek_v4")],
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    import torch

    from tests.support.torch_models import save_audited

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    save_audited(request.param, folder, vocab_size=VOCAB, eos_token_id=257, bos_token_id=256)
    save_tokenizer(folder)
    return request.param, folder


@pytest.fixture(scope="module")
async def answers(saved: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[list[Json]]]:
    """What each route of the model says to the same prompts, several of them at a time."""
    kind, folder = saved
    found = []
    for spans in ROUTES[kind]:
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), {"prefill_chunk_max": 32})
        try:
            await cluster.start_tracker()
            for span in spans:
                common = ["--engine", "torch", "--kv-tokens", "4096", "--threads", "1"]
                await cluster.start_node(str(folder), *common, "--layers", span)
            await cluster.start_gateway()
            for node in cluster.nodes:
                await node.until("ready", 120)
            cluster.model = (await cluster.http.get(f"{cluster.gateway.url}/v1/models")).json()["data"][0]["id"]
            found.append(await ask_all(cluster))
            await cluster.until_free()
        finally:
            await cluster.stop()
    yield found


def prompts() -> list[list[int]]:
    """Of 20, 60, 150 and 300 tokens; the longest twice, so that nothing is left over from another session."""
    made = [random.Random(length).choices(range(256), k=length) for length in (20, 60, 150, 300)]
    return [*made, made[-1]]


async def ask_all(cluster: Cluster) -> list[Json]:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(cluster, ids)) for ids in prompts()]
    return [task.result() for task in asked]


async def ask(cluster: Cluster, ids: Sequence[int]) -> Json:
    body: dict[str, Any] = {"model": cluster.model, "prompt": list(ids), "max_tokens": TOKENS, "temperature": 0}
    answer = await cluster.http.post(
        f"{cluster.gateway.url}/v1/completions", json={**body, "logprobs": 3, "ignore_eos": True}
    )
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return {"tokens": choice["logprobs"]["tokens"], "logprobs": choice["logprobs"]["token_logprobs"]}


async def test_routes_of_every_length_say_the_same(answers: list[list[Json]]) -> None:
    """To the bit: chunks of a prompt are the same on every route, and entries of a batch are computed one by one."""
    alone = answers[0]
    assert all(len(answer["tokens"]) == TOKENS for answer in alone)
    assert alone[3] == alone[4]
    assert len({tuple(answer["logprobs"]) for answer in alone[:4]}) == 4
    for route in answers[1:]:
        assert route == alone
