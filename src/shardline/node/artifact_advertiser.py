"""Tells the Tracker which pieces this Node gives to others, signed with its key: at first, on change, and often enough.

Owns when that is told, and the sequence. What is told is what the store says is held: read back and synced. Shown by
tests/node/test_artifact_advertiser.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from shardline.artifact.shelf import held_file
from shardline.artifact.store import StoredArtifact
from shardline.errors import ShardlineError
from shardline.node.info import Identity
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.artifacts import (
    ADVERTISE_EVERY_S,
    ADVERTISE_PAUSE_S,
    ADVERTISEMENT_DOMAIN,
    ADVERTISEMENT_S,
    Advertisement,
    Fetching,
)
from shardline.wire.bitmap import HeldFile
from shardline.wire.messages import Signed
from shardline.wire.tickets import sign

LOOK_S = 0.5
"""So often it looks what is held."""
_SEQUENCE_LIMIT = 1 << 52
_MARGIN_S = 5.0
"""Less than may be promised: clocks of two machines differ."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Advertised:
    """One artifact, and what was told of it last."""

    artifact: StoredArtifact
    fetching: Callable[[], Fetching | None] = lambda: None
    accused: Callable[[], list[str]] = lambda: []
    """Nodes that gave wrong bytes since it was asked last."""
    unheard: list[str] = field(default_factory=list)
    """Those of them that the Tracker has not heard of yet."""
    told: Any = None
    told_at: float = float("-inf")
    not_before: float = float("-inf")
    complained: str = ""


class Advertiser:
    """`run()` tells, until it is cancelled. `epoch`: changes when the Tracker may have forgotten what it was told; None
    while this Node is not registered."""

    def __init__(
        self,
        *,
        identity: Identity,
        tracker: TrackerClient,
        epoch: Callable[[], str | None],
        artifacts: list[Advertised],
        bittorrent_port: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._identity = identity
        self._tracker = tracker
        self._epoch = epoch
        self._artifacts = artifacts
        self._bittorrent_port = bittorrent_port
        self._sequence = 0

    async def run(self) -> None:
        """Look often, tell when it is due. A Tracker that is away, or does not know us yet, is told again."""
        while True:
            epoch = self._epoch()
            if epoch is not None:
                for advertised in self._artifacts:
                    await self._look(advertised, epoch)
            await asyncio.sleep(LOOK_S)

    async def _look(self, advertised: Advertised, epoch: str) -> None:
        now = time.monotonic()
        if now < advertised.not_before:
            return
        files = await asyncio.to_thread(held_files, advertised.artifact)
        fetching = advertised.fetching()
        news = (epoch, files, fetching, self._bittorrent_port())
        advertised.unheard += advertised.accused()
        if news == advertised.told and not advertised.unheard and now - advertised.told_at < ADVERTISE_EVERY_S:
            return
        advertised.not_before = now + ADVERTISE_PAUSE_S
        try:
            await self._tracker.advertise(self._identity.node_id, self._signed(advertised, files, fetching))
        except ShardlineError as error:
            self._catch_up(error)
            if error.message != advertised.complained:
                advertised.complained = error.message
                log.info("pieces_not_advertised", content_id=advertised.artifact.content_id, reason=error.message)
            return
        advertised.told, advertised.told_at, advertised.complained = news, now, ""
        advertised.unheard.clear()

    def _catch_up(self, error: ShardlineError) -> None:
        """Where the clock was set back since this Node advertised in another life, go on from what is known of it."""
        known = error.details.get("known")
        if error.param == "sequence" and isinstance(known, int) and 0 <= known < _SEQUENCE_LIMIT:
            self._sequence = max(self._sequence, known)

    def _signed(self, advertised: Advertised, files: list[HeldFile], fetching: Fetching | None) -> Signed:
        # Of the clock, so that it grows over restarts of a Node that keeps its identity.
        self._sequence = max(self._sequence + 1, int(time.time() * 1e3))
        told = Advertisement(
            node=self._identity.node_id,
            content_id=advertised.artifact.content_id,
            sequence=self._sequence,
            expires=time.time() + ADVERTISEMENT_S - _MARGIN_S,
            files=files,
            bittorrent_port=self._bittorrent_port(),
            fetching=fetching,
            accused=list(advertised.unheard),
        )
        return Signed(statement=sign(self._identity.key, ADVERTISEMENT_DOMAIN, told))


def held_files(artifact: StoredArtifact) -> list[HeldFile]:
    """The files of which anything is held. Blocking."""
    return [held for held in map(held_file, artifact.files) if any(held.pieces)]
