"""From a request's bytes to generations that can start: model, text, prompt, room.

Owns the order in which a request is checked, so that everything that can be refused is refused before a Node does
more than tokenise. Whatever it returns has not started yet. Shown by tests/gateway/test_app_requests.py.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from shardline.errors import COMPOSITE_GONE, ONE_ENGINE, RETURNING, ShardlineError
from shardline.gateway.choices import Choice
from shardline.gateway.composite_requests import NO_VOCABULARY, chat_calls, generations, text_calls
from shardline.gateway.detokenize import TextStream, Vocabulary
from shardline.gateway.generate_api import Generation, GenerationRequest, Generations
from shardline.gateway.json_body import unsupported
from shardline.gateway.openai_answers import Envelope, fingerprint, lack_of, layers_text, missing_layers
from shardline.gateway.openai_requests import (
    Asked,
    ChatRequest,
    Prompt,
    chat_request,
    check_vocabulary,
    room,
    text_request,
)
from shardline.gateway.passed_choice import CallForm, PassedChoice
from shardline.gateway.template import Templates
from shardline.gateway.text import TextStore
from shardline.gateway.tools_answer import Reading
from shardline.settings import Settings
from shardline.wire.composite import UpstreamCall
from shardline.wire.messages import ModelInfo

T = TypeVar("T")
_INLINE_BYTES = 64 << 10
"""A larger body is decoded beside the event loop: that can take longer than a decode step."""
RETRY_AFTER_S = 5
_RETURNING_S = 2
_ENGINES_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An answer that can begin: its choices in order, and what stands in front of the text of each."""

    asked: Asked
    envelope: Envelope
    requests: list[GenerationRequest]
    echoes: list[str]
    prompt_tokens: int
    """As usage counts them: each prompt once, whatever `n`."""
    reading: Reading | None = None
    """Of a chat: what is read out of its text."""
    prompt: str = ""
    passed_on: bool = False
    """To another server, which knows its tokens, and alone can count them."""
    whole_calls: bool = False
    """Calls are told whole, not in pieces, and their arguments are objects."""

    def start(self, generations: Generations) -> list[Choice]:
        return [self._choice(index, generations.start(request)) for index, request in enumerate(self.requests)]

    def _choice(self, index: int, generation: Generation) -> Choice:
        if self.passed_on:
            calls: CallForm = "objects" if self.whole_calls else "pieces" if self.asked.stream else "whole"
            return PassedChoice(index, generation, chat=self.envelope.chat, calls=calls)
        stop, vocabulary, reading = self.requests[index].stop, self.envelope.vocabulary, self.reading
        if reading is None:
            return Choice(index, generation, TextStream(vocabulary, stop))
        return Choice(index, generation, TextStream(vocabulary, stop, reading.marks), reading.reader(self.prompt))


