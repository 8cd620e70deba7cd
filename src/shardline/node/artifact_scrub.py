"""Reads again, in the background, what this machine holds of a Model Artifact: what has rotted is not given away.

Owns when that is done; the reading and the verdict are artifact/scrub.py's. Shown by tests/node/test_artifact_scrub.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shardline.artifact.scrub import scrub
from shardline.artifact.store import StoredArtifact
from shardline.errors import ShardlineError
from shardline.settings import Settings

log = structlog.get_logger(__name__)


async def scrub_often(
    artifact: StoredArtifact,
    settings: Settings,
    begin: asyncio.Event,
    damaged: Callable[[], Awaitable[None]] | None = None,
    *,
    at_once: bool = False,
) -> None:
    """One round every `scrub_interval_s` after `begin`, until cancelled; `at_once`: the first one then.

    `damaged` is called after a round that found pieces that are no longer what they were. What goes wrong is logged.
    """
    await begin.wait()
    if not at_once:
        await asyncio.sleep(settings.scrub_interval_s)
    while True:
        try:
            report = await scrub(artifact, bytes_per_s=settings.scrub_bytes_per_s)
            log.info("scrubbed", content_id=artifact.content_id, checked_bytes=report.checked_bytes, bad=report.bad)
            if report.bad and damaged is not None:
                await damaged()
        except ShardlineError as error:
            log.warning("scrub_failed", content_id=artifact.content_id, reason=error.message)
        await asyncio.sleep(settings.scrub_interval_s)
