"""Which models there are, as the Tracker's routing sees it: asked at most once a second, never older than a failure.

Owns the list between two questions, and the memory of models that were there a moment ago: while a restarted Tracker
does not know its Nodes yet, a client is told to come again, not that there is no such model. It chooses no route.
Shown by tests/gateway/test_served_models.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from shardline.errors import ShardlineError
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.messages import ModelInfo

FRESH_S = 1.0
"""The Tracker is not asked again before; nor does anybody wait longer for a report to reach it."""
REMEMBERED_S = 60.0
"""A model that no Node serves any more is listed for so long as one whose layers are all missing."""


class ServedModels:
    """The list of one Gateway. `clock` gives monotonic seconds."""

    def __init__(self, tracker: TrackerClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracker = tracker
        self._clock = clock
        self._fresh: tuple[float, list[ModelInfo]] | None = None
        self._seen: dict[tuple[str, str], tuple[float, ModelInfo]] = {}
        self._lock = asyncio.Lock()
        self._doubts = 0
        self._asked = 0
        """Questions that were answered, or failed."""
        self._failure: ShardlineError | None = None
        """Of the last question."""
        self._reports: set[asyncio.Task[None]] = set()

    async def all(self) -> list[ModelInfo]:
        """Models, whole or not. Whoever asks while a question is under way has its answer, or its
        `tracker_unreachable`: a silent Tracker makes nobody wait for another's question."""
        asked = self._asked
        async with self._lock:
            if self._failure is not None and self._asked > asked:
                raise self._failure
            if self._reports:
                await asyncio.wait(set(self._reports), timeout=FRESH_S)
            now = self._clock()
            if self._fresh is None or now - self._fresh[0] > FRESH_S:
                return await self._ask(now)
            return self._fresh[1]

    async def _ask(self, now: float) -> list[ModelInfo]:
        doubts = self._doubts
        self._failure = None
        try:
            models = self._with_remembered((await self._tracker.models()).models, now)
        except ShardlineError as error:
            self._failure = error
            raise
        finally:
            self._asked += 1
        if doubts == self._doubts:  # else what failed while the answer was on its way may not be in it
            self._fresh = (now, models)
        return models

    def doubt(self, report: asyncio.Task[None] | None = None) -> None:
        """Something has failed, or was refused, that the list may not hold: ask anew, once the Tracker has `report`."""
        self._fresh = None
        self._doubts += 1
        if report is not None:
            self._reports.add(report)
            report.add_done_callback(self._reports.discard)

    def _with_remembered(self, models: list[ModelInfo], now: float) -> list[ModelInfo]:
        # A composite model that never was ready is a start that failed: nobody is to wait for it.
        known = [model for model in models if model.ready or not model.composite]
        self._seen |= {(model.model, model.content_id): (now, model) for model in known}
        self._seen = {key: entry for key, entry in self._seen.items() if now - entry[0] <= REMEMBERED_S}
        listed = {model.content_id for model in models} | {model.model for model in models}
        gone = [model for key, (_, model) in self._seen.items() if listed.isdisjoint(key)]
        return models + [_missing(model) for model in gone]


def _missing(model: ModelInfo) -> ModelInfo:
    """`model` without a Node."""
    return msgspec.structs.replace(
        model,
        ready=False,
        missing=[] if model.composite else [(0, model.n_layers)],
        returning=False,
        text_nodes=[],
        head_nodes=[],
        kv_capacity_tokens=0,
    )