class Completions:
    """Both endpoints up to the start of the generations."""

    def __init__(self, generations: Generations, texts: TextStore, templates: Templates, settings: Settings) -> None:
        self._generations = generations
        self._texts = texts
        self._templates = templates
        self._settings = settings
        self._decoding = asyncio.Semaphore(1)

    @property
    def texts(self) -> TextStore:
        return self._texts

    async def chat(self, body: bytes, key_id: str, decode: Callable[[bytes], ChatRequest] = chat_request) -> Prepared:
        """`POST /v1/chat/completions`; with another `decode`, what means the same in another API."""
        request = await self.decoded(decode, body)
        model = await self.model(request.asked.model)
        with self._announced(model, key_id) as session:
            if model.composite:
                calls = chat_calls(request, model, self._settings)
                prepared = self._passed_on(calls, request.asked, model, session, key_id, [""], chat=True)
                return replace(prepared, whole_calls=decode is not chat_request)
            vocabulary = await self._texts.vocabulary(model)
            asked = check_vocabulary(request.asked, [], _ids(model, vocabulary), vocabulary.bundle.eog)
            tools = request.tools
            reading = Reading(vocabulary, tools, inline=request.inline_reasoning)
            _check_effort(request.variables, vocabulary)
            text = await self._templates.prompt(
                vocabulary,
                request.messages,
                continued=request.continued,
                tools=None if tools is None else tools.shown,
                more=request.variables,
            )
            grammar = reading.grammar(asked.sampling.grammar, text, continued=request.continued)
            asked = replace(asked, sampling=msgspec.structs.replace(asked.sampling, grammar=grammar))
            # The template alone decides what stands around the text, BOS too.
            tokens = await self._texts.tokenize(model, vocabulary, text, add_special=False, param="messages")
            if not tokens:
                raise ShardlineError("template_error", "the chat template makes an empty prompt", param="messages")
            prepared = self._prepared(asked, model, vocabulary, [tokens], [""], session, key_id, param="messages")
            return replace(prepared, reading=reading, prompt=text)

    async def text(self, body: bytes, key_id: str) -> Prepared:
        """`POST /v1/completions`."""
        request = await self.decoded(text_request, body)
        model = await self.model(request.asked.model)
        for prompt in request.prompts if not model.composite else ():
            if isinstance(prompt, list):  # one that is too long is not looked through
                room(request.asked.max_tokens, len(prompt), model, self._settings, param="prompt")
        with self._announced(model, key_id) as session:
            if model.composite:
                calls = text_calls(request, model, self._settings)
                echoes = [prompt if request.echo and isinstance(prompt, str) else "" for prompt in request.prompts]
                return self._passed_on(calls, request.asked, model, session, key_id, echoes, chat=False)
            vocabulary = await self._texts.vocabulary(model)
            eog = vocabulary.bundle.eog
            asked = check_vocabulary(request.asked, request.prompts, _ids(model, vocabulary), eog)
            prompts = [await self._tokens(model, vocabulary, prompt, request.suffix) for prompt in request.prompts]
            echoes = [_echo(prompt, vocabulary) if request.echo else "" for prompt in request.prompts]
            return self._prepared(asked, model, vocabulary, prompts, echoes, session, key_id, param="prompt")

    async def decoded(self, decode: Callable[[bytes], T], body: bytes) -> T:
        """Large bodies one at a time: several threads at once would leave the event loop hardly a turn."""
        if len(body) <= _INLINE_BYTES:
            return decode(body)
        async with self._decoding:
            work = asyncio.get_running_loop().run_in_executor(None, decode, body)
            try:
                return await asyncio.shield(work)
            finally:
                # A thread does not end when its request is cancelled: the next one waits for it all the same.
                await asyncio.wait([work])
                if not work.cancelled():
                    work.exception()
                del work  # it knows what was raised, and that this frame, with the body

    @contextmanager
    def _announced(self, model: ModelInfo, key_id: str) -> Iterator[str]:
        """The first choice's Route Session has its record from here on, before a Node is asked for anything."""
        session = self._generations.announce(model.model, key_id)
        try:
            yield session
        except BaseException as error:
            self._generations.withdraw(session, error if isinstance(error, ShardlineError) else None)
            raise

    async def model(self, name: str) -> ModelInfo:
        """The served model of this name, or with this `content_id`; never another one."""
        models = await self._generations.models()
        known = [model for model in models if name in (model.model, model.content_id)]
        if not known:
            raise ShardlineError("model_not_found", f"the model '{_short(name)}' is not served here", param="model")
        ready = next((model for model in known if model.ready), None)
        if ready is None:
            raise _not_whole(name, known, models)
        return ready

    async def _tokens(self, model: ModelInfo, vocabulary: Vocabulary, prompt: Prompt, suffix: str | None) -> list[int]:
        if suffix is not None:
            return await self._infill(model, vocabulary, prompt, suffix)
        if isinstance(prompt, list):
            return prompt
        tokens = await self._texts.tokenize(model, vocabulary, prompt, add_special=True, param="prompt")
        if not tokens:
            raise ShardlineError("invalid_value", "the prompt is empty", param="prompt")
        return tokens

    async def _infill(self, model: ModelInfo, vocabulary: Vocabulary, prompt: Prompt, suffix: str) -> list[int]:
        """What stands before and behind the gap, in the order that infilling models were trained on."""
        fim = vocabulary.bundle.fim or {}
        marks = [fim.get(name) for name in ("prefix", "suffix", "middle")]
        if not isinstance(prompt, str) or None in marks:
            why = "token ids cannot have one" if not isinstance(prompt, str) else "the model was not made for infilling"
            raise ShardlineError("unsupported_parameter", f"'suffix': {why}", param="suffix")
        before, behind, middle = (mark for mark in marks if mark is not None)
        head = await self._texts.tokenize(model, vocabulary, prompt, add_special=False, param="prompt")
        tail = await self._texts.tokenize(model, vocabulary, suffix, add_special=False, param="suffix")
        bundle = vocabulary.bundle
        bos = [bundle.bos] if bundle.add_bos and bundle.bos is not None else []
        return [*bos, before, *head, behind, *tail, middle]

    def _passed_on(
        self,
        calls: list[UpstreamCall],
        asked: Asked,
        model: ModelInfo,
        session: str,
        key_id: str,
        echoes: Sequence[str],
        *,
        chat: bool,
    ) -> Prepared:
        return Prepared(
            asked=asked,
            envelope=_envelope(asked, model, NO_VOCABULARY, chat=chat),
            requests=generations(calls, asked, model, self._settings, key_id=key_id, session=session),
            echoes=[echo for echo in echoes for _ in range(asked.n)],
            prompt_tokens=0,
            passed_on=True,
        )

    def _prepared(
        self,
        asked: Asked,
        model: ModelInfo,
        vocabulary: Vocabulary,
        prompts: Sequence[list[int]],
        echoes: Sequence[str],
        session: str,
        key_id: str,
        *,
        param: str,
    ) -> Prepared:
        limits = [room(asked.max_tokens, len(tokens), model, self._settings, param=param) for tokens in prompts]
        requests = [
            GenerationRequest(
                model=model.model,
                name=asked.model,
                content_id=model.content_id,
                prompt=tokens,
                max_tokens=limit,
                sampling=msgspec.structs.replace(
                    asked.sampling_of(choice), min_tokens=min(asked.sampling.min_tokens, limit)
                ),
                stop=asked.stop,
                key_id=key_id,
                reuse=asked.cache_prompt,
                session=session if number == choice == 0 else None,
            )
            for number, (tokens, limit) in enumerate(zip(prompts, limits, strict=True))
            for choice in range(asked.n)
        ]
        return Prepared(
            asked=asked,
            envelope=_envelope(asked, model, vocabulary, chat=param == "messages"),
            requests=requests,
            echoes=[echo for echo in echoes for _ in range(asked.n)],
            prompt_tokens=sum(map(len, prompts)),
        )


