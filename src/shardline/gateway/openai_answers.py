"""OpenAI answers: text, tokens and counts into the objects that clients read, streamed or whole.

Owns the shape of chunks, final answers, log-probabilities, usage, llama-server's `timings` and `prompt_progress`,
and the list of models. It counts nothing itself. Numbers are finite or null. Pure.
Shown by tests/gateway/test_openai_answers.py and, with the official client, test_app_answers.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.gateway.detokenize import ShownToken, Vocabulary
from shardline.gateway.tools_parts import Call, CallPart, Content, Piece, Reasoning
from shardline.settings import Settings
from shardline.wire.messages import ModelInfo
from shardline.wire.telemetry import PrefillView

Json = dict[str, Any]

UNLIKELY = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None: not told, by the upstream of a composite model."""
    reasoning_tokens: int = 0
    known: bool = True
    """Of a composite model whose upstream does not tell it of all choices: False, and the numbers are of the others."""

    def fields(self) -> Json | None:
        """Null where it is not known."""
        if not self.known:
            return None
        fields = self._fields()
        if self.reasoning_tokens:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return fields

    def _fields(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeChoice:
    """One choice of an answer that is not streamed."""

    text: str
    tokens: Sequence[ShownToken]
    finish_reason: str
    telemetry: Any
    parts: Sequence[Piece] | None = None
    """Instead of the text, where calls and reasoning were read out of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all objects of one answer share. `chat`: the endpoint, and with it the shape of a choice."""

    id: str
    created: int
    model: str
    fingerprint: str
    chat: bool
    vocabulary: Vocabulary
    logprobs: int | None
    """None: none. Else how many alternatives a token has."""

    def opening(self, index: int) -> Json:
        """The first chunk of a chat choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: str, tokens: Sequence[ShownToken], *, offset: int = 0) -> Json:
        """Text that was added. `offset`: characters that stand in front of the generated text (echo)."""
        return self._chunk(index, {"content": text}, logprobs=self._logprobs(tokens, offset))

    def part(self, index: int, part: Piece | None, tokens: Sequence[ShownToken]) -> Json:
        """One part of a chat answer, streamed; None: tokens of which it is not known yet what they are."""
        return self._chunk(index, _delta(part), logprobs=self._logprobs(tokens, 0))

    def finish(self, index: int, reason: str) -> Json:
        return self._chunk(index, {}, reason=reason)

    def beside(self, index: int, **fields: Any) -> Json:
        """A chunk that adds no text to choice `index`, for fields of ours and of llama-server."""
        return {**self._chunk(index, {}), **fields}

    def usage(self, usage: Usage) -> Json:
        return {**self._fields(stream=True), "choices": [], "usage": usage.fields()}

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, *, offsets: Sequence[int]) -> Json:
        """The answer that is not streamed; `telemetry` is that of the only, or first, choice."""
        shaped = []
        for index, (choice, offset) in enumerate(zip(choices, offsets, strict=True)):
            logprobs = self._logprobs(choice.tokens, offset)
            if self.chat:
                message = _message(choice)
                body: Json = {"index": index, "message": message, "logprobs": logprobs}
            else:
                body = {"index": index, "text": choice.text, "logprobs": logprobs}
            body["finish_reason"] = choice.finish_reason
            if len(choices) > 1:
                body["telemetry"] = choice.telemetry
            shaped.append(body)
        return {
            **self._fields(stream=False),
            "choices": shaped,
            "usage": usage.fields(),
            "telemetry": choices[0].telemetry,
        }

    def _fields(self, *, stream: bool) -> Json:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _chunk(self, index: int, delta: Json, *, logprobs: Json | None = None, reason: str | None = None) -> Json:
        choice: Json = (
            {"index": index, "delta": delta}
            if self.chat
            else {
                "index": index,
                "text": delta.get("content", ""),
            }
        )
        return {
            **self._fields(stream=True),
            "choices": [{**choice, "logprobs": logprobs, "finish_reason": reason}],
        }

    def _logprobs(self, tokens: Sequence[ShownToken], offset: int) -> Json | None:
        if self.logprobs is None:
            return None
        if self.chat:
            return {"content": [self._chat_item(shown) for shown in tokens], "refusal": None}
        return self._text_items(tokens, offset)

    def _chat_item(self, shown: ShownToken) -> Json:
        token = shown.token
        top = (token.top or [])[: self.logprobs]
        return {
            **self._named(token.id, token.logprob),
            "top_logprobs": [self._named(other.id, other.logprob) for other in top],
        }

    def _named(self, token: int, logprob: float | None) -> Json:
        piece = self.vocabulary.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}

    def _text_items(self, tokens: Sequence[ShownToken], offset: int) -> Json:
        tops = []
        for shown in tokens:
            token = shown.token
            top = {self._key(other.id): _finite(other.logprob) for other in (token.top or [])[: self.logprobs]}
            tops.append({**top, self._key(token.id): _finite(token.logprob)})
        return {
            "tokens": [self._key(shown.token.id) for shown in tokens],
            "token_logprobs": [_finite(shown.token.logprob) for shown in tokens],
            "top_logprobs": tops,
            "text_offset": [shown.start + offset for shown in tokens],
        }

    def _key(self, token: int) -> str:
        """Two tokens with broken characters must not share a key, so these are written byte by byte."""
        piece = self.vocabulary.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _delta(part: Piece | None) -> Json:
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case Call():
            return {"tool_calls": [{"index": part.index, **_call(part)}]}
        case CallPart():
            return {"tool_calls": [{"index": part.index, **_piece(part)}]}
    return {}


def _piece(part: CallPart) -> Json:
    named: Json = {} if part.name is None else {"name": part.name}
    begun: Json = {} if part.id is None else {"id": part.id, "type": "function"}
    return {**begun, "function": {**named, "arguments": part.arguments}}


def _call(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message(choice: WholeChoice) -> Json:
    if choice.parts is None:
        return {"role": "assistant", "content": choice.text, "refusal": None}
    calls = [_call(part) for part in choice.parts if isinstance(part, Call)]
    content = "".join(part.text for part in choice.parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in choice.parts if isinstance(part, Reasoning))
    message: Json = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def fingerprint(model: ModelInfo) -> str:
    """Changes when the engine class or the files of the model change: then answers may differ for one seed."""
    digest = hashlib.sha256(f"{model.engine_class}\n{model.content_id}".encode())
    return "fp_" + digest.hexdigest()[:16]


def timings(prompt_tokens: int, cached_tokens: int | None, generated: int, times: dict[str, float | None]) -> Json:
    """llama-server's `timings`. The span from the first token to the last one holds one token less than there are."""
    prompt_n = None if cached_tokens is None else prompt_tokens - cached_tokens
    prompt_ms, predicted_ms = times.get("prompt_ms"), times.get("predicted_ms")
    return {
        "cache_n": cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": None if prompt_n is None else _ratio(prompt_n * 1e3, prompt_ms),
        "predicted_n": generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, generated - 1),
        "predicted_per_second": _ratio((generated - 1) * 1e3, predicted_ms) if generated > 1 else None,
    }


