"""Isolation on the PyTorch engine, with real processes: a tiny model with random weights over two Nodes, whose every
answer is compared, token by token and number by number, with that of transformers alone on the same prompt."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.support.cluster import Cluster, Json
from tests.support.tokenizer_folder import VOCAB, save_tokenizer

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
torch = pytest.importorskip("torch")

TOKENS = 8
CLIENTS, ROUNDS = 16, 2
KV_TOKENS = 420
"""Room for about six sessions of those sixteen at a time."""


class Alone:
    """transformers with the same weights: log-probabilities of the greedy tokens behind a prompt."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[float]] = {}

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        key = tuple(ids)
        if key not in self._known:
            prompt = torch.tensor([list(ids)])
            with torch.inference_mode():
                out = self._model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=TOKENS,
                    do_sample=False,
                    output_scores=True,
                    return_dict_in_generate=True,
                    eos_token_id=None,
                )
            made = out.sequences[0, len(ids) :].tolist()
            scores = (score[0].log_softmax(-1) for score in out.scores)
            self._known[key] = [float(score[token]) for score, token in zip(scores, made, strict=True)]
        return self._known[key]


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Cluster, Alone]]:
    """Tests share it: that others were here before is what they are about."""
    transformers = pytest.importorskip("transformers")
    from tests.support.torch_models import SIZES, save

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": 257, "bos_token_id": 256}
    model = save(transformers.LlamaConfig(**sizes), folder)
    save_tokenizer(folder)
    arguments = ["--kv-tokens", str(KV_TOKENS), "--threads", "1"]
    settings = {"prefill_chunk_max": 16, "queue_limit": 100}
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), settings)
    try:
        await cluster.start_tracker()
        for span in ("0:2", "2:4"):
            await cluster.start_node(str(folder), "--engine", "torch", "--layers", span, *arguments)
        await cluster.start_gateway()
        for node in cluster.nodes:
            await node.until("ready", 120)
        cluster.model = (await cluster.http.get(f"{cluster.gateway.url}/v1/models")).json()["data"][0]["id"]
        yield cluster, Alone(model)
    finally:
        await cluster.stop()


def request(cluster: Cluster, ids: Sequence[int], **more: Any) -> Json:
    body = {"model": cluster.model, "prompt": list(ids), "max_tokens": TOKENS, "temperature": 0, "logprobs": 1}
    return {**body, "ignore_eos": True, **more}


async def ask(cluster: Cluster, ids: Sequence[int], **more: Any) -> Json:
    answer = await cluster.http.post(f"{cluster.gateway.url}/v1/completions", json=request(cluster, ids, **more))
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def check(choice: Json, alone: Alone, ids: Sequence[int]) -> None:
    """The same token at every step: another one, or other rows in the cache, would have another log-probability."""
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(alone.logprobs(ids), abs=1e-4)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


async def test_sixteen_clients_of_which_a_third_leaves(served: tuple[Cluster, Alone]) -> None:
    """Sixteen prompts at once with a third of the clients leaving at random moments, in a pool for about six: every
    answer is that of its prompt alone."""
    cluster, alone = served
    rng = random.Random(69)
    prompts = [prompt(i, 40 + 3 * i) for i in range(CLIENTS)]
    expected = [await ask(cluster, ids) for ids in prompts]
    for choice, ids in zip(expected, prompts, strict=True):
        check(choice, alone, ids)
    for _ in range(ROUNDS):
        leavers = set(rng.sample(range(CLIENTS), CLIENTS // 3))

        async def one(number: int, leaves_s: float | None) -> Json | None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(leaves_s):
                    return await ask(cluster, prompts[number])
            return None

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(one(i, rng.random() * 0.3 if i in leavers else None)) for i in range(CLIENTS)]
        for number, task in enumerate(asked):
            choice = task.result()
            assert choice == expected[number] or (choice is None and number in leavers)
    await cluster.until_free()


async def test_nothing_is_left_of_the_last_request(served: tuple[Cluster, Alone]) -> None:
    """Prompts of 28 and 37 tokens in a row, one of them twice, one after a cancelled one, and both in turn."""
    cluster, alone = served
    short, long = prompt(28, 28), prompt(37, 37)
    for ids in (short, long, short, short, long):
        check(await ask(cluster, ids), alone, ids)
    url = f"{cluster.gateway.url}/v1/completions"
    body = request(cluster, prompt(1, 60), stream=True, max_tokens=300)
    async with cluster.http.stream("POST", url, json=body) as left:
        seen = 0
        async for line in left.aiter_lines():
            seen += line.startswith("data: {")
            if seen == 3:
                break
    check(await ask(cluster, long), alone, long)
    async with asyncio.TaskGroup() as tasks:
        pair = [tasks.create_task(ask(cluster, ids)) for ids in (short, long)]
    for task, ids in zip(pair, (short, long), strict=True):
        check(task.result(), alone, ids)
    await cluster.until_free()


async def test_a_prompt_that_was_there_before(served: tuple[Cluster, Alone]) -> None:
    """The same 200 tokens three times, then four at once: identical tokens and log-probabilities, to the last bit."""
    cluster, alone = served
    ids = prompt(200, 200)
    first = await ask(cluster, ids)
    check(first, alone, ids)
    answers = [await ask(cluster, ids) for _ in range(2)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ask(cluster, ids)) for _ in range(4)]
    answers += [task.result() for task in running]
    assert all(answer == first for answer in answers)
    await cluster.until_free()
