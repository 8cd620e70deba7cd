"""Requests to a composite model: checked as all others are, then made ready to be passed on to its upstream.

Owns which fields go along, which are refused by name because an upstream cannot promise them, and the form of messages
that servers of OpenAI's API take. A field is passed on as the client has sent it, or not at all; where it has sent
none, the upstream's own default holds. Pure. Shown by tests/gateway/test_composite_requests.py.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway.detokenize import Vocabulary
from shardline.gateway.generate_api import GenerationRequest
from shardline.gateway.json_body import refuse, unsupported
from shardline.gateway.openai_requests import Asked, ChatRequest, TextRequest
from shardline.settings import Settings
from shardline.wire.composite import EXTRA, PASSED_CHAT, PASSED_TEXT, UpstreamCall
from shardline.wire.messages import ModelInfo, TextBundle

NO_VOCABULARY: Final = Vocabulary(
    TextBundle(pieces=[], special=[], eog=[], bos=None, eos=None, add_bos=False, chat_template=None, context_length=0)
)
"""Of a model whose tokens nobody here knows."""
REFUSED: Final = {
    "logprobs": "how likely tokens were, its server is not asked",
    "top_logprobs": "how likely tokens were, its server is not asked",
    "return_progress": "its server shows nothing of its prefill",
    "suffix": "its server is not known to fill gaps",
    "cache_prompt": "what its server keeps is its own business",
    "reasoning_format": "its server alone tells reasoning from content",
}
"""Fields that ask for what an upstream cannot be held to -> why."""
_ASKS_NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "return_progress": (False,),
    "suffix": ("",),
    "cache_prompt": (True,),
    "reasoning_format": ("auto", "deepseek"),
}
_MADE_HERE: Final = frozenset({"messages", "prompt", "max_tokens", "seed", "stop"})
"""Passed on in the form that follows from the whole request."""


def chat_calls(request: ChatRequest, model: ModelInfo, settings: Settings) -> list[UpstreamCall]:
    """A call for each of the `n` answers. Raises `unsupported_parameter` and `invalid_value`."""
    if request.continued:
        unsupported(
            "messages", "'messages': the last one is the assistant's, and its server is not known to go on with it"
        )
    fields = _passed(request.body, PASSED_CHAT)
    fields["messages"] = [_message(message) for message in request.messages]
    return _calls("chat", fields, request.asked, model, settings)


def text_calls(request: TextRequest, model: ModelInfo, settings: Settings) -> list[UpstreamCall]:
    """The same of a request for text: for each prompt in order, `n` answers."""
    if request.echo and any(isinstance(prompt, list) for prompt in request.prompts):
        unsupported("echo", "'echo': the text of token ids is not known here")
    fields = _passed(request.body, PASSED_TEXT)
    return [
        call
        for prompt in request.prompts
        for call in _calls("text", {**fields, "prompt": prompt}, request.asked, model, settings)
    ]


def generations(
    calls: list[UpstreamCall], asked: Asked, model: ModelInfo, settings: Settings, *, key_id: str, session: str
) -> list[GenerationRequest]:
    """What the calls reserve, and whose they are; the first is the announced `session`."""
    return [
        GenerationRequest(
            model=model.model,
            name=asked.model,
            content_id=model.content_id,
            prompt=[],
            max_tokens=_limit(asked, model, settings),
            sampling=asked.sampling,
            stop=asked.stop,
            key_id=key_id,
            reuse=False,
            session=session if number == 0 else None,
            call=call,
            place_tokens=model.context_length,
        )
        for number, call in enumerate(calls)
    ]


def _passed(body: bytes, known: frozenset[str]) -> dict[str, Any]:
    """Fields of the checked `body` that go along as they are. Null is as if absent."""
    sent = {name: value for name, value in msgspec.json.decode(body).items() if value is not None}
    for name, why in REFUSED.items():
        nothing = _ASKS_NOTHING[name]
        # By type too: of completions, `"logprobs": 0` asks for those of the tokens themselves, and 0 equals false.
        if name in sent and not any(sent[name] == value and type(sent[name]) is type(value) for value in nothing):
            unsupported(name, f"'{name}' is not supported of this model: {why}")
    return {name: value for name, value in sent.items() if name in (known | EXTRA) - _MADE_HERE}


def _calls(kind: Any, fields: dict[str, Any], asked: Asked, model: ModelInfo, settings: Settings) -> list[UpstreamCall]:
    fields = {**fields, "max_tokens": _limit(asked, model, settings)}
    if asked.stop:
        fields["stop"] = list(asked.stop)
    calls = []
    for choice in range(asked.n):
        seed = asked.sampling_of(choice).seed
        calls.append(UpstreamCall(kind=kind, fields=fields if seed is None else {**fields, "seed": seed}))
    return calls


def _limit(asked: Asked, model: ModelInfo, settings: Settings) -> int:
    """Tokens of the answer. How many the prompt has, only the upstream knows: it refuses what is too long together."""
    most = model.context_length - 1
    if most < 1:
        raise ShardlineError("model_unavailable", "the context of the model is not known yet", retry_after=2)
    if asked.max_tokens is not None and asked.max_tokens > most:
        refuse("max_tokens", f"'max_tokens' is {asked.max_tokens}, the context has {model.context_length} in all")
    return min(settings.default_max_tokens if asked.max_tokens is None else asked.max_tokens, most)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """From the form that chat templates read into that of the API: arguments are text, and a call says what it is."""
    plain = {name: value for name, value in message.items() if name != "thinking"}
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
            for call in plain["tool_calls"]
        ]
        plain["content"] = plain["content"] or None
    return plain


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
