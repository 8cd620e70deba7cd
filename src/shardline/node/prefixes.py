"""What a Node keeps of sessions that have ended, for prompts that begin alike.

Owns which caches are kept, within which bounds, and in which order they give way. Refuses to know engines, sessions and
the clock: whoever calls it frees what it gives up. Pure. Shown by tests/node/test_prefixes.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardline.wire.prefix import BLOCK, BLOCKS, blocks_in, common_blocks


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The cache of an ended session, cut to whole blocks. `number` is the engine's name for it."""

    number: int
    digests: bytes
    ids: bytes
    """Token ids of all blocks, I32 little-endian."""

    @property
    def tokens(self) -> int:
        return BLOCK * blocks_in(self.digests)


@dataclass(frozen=True, slots=True)
class Match:
    """The first `tokens` of `kept` are the first of a prompt."""

    kept: Kept
    tokens: int


class Prefixes:
    """All that is kept on one Node: at most `limit` tokens and `share` of its KV capacity, and at most `count`
    sessions."""

    def __init__(self, *, share: float, limit: int, count: int) -> None:
        self._share = share
        self._limit = limit
        self._count = count
        self._kept: dict[int, Kept] = {}
        """By number; the least recently used first."""
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        """Least recently used first."""
        return iter(list(self._kept.values()))

    @property
    def off(self) -> bool:
        return self._count < 1

    def whole(self, tokens: int, capacity: int) -> int:
        """How many of `tokens` of a session may be kept: whole blocks, within the bounds."""
        return BLOCK * min(tokens // BLOCK, self._most(capacity) // BLOCK, BLOCKS)

    def _most(self, capacity: int) -> int:
        return 0 if self.off else min(self._limit, int(min(1.0, self._share) * capacity))

    def find(self, digests: bytes, prompt_tokens: int) -> Match | None:
        """What holds most of a prompt with these digests: whole blocks, and less than all of it, because the last row
        must be computed for the first token. What is found is the most recently used from then on."""
        limit = (prompt_tokens - 1) // BLOCK
        best: Kept | None = None
        blocks = 0
        for kept in self._kept.values():
            common = min(common_blocks(kept.digests, digests), limit)
            if common and common >= blocks:
                best, blocks = kept, common
        if best is None:
            return None
        self._touch(best)
        return Match(best, BLOCK * blocks)

    def holds(self, digests: bytes) -> bool:
        """Whether something kept begins with all of these; it is the most recently used from then on."""
        blocks = blocks_in(digests)
        found = next((k for k in self._kept.values() if common_blocks(k.digests, digests) == blocks), None)
        if found is not None:
            self._touch(found)
        return found is not None

    def _touch(self, kept: Kept) -> None:
        self._kept[kept.number] = self._kept.pop(kept.number)

    def add(self, kept: Kept, capacity: int) -> list[Kept]:
        """Keep one more. Returns what must be freed for it: what it goes beyond, the least recently used where the
        bounds are passed, or itself where something else holds all of it."""
        if self.holds(kept.digests):
            return [kept]
        gone = [k for k in self._kept.values() if common_blocks(k.digests, kept.digests) == blocks_in(k.digests)]
        for shorter in gone:
            self.remove(shorter)
        self._kept[kept.number] = kept
        self.tokens += kept.tokens
        for oldest in self:
            if len(self._kept) <= self._count and self.tokens <= self._most(capacity):
                break
            self.remove(oldest)
            gone.append(oldest)
        return gone

    def remove(self, kept: Kept) -> bool:
        """Forget it; False where it was not there (any more)."""
        if self._kept.get(kept.number) is not kept:
            return False
        del self._kept[kept.number]
        self.tokens -= kept.tokens
        return True

    def clear(self) -> list[Kept]:
        """Forget everything; returns what was kept."""
        gone = list(self)
        self._kept.clear()
        self.tokens = 0
        return gone
