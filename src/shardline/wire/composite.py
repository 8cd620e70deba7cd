"""What a Gateway and a composite Node say to each other, instead of token ids: a request that is passed on, and text.

A composite Node serves a whole model by another server, its upstream, which makes the prompt and knows the tokens. Owns
which fields of OpenAI's API may be passed on, the events of the answer, and how much of it there may be. Part of the
contract of messages.py. Pure. Shown by tests/wire/test_messages.py and tests/cluster/test_composite.py.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

PASSED: Final = frozenset(
    {
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "max_tokens"),
        "response_format",
    }
)
"""What every server of OpenAI's API is held to, for both kinds of request."""
PASSED_CHAT: Final = PASSED | {"messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}
PASSED_TEXT: Final = PASSED | {"prompt"}
EXTRA: Final = frozenset(
    {
        *("top_k", "min_p", "repeat_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
        *("grammar", "regex", "chat_template_kwargs"),
    }
)
"""What some servers know beside that, and others ignore without a word: passed on only where the operator of the Node
says that its upstream does them."""

BY_NAME: Final = "name1-"
"""How the `content_id` of a model begins that is known by name alone: it names no content, and no file has it."""
EndReason = Literal["stop", "length", "tool_calls", "content_filter"]
CALLS: Final = 128
"""Most calls of tools in one answer."""
CHARS_PER_TOKEN: Final = 256
"""Of an answer, in the average; the longest tokens of today's vocabularies have half as many."""
CHARS_BESIDE: Final = 64 << 10
"""What an answer may have beyond that, however short it was to be."""
_PIECE_CHARS = 16
"""What a piece counts beside its characters: it takes memory, too."""
_COUNT_LIMIT = 1 << 40


def content_id_of(model: str) -> str:
    """Of a model that is known by this name alone."""
    return BY_NAME + hashlib.sha256(model.encode()).hexdigest()


class UpstreamCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request for one answer. `fields` is a JSON object with the names of OpenAI's API; the Node adds the model and
    how the answer is to come, and refuses by name what its upstream is not known to do."""

    kind: Literal["chat", "text"]
    fields: dict[str, Any]


class CallPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a call of a tool, as it comes: id and name with its first one, then more of the arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class UpstreamUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens as the upstream counts them; what it does not tell is null."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag="taken", tag_field="event"):
    """From a composite Node: its upstream has taken the request, and answers."""


class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text", tag_field="event", omit_defaults=True):
    """From a composite Node, instead of tokens: what its upstream has added."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = []


def most_chars(max_tokens: int) -> int:
    """What an answer of so many tokens can have at most, as `chars_of` counts."""
    return CHARS_BESIDE + CHARS_PER_TOKEN * max_tokens


def chars_of(text: Text) -> int:
    """Characters of a piece of an answer, and what it takes beside them."""
    calls = (len(c.arguments) + len(c.id or "") + len(c.name or "") + _PIECE_CHARS for c in text.calls)
    return _PIECE_CHARS + len(text.text) + len(text.reasoning) + sum(calls)


def can_be(usage: UpstreamUsage) -> bool:
    """Whether these are counts at all, and no part is larger than the whole."""
    cached, reasoned = usage.cached_tokens or 0, usage.reasoning_tokens or 0
    counts = (usage.prompt_tokens, usage.completion_tokens, cached, reasoned)
    return (
        all(0 <= count < _COUNT_LIMIT for count in counts)
        and cached <= usage.prompt_tokens
        and reasoned <= usage.completion_tokens
    )


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answered", tag_field="event", omit_defaults=True):
    """From a composite Node: the answer is whole. `stop`: the stop string that ended it, where the upstream says so."""

    reason: EndReason
    usage: UpstreamUsage | None = None
    stop: str | None = None
