"""What each key has used, over restarts: requests, refusals, prompt and completion tokens.

Owns the file in the state folder and how several Gateways add to it: each keeps what it has not written yet, and adds
it under a lock. Bounded: names that were used longest ago make way. It prices nothing and refuses nobody.
Shown by tests/gateway/test_ledger.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardline.errors import ShardlineError
from shardline.transport.credentials import keep_secret, kept_secret, locked

USAGE_FILE = "api-usage.json"
"""Name in the state folder."""
NAMES_LIMIT = 1000


class KeyUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums of one key. Tokens are counted as `usage` in answers counts them, also of answers that were cut off."""

    requests: int = 0
    """Those that were let in."""
    refused: int = 0
    """Those that a limit of the key refused."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_used: float = 0.0
    """Unix seconds."""

    def plus(self, more: KeyUsage) -> KeyUsage:
        return KeyUsage(
            requests=self.requests + more.requests,
            refused=self.refused + more.refused,
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            completion_tokens=self.completion_tokens + more.completion_tokens,
            last_used=max(self.last_used, more.last_used),
        )


def kept_usage(path: Path) -> dict[str, KeyUsage]:
    """Name -> sums; empty where there is no file. Raises `setting_invalid` for one that is damaged."""
    raw = kept_secret(path)
    if raw is None:
        return {}
    try:
        return msgspec.json.decode(raw, type=dict[str, KeyUsage])
    except msgspec.MsgspecError as error:
        raise ShardlineError(
            "setting_invalid",
            f"{path} is damaged: {error}",
            advice="Put a copy of it back; without one, delete it: usage is counted anew.",
        ) from None


class Ledger:
    """The sums that one Gateway has not written yet. `path` None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._unwritten: dict[str, KeyUsage] = {}

    def add(self, name: str, usage: KeyUsage) -> None:
        if self._path is not None:
            self._unwritten[name] = self._unwritten.get(name, KeyUsage()).plus(usage)

    @property
    def due(self) -> bool:
        return bool(self._unwritten)

    def take(self) -> dict[str, KeyUsage]:
        """What is to be written; give it back with `add` should that fail."""
        taken, self._unwritten = self._unwritten, {}
        return taken

    def write(self, added: Mapping[str, KeyUsage]) -> None:
        """Add to the file. Blocks for a disk write: call it in a thread. Raises `setting_invalid`."""
        if self._path is None or not added:
            return
        with locked(self._path):
            sums = kept_usage(self._path)
            for name, usage in added.items():
                sums[name] = sums.get(name, KeyUsage()).plus(usage)
            newest = sorted(sums, key=lambda name: sums[name].last_used)[-NAMES_LIMIT:]
            keep_secret(self._path, msgspec.json.encode({name: sums[name] for name in newest}))
