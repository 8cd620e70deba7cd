"""Greedy answers of a route, with how near the second best was at each step; and the rule by which two are the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tests.support.cluster import Cluster

LAST_BITS = 1e-3
"""Where sums differ in their last bits only: two logits nearer than this are as good as equal."""
EIGHT_BITS = 1.7
"""With weights of 4 bits llama.cpp rounds what goes into a product to 8 bits, and one last bit becomes one of 8. So the
unsplit library moves logits of SmolLM2 by 0.7 (median) and up to 1.5 when nothing changes but the cells in which a
sequence lies; both are then as far from PyTorch as from one another."""

_THINGS = ["red", "round", "old", "made of wood", "loud", "cold", "found in a kitchen", "heavy", "sweet", "far away"]
_FORMS = ["Name three things that are {}.", "Why is something {}?", "A poem on what is {}:", "{} or not?", "Define: {}"]


def prompts(count: int) -> list[str]:
    """Different questions as chat prompts, up to 50."""
    texts = [form.format(thing) for thing, form in product(_THINGS, _FORMS)]
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts[:count]]


@dataclass(frozen=True)
class Answer:
    """`gaps`: logit of the best less that of the second, at each step."""

    tokens: tuple[str, ...]
    gaps: tuple[float, ...]


async def answer(cluster: Cluster, prompt: str | list[int], count: int, *, ignore_eos: bool = False) -> Answer:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 2}
    if ignore_eos:
        body["ignore_eos"] = True
    reply = await cluster.http.post(f"{cluster.gateway.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    found = reply.json()["choices"][0]["logprobs"]
    return Answer(tuple(found["tokens"]), tuple(_gap(top) for top in found["top_logprobs"]))


def _gap(top: dict[str, float]) -> float:
    best = sorted(top.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else math.inf


async def answers(cluster: Cluster, asked: Sequence[str], count: int, *, at_once: int) -> list[Answer]:
    """One answer a prompt, `at_once` of them under way at any time."""
    limit = asyncio.Semaphore(at_once)

    async def one(prompt: str) -> Answer:
        async with limit:
            return await answer(cluster, prompt, count)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(prompt)) for prompt in asked]
    return [task.result() for task in running]


def near_tie(alone: Answer, other: Answer, tie: float) -> str | None:
    """None where both say the same; else where they part, in words. Raises AssertionError where that is no near-tie."""
    for step, (a, b) in enumerate(zip(alone.tokens, other.tokens, strict=False)):
        if a != b:
            said = f"step {step}: {b!r} for {a!r}, gap {alone.gaps[step]:.4f}"
            assert alone.gaps[step] < tie, said
            return said
    assert len(alone.tokens) == len(other.tokens), (alone.tokens, other.tokens)
    return None
