"""OpenAI requests: bytes in, checked values out, or an error that names the field.

Owns which fields there are, their types and ranges, what null means, and the normal form of messages and prompts.
A field that would change the answer and is not supported is refused by name, never ignored. It does not know which
models are served: what needs their vocabulary or context is checked by `check_vocabulary` and `room`. Pure.
Shown by tests/gateway/test_openai_requests.py; the list of fields is docs/api.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway.json_body import decode_body, refuse, unsupported
from shardline.gateway.messages import Message, conversation
from shardline.gateway.structured import ResponseFormat, grammar_of
from shardline.gateway.tools_request import Tool, ToolChoice, Tools, tools_of
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
_INT64 = 1 << 63
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class _Range:
    """Numbers from `low` to `high`, both included unless `above`: then `low` itself is not."""

    low: float
    high: float
    above: bool = False

    def check(self, name: str, value: float) -> None:
        if not (self.low < value or (value == self.low and not self.above)) or value > self.high:
            refuse(name, f"'{name}' must be {self._words(value)}, not {_number(value)}")

    def _words(self, value: float) -> str:
        if self.high >= _INT64 - 1:  # what a 64-bit integer holds: one end at a time says more
            return f"at most {self.high}" if value > self.high else f"at least {self.low}"
        return f"above {self.low:g} and at most {self.high:g}" if self.above else f"{self.low:g} to {self.high:g}"


_RANGES = {
    "temperature": _Range(0, 2),
    "top_p": _Range(0, 1, above=True),
    "min_p": _Range(0, 1),
    "repeat_penalty": _Range(0.01, 100),
    "repetition_penalty": _Range(0.01, 100),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "n": _Range(1, CHOICES),
    "top_k": _Range(-1, _INT64 - 1),
    "seed": _Range(-_INT64, _INT64 - 1),
    "max_tokens": _Range(1, _INT64 - 1),
    "max_completion_tokens": _Range(1, _INT64 - 1),
    "min_tokens": _Range(0, _INT64 - 1),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_telemetry: bool | None = None
    include_obfuscation: bool | None = None


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. Null is as if absent. Fields of type Raw are checked by name, not decoded."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    min_tokens: int | None = None
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
    user: str | None = None
    metadata: msgspec.Raw = msgspec.Raw()
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class _ChatBody(_Body):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: str | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # OpenAI's, and not supported: here to take their null, and values that ask for nothing (`_NOTHING_ASKED`).
    functions: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    moderation: msgspec.Raw = msgspec.Raw()
    prediction: msgspec.Raw = msgspec.Raw()
    prompt_cache_options: msgspec.Raw = msgspec.Raw()
    prompt_cache_retention: msgspec.Raw = msgspec.Raw()
    verbosity: msgspec.Raw = msgspec.Raw()
    web_search_options: msgspec.Raw = msgspec.Raw()


_NOTHING_ASKED = {
    "functions": "[]",
    "function_call": '"none"',
    "audio": "null",
    "moderation": "null",
    "prediction": "null",
    "prompt_cache_options": "null",
    "prompt_cache_retention": "null",
    "verbosity": "null",
    "web_search_options": "null",
}


class _TextBody(_Body):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


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
        return msgspec.structs.replace(self.sampling, seed=(seed + choice + _INT64) % (2 * _INT64) - _INT64)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    asked: Asked
    prompts: list[Prompt]
    """Answered in order, `n` choices each."""
    echo: bool
    suffix: str | None


def chat_request(body: bytes, *, own: bool = False) -> ChatRequest:
    """The body of `POST /v1/chat/completions`; raises what docs/api.md says. `own`: as of `decode_body`."""
    sent = decode_body(body, _ChatBody, own=own)
    for name, nothing in _NOTHING_ASKED.items():
        value = b"".join(bytes(getattr(sent, name)).split())
        if value not in (b"", b"null", nothing.encode()):
            unsupported(name, f"'{name}' is not supported")
    if sent.modalities not in (None, ["text"]):
        unsupported("modalities", "'modalities' may be text only")
    if sent.top_logprobs is not None:
        _Range(0, CHAT_LOGPROBS).check("top_logprobs", sent.top_logprobs)
        if sent.logprobs is not True:
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
    )


def _inline(reasoning_format: str | None) -> bool:
    if reasoning_format not in (None, "auto", "deepseek", "none"):
        unsupported("reasoning_format", "'reasoning_format' may be auto, deepseek or none")
    return reasoning_format == "none"


def _variables(sent: _ChatBody) -> dict[str, Any]:
    given = sent.chat_template_kwargs or {}
    for name in given:
        if name in TEMPLATE_VARIABLES or not name.isidentifier() or name.startswith("_"):
            refuse("chat_template_kwargs", f"'chat_template_kwargs' cannot give '{name[:40]}'")
    return given if sent.reasoning_effort is None else {**given, "reasoning_effort": sent.reasoning_effort}


def text_request(body: bytes) -> TextRequest:
    """The body of `POST /v1/completions`; raises what docs/api.md says."""
    sent = decode_body(body, _TextBody)
    if sent.best_of is not None:
        if sent.best_of < 1:
            refuse("best_of", "'best_of' must be 1")
        if sent.best_of > 1:
            unsupported("best_of", "only 'best_of': 1 is supported")
    if sent.logprobs is not None:
        _Range(0, TEXT_LOGPROBS).check("logprobs", sent.logprobs)
        if sent.echo:
            unsupported("echo", "'echo' with 'logprobs' is not supported: there are none of the prompt")
    if sent.suffix and sent.echo:
        unsupported("echo", "'echo' with 'suffix' is not supported")
    asked = _asked(sent, logprobs=sent.logprobs, max_tokens=sent.max_tokens)
    prompts = _prompts(sent.prompt)
    if len(prompts) * asked.n > ANSWERS:
        refuse("prompt", f"{len(prompts)} prompts with n = {asked.n}: at most {ANSWERS} answers a request")
    return TextRequest(asked=asked, prompts=prompts, echo=bool(sent.echo), suffix=sent.suffix or None)


def check_vocabulary(asked: Asked, prompts: list[Prompt], vocab_size: int, eog: Iterable[int] = ()) -> Asked:
    """Refuse token ids that the model does not have, and bans that leave none; what asks for more tokens than there are
    asks for all. `eog`: end-of-generation ids of the model."""
    for token in asked.sampling.logit_bias:
        if token >= vocab_size:
            refuse("logit_bias", f"token id {token} is not in the vocabulary of {vocab_size}")
    for prompt in prompts:
        if isinstance(prompt, list) and (min(prompt) < 0 or max(prompt) >= vocab_size):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            refuse("prompt", f"'prompt': token ids are 0 to {vocab_size - 1}, not {_number(wrong)}")
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


def _number(value: float) -> str:
    if abs(value) < _INT64:
        return f"{value:g}" if isinstance(value, float) else str(value)
    return "a larger number" if value > 0 else "a smaller number"


def _asked(sent: _Body, *, logprobs: int | None, max_tokens: int | None) -> Asked:
    for name, allowed in _RANGES.items():
        value = getattr(sent, name, None)
        if value is not None:
            allowed.check(name, value)
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
        if not -100 <= value <= 100:
            refuse("logit_bias", f"'logit_bias' of token {key} must be -100 to 100, not {value:g}")
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
    if sent.service_tier not in (None, "auto", "default"):
        unsupported("service_tier", "'service_tier' may be auto or default only")
    metadata = bytes(sent.metadata).lstrip()
    if metadata and metadata != b"null" and not metadata.startswith(b"{"):
        refuse("metadata", "'metadata' must be an object")


def _prompts(sent: str | list[str | int | list[int]] | None) -> list[Prompt]:
    if sent is None:
        refuse("prompt", "the field 'prompt' is required")
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
