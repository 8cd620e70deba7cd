"""API keys: who a client is, told by a digest of what it sends, and what its key may do.

Owns the comparison, which takes the same time for every wrong key, the names of principals, scopes and limits as a key
carries them. Keys are kept as SHA-256 from the moment they are read: they are random, so nothing slower is needed. It
reads no file (key_file.py does) and counts nothing (quotas.py). Pure. Shown by tests/gateway/test_keys.py.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from shardline.errors import A_KEY, ShardlineError

Scope = Literal["generate", "look"]
SCOPES: tuple[Scope, ...] = ("generate", "look")
"""`generate`: ask for answers, cancel its own. `look`: the cluster, read only. Its own sessions every key may see."""
ANYBODY = "anybody"
"""The principal of all clients where no keys are configured (a listener on loopback)."""
KEY_CHARACTERS = 16
"""A shorter key could be guessed."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASHED = re.compile(rf"({NAME.pattern}):([0-9a-f]{{64}})")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key as it is kept: never the key itself."""

    name: str
    digest: str
    """SHA-256 in hex."""
    scopes: tuple[Scope, ...] = SCOPES
    requests_per_minute: int | None = None
    concurrent: int | None = None
    """Requests at a time; None: no limit of its own."""
    created: float | None = None
    """Unix seconds."""
    revoked: float | None = None
    """Unix seconds; its name stays taken, so that nobody inherits its sessions and usage."""


EVERYBODY = ApiKey(name=ANYBODY, digest="")


class ApiKeys:
    """The keys that are valid here; none: everybody is `ANYBODY`."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = {bytes.fromhex(key.digest): key for key in keys if key.revoked is None}

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> ApiKeys:
        """A key a line, `name:sha256hex` or as it is; empty lines and those that begin with # are skipped.

        A key without a name is called by the beginning of its digest. Raises `setting_invalid` by line number.
        """
        digests: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            hashed = _HASHED.fullmatch(text)
            if hashed:
                name, digest = hashed[1], hashed[2]
            elif len(text) < KEY_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
                raise _invalid(number, f"a key has at least {KEY_CHARACTERS} printable characters and no space")
            else:
                digest = digest_of(text)
                name = f"key-{digest[:12]}"
            if name in digests or name == ANYBODY or digest in digests.values():
                raise _invalid(number, f"the key or its name '{name}' is there twice")
            digests[name] = digest
        return cls(ApiKey(name=name, digest=digest) for name, digest in digests.items())

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, authorization: str | None) -> ApiKey | None:
        """The key that an Authorization field carries, if it is one of these."""
        scheme, _, given = (authorization or "").partition(" ")
        digest = bytes.fromhex(digest_of(given.strip()))
        found = None
        # All of them, always: how long it takes says nothing of which one was close.
        for known, key in self._keys.items():
            if hmac.compare_digest(digest, known):
                found = key
        return found if scheme.lower() == "bearer" else None

    def principal(self, authorization: str | None) -> str:
        """The `key_id` of who sends this Authorization field; raises `unauthorized`."""
        if not self._keys:
            return ANYBODY
        found = self.find(authorization)
        if found is None:
            raise unknown_key()
        return found.name


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def unknown_key() -> ShardlineError:
    return ShardlineError("unauthorized", "the API key is missing or not valid here", advice=A_KEY)


def check_scope(key: ApiKey, scope: Scope) -> None:
    """Raise `forbidden` unless the key may do this."""
    if scope not in key.scopes:
        raise ShardlineError("forbidden", f"the key '{key.name}' lacks the scope '{scope}'", scope=scope)


def _invalid(line: int, why: str) -> ShardlineError:
    return ShardlineError("setting_invalid", f"API keys, line {line}: {why}", param="api_keys")