def _envelope(asked: Asked, model: ModelInfo, vocabulary: Vocabulary, *, chat: bool) -> Envelope:
    return Envelope(
        id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        created=int(time.time()),
        model=asked.model,
        fingerprint=fingerprint(model),
        chat=chat,
        vocabulary=vocabulary,
        logprobs=asked.sampling.logprobs,
    )


def _check_effort(variables: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Where the template does not look at it, it would change nothing."""
    if "reasoning_effort" in variables and "reasoning_effort" not in (vocabulary.bundle.chat_template or ""):
        unsupported("reasoning_effort", "'reasoning_effort': the chat template of the model does not know of it")


def _not_whole(name: str, known: list[ModelInfo], models: Sequence[ModelInfo]) -> ShardlineError:
    """Of the engine classes that have parts of the model: of the one that comes back by itself, else lacks least."""
    model = min(known, key=lambda m: (not m.returning, sum(last - first for first, last in m.missing)))
    what = "is not served" if model.composite else "is not whole"
    message = f"the model '{_short(name)}' {what}: {lack_of(model)}"
    others = [m for m in models if m.content_id == model.content_id and m.engine_class != model.engine_class]
    for other in others[:_ENGINES_TOLD]:
        lacks = layers_text(other.missing)
        message += f"; of engine class {other.engine_class} {lacks} are missing, and no route mixes engine classes"
    return ShardlineError(
        "model_unavailable",
        f"{message} for the moment" if model.returning else message,
        param="model",
        advice=_advice(model, one_engine=bool(others)),
        missing=missing_layers(model),
        retry_after=_RETURNING_S if model.returning else RETRY_AFTER_S,
    )


def _advice(model: ModelInfo, *, one_engine: bool) -> str | None:
    if model.composite:
        return COMPOSITE_GONE
    return RETURNING if model.returning else ONE_ENGINE if one_engine else None


def _ids(model: ModelInfo, vocabulary: Vocabulary) -> int:
    """Token ids that a client may name: those with a text, which can be fewer than the model has rows for."""
    return min(model.vocab_size, vocabulary.size)


def _echo(prompt: Prompt, vocabulary: Vocabulary) -> str:
    return prompt if isinstance(prompt, str) else vocabulary.text(prompt)


def _short(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "…"
