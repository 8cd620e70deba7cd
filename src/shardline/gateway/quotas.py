"""How much one key may ask for: requests in any 60 seconds, and requests at a time.

Owns the count for each key, with the clock as an argument, and how long a refused client should wait. What is refused
counts for nothing. It knows no client without limits longer than it runs. Shown by tests/gateway/test_quotas.py.
"""

from __future__ import annotations

import math
from collections import deque

from shardline.errors import ShardlineError
from shardline.gateway.keys import ApiKey

WINDOW_S = 60.0
BUSY_RETRY_S = 1
"""When one more may be tried where all places are taken: how long they run is not known."""


class _Account:
    __slots__ = ("began", "running")

    def __init__(self) -> None:
        self.began: deque[float] = deque()
        """Of requests of the last 60 seconds, at most as many as the key may make."""
        self.running = 0

    def is_idle(self, now: float) -> bool:
        """It says nothing any more."""
        return not self.running and (not self.began or self.began[-1] <= now - WINDOW_S)


class Quotas:
    """The accounts of one Gateway; each Gateway counts for itself."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def enter(self, key: ApiKey, now: float) -> None:
        """Count a request in; raises `concurrency_limit_exceeded` or `rate_limit_exceeded`. Whoever entered leaves."""
        account = self._accounts.get(key.name) or _Account()
        if key.concurrent is not None and account.running >= key.concurrent:
            raise ShardlineError(
                "concurrency_limit_exceeded",
                f"the key '{key.name}' has {account.running} requests under way; its limit is {key.concurrent}",
                limit="concurrent",
                retry_after=BUSY_RETRY_S,
            )
        while account.began and account.began[0] <= now - WINDOW_S:
            account.began.popleft()
        if key.requests_per_minute is not None:
            if len(account.began) >= key.requests_per_minute:
                # The one that has to be a minute old, should the limit have been lowered since.
                freeing = account.began[-key.requests_per_minute]
                raise ShardlineError(
                    "rate_limit_exceeded",
                    f"the key '{key.name}' may make {key.requests_per_minute} requests a minute",
                    limit="requests_per_minute",
                    retry_after=max(1, math.ceil(freeing + WINDOW_S - now)),
                )
            account.began.append(now)
        account.running += 1
        self._accounts[key.name] = account

    def leave(self, key: ApiKey, now: float) -> None:
        """The request is over."""
        account = self._accounts[key.name]
        account.running -= 1
        if account.is_idle(now):
            del self._accounts[key.name]

    def forget_idle(self, now: float) -> None:
        """Drop accounts that say nothing any more; called now and then."""
        for name, account in list(self._accounts.items()):
            if account.is_idle(now):
                del self._accounts[name]
