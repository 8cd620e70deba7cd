"""OpenAI requests: bytes in, checked values out, or an error that names the field.

Owns which fields there are, their types and ranges, what null means, and the normal form of messages and prompts.
A field that would change the answer and is not supported is refused by name, never ignored. It does not know which
models are served: what needs their vocabulary or context is checked by `check_vocabulary` and `room`. Pure.
Shown by tests/gateway/test_openai_requests.py; the list of fields is docs/api.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway.json_body import decode_body, refuse, unsupported
from shardline.gateway.messages import Message, conversation
from shardline.gateway.request_fields import (
    INT64,
    NO_EFFECT,
    NOT_SENT,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    TOP_P,
    check_nothing_asked,
    check_ranges,
    matching,
    neutral,
    number_text,
    one_of,
    only,
    shown,
    texts_or_ids,
    within,
)
from shardline.gateway.structured import ResponseFormat, grammar_of
from shardline.gateway.tools_request import FUNCTIONS, TOOL_CHOICES, Tool, ToolChoice, Tools, tools_of
from shardline.settings import Settings
from shardline.wire.messages import BIAS_FORCES, ModelInfo, Sampling

Prompt = str | list[int]

CHOICES = 8
"""Most choices of one prompt (`n`) …"""
ANSWERS = 64
"""… and of one request, over all its prompts."""
TEMPLATE_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "chat_template"}
)
"""Those that all chat templates are given: no request brings its own."""
STOPS = 16
STOP_CHARACTERS = 256
BIASES = 4096
CHAT_LOGPROBS = 20
TEXT_LOGPROBS = 5
BIAS = 100
"""Biases are at most so far from 0: from there on they ban, or force."""
TIERS = ("auto", "default")
REASONING_FORMATS = ("auto", "deepseek", "none")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_PENALTY = within(-2, 2)
_REPEAT_PENALTY = within(0.01, 100)
_STOP = shown(minLength=1, maxLength=STOP_CHARACTERS)
_OBJECT = shown(type=["object", "null"])
_FREE_NAME = shown(**{"not": {"enum": sorted(TEMPLATE_VARIABLES)}})
_ONLY_FALSE = neutral(False, None)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_telemetry: bool | None = None
    include_obfuscation: Annotated[bool | None, _ONLY_FALSE] = None


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. Null is as if absent. Fields of type Raw are checked by name, not decoded."""

    model: str
    max_tokens: Annotated[int | None, TOKENS] = None
    temperature: Annotated[float | None, TEMPERATURE] = None
    top_p: Annotated[float | None, TOP_P] = None
    top_k: Annotated[int | None, TOP_K] = None
    min_p: Annotated[float | None, within(0, 1)] = None
    repeat_penalty: Annotated[float | None, _REPEAT_PENALTY] = None
    repetition_penalty: Annotated[float | None, _REPEAT_PENALTY] = None
    presence_penalty: Annotated[float | None, _PENALTY] = None
    frequency_penalty: Annotated[float | None, _PENALTY] = None
    logit_bias: Annotated[
        dict[Annotated[str, matching(_TOKEN_ID)], Annotated[float, shown(minimum=-BIAS, maximum=BIAS)]] | None,
        shown(maxProperties=BIASES),
    ] = None
    seed: Annotated[int | None, within(-INT64, INT64 - 1)] = None
    stop: Annotated[str, _STOP] | Annotated[list[Annotated[str, _STOP]], shown(maxItems=STOPS)] | None = None
    n: Annotated[int | None, within(1, CHOICES)] = None
    min_tokens: Annotated[int | None, within(0, INT64 - 1)] = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    cache_prompt: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    regex: str | None = None
    # Sent by clients on their own; they change no answer.
    user: Annotated[str | None, NO_EFFECT] = None
    metadata: Annotated[msgspec.Raw, NO_EFFECT, _OBJECT] = NOT_SENT
    store: Annotated[bool | None, _ONLY_FALSE] = None
    service_tier: Annotated[str | None, neutral(*TIERS, None)] = None
    safety_identifier: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[str | None, NO_EFFECT] = None


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], shown(minItems=1)]
    max_completion_tokens: Annotated[int | None, TOKENS] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, within(0, CHAT_LOGPROBS)] = None
    modalities: Annotated[list[str] | None, neutral(["text"], None)] = None
    tools: Annotated[list[Tool] | None, shown(maxItems=FUNCTIONS)] = None
    tool_choice: Annotated[str, one_of(TOOL_CHOICES)] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Annotated[str | None, one_of(REASONING_FORMATS, optional=True)] = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[Annotated[str, matching(_VARIABLE), _FREE_NAME], Any] | None = None
    # OpenAI's, and not supported: here to take their null, and values that ask for nothing.
    functions: Annotated[msgspec.Raw, only("[]")] = NOT_SENT
    function_call: Annotated[msgspec.Raw, only('"none"')] = NOT_SENT
    audio: Annotated[msgspec.Raw, only()] = NOT_SENT
    moderation: Annotated[msgspec.Raw, only()] = NOT_SENT
    prediction: Annotated[msgspec.Raw, only()] = NOT_SENT
    prompt_cache_options: Annotated[msgspec.Raw, only()] = NOT_SENT
    prompt_cache_retention: Annotated[msgspec.Raw, only()] = NOT_SENT
    verbosity: Annotated[msgspec.Raw, only()] = NOT_SENT
    web_search_options: Annotated[msgspec.Raw, only()] = NOT_SENT


