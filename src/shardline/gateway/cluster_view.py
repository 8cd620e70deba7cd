"""The cluster as people look at it: Nodes, models, Model Artifacts and routes, in the words of the Tracker.

Owns how often the Tracker is asked: at most once a second for each part, by whoever looks; while nobody does, never.
Which fields leave the Gateway is decided here. It judges nothing. Shown by tests/gateway/test_cluster_view.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from shardline.errors import ShardlineError
from shardline.wire.artifacts import ArtifactList
from shardline.wire.messages import ModelInfo

FRESH_S = 1.0
"""No part is asked for again before."""
ROUTES_FRESH_S = 3.0
"""To explain routes the Tracker searches them."""
MODELS_EXPLAINED = 4
_NODE_FIELDS = (
    *("id", "version", "url", "host", "memory_bytes", "rss_bytes", "engine", "health", "shards", "kv", "queue_bytes"),
    *("state", "reason", "last_seen_s", "peers", "artifacts"),
)
_GONE = frozenset({"left", "expired", "expelled"})
_OF_NODES_ONLY = frozenset({"text_nodes", "head_nodes"})
"""What is said of a model for the Gateway's own use."""
_encoder = msgspec.json.Encoder()


class AskedTracker(Protocol):
    """What is asked of it (transport/tracker_client.py)."""

    async def nodes(self) -> dict[str, Any]: ...

    async def artifacts(self) -> ArtifactList: ...

    async def explain(self, model: str) -> dict[str, Any]: ...


@dataclass(slots=True)
class _Part:
    ask: Callable[[], Awaitable[Any]]
    fresh_s: float
    asked_at: float | None = None
    failed: bool = False
    body: bytes = b"null"
    """`null`: not known yet."""

    def is_due(self, now: float) -> bool:
        # A look each second must not miss a part that is fresh for a moment more.
        fresh_s = FRESH_S if self.failed else self.fresh_s
        return self.asked_at is None or now - self.asked_at >= fresh_s - 0.05


class ClusterView:
    """The view of one Gateway, shared by all who look. `models`: what is served; may raise as the Tracker does."""

    def __init__(
        self,
        tracker: AskedTracker,
        models: Callable[[], Awaitable[list[ModelInfo]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = tracker
        self._served = models
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: tuple[tuple[str, str, str, bool], ...] = ()
        """The models of the last answer, by name, content and engine class, and whether they are whole."""
        self._explained: tuple[tuple[str, str, str, bool], ...] | None = None
        """Those of which the routes were explained last."""
        self.node_urls: dict[str, str] = {}
        """Of the Nodes that live, as the Tracker has dialled them when it was last asked."""
        self._failure: ShardlineError | None = None
        self._answered = 0.0
        """Unix seconds of the last round in which the Tracker answered all."""
        self._parts = {
            "models": _Part(self._models, FRESH_S),
            "nodes": _Part(self._nodes, FRESH_S),
            "artifacts": _Part(self._artifacts, FRESH_S),
            "routes": _Part(self._routes, ROUTES_FRESH_S),
        }

    async def look(self) -> dict[str, bytes]:
        """Every part as JSON. Where the Tracker did not answer, `tracker` says why, and the others are as they were
        when it last did. Whoever looks while a question is under way has its answer."""
        async with self._lock:
            now = self._clock()
            due = {name for name, part in self._parts.items() if name != "routes" and part.is_due(now)}
            if due:
                await self._ask(due, now)
            tracker = {
                "answered": round(self._answered, 3),
                "error": None if self._failure is None else self._failure.body(),
            }
            return {"tracker": _encoder.encode(tracker), **{name: part.body for name, part in self._parts.items()}}

    async def _ask(self, due: set[str], now: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._one(self._parts[name], now)) for name in sorted(due - {"models"})]
            if "models" in due:
                asked.append(tasks.create_task(self._models_and_routes(now)))
        failures = [task.result() for task in asked]
        self._failure = next((failure for failure in failures if failure is not None), None)
        if self._failure is None:
            self._answered = time.time()

    async def _models_and_routes(self, now: float) -> ShardlineError | None:
        """In this order: before it is known which models there are, nobody may read that none has a route. Models that
        are others since, or whole, are explained at once."""
        routes = self._parts["routes"]
        failure = await self._one(self._parts["models"], now)
        if failure is None and (routes.is_due(now) or self._explained != self._known):
            failure = await self._one(routes, now)
        return failure

    async def _one(self, part: _Part, now: float) -> ShardlineError | None:
        failure = None
        try:
            part.body = _encoder.encode(await part.ask())
        except ShardlineError as error:
            # A Tracker of an earlier version has no such path: the part stays null, nothing is out of order.
            failure = None if error.code == "not_found" else error
        part.asked_at, part.failed = now, failure is not None
        return failure

    async def _models(self) -> list[dict[str, Any]]:
        models = await self._served()
        self._known = tuple(sorted((m.model, m.content_id, m.engine_class, m.ready) for m in models))
        return [_without(msgspec.to_builtins(model), _OF_NODES_ONLY) for model in models]

    async def _nodes(self) -> list[dict[str, Any]]:
        listed = (await self._tracker.nodes()).get("nodes") or []
        self.node_urls = {
            node["id"]: node["dialled_url"]
            for node in listed
            if node.get("dialled_url") and node.get("state") not in _GONE
        }
        return [{name: node.get(name) for name in _NODE_FIELDS} for node in listed]

    async def _artifacts(self) -> Any:
        return msgspec.to_builtins((await self._tracker.artifacts()).artifacts)

    async def _routes(self) -> list[dict[str, Any]]:
        """Why each model takes the route that it takes; of models that are listed."""
        found = []
        self._explained = self._known
        for name in sorted({model for model, *_ in self._known})[:MODELS_EXPLAINED]:
            try:
                found.append(await self._tracker.explain(name))
            except ShardlineError as error:
                if error.code != "model_not_found":  # its last Node went meanwhile
                    raise
        return found


def _without(value: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name not in names}
