"""How much of a prompt a route has already: what a session asks for, and where its prefill begins.

Owns the rule that all Nodes of a route reuse the same tokens or none, and the words for why it is none. Refuses to know
sockets and caches. Pure. Shown by tests/gateway/test_reuse.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from shardline.errors import ShardlineError
from shardline.wire.messages import Opened
from shardline.wire.prefix import BLOCK, Prefix, digests_of, salt_of

OFF = "off: by the settings of the Gateway, or by the request"
_SHORT = f"the prompt is not longer than a block of {BLOCK} tokens"
_NOTHING = "nothing kept of this prompt"
_WHY = {
    "off": "nothing is kept there",
    "engine": "its engine cannot go back exactly",
    "lost": "what it kept was lost",
}


@dataclass(frozen=True, slots=True)
class Start:
    """Where prefill begins."""

    position: int = 0
    """Tokens of the prompt that no Node computes again."""
    rollback: bool = False
    """A Node has more than that: it goes back."""
    reason: str | None = None
    """Why `position` is 0; None where it is not."""


def prefix_of(prompt: Sequence[int], key_id: str) -> Prefix:
    """What Nodes need to know of a prompt to find what they kept of it for this API key."""
    salt = salt_of(key_id)
    ids = array("i", prompt)
    return Prefix(salt=salt, digests=digests_of(salt, ids.tobytes()))


def check_opened(opened: Opened, prompt_tokens: int) -> None:
    """`seam_invalid` for a count that no Node can have."""
    tokens = opened.reusable_tokens or 0
    if not 0 <= tokens < prompt_tokens or tokens % BLOCK:
        raise ShardlineError(
            "seam_invalid", f"a Node says that it has {tokens} tokens of a prompt of {prompt_tokens}", node=opened.node
        )


def start_of(answers: Sequence[Opened], prompt_tokens: int, *, asked: bool) -> Start:
    """Where prefill begins on a route whose hops gave these answers, in order. `asked`: a prefix was sent."""
    if not asked:
        return Start(reason=OFF)
    counts = [answer.reusable_tokens or 0 for answer in answers]
    position, most = min(counts), max(counts)
    return Start(position, most > position, None if position else _why_none(answers, prompt_tokens))


def _why_none(answers: Sequence[Opened], prompt_tokens: int) -> str:
    if prompt_tokens <= BLOCK:
        return _SHORT
    cannot = [f"Node {a.node}: {_WHY.get(a.unused, 'it keeps nothing')}" for a in answers if a.unused is not None]
    if cannot:
        return "; ".join(cannot)
    if not any(a.reusable_tokens for a in answers):
        return _NOTHING
    counts = [f"Node {a.node} kept {a.reusable_tokens}" for a in answers if a.reusable_tokens]
    return ", ".join([*counts, *(f"Node {a.node} none" for a in answers if not a.reusable_tokens)])
