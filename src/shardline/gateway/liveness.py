"""Both directions of liveness at the Gateway: it beats to Nodes with sessions, and judges those that fell silent.

Owns one beat task a Node and one watch over all sessions. What silence means for a session is the session's.
Shown by tests/gateway/test_session.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Protocol

import msgspec

from shardline.settings import Settings
from shardline.telemetry.contained import contained
from shardline.transport.failures import HttpFailure
from shardline.transport.http_client import HttpClient
from shardline.transport.tracing import untraced
from shardline.wire.messages import Beats


class Watched(Protocol):
    """A session under watch."""

    def judge(self, now: float) -> None:
        """Fail if a Node has been silent for too long at `now` (monotonic seconds)."""


class Liveness:
    """`run()` owns the tasks."""

    def __init__(self, *, gateway_id: str, client: HttpClient, settings: Settings) -> None:
        self.gateway_id = gateway_id
        self._client = client
        self._settings = settings
        self._sessions: set[Watched] = set()
        self._nodes: Counter[str] = Counter()
        self._beating: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._body = msgspec.json.encode(Beats(gateway=gateway_id))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._watch()

    def watch(self, session: Watched, urls: list[str]) -> None:
        self._sessions.add(session)
        for url in urls:
            self._nodes[url] += 1
            if url not in self._beating and self._tasks is not None:
                with untraced():  # it beats for all sessions
                    self._beating[url] = self._tasks.create_task(contained(self._beat(url), "beat"))

    def unwatch(self, session: Watched, urls: list[str]) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
            self._nodes.subtract(urls)

    async def _beat(self, url: str) -> None:
        """One POST per half second to one Node, for as long as a session is there."""
        try:
            while self._nodes[url] > 0:
                started = time.monotonic()
                # A beat that fails needs no answer here: the session streams say whether the Node lives.
                with contextlib.suppress(HttpFailure):
                    await self._client.request(
                        "POST",
                        f"{url}/v1/beats",
                        body=self._body,
                        content_type="application/json",
                        timeout_s=self._settings.beat_interval_s,  # one that is stuck must not silence the next
                        limit="heartbeat",
                    )
                await asyncio.sleep(max(0.0, started + self._settings.beat_interval_s - time.monotonic()))
        finally:
            del self._beating[url]
            if self._nodes[url] <= 0:
                del self._nodes[url]

    async def _watch(self) -> None:
        interval = self._settings.beat_interval_s / 2
        expected = time.monotonic() + interval
        while True:
            await asyncio.sleep(max(0.0, expected - time.monotonic()))
            now = time.monotonic()
            late = now - expected > self._settings.late_timer_s
            expected = now + interval
            if not late:  # after a pause of our own, read what waits on the sockets first: judge in the next round
                self._judge(now)

    def _judge(self, now: float) -> None:
        for session in list(self._sessions):
            session.judge(now)