def prompt_progress(prefill: PrefillView, cached_tokens: int, time_ms: float) -> Json:
    """llama-server's `prompt_progress`: `processed` holds the cached tokens too."""
    return {
        "total": prefill.total,
        "cache": cached_tokens,
        "processed": max(prefill.done or 0, cached_tokens),
        "time_ms": round(time_ms, 3),
    }


def model_entry(model: ModelInfo, settings: Settings, created: int) -> Json:
    """One entry of `GET /v1/models`. `ready` is false where layers are `missing`, or nobody serves a composite one."""
    return {
        "id": model.model,
        "object": "model",
        "created": created,
        "owned_by": "shardline",
        "ready": model.ready,
        "missing": missing_layers(model),
        "content_id": model.content_id,
        "engine_class": model.engine_class,
        "composite": model.composite,
        "n_layers": None if model.composite else model.n_layers,
        "context_length": model.context_length,
        "vocab_size": None if model.composite else model.vocab_size,
        "kv_capacity_tokens": model.kv_capacity_tokens,
        "default_max_tokens": settings.default_max_tokens,
    }


def missing_layers(model: ModelInfo) -> list[list[int]]:
    """Half-open layer ranges that no Node has; none of a composite model, whose layers nobody knows."""
    return [] if model.composite else [list(layers) for layers in model.missing]


def lack_of(model: ModelInfo) -> str:
    """What keeps a model from being whole, for a person."""
    if model.composite:
        return "no Node passes requests on to its server"
    return f"layers {layers_text(model.missing) or 'none'} are missing"


def layers_text(missing: Iterable[tuple[int, int]]) -> str:
    """Half-open layer ranges for a person: `10:20, 24:30`."""
    return ", ".join(f"{first}:{last}" for first, last in missing)


def _finite(logprob: float | None) -> float | None:
    if logprob is None or math.isnan(logprob):
        return None
    return max(logprob, UNLIKELY)


def _ratio(above: float | None, below: float | None) -> float | None:
    """Null where there is nothing to divide by: never a rate over no time."""
    if above is None or below is None or below <= 0:
        return None
    return round(above / below, 3)
