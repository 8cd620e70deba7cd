"""A Node that was given a file of its own gives it to others, too, where the Tracker offers the very same bytes.

Owns finding that out, by content and not by name, and all that giving takes: the description in the store, which then
refers to the file where it lies; the swarm and the advertisement. Nothing is copied or fetched but the description, and
whatever fails here is told and costs the Node nothing. Shown by tests/cluster/test_from_nothing.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import structlog

from shardline.artifact.adoption import adopt_hashed
from shardline.artifact.bundle import TrustPolicy
from shardline.artifact.identity import hashed_files
from shardline.artifact.signing import read_public_key
from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError
from shardline.node import artifact_description as description
from shardline.node.artifact_advertiser import Advertised, Advertiser
from shardline.node.artifact_door import ArtifactDoor
from shardline.node.artifact_start import store_folder
from shardline.node.info import Identity
from shardline.node.plan import CONTENT_IDS, ModelFacts
from shardline.node.swarm import Swarm
from shardline.options import NodeOptions
from shardline.transport.tls import ClusterTls
from shardline.transport.tracker_client import TrackerClient

LOOK_S = 30.0
"""So often the Tracker is asked whether it offers these bytes: it may be another one by then."""

log = structlog.get_logger(__name__)


async def give_own_file(
    options: NodeOptions,
    facts: ModelFacts,
    *,
    identity: Identity,
    tracker: TrackerClient,
    door: ArtifactDoor,
    epoch: Callable[[], str | None],
    tls: ClusterTls | None,
) -> None:
    """Until cancelled; returns where it cannot be given. `epoch`: as of `Advertiser`."""
    with ExitStack() as stack:
        try:
            artifact = await _described(options, facts, tracker, epoch, stack)
            swarm = Swarm(
                options.settings,
                options.host,
                partial(tracker.sources, node=identity.node_id),
                environment=options.environment,
                tls=tls,
                upload_pace=door.pace,
            )
            swarm.put(artifact)
        except ShardlineError as error:
            log.warning("own_file_not_given", content_id=facts.content_id, reason=error.message)
            return
        log.info("own_file_given", content_id=facts.content_id, name=artifact.bundle.manifest.name)
        # Last: what the door has is closed by nobody before the Node's end.
        door.put(artifact)
        advertiser = Advertiser(
            identity=identity,
            tracker=tracker,
            epoch=epoch,
            artifacts=[Advertised(artifact)],
            bittorrent_port=lambda: swarm.port,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(swarm.run())
                tasks.create_task(advertiser.run())
        finally:
            await swarm.take(artifact.content_id)


async def _described(
    options: NodeOptions,
    facts: ModelFacts,
    tracker: TrackerClient,
    epoch: Callable[[], str | None],
    stack: ExitStack,
) -> StoredArtifact:
    """The artifact that the file is of, with the file in it; closed by `stack`."""
    policy = TrustPolicy(keys=tuple(map(read_public_key, options.trusted_keys)))
    policy = description.policy_for(policy, facts.content_id)
    await _until_offered(facts.content_id, tracker, epoch)
    store = Store(store_folder(options), reserve_bytes=options.settings.store_reserve_bytes)
    stack.callback(store.close)
    artifact = await asyncio.to_thread(description.stored, store, facts.content_id, policy)
    if artifact is None:
        ask = partial(tracker.bundle_file, facts.content_id)
        artifact = await description.fetched(store, facts.content_id, policy, ask)
    stack.callback(artifact.close)
    files = await asyncio.to_thread(hashed_files, facts.path, cache_dir=options.state_dir / CONTENT_IDS)
    await asyncio.to_thread(adopt_hashed, artifact, files)
    return artifact


async def _until_offered(content_id: str, tracker: TrackerClient, epoch: Callable[[], str | None]) -> None:
    """Ask as often as there may be news: most clusters offer nothing, and then nothing is made for it."""
    while True:
        if epoch() is not None:
            try:
                if any(one.offered and one.content_id == content_id for one in (await tracker.artifacts()).artifacts):
                    return
            except ShardlineError as error:
                log.debug("offers_unknown", reason=error.message)
        await asyncio.sleep(LOOK_S if epoch() is not None else 0.5)
