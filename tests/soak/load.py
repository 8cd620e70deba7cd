"""Mixed load on a cluster: short and long, chat and completions, streamed and whole, left early, cancelled, several at
once; each answer compared with what the same request gave alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from tests.support.cluster import Cluster, Json, Stream
from tests.support.greedy import Answer, answer, near_tie_of_text

CLIENTS = 6
_DOCUMENT = "Section {n}. A shard is a piece of something larger; it may be sharp, or old, or {what}. "
_WHATS = ["both", "made of glass", "found by the sea", "worth a lot", "of no use"]


def document(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    return "".join(_DOCUMENT.format(n=i, what=rng.choice(_WHATS)) for i in range(1, sentences + 1))


@dataclass(frozen=True)
class Question:
    """`messages` for chat, else `prompt`."""

    name: str
    tokens: int
    prompt: str = ""
    messages: tuple[tuple[str, str], ...] = ()

    def body(self, model: str, **more: object) -> tuple[str, Json]:
        asked: Json = {"model": model, "max_tokens": self.tokens, "temperature": 0, **more}
        if self.messages:
            asked["messages"] = [{"role": role, "content": text} for role, text in self.messages]
            return "/v1/chat/completions", asked
        return "/v1/completions", {**asked, "prompt": self.prompt}


def questions() -> list[Question]:
    """Prompts of 10 to 1,500 tokens; several begin alike, and conversations go on where others end."""
    short = ["red", "round", "loud", "cold", "heavy", "sweet", "old", "far away"]
    asked = [Question("chat", 10 + 4 * i, messages=(("user", f"Why is a thing {w}?"),)) for i, w in enumerate(short)]
    asked += [Question("text", 8 + 5 * i, prompt=f"The {w} thing over there") for i, w in enumerate(short)]
    for seed, sentences in ((1, 20), (2, 45), (3, 60)):
        text = document(seed, sentences)
        for n in (2, 7, 11):
            ask = f"{text}\nWhat does section {n} say?"
            asked.append(Question("document", 12, messages=(("user", ask),)))
    said: tuple[tuple[str, str], ...] = ()
    for turn in ("Tell me about glass.", "And about stone?", "Which is older?", "Thank you."):
        said = (*said, ("user", turn))
        asked.append(Question("conversation", 24, messages=said))
        said = (*said, ("assistant", "It is an old and useful thing, and people have made much of it."))
    return asked


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    ties: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    tokens: int = 0


class Load:
    """`alone` first, then `run`."""

    def __init__(self, cluster: Cluster, seed: int, tie: float) -> None:
        """`tie`: answers may part where two logits are nearer than this."""
        self._cluster = cluster
        self._tie = tie
        self._rng = random.Random(seed)
        self._alone: dict[Question, Answer] = {}
        self.outcome = Outcome()

    async def alone(self) -> None:
        """Every question once, with nothing beside it."""
        for question in questions():
            self._alone[question] = await self._answer_alone(question)

    async def _answer_alone(self, question: Question) -> Answer:
        if not question.messages:
            return await answer(self._cluster, question.prompt, question.tokens)
        path, body = question.body(self._cluster.model, logprobs=True, top_logprobs=5)
        reply = await self._cluster.http.post(f"{self._cluster.gateway.url}{path}", json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        steps = reply.json()["choices"][0]["logprobs"]["content"]
        gaps = []
        for step in steps:
            best = max(top["logprob"] for top in step["top_logprobs"])
            gaps.append({top["token"]: best - top["logprob"] for top in step["top_logprobs"]})
        return Answer(tuple(step["token"] for step in steps), tuple(gaps))

    async def run(self, until: float) -> None:
        """`CLIENTS` clients, each asking one question after another until the clock says `until`."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._client(random.Random(self._rng.random() + number), until))

    async def _client(self, rng: random.Random, until: float) -> None:
        ways: list[tuple[int, str, Callable[[random.Random, Question], object]]] = [
            (4, "whole", self._whole),
            (4, "streamed", self._streamed),
            (2, "left", self._left),
            (1, "cancelled", self._cancelled),
        ]
        while time.monotonic() < until:
            question = rng.choice(list(self._alone))
            ((_, name, way),) = rng.choices(ways, [weight for weight, *_ in ways])
            try:
                await way(rng, question)  # type: ignore[misc]
            except httpx.HTTPError as error:
                self.outcome.wrong.append(f"{question.name}, {name}: {type(error).__name__}: {error}")
            self.outcome.counts[f"{question.name}, {name}"] += 1
            if rng.random() < 0.1:
                await asyncio.sleep(rng.uniform(0, 2))

    async def _whole(self, _: random.Random, question: Question) -> None:
        path, body = question.body(self._cluster.model)
        reply = await self._cluster.http.post(f"{self._cluster.gateway.url}{path}", json=body, timeout=300)
        if reply.status_code != 200:
            self.outcome.refused.append(f"{reply.status_code} {reply.json()['error']['code']}")
            return
        choice = reply.json()["choices"][0]
        text = choice["message"]["content"] if question.messages else choice["text"]
        self.outcome.tokens += reply.json()["usage"]["completion_tokens"]
        if cached := reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]:
            self.outcome.counts["reused prefixes"] += 1
            self.outcome.counts["reused tokens"] += cached
        self._compare(question, text, whole=True)

    async def _streamed(self, _: random.Random, question: Question, chunks: int | None = None) -> None:
        """`chunks`: leave after so many."""
        path, body = question.body(self._cluster.model, stream=True)
        url = f"{self._cluster.gateway.url}{path}"
        async with self._cluster.http.stream("POST", url, json=body, timeout=300) as response:
            if response.status_code != 200:
                self.outcome.refused.append(str(response.status_code))
                return
            stream = Stream(response)
            while (chunks is None or len(stream.chunks) < chunks) and await stream.next() is not None:
                pass
        if stream.error is not None:
            self.outcome.wrong.append(f"{question.name}: {stream.error}")
            return
        self._compare(question, stream.text, whole=stream.done)

    async def _left(self, rng: random.Random, question: Question) -> None:
        """After some chunks of the stream, or at once, in prefill too."""
        if rng.random() < 0.5:
            await self._streamed(rng, question, rng.randint(1, 6))
            return
        try:
            async with asyncio.timeout(rng.uniform(0.01, 1.5)):
                await self._streamed(rng, question)
        except TimeoutError:
            return

    async def _cancelled(self, rng: random.Random, question: Question) -> None:
        path, body = question.body(self._cluster.model, stream=True)
        gateway = self._cluster.gateway.url
        async with self._cluster.http.stream("POST", f"{gateway}{path}", json=body, timeout=300) as response:
            if response.status_code != 200:
                self.outcome.refused.append(str(response.status_code))
                return
            stream = Stream(response)
            await asyncio.sleep(rng.uniform(0, 0.5))
            await self._cluster.http.delete(f"{gateway}/v1/route-sessions/{stream.session_id}")
            while await stream.next() is not None:
                pass
        if stream.error is not None and stream.error["code"] not in ("cancelled", "session_cancelled"):
            self.outcome.wrong.append(f"{question.name}, cancelled: {stream.error}")
        self._compare(question, stream.text, whole=stream.finish_reason in ("stop", "length") and stream.done)

    def _compare(self, question: Question, text: str, *, whole: bool) -> None:
        alone = self._alone[question]
        try:
            tie = near_tie_of_text(alone, text, self._tie, whole=whole)
        except AssertionError as error:
            self.outcome.wrong.append(f"{question.name}: {error}")
            return
        self.outcome.counts["compared"] += 1
        if tie is not None:
            self.outcome.ties.append(tie)
