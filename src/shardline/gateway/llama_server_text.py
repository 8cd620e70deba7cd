"""llama-server's small questions: `POST /tokenize`, `POST /detokenize`, `GET /props`, with its names and shapes.

Owns which model is meant where a request names none, and what llama-server's fields are here. Token ids come from the
model's head Node, texts from its bundle: this file has no tokenizer. Shown by tests/gateway/test_llama_server.py.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeVar

import msgspec

from shardline import __version__
from shardline.errors import ShardlineError
from shardline.gateway.completions import Completions
from shardline.gateway.detokenize import Vocabulary
from shardline.gateway.generate_api import Generations
from shardline.gateway.json_body import decode_body, refuse, unsupported
from shardline.gateway.openai_answers import Json
from shardline.gateway.openai_requests import window_of
from shardline.gateway.request_fields import neutral
from shardline.settings import Settings
from shardline.wire.messages import ModelInfo

T = TypeVar("T")


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    content: str
    add_special: bool | None = None
    parse_special: Annotated[bool | None, neutral(True, None)] = None
    with_pieces: bool | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class LlamaServerText:
    """Of one Gateway. `model` is ours: where several models are served, a request must name one."""

    def __init__(self, completions: Completions, generations: Generations, settings: Settings) -> None:
        self._completions = completions
        self._generations = generations
        self._settings = settings

    async def tokenize(self, body: bytes) -> Json:
        """`{"tokens": […]}`: ids, or with `with_pieces` objects of `id` and `piece`. Raises what docs/api.md says."""
        sent = await self._decoded(TokenizeBody, body)
        if sent.parse_special is False:
            unsupported("parse_special", "'parse_special': control tokens in the text are always read as such")
        model = await self._model(sent.model)
        texts = self._completions.texts
        vocabulary = await texts.vocabulary(model)
        add_special = bool(sent.add_special)
        tokens = await texts.tokenize(model, vocabulary, sent.content, add_special=add_special, param="content")
        if sent.with_pieces:
            return {"tokens": [{"id": token, "piece": _piece(vocabulary.piece(token))} for token in tokens]}
        return {"tokens": tokens}

    async def detokenize(self, body: bytes) -> Json:
        """`{"content": "…"}`, control tokens included. Raises `invalid_value` for ids that the model does not have."""
        sent = await self._decoded(DetokenizeBody, body)
        model = await self._model(sent.model)
        vocabulary = await self._completions.texts.vocabulary(model)
        if any(not 0 <= token < vocabulary.size for token in sent.tokens):
            refuse("tokens", f"'tokens': token ids are 0 to {vocabulary.size - 1}")
        return {"content": b"".join(map(vocabulary.piece, sent.tokens)).decode("utf-8", "replace")}

    async def props(self, name: str | None) -> Json:
        """What a client must know of the model of this name."""
        model = await self._model(name)
        vocabulary = await self._completions.texts.vocabulary(model)
        return _props(model, vocabulary, self._settings)

    async def _decoded(self, kind: type[T], body: bytes) -> T:
        return await self._completions.decoded(partial(decode_body, kind=kind), body)

    async def _model(self, name: str | None) -> ModelInfo:
        """The one of this name; of none, the only one that is served."""
        if name is not None:
            return await self._completions.model(name)
        names = sorted({model.model for model in await self._generations.models()})
        if not names:
            raise ShardlineError("model_unavailable", "no model is served yet", param="model", retry_after=1)
        if len(names) > 1:
            refuse("model", f"'model' must be named, there are several: {', '.join(names[:5])}")
        return await self._completions.model(names[0])


def _piece(piece: bytes) -> str | list[int]:
    """Its text, or its bytes where they are part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _props(model: ModelInfo, vocabulary: Vocabulary, settings: Settings) -> Json:
    bundle = vocabulary.bundle
    return {
        "default_generation_settings": {
            "n_ctx": window_of(model),
            "params": {
                "n_predict": settings.default_max_tokens,
                "seed": -1,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 0.0,
                "repeat_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop": [],
            },
        },
        "model_alias": model.model,
        "model_path": model.model,
        "chat_template": bundle.chat_template or "",
        "bos_token": vocabulary.control_text(bundle.bos),
        "eos_token": vocabulary.control_text(bundle.eos),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"shardline-{__version__}",
    }
