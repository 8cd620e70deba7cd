"""Who asks this Gateway: the keys of its start and those of the state folder, with their limits and their usage.

Owns the moment at which a changed key file takes effect (about half a second), and that a file that is damaged or gone
lets nobody in whom it did not let in before. It knows no HTTP. Shown by tests/gateway/test_clients.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from shardline.errors import ShardlineError
from shardline.gateway.key_file import kept_keys
from shardline.gateway.keys import EVERYBODY, ApiKey, ApiKeys, Scope, check_scope, unknown_key
from shardline.gateway.ledger import USAGE_FILE, KeyUsage, Ledger
from shardline.gateway.quotas import Quotas
from shardline.options import KEYS_FILE

log = structlog.get_logger(__name__)
LOOK_S = 0.5
"""Pause between two looks at the key file."""
_WRITE_EVERY = 4
"""Usage is written every so many looks, and at the end."""


class Clients:
    """Of one Gateway. `run` keeps it up to date; without it, it knows what it read when it was made.

    `fixed`: keys of --api-keys. `folder`: the state folder; None: no file, no usage. Raises `setting_invalid`.
    """

    def __init__(self, fixed: ApiKeys, folder: Path | None = None) -> None:
        self._fixed = fixed
        self._path = None if folder is None else folder / KEYS_FILE
        self._seen: tuple[int, int, int] | None = None
        self._kept: ApiKeys | None = None
        self._quotas = Quotas()
        self._ledger = Ledger(None if folder is None else folder / USAGE_FILE)
        self._read()

    @property
    def ask_for_keys(self) -> bool:
        """False: everybody who reaches the listener may use it. Once true, it stays so until the process ends."""
        return len(self._fixed) > 0 or self._kept is not None

    def client(self, authorization: str | None, scope: Scope | None = None) -> ApiKey:
        """Who sends this Authorization field; raises `unauthorized`, and `forbidden` for want of `scope`."""
        if not self.ask_for_keys:
            return EVERYBODY
        fixed = self._fixed.find(authorization)
        kept = None if self._kept is None else self._kept.find(authorization)
        found = fixed or kept
        if found is None:
            raise unknown_key()
        if scope is not None:
            check_scope(found, scope)
        return found

    @contextlib.contextmanager
    def admitted(self, key: ApiKey) -> Iterator[None]:
        """Around one request that generates; raises `rate_limit_exceeded`, `concurrency_limit_exceeded`."""
        if key is EVERYBODY:
            yield
            return
        try:
            self._quotas.enter(key, time.monotonic())
        except ShardlineError:
            self._ledger.add(key.name, KeyUsage(refused=1, last_used=time.time()))
            raise
        try:
            self._ledger.add(key.name, KeyUsage(requests=1, last_used=time.time()))
            yield
        finally:
            self._quotas.leave(key, time.monotonic())

    def used(self, key: ApiKey, *, prompt_tokens: int, completion_tokens: int) -> None:
        """What a request has cost, whole or cut off."""
        if key is not EVERYBODY:
            self._ledger.add(
                key.name,
                KeyUsage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, last_used=time.time()),
            )

    async def run(self) -> None:
        """Until cancelled: follow the file, write usage; what is left is written at the end."""
        looks = 0
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._look()
                looks += 1
                if looks % _WRITE_EVERY == 0:
                    self._quotas.forget_idle(time.monotonic())
                    await asyncio.to_thread(self._write)
        finally:
            self._write()

    def _look(self) -> None:
        try:
            self._read()
        except ShardlineError as error:
            # Who was valid stays so: an operator's slip must not lock everybody out, nor let anybody in.
            log.warning("key_file_unreadable", reason=error.message)

    def _read(self) -> None:
        if self._path is None:
            return
        found = _signature(self._path)
        if found == self._seen:
            return
        self._seen = found
        keys = kept_keys(self._path)
        if keys is None:
            log.warning("key_file_gone", path=self._path.name)
            return
        self._kept = ApiKeys(keys)
        log.info("key_file_read", valid=len(self._kept))

    def _write(self) -> None:
        taken = self._ledger.take()
        try:
            self._ledger.write(taken)
        except ShardlineError as error:
            for name, usage in taken.items():
                self._ledger.add(name, usage)
            log.warning("usage_unwritten", reason=error.message)


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Another one for another content: the file is replaced as a whole."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
