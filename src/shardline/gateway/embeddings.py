"""Embeddings of one request: a Route Session an input, some at a time, and the answer when all are there.

Owns the order (everything that can be refused is, before a Node does more than tokenise), how many run at a time, and
the end: one that fails ends all. What a vector looks like is embeddings_request.py's. Shown by
tests/cases/test_embeddings_over_nodes.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import structlog

from shardline.errors import ShardlineError, first_of
from shardline.gateway.completions import Completions
from shardline.gateway.detokenize import Vocabulary
from shardline.gateway.embeddings_request import (
    EmbeddingsRequest,
    Input,
    check_ids,
    embeddings_request,
    shaped,
    written,
)
from shardline.gateway.generate_api import FinishedEvent, Generation, GenerationRequest, Generations
from shardline.gateway.json_body import refuse
from shardline.gateway.openai_answers import Json
from shardline.gateway.openai_requests import window_of
from shardline.settings import Settings
from shardline.wire.messages import Embed, Embedded, ModelInfo, Sampling

log = structlog.get_logger(__name__)
AT_A_TIME = 8
"""Inputs of one request that are on their way together: enough to keep every hop at work, and few beside the sessions
of others."""
SESSIONS_TOLD = 64
"""Ids of Route Sessions that fit into a header field."""
VALUES = 1 << 25
"""Most numbers of an answer, which is in memory until its last vector has come: 2,048 vectors of 16,384."""


@dataclass(slots=True)
class Embedding:
    """The vectors of one request, as they come."""

    request: EmbeddingsRequest
    model: ModelInfo
    key_id: str
    prompts: list[list[int]]
    announced: str | None
    """The Route Session of the first input, until that begins."""
    sessions: dict[int, str] = field(default_factory=dict)
    """Input -> public id of its Route Session, of those that have begun."""
    vectors: dict[int, msgspec.Raw] = field(default_factory=dict)
    pooling: str | None = None
    width: int | None = None
    """Numbers of a vector as it came."""

    def take(self, index: int, embedded: Embedded) -> None:
        """Keep a vector as it will be written. `seam_invalid` for one that is unlike the others, which a Node made up;
        `invalid_value` where so many vectors of this width are more than `VALUES`, or `dimensions` is larger."""
        width = len(embedded.vector) // 4
        if self.pooling not in (None, embedded.pooling) or self.width not in (None, width):
            what = f"a vector of {width} numbers, pooled by {embedded.pooling}, where others were of {self.width}"
            raise ShardlineError("seam_invalid", f"{what}, by {self.pooling}")
        self.pooling, self.width = embedded.pooling, width
        values = shaped(embedded.vector, self.request)
        most = VALUES // len(values)
        if len(self.prompts) > most:
            refuse("input", f"'input': {len(self.prompts)} vectors of {len(values)} numbers, at most {most} at a time")
        self.vectors[index] = written(values, base64=self.request.base64)

    @property
    def tokens(self) -> int:
        """Of inputs that were computed."""
        return sum(len(self.prompts[index]) for index in self.vectors)

    @property
    def told_sessions(self) -> list[str]:
        """Ids of the first inputs' Route Sessions, in their order."""
        return [self.sessions[index] for index in sorted(self.sessions)[:SESSIONS_TOLD]]

    def answer(self) -> Json:
        """OpenAI's object; of ours, `pooling` says how it was done."""
        data = [
            {"object": "embedding", "index": index, "embedding": self.vectors[index]}
            for index in range(len(self.prompts))
        ]
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        return {
            "object": "list",
            "data": data,
            "model": self.request.model,
            "usage": usage,
            "pooling": self.pooling,
        }


