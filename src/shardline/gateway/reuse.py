"""How much of a prompt a route has already: what a session asks for, and where its prefill begins.

Owns the rule that all Nodes of a route reuse the same tokens or none, the words for why it is none, and the memory of
where earlier sessions left their caches, which is a belief: the Nodes know. Refuses to know sockets and caches. Pure.
Shown by tests/gateway/test_reuse.py.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardline.errors import ShardlineError
from shardline.wire.messages import Opened
from shardline.wire.prefix import BLOCK, DIGEST_BYTES, Prefix, blocks_in, common_blocks, digests_of, salt_of

REMEMBERED = 256
"""Sessions of which a Gateway knows where their caches are; of more than that, the latest."""
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


def gone_on(named: Prefix, prompt: Sequence[int], generated: Sequence[int]) -> bytes:
    """The digests of a prompt that is `named`, with what was generated behind it."""
    rest = array("i", prompt[BLOCK * blocks_in(named.digests) :])
    rest.extend(generated)
    return digests_of(named.salt, rest.tobytes(), named.digests)


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


@dataclass(frozen=True, slots=True)
class _Left:
    """What a session that ended well has left on its Nodes."""

    content_id: str
    digests: bytes
    nodes: tuple[str, ...]


class HotRoutes:
    """Which Nodes were left with which beginnings of prompts, so that a prompt that goes on from one can go there."""

    def __init__(self) -> None:
        self._left: deque[_Left] = deque(maxlen=REMEMBERED)

    def add(self, content_id: str, digests: bytes, nodes: Iterable[str]) -> None:
        """A session ended well: its Nodes have the blocks of `digests`, unless they have given them up since. What is
        a beginning of that, on the same Nodes, need not be remembered."""
        if not digests:
            return
        left = _Left(content_id, digests, tuple(nodes))
        kept = [o for o in self._left if not (o.nodes == left.nodes and digests.startswith(o.digests))]
        self._left = deque([*kept, left], REMEMBERED)

    def find(self, content_id: str, digests: bytes, prompt_tokens: int) -> dict[str, int]:
        """Node id -> tokens of the prompt of `digests` that it should have: whole blocks, less than all."""
        found: dict[str, int] = {}
        first = digests[:DIGEST_BYTES]
        most = (prompt_tokens - 1) // BLOCK
        for left in self._left:
            if not first or left.content_id != content_id or not left.digests.startswith(first):
                continue
            tokens = BLOCK * min(most, common_blocks(left.digests, digests))
            for node in left.nodes if tokens else ():
                found[node] = max(tokens, found.get(node, 0))
        return found

    def forget(self, node: str) -> None:
        """It failed: what it had is gone, and so is what its routes could reuse."""
        self._left = deque((left for left in self._left if node not in left.nodes), REMEMBERED)
