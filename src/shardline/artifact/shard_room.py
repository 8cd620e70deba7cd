"""Whether a disk has room for a Shard's pieces and for the Shard file made of them, before the first is fetched.

Owns that sum: where both lie on one disk the fetch must leave room for the file; on two disks the file must fit on its
own. What is there already is not counted. Blocking, writes nothing. Shown by tests/artifact/test_shard_room.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardline.artifact.shard_files import ShardFiles
from shardline.artifact.store import StoredArtifact
from shardline.artifact.stored_file import unwritable
from shardline.artifact.stored_shard import stored_model
from shardline.errors import ShardlineError
from shardline.formats.shard_gguf import plan_shard, plan_vocabulary

_ADVICE = "Make room on that disk, or choose another folder for the files of the Node: --state-dir."


def bytes_beside(artifact: StoredArtifact, files: ShardFiles, first: int, last: int, *, vocabulary: bool) -> int:
    """Bytes that the disk of the store must have beside the missing pieces of Shard [first, last).

    The headers must be held. Errors: `disk_full` where the file lies on another disk, and does not fit there; those of
    `stored_model` and `plan_shard`; `state_unwritable`.
    """
    model = stored_model(artifact)
    content_id = artifact.content_id
    plans = [(files.shard_path(content_id, first, last), plan_shard(model, first, last, content_id=content_id))]
    if vocabulary:
        plans.append((files.vocabulary_path(content_id), plan_vocabulary(model)))
    needed = sum(plan.nbytes for path, plan in plans if not _has_size(path, plan.nbytes))
    folder = _existing(files.folder)
    try:
        if os.stat(folder).st_dev == os.stat(artifact.folder).st_dev:
            return needed
        found = os.statvfs(folder)
    except OSError as error:
        raise unwritable(error, artifact.folder) from None
    free = found.f_bavail * found.f_frsize
    if free < needed:
        message = f"the Shard file needs {needed} bytes in {str(files.folder)!r:.300}, and {free} are free there"
        raise ShardlineError("disk_full", message, advice=_ADVICE, needed_bytes=needed, free_bytes=free)
    return 0


def _existing(folder: Path) -> Path:
    """This folder, or the nearest above it that is there."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _has_size(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except OSError:
        return False
