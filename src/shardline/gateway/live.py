"""`GET /v1/live`: all that the page shows, as one stream of server-sent events, so that it needs one connection.

Owns which event is sent when: `hello` once, then `sessions` of the key that asks, and the parts of the cluster that it
may see (cluster_view.py), each whole and only when it has changed. Every event replaces what an earlier one said, but
`log`, which brings the lines that are new (node_logs.py): all of them to a reader that comes anew. Shown by
tests/gateway/test_live.py; described in docs/page.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from shardline.errors import ShardlineError
from shardline.gateway import sse
from shardline.gateway.cluster_view import FRESH_S, ClusterView
from shardline.gateway.keys import ApiKey
from shardline.gateway.node_logs import NodeLogs
from shardline.settings import Settings
from shardline.telemetry.records import Records

SESSIONS = 200
"""Of sessions that have ended, at most so many are shown; the live ones are always."""
FOR_ALL = frozenset({"tracker", "models"})
"""What a key sees of the cluster without the scope `look`: as much as `GET /v1/models` tells."""
PAUSE_S = 0.1
"""Between two events about sessions: what changes faster is put together."""
_encoder = msgspec.json.Encoder()


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """How another machine comes to the cluster, as far as this Gateway knows."""

    tracker: str
    """URL."""
    keys: bool
    """A cluster with keys: each machine needs a line of its own, made by `shardline invite`."""
    is_local: bool
    """The Tracker listens on loopback: only this machine can join."""
    flags: list[str] = []
    """Flags of `shardline` with which a command on this machine finds the cluster's credential."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first event: who is asked, and by whom."""

    version: str
    gateway: str
    """Its id: in a cluster with keys the one that its certificate, and `shardline expel`, call it by."""
    key: str
    """Name of the key that asks."""
    scopes: list[str]
    time: float
    """Unix seconds at the Gateway, by which a reader knows how far its own clock is off."""
    record_ttl_s: float
    default_max_tokens: int
    joining: Joining


class Live:
    """The streams of one Gateway. `close` ends them all, for the end of the process."""

    def __init__(
        self,
        *,
        records: Records,
        cluster: ClusterView,
        logs: NodeLogs,
        settings: Settings,
        version: str,
        gateway: str,
        joining: Joining,
    ) -> None:
        self._records = records
        self._cluster = cluster
        self._logs = logs
        self._settings = settings
        self._version = version
        self._gateway = gateway
        self._joining = joining
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Every stream ends, also those that begin from now on."""
        self._closed.set()

    async def follow(self, key: Callable[[], ApiKey], response: sse.EventResponse) -> None:
        """Write events for the owner of `key` until `close`, or the caller is cancelled. Raises `slow_client`, and what
        `key` raises: it is asked each second."""
        known = key()
        await response.start()
        await response.write(sse.named("hello", _encoder.encode(self._hello(known))))
        async with asyncio.TaskGroup() as tasks:
            followers = [
                tasks.create_task(self._sessions(known.name, response)),
                tasks.create_task(self._parts(key, response)),
                tasks.create_task(self._log_lines(key, response)),
            ]
            await self._closed.wait()
            for follower in followers:
                follower.cancel()
        await response.end()

    def _hello(self, key: ApiKey) -> Hello:
        return Hello(
            version=self._version,
            gateway=self._gateway,
            key=key.name,
            scopes=list(key.scopes),
            time=round(time.time(), 3),
            record_ttl_s=self._settings.record_ttl_s,
            default_max_tokens=self._settings.default_max_tokens,
            joining=self._joining,
        )

    async def _sessions(self, key_id: str, response: sse.EventResponse) -> None:
        with self._records.watching(key_id) as watch:
            await response.write(_of_sessions(self._records.latest(key_id, SESSIONS)))
            while True:
                changed = []
                for record_id in await watch.changed():
                    with contextlib.suppress(ShardlineError):  # it made way for others meanwhile
                        changed.append(self._records.get(record_id, key_id))
                await response.write(_of_sessions(changed))
                await asyncio.sleep(PAUSE_S)

    async def _parts(self, key: Callable[[], ApiKey], response: sse.EventResponse) -> None:
        sent: dict[str, bytes] = {}
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            looks = "look" in key().scopes
            for name, body in (await self._cluster.look()).items():
                if name not in FOR_ALL and not looks:
                    continue
                # `tracker` goes each time: by it a reader knows that the rest is not old.
                if name == "tracker" or sent.get(name) != body:
                    await response.write(sse.named(name, body))
                    sent[name] = body
            await asyncio.sleep(max(PAUSE_S, FRESH_S - (loop.time() - begun)))

    async def _log_lines(self, key: Callable[[], ApiKey], response: sse.EventResponse) -> None:
        """Apart from the parts: a Node that does not answer must not keep them back."""
        seen: dict[str, int] = {}
        while True:
            if "look" in key().scopes:
                await self._logs.look()
                for event in self._logs.news(seen):
                    await response.write(sse.named("log", event))
            await asyncio.sleep(FRESH_S)


def _of_sessions(views: list[dict[str, Any]]) -> bytes:
    return sse.named("sessions", _encoder.encode(views))
