"""The description of a Model Artifact, from the store of this machine or from the Tracker, checked by this Node itself.

Owns the order: signature or pin first, then the manifest, then what the manifest names, each bounded by what is known
of it by then; what lies in the store is not asked for again. That a description holds is bundle.py's to say. Shown by
tests/node/test_artifact_description.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from shardline.artifact.bundle import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    SMALL_FOLDER,
    TORRENT_NAME,
    TrustPolicy,
    load_bundle,
)
from shardline.artifact.signing import SIGNATURE_BYTES_LIMIT, verify
from shardline.artifact.store import Store, StoredArtifact
from shardline.artifact.stored_file import unwritable
from shardline.artifact.torrent import TORRENT_BYTES_LIMIT
from shardline.errors import ShardlineError
from shardline.wire.manifest import MANIFEST_BYTES_LIMIT, Manifest, decode_manifest

SMALL_TOTAL_LIMIT = 1 << 30
"""Bytes of all small files together that are fetched on a manifest's word."""

log = structlog.get_logger(__name__)

BUSY_S = 60.0
"""A Tracker that has no time for a file now is asked again for so long."""
_AGAIN_S = 1.0

AskFile = Callable[[str, int], Awaitable[bytes]]
"""(path in the bundle, most bytes) -> its bytes; `not_found` where there is none."""


def stored(store: Store, content_id: str, policy: TrustPolicy) -> StoredArtifact | None:
    """What the store has of it, if the policy believes that; None else. Blocking."""
    try:
        return store.open(content_id, policy)
    except ShardlineError as error:
        if error.code not in ("not_found", "artifact_untrusted", "artifact_invalid"):
            raise
        if error.code != "not_found":
            log.info("stored_description_refused", content_id=content_id, reason=error.message)
        return None


def stored_names(store: Store, policy: TrustPolicy) -> list[tuple[str, str]]:
    """(content_id, name) of all that the policy believes; of a store that is our own, without keys, all. Blocking."""
    found = []
    for content_id in store.content_ids():
        artifact = stored(store, content_id, policy_for(policy, content_id))
        if artifact is not None:
            with artifact:
                found.append((content_id, artifact.bundle.manifest.name))
    return found


def policy_for(policy: TrustPolicy, content_id: str) -> TrustPolicy:
    """`policy` where it names keys; else the pin of this content: whoever named it to us is believed."""
    return policy if policy.keys else TrustPolicy(content_ids=frozenset({content_id}))


async def fetched(store: Store, content_id: str, policy: TrustPolicy, ask: AskFile) -> StoredArtifact:
    """Fetch the description file by file, check it, and put it into the store.

    Errors: `artifact_untrusted`, `artifact_invalid`, `artifact_mismatch` where it is of another content; `disk_full`,
    `state_unwritable`; those of `ask`.
    """
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".description-", dir=store.folder))
    except OSError as error:
        raise unwritable(error, store.folder) from None
    try:
        await _fetch_into(folder, content_id, policy, _patient(ask))
        return await asyncio.to_thread(_kept, store, folder, content_id, policy)
    except OSError as error:
        raise unwritable(error, store.folder) from None
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _patient(ask: AskFile) -> AskFile:
    """`ask`, which is tried again while others keep the Tracker busy."""

    async def patient(path: str, most: int) -> bytes:
        deadline = asyncio.get_running_loop().time() + BUSY_S
        while True:
            try:
                return await ask(path, most)
            except ShardlineError as error:
                if error.code != "queue_full" or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(_AGAIN_S)

    return patient


def _kept(store: Store, folder: Path, content_id: str, policy: TrustPolicy) -> StoredArtifact:
    with store.add(load_bundle(folder, policy)):
        return store.open(content_id, policy)


async def _fetch_into(folder: Path, content_id: str, policy: TrustPolicy, ask: AskFile) -> None:
    raw = await ask(MANIFEST_NAME, MANIFEST_BYTES_LIMIT)
    signature = await _signature(ask)
    digests = None
    if policy.keys:
        if signature is None:
            raise ShardlineError("artifact_untrusted", f"{content_id} is not signed, and only named keys are trusted")
        digests = verify(signature, policy.keys).digests
        if digests.get(MANIFEST_NAME) != hashlib.sha256(raw).hexdigest():
            raise ShardlineError("artifact_invalid", f"{MANIFEST_NAME} is not the file that was signed")
    manifest = decode_manifest(raw)
    if manifest.content_id != content_id:
        why = f"{content_id} was asked for, and {manifest.content_id} came"
        raise ShardlineError(
            "artifact_mismatch", why, advice="Ask the operator of the Tracker which artifact is meant."
        )
    _check_small(manifest)
    _write(folder, MANIFEST_NAME, raw)
    if signature is not None:
        _write(folder, SIGNATURE_NAME, signature)
    _write(folder, TORRENT_NAME, await ask(TORRENT_NAME, TORRENT_BYTES_LIMIT))
    for entry in manifest.small_files:
        path = f"{SMALL_FOLDER}/{entry.path}"
        _write(folder, path, await ask(path, entry.size) if entry.size else b"")


async def _signature(ask: AskFile) -> bytes | None:
    try:
        return await ask(SIGNATURE_NAME, SIGNATURE_BYTES_LIMIT)
    except ShardlineError as error:
        if error.code != "not_found":
            raise
        return None


def _check_small(manifest: Manifest) -> None:
    total = sum(entry.size for entry in manifest.small_files)
    if total > SMALL_TOTAL_LIMIT:
        raise ShardlineError(
            "artifact_invalid", f"its small files have {total} bytes, the limit is {SMALL_TOTAL_LIMIT}"
        )


def _write(folder: Path, name: str, raw: bytes) -> None:
    """`name` is one that a checked manifest allows, or ours."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