class EmbeddingRequests:
    """The endpoint, without HTTP."""

    def __init__(self, completions: Completions, generations: Generations, settings: Settings) -> None:
        self._completions = completions
        self._generations = generations
        self._settings = settings

    async def prepare(self, body: bytes, key_id: str) -> Embedding:
        """Check and tokenise all; nothing has begun yet."""
        request = await self._completions.decoded(embeddings_request, body)
        model = await self._completions.model(request.model)
        if model.composite:
            what = (
                f"no embeddings for the model '{request.model[:100]}': another server has it, which is asked for text"
            )
            advice = "Ask that server for them, or another model: one with composite false in GET /v1/models."
            raise ShardlineError("invalid_value", what, param="model", advice=advice)
        for index, item in enumerate(request.inputs):
            if isinstance(item, list):  # one that is too long is not looked through
                _check_room(index, len(item), model)
        with self._announced(model, key_id) as session:
            vocabulary = await self._completions.texts.vocabulary(model)
            check_ids(request.inputs, min(model.vocab_size, vocabulary.size))
            prompts: dict[int, list[int]] = {}

            async def tokenise(index: int) -> None:
                prompts[index] = await self._tokens(index, request.inputs[index], model, vocabulary)

            await some_at_a_time(len(request.inputs), tokenise)
            return Embedding(request, model, key_id, [prompts[i] for i in range(len(prompts))], session)

    @contextmanager
    def _announced(self, model: ModelInfo, key_id: str) -> Iterator[str]:
        """The first input's Route Session has its record from here on, before a Node is asked for anything."""
        session = self._generations.announce(model.model, key_id)
        try:
            yield session
        except BaseException as error:
            self._generations.withdraw(session, error if isinstance(error, ShardlineError) else None)
            raise

    async def _tokens(self, index: int, item: Input, model: ModelInfo, vocabulary: Vocabulary) -> list[int]:
        if isinstance(item, list):
            return item
        texts = self._completions.texts
        tokens = await texts.tokenize(model, vocabulary, item, add_special=True, param="input")
        if not tokens:
            refuse("input", f"input {index} is no token of the model")
        _check_room(index, len(tokens), model)
        return tokens

    async def run(self, embedding: Embedding) -> None:
        """Compute all vectors. Whatever ends it, no Route Session of it runs on; a failure tells which input."""

        async def embed(index: int) -> None:
            embedding.take(index, await self._embedded(embedding, index))

        try:
            await some_at_a_time(len(embedding.prompts), embed)
        except ShardlineError as error:
            error.details.setdefault("route_sessions", embedding.told_sessions)
            raise
        finally:
            if embedding.announced is not None:  # it was left before the first one began
                self._generations.withdraw(embedding.announced, None)

    async def _embedded(self, embedding: Embedding, index: int) -> Embedded:
        request, model = embedding.request, embedding.model
        session, embedding.announced = embedding.announced, None
        generation = self._generations.start(
            GenerationRequest(
                model=model.model,
                name=request.model,
                content_id=model.content_id,
                prompt=embedding.prompts[index],
                max_tokens=0,
                sampling=Sampling(),
                stop=(),
                key_id=embedding.key_id,
                reuse=False,
                session=session,
                embed=Embed(pooling=request.pooling),
            )
        )
        embedding.sessions[index] = generation.id
        embedded = None
        try:
            async for event in generation:
                if isinstance(event, FinishedEvent):
                    embedded = event.embedded
        except ShardlineError as error:
            if len(embedding.prompts) > 1:
                error.details.setdefault("input", index)
            raise
        except BaseException:
            await self._cancel(generation)
            raise
        if embedded is None:
            raise ShardlineError("cancelled", "the session ended without a vector", session=generation.id)
        return embedded

    async def _cancel(self, generation: Generation) -> None:
        try:
            async with asyncio.timeout(self._settings.control_s):
                await generation.cancel("the request ended")
        except TimeoutError:
            log.warning("generation_still_closing", session=generation.id, limit_s=self._settings.control_s)


async def some_at_a_time(count: int, do: Callable[[int], Awaitable[None]]) -> None:
    """`do` 0 to `count` - 1, begun in this order, `AT_A_TIME` together. The first failure ends all, and is raised."""
    waiting = iter(range(count))

    async def work() -> None:
        for index in waiting:
            await do(index)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(count, AT_A_TIME)):
                tasks.create_task(work())
    except* ShardlineError as group:
        raise first_of(group) from None


def _check_room(index: int, tokens: int, model: ModelInfo) -> None:
    """`context_length_exceeded`: an input may fill the context, as nothing is generated behind it."""
    window = window_of(model)
    if tokens > window:
        raise ShardlineError(
            "context_length_exceeded",
            f"input {index} has {tokens} tokens, the context has {window}",
            param="input",
            prompt_tokens=tokens,
            context_length=window,
            input=index,
        )
