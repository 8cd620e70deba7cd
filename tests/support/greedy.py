"""Greedy answers of a route, with how near the second best was at each step; and the rule by which two are the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tests.support.cluster import Cluster

F16_CACHE = 0.05
"""Weights of float32, a cache of float16: the unsplit library moves logits of SmolLM2 by 0.013 (median) and up to 0.041
when nothing changes but the cells in which a sequence lies."""
EIGHT_BITS = 1.7
"""With weights of 4 bits llama.cpp rounds what goes into a product to 8 bits, and one last bit becomes one of 8. So the
unsplit library moves logits of SmolLM2 by 0.7 (median) and up to 1.5 when nothing changes but the cells in which a
sequence lies; both are then as far from PyTorch as from one another."""

ENDS = ("<|im_end|>", "<|endoftext|>")
"""As SmolLM2 ends."""

_THINGS = ["red", "round", "old", "made of wood", "loud", "cold", "found in a kitchen", "heavy", "sweet", "far away"]
_FORMS = ["Name three things that are {}.", "Why is something {}?", "A poem on what is {}:", "{} or not?", "Define: {}"]


def prompts(count: int) -> list[str]:
    """Different questions as chat prompts, up to 50."""
    texts = [form.format(thing) for thing, form in product(_THINGS, _FORMS)]
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts[:count]]


@dataclass(frozen=True)
class Answer:
    """`gaps`: of each step, by how much the likeliest tokens fall behind the best, by their text."""

    tokens: tuple[str, ...]
    gaps: tuple[dict[str, float], ...]

    @property
    def text(self) -> str:
        return "".join(self.tokens)


async def answer(cluster: Cluster, prompt: str | list[int], count: int, *, ignore_eos: bool = False) -> Answer:
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 5}
    if ignore_eos:
        body["ignore_eos"] = True
    reply = await cluster.http.post(f"{cluster.gateway.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    found = reply.json()["choices"][0]["logprobs"]
    return Answer(tuple(found["tokens"]), tuple(_gaps(top) for top in found["top_logprobs"]))


def _gaps(top: dict[str, float]) -> dict[str, float]:
    best = max(top.values())
    return {token: best - logprob for token, logprob in top.items()}


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
            gap = alone.gaps[step].get(b, math.inf)
            said = f"step {step}: {b!r} for {a!r}, gap {gap:.4f}"
            assert gap < tie, said
            return said
    if len(alone.tokens) == len(other.tokens):
        return None
    shorter, longer = sorted((alone, other), key=lambda each: len(each.tokens))
    step = len(shorter.tokens)
    gap = min(longer.gaps[step].get(end, math.inf) for end in ENDS)
    said = f"step {step}: the end for {longer.tokens[step]!r}, or the reverse, gap {gap:.4f}"
    assert gap < tie, said
    return said


def near_tie_of_text(alone: Answer, text: str, tie: float, *, whole: bool) -> str | None:
    """The same for an answer of which only the text is known; `whole`: it is not the beginning of one."""
    at = 0
    for step, token in enumerate(alone.tokens):
        rest = text[at:]
        if rest.startswith(token):
            at += len(token)
            continue
        if token.startswith(rest) and not (rest == "" and whole):
            return None
        ended = min(alone.gaps[step].get(end, math.inf) for end in ENDS) if rest == "" else math.inf
        if ended < tie:
            return f"step {step}: the end for {token!r}, gap {ended:.4f}"
        near = {other: gap for other, gap in alone.gaps[step].items() if other != token and gap < tie}
        said = f"step {step}: {rest[:20]!r} for {token!r}, gaps {near}"
        assert any(rest.startswith(other) or other.startswith(rest) for other in near), said
        return said
    # Where the answer alone ended by itself, by how much is not told: only that this one begins like it.
    return f"went on with {text[at:][:20]!r} behind the end" if text[at:] else None
