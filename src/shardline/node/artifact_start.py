"""A Node from nothing: which model, its description, what this machine has of it already, and its headers.

Owns that order, up to the point where such a Node knows as much as one that was given a file. What it believes is its
operator's keys, or else the content that the cluster's Tracker names. Without a Tracker the store serves, where it is
clear which artifact is meant. Shown by tests/cluster/test_from_nothing.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from shardline.artifact.adoption import adopt_all
from shardline.artifact.bundle import TrustPolicy
from shardline.artifact.signing import read_public_key
from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError
from shardline.node import artifact_description as description
from shardline.node.artifact_choice import Chosen, chosen_offer, chosen_stored
from shardline.node.artifact_pieces import ArtifactPieces
from shardline.node.plan import ModelFacts, inspect_stored
from shardline.node.tracker_patience import answered
from shardline.options import STORE_FOLDER, NodeOptions
from shardline.transport.http_client import HttpClient
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.artifacts import ArtifactInfo

_RETRY_S = 1.0
_LISTED = 8
"""Artifacts that a message names."""

log = structlog.get_logger(__name__)


class Start(NamedTuple):
    """What a Node with a file has from its file."""

    options: NodeOptions
    """With the engine that computes the artifact."""
    facts: ModelFacts
    pieces: ArtifactPieces


def store_folder(options: NodeOptions) -> Path:
    """Where the pieces lie."""
    return options.store or options.state_dir / STORE_FOLDER


@asynccontextmanager
async def from_nothing(
    options: NodeOptions, tracker: TrackerClient, client: HttpClient, node_id: str
) -> AsyncIterator[Start]:
    """Everything up to the headers; the artifact is in use until the end of the block.

    Errors: `artifact_unavailable` where nobody offers one, those of description.py and of `inspect_stored`, and of the
    store: `disk_full`, `state_unwritable`.
    """
    policy = TrustPolicy(keys=tuple(map(read_public_key, options.trusted_keys)))
    async with AsyncExitStack() as stack:
        store = Store(store_folder(options), reserve_bytes=options.settings.store_reserve_bytes)
        stack.callback(store.close)
        opening = partial(_opened, options, store, tracker, policy)
        artifact = await answered(opening, options.announce, pause_s=_RETRY_S, command="shardline serve --artifact DIR")
        stack.callback(artifact.close)
        options = _with_engine(options, artifact)
        for taken in await asyncio.to_thread(adopt_all, artifact, options.look_in):
            log.info("file_adopted", path=str(taken.path), way=taken.way, pieces=taken.pieces)
        pieces = ArtifactPieces(
            artifact,
            sources=partial(tracker.sources, artifact.content_id, node_id),
            client=client,
            settings=options.settings,
            announce=options.announce,
        )
        stack.push_async_callback(pieces.aclose)
        await pieces.bring_headers()
        facts = await asyncio.to_thread(inspect_stored, artifact, options)
        yield Start(options, facts, pieces)


async def _opened(options: NodeOptions, store: Store, tracker: TrackerClient, policy: TrustPolicy) -> StoredArtifact:
    """The artifact that this Node is about, described in the store."""
    chosen = await _chosen(options, store, tracker, policy)
    believed = description.policy_for(policy, chosen.content_id)
    artifact = await asyncio.to_thread(description.stored, store, chosen.content_id, believed)
    if artifact is None:
        ask = partial(tracker.bundle_file, chosen.content_id)
        artifact = await description.fetched(store, chosen.content_id, believed, ask)
    options.announce("chosen", name=chosen.name, content_id=chosen.content_id, reason=chosen.reason)
    return artifact


async def _chosen(options: NodeOptions, store: Store, tracker: TrackerClient, policy: TrustPolicy) -> Chosen:
    """By the Tracker's list; where there is none, or not the right one in it, by the store."""
    asked = options.artifact or options.content_id
    offers: Sequence[ArtifactInfo] = ()
    away: ShardlineError | None = None
    try:
        offers = (await tracker.artifacts()).artifacts
    except ShardlineError as error:
        if error.code not in ("tracker_unreachable", "not_found"):
            raise
        away = error
    chosen = chosen_offer(offers, asked)
    if chosen is None:
        chosen = chosen_stored(await asyncio.to_thread(description.stored_names, store, policy), asked)
    if chosen is not None:
        return chosen
    if away is not None and away.code == "tracker_unreachable":
        raise away
    what = "no Model Artifact" if asked is None else f"no Model Artifact {asked!r:.200}"
    there = ", ".join(f"{offer.name} ({offer.content_id})" for offer in offers[:_LISTED] if offer.offered)
    if asked is not None and there:
        raise ShardlineError(
            "artifact_unavailable",
            f"the Tracker at {tracker.url} offers {what}; it offers {there}"[:2000],
            advice="Name one of these with --artifact, or leave it out.",
        )
    raise ShardlineError(
        "artifact_unavailable",
        f"the Tracker at {tracker.url} offers {what}, and the store of this machine does not say which to take",
        advice="Offer one: shardline serve --artifact DIR. Or give a file: --model PATH.",
    )


def _with_engine(options: NodeOptions, artifact: StoredArtifact) -> NodeOptions:
    """A folder of safetensors is computed by PyTorch, where nobody asked for another engine."""
    if options.engine_is_default and artifact.bundle.manifest.format.container == "safetensors":
        return replace(options, engine="torch")
    return options
