"""API keys: who a client is, told by a digest of what it sends.

Owns the comparison, which takes the same time for every wrong key, and the names of principals. Keys are kept as
SHA-256 from the moment they are read: they are random, so nothing slower is needed. It reads no file and decides no
right: whoever has a name sees its own sessions only. Pure. Shown by tests/gateway/test_keys.py.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from shardline.errors import ShardlineError

ANYBODY = "anybody"
"""The principal of all clients where no keys are configured (a listener on loopback)."""
KEY_CHARACTERS = 16
"""A shorter key could be guessed."""
_HASHED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9a-f]{64})")


class ApiKeys:
    """The keys that are valid here; none: everybody is `ANYBODY`."""

    def __init__(self, digests: dict[str, bytes]) -> None:
        self._digests = dict(digests)

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> ApiKeys:
        """A key a line, `name:sha256hex` or as it is; empty lines and those that begin with # are skipped.

        A key without a name is called by the beginning of its digest. Raises `setting_invalid` by line number.
        """
        digests: dict[str, bytes] = {}
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            hashed = _HASHED.fullmatch(text)
            if hashed:
                name, digest = hashed[1], bytes.fromhex(hashed[2])
            elif len(text) < KEY_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
                raise _invalid(number, f"a key has at least {KEY_CHARACTERS} printable characters and no space")
            else:
                digest = _digest(text)
                name = f"key-{digest.hex()[:12]}"
            if name in digests or name == ANYBODY or digest in digests.values():
                raise _invalid(number, f"the key or its name '{name}' is there twice")
            digests[name] = digest
        return cls(digests)

    def __len__(self) -> int:
        return len(self._digests)

    def principal(self, authorization: str | None) -> str:
        """The `key_id` of who sends this Authorization field; raises `unauthorized`."""
        if not self._digests:
            return ANYBODY
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip())
        found = None
        # All of them, always: how long it takes says nothing of which one was close.
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        if found is None or scheme.lower() != "bearer":
            raise ShardlineError("unauthorized", "the API key is missing or not valid here")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _invalid(line: int, why: str) -> ShardlineError:
    return ShardlineError("setting_invalid", f"API keys, line {line}: {why}", param="api_keys")
