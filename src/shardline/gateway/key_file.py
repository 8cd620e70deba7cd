"""The keys that `shardline keys` made, in one file of the state folder: hashed, for their owner alone.

Owns the file: read whole, written atomically under a lock, so that a Gateway that runs and commands never see half of
it. A revoked key stays as an entry without effect. Who is let in is keys.py's and clients.py's.
Shown by tests/gateway/test_key_file.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway.keys import ANYBODY, NAME, SCOPES, ApiKey, Scope, digest_of
from shardline.options import OPERATOR_FILE
from shardline.transport.credentials import keep_secret, kept_secret, locked

OPERATOR = "operator"
"""The key of the commands of this machine: made with the first one, so that `chat` goes on working here."""
KEYS_LIMIT = 800
"""Entries of the file; revoked ones make way, the oldest first."""
_KEY_BYTES = 32


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    keys: tuple[ApiKey, ...]


def kept_keys(path: Path) -> tuple[ApiKey, ...] | None:
    """Every entry, revoked ones too; None: there is no file. Raises `setting_invalid` for one that is damaged."""
    raw = kept_secret(path)
    if raw is None:
        return None
    try:
        keys = msgspec.json.decode(raw, type=_Content).keys
        for key in keys:
            if len(bytes.fromhex(key.digest)) != 32 or not NAME.fullmatch(key.name):
                raise ValueError("an entry is not one of a key")
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError) as error:
        raise ShardlineError(
            "setting_invalid",
            f"{path} is damaged: {error}",
            advice="Put a copy of it back; without one, delete it, and make all keys anew.",
        ) from None
    return keys


def add_key(
    path: Path,
    name: str,
    *,
    now: float,
    scopes: Sequence[Scope] = SCOPES,
    requests_per_minute: int | None = None,
    concurrent: int | None = None,
) -> tuple[str, ApiKey]:
    """A fresh key and its entry, which is in the file when this returns. The key itself is kept nowhere.

    Raises `invalid_value` for a name that is taken, also by a revoked key, or that cannot be one.
    """
    if not NAME.fullmatch(name) or name == ANYBODY:
        raise _refused(name, "is no name of a key: letters, digits, and . _ - behind the first, at most 64")
    for limit in (requests_per_minute, concurrent):
        if limit is not None and limit < 1:
            raise _refused(name, f"cannot have a limit of {limit}")
    key = f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"
    entry = ApiKey(
        name=name,
        digest=digest_of(key),
        scopes=tuple(scopes),
        requests_per_minute=requests_per_minute,
        concurrent=concurrent,
        created=now,
    )
    with locked(path):
        known = kept_keys(path) or ()
        if any(other.name == name for other in known):
            raise _refused(name, "is the name of a key already; a revoked one keeps its name")
        keep_secret(path, msgspec.json.encode(_Content(keys=(*_with_room(known), entry))))
    return key, entry


def operator_key(path: Path, now: float) -> None:
    """Make the key of this machine's own commands beside `path`, unless its entry is there, valid or revoked."""
    if any(key.name == OPERATOR for key in kept_keys(path) or ()):
        return
    key, _ = add_key(path, OPERATOR, now=now)
    keep_secret(path.parent / OPERATOR_FILE, key.encode() + b"\n")


def revoke_key(path: Path, name: str, *, now: float) -> ApiKey:
    """Its entry, without effect from now on. Raises `invalid_value` for a name that no valid key has."""
    with locked(path):
        known = kept_keys(path) or ()
        found = next((key for key in known if key.name == name and key.revoked is None), None)
        if found is None:
            raise _refused(name, "is the name of no valid key: `shardline keys list` shows them")
        gone = msgspec.structs.replace(found, revoked=now)
        kept = [gone if key is found else key for key in known]
        keep_secret(path, msgspec.json.encode(_Content(keys=tuple(kept))))
    return gone


def _with_room(known: Sequence[ApiKey]) -> list[ApiKey]:
    """What stays when one more comes. Entries stand in the order in which they were made."""
    kept = list(known)
    while len(kept) >= KEYS_LIMIT:
        oldest = next((key for key in kept if key.revoked is not None), None)
        if oldest is None:
            raise ShardlineError("invalid_value", f"there are {KEYS_LIMIT} keys already, the limit", param="name")
        kept.remove(oldest)
    return kept


def _refused(name: str, why: str) -> ShardlineError:
    return ShardlineError("invalid_value", f"'{name[:80]}' {why}", param="name", advice="Give another name.")