class TextBody(_Body):
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[str | int | list[int]], texts_or_ids(ANSWERS)]
    logprobs: Annotated[int | None, within(0, TEXT_LOGPROBS)] = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int | None, neutral(1, None)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What both kinds of request have, checked and in normal form."""

    model: str
    n: int
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    include_telemetry: bool
    return_progress: bool
    timings_per_token: bool
    cache_prompt: bool = True

    def sampling_of(self, choice: int) -> Sampling:
        """Choice i of n samples with seed + i, so that choices differ and each can be had again."""
        seed = self.sampling.seed
        if seed is None or choice == 0:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=(seed + choice + INT64) % (2 * INT64) - INT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    asked: Asked
    messages: list[dict[str, Any]]
    """For the chat template: content is always a string."""
    continued: bool
    """The last message is the assistant's: its text is continued."""
    tools: Tools | None = None
    """None: none may be called."""
    inline_reasoning: bool = False
    variables: dict[str, Any]
    """Of this model's chat template alone."""
    body: bytes = field(default=b"", compare=False)
    """As it came; only a composite model reads it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    asked: Asked
    prompts: list[Prompt]
    """Answered in order, `n` choices each."""
    echo: bool
    suffix: str | None
    body: bytes = field(default=b"", compare=False)


def chat_request(body: bytes, *, own: bool = False) -> ChatRequest:
    """The body of `POST /v1/chat/completions`; raises what docs/api.md says. `own`: as of `decode_body`."""
    sent = decode_body(body, ChatBody, own=own)
    check_nothing_asked(sent)
    if sent.modalities not in (None, ["text"]):
        unsupported("modalities", "'modalities' may be text only")
    check_ranges(sent)
    if sent.top_logprobs is not None and sent.logprobs is not True:
        refuse("top_logprobs", "'top_logprobs' needs 'logprobs': true")
    logprobs = (sent.top_logprobs or 0) if sent.logprobs else None
    limits = [limit for limit in (sent.max_tokens, sent.max_completion_tokens) if limit is not None]
    asked = _asked(sent, logprobs=logprobs, max_tokens=min(limits, default=None))
    messages, continued = conversation(sent.messages)
    return ChatRequest(
        asked=asked,
        messages=messages,
        continued=continued,
        tools=tools_of(sent.tools, sent.tool_choice, sent.parallel_tool_calls),
        inline_reasoning=_inline(sent.reasoning_format),
        variables=_variables(sent),
        body=body,
    )


def _inline(reasoning_format: str | None) -> bool:
    if reasoning_format not in (None, *REASONING_FORMATS):
        unsupported("reasoning_format", f"'reasoning_format' may be one of {', '.join(REASONING_FORMATS)}")
    return reasoning_format == "none"


def _variables(sent: ChatBody) -> dict[str, Any]:
    given = sent.chat_template_kwargs or {}
    for name in given:
        if name in TEMPLATE_VARIABLES or not _VARIABLE.fullmatch(name):
            refuse("chat_template_kwargs", f"'chat_template_kwargs' cannot give '{name[:40]}'")
    return given if sent.reasoning_effort is None else {**given, "reasoning_effort": sent.reasoning_effort}


def text_request(body: bytes) -> TextRequest:
    """The body of `POST /v1/completions`; raises what docs/api.md says."""
    sent = decode_body(body, TextBody)
    check_ranges(sent)
    if sent.best_of is not None:
        if sent.best_of < 1:
            refuse("best_of", "'best_of' must be 1")
        if sent.best_of > 1:
            unsupported("best_of", "only 'best_of': 1 is supported")
    if sent.logprobs is not None and sent.echo:
        unsupported("echo", "'echo' with 'logprobs' is not supported: there are none of the prompt")
    if sent.suffix and sent.echo:
        unsupported("echo", "'echo' with 'suffix' is not supported")
    asked = _asked(sent, logprobs=sent.logprobs, max_tokens=sent.max_tokens)
    prompts = _prompts(sent.prompt)
    if len(prompts) * asked.n > ANSWERS:
        refuse("prompt", f"{len(prompts)} prompts with n = {asked.n}: at most {ANSWERS} answers a request")
    return TextRequest(asked=asked, prompts=prompts, echo=bool(sent.echo), suffix=sent.suffix or None, body=body)


def check_vocabulary(asked: Asked, prompts: list[Prompt], vocab_size: int, eog: Iterable[int] = ()) -> Asked:
    """Refuse token ids that the model does not have, and bans that leave none; what asks for more tokens than there are
    asks for all. `eog`: end-of-generation ids of the model."""
    for token in asked.sampling.logit_bias:
        if token >= vocab_size:
            refuse("logit_bias", f"token id {token} is not in the vocabulary of {vocab_size}")
    for prompt in prompts:
        if isinstance(prompt, list) and (min(prompt) < 0 or max(prompt) >= vocab_size):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            refuse("prompt", f"'prompt': token ids are 0 to {vocab_size - 1}, not {number_text(wrong)}")
    _check_choice(asked.sampling, vocab_size, eog)
    if asked.sampling.top_k < vocab_size:
        return asked
    return replace(asked, sampling=msgspec.structs.replace(asked.sampling, top_k=0))


def _check_choice(sampling: Sampling, vocab_size: int, eog: Iterable[int]) -> None:
    """Refuse what leaves nothing to choose for the first token; all later ones have at least as much."""
    bias = sampling.logit_bias
    forced = {token for token, value in bias.items() if value >= BIAS_FORCES}
    banned = {token for token, value in bias.items() if value <= -BIAS_FORCES}
    endless = "ignore_eos" if sampling.ignore_eos else "min_tokens" if sampling.min_tokens else None
    if endless:
        banned.update(token for token in eog if token < vocab_size)
    if forced - banned or (not forced and len(banned) < vocab_size):
        return
    names = [name for name in ("logit_bias" if bias else None, endless) if name]
    what = " with ".join(f"'{name}'" for name in names)
    raise ShardlineError("no_token_left", f"{what} leaves no token to choose", param=names[0])


def room(asked: int | None, prompt_tokens: int, model: ModelInfo, settings: Settings, *, param: str) -> int:
    """How many tokens may be generated: what was asked, less where the context ends.

    Raises `context_length_exceeded` where not even one fits. The window is the model's context, or the KV of the
    smallest Node of its best route where that is less: a longer session could never be opened.
    """
    window = window_of(model)
    if prompt_tokens >= window:
        raise too_long(prompt_tokens, window, param=param)
    return min(settings.default_max_tokens if asked is None else asked, window - prompt_tokens)


def window_of(model: ModelInfo) -> int:
    kv = model.kv_capacity_tokens
    return min(model.context_length, kv) if kv > 0 else model.context_length


def too_long(prompt_tokens: int, window: int, *, param: str, at_least: bool = False) -> ShardlineError:
    words = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    return ShardlineError(
        "context_length_exceeded",
        f"the prompt has {words} tokens, the context has {window}: room for one more must be left",
        param=param,
        prompt_tokens=prompt_tokens,
        context_length=window,
    )


def _asked(sent: _Body, *, logprobs: int | None, max_tokens: int | None) -> Asked:
    _check_inert(sent)
    min_tokens = sent.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", f"'min_tokens' ({min_tokens}) is above the limit of tokens ({max_tokens})")
    options = sent.stream_options
    if options is not None and not sent.stream:
        refuse("stream_options", "'stream_options' needs 'stream': true")
    if options is not None and options.include_obfuscation:
        unsupported("stream_options.include_obfuscation", "obfuscation of chunks is not supported")
    return Asked(
        model=sent.model,
        n=1 if sent.n is None else sent.n,
        max_tokens=max_tokens,
        sampling=_sampling(sent, logprobs, min_tokens),
        stop=_stops(sent.stop),
        stream=bool(sent.stream),
        include_usage=options is not None and bool(options.include_usage),
        include_telemetry=options is not None and bool(options.include_telemetry),
        return_progress=bool(sent.return_progress),
        timings_per_token=bool(sent.timings_per_token),
        cache_prompt=sent.cache_prompt is not False,
    )


def _sampling(sent: _Body, logprobs: int | None, min_tokens: int) -> Sampling:
    penalties = {sent.repeat_penalty, sent.repetition_penalty} - {None}
    if len(penalties) > 1:
        refuse("repetition_penalty", "'repeat_penalty' and 'repetition_penalty' are one thing, and differ")
    top_k = sent.top_k
    return Sampling(
        temperature=1.0 if sent.temperature is None else sent.temperature,
        top_k=0 if top_k is None or top_k < 0 else top_k,
        top_p=1.0 if sent.top_p is None else sent.top_p,
        min_p=sent.min_p or 0.0,
        repeat_penalty=penalties.pop() or 1.0 if penalties else 1.0,
        presence_penalty=sent.presence_penalty or 0.0,
        frequency_penalty=sent.frequency_penalty or 0.0,
        logit_bias=_bias(sent.logit_bias or {}),
        seed=None if sent.seed == -1 else sent.seed,
        logprobs=logprobs,
        min_tokens=min_tokens,
        ignore_eos=bool(sent.ignore_eos),
        grammar=grammar_of(sent.response_format, sent.grammar, sent.regex),
    )


def _bias(sent: dict[str, float]) -> dict[int, float]:
    if len(sent) > BIASES:
        refuse("logit_bias", f"'logit_bias' has {len(sent)} entries, at most {BIASES} are taken")
    bias = {}
    for key, value in sent.items():
        if not _TOKEN_ID.fullmatch(key):
            refuse("logit_bias", f"'logit_bias': '{key[:40]}' is not a token id")
        if not -BIAS <= value <= BIAS:
            refuse("logit_bias", f"'logit_bias' of token {key} must be -{BIAS} to {BIAS}, not {value:g}")
        bias[int(key)] = value
    return bias


def _stops(sent: str | list[str] | None) -> tuple[str, ...]:
    stops = (sent,) if isinstance(sent, str) else tuple(sent or ())
    if len(stops) > STOPS:
        refuse("stop", f"'stop' has {len(stops)} strings, at most {STOPS} are taken")
    for stop in stops:
        if not stop:
            refuse("stop", "'stop' must not hold an empty string")
        if len(stop) > STOP_CHARACTERS:
            refuse("stop", f"a string in 'stop' has {len(stop)} characters, at most {STOP_CHARACTERS} are taken")
    return tuple(dict.fromkeys(stops))


def _check_inert(sent: _Body) -> None:
    """Fields that are accepted only because they change nothing."""
    if sent.store:
        unsupported("store", "'store': answers are not stored here")
    if sent.service_tier not in (None, *TIERS):
        unsupported("service_tier", f"'service_tier' may be {' or '.join(TIERS)} only")
    metadata = bytes(sent.metadata).lstrip()
    if metadata and metadata != b"null" and not metadata.startswith(b"{"):
        refuse("metadata", "'metadata' must be an object")


def _prompts(sent: str | list[str | int | list[int]]) -> list[Prompt]:
    if isinstance(sent, str):
        return [sent]
    if not sent:
        refuse("prompt", "'prompt' must not be an empty list")
    kinds = {type(item) for item in sent}
    if kinds == {int}:
        return [cast(list[int], sent)]
    if len(kinds) > 1 or int in kinds:
        refuse("prompt", "'prompt' must be a string, token ids, or a list of either, not a mixture")
    if not all(sent) and list in kinds:
        refuse("prompt", "'prompt' must not hold an empty list")
    if len(sent) > ANSWERS:
        refuse("prompt", f"'prompt' has {len(sent)} prompts: at most {ANSWERS} answers a request")
    return cast(list[Prompt], sent)
