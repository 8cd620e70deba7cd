"""A Shard file from what the store holds: only when all its ranges are held, and after they were hashed once more.

Owns that order. Headers are compared with the signed table before any reader of tensors sees them. What stands in a
Shard file, and that it is written once, is shard_files.py's. Blocking. Shown by tests/artifact/test_stored_shard.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from shardline.artifact.shard_files import ShardFiles
from shardline.artifact.store import StoredArtifact, Wanted
from shardline.artifact.verification import check_folder_facts, check_header
from shardline.errors import ShardlineError
from shardline.formats.gguf import TensorInfo, parse_header
from shardline.formats.gguf_files import GGUFModel
from shardline.wire.bitmap import Pieces

Progress = Callable[[int, int], None]
Cancelled = Callable[[], bool]

log = structlog.get_logger(__name__)


def stored_model(artifact: StoredArtifact) -> GGUFModel:
    """The GGUF model whose headers the store holds; of its tensors only those of held pieces may be read.

    Errors: `artifact_incomplete`; `model_file_invalid`, `artifact_mismatch` for headers that are not as was signed.
    """
    manifest = artifact.bundle.manifest
    if manifest.format.container != "gguf":
        raise ShardlineError("invalid_value", "this artifact has no GGUF files")
    headers = []
    tensors: dict[str, TensorInfo] = {}
    for number, (entry, file) in enumerate(zip(manifest.files, artifact.files, strict=True)):
        raw = file.read(0, entry.data_offset)
        check_header(manifest, number, raw)
        header = parse_header(raw, entry.size)
        headers.append(header)
        tensors |= {info.name: replace(info, file=number) for info in header.tensors.values()}
    return GGUFModel(tuple(file.path() for file in artifact.files), tuple(headers), tensors)


def check_headers(artifact: StoredArtifact) -> None:
    """Compare the headers of all files, of any container, with the signed table; errors as of `stored_model`."""
    manifest = artifact.bundle.manifest
    for number, (entry, file) in enumerate(zip(manifest.files, artifact.files, strict=True)):
        check_header(manifest, number, file.read(0, entry.data_offset))
    if manifest.format.container == "safetensors":
        check_folder_facts(artifact.bundle)


def check_pieces(
    artifact: StoredArtifact,
    first: int,
    last: int,
    *,
    progress: Progress | None = None,
    cancelled: Cancelled | None = None,
) -> None:
    """Hash all pieces of Shard [first, last) once more. Those that are damaged are held no longer.

    Errors: `artifact_incomplete` where some are not held, or not any more; `cancelled`.
    """
    artifact.check_held(first, last)
    drop_damaged(artifact, artifact.wanted(first, last), progress=progress, cancelled=cancelled)
    artifact.check_held(first, last)


def drop_damaged(
    artifact: StoredArtifact,
    wanted: Wanted,
    *,
    progress: Progress | None = None,
    cancelled: Cancelled | None = None,
) -> bool:
    """Hash these pieces, which are held, once more. Whether some are damaged: those are held no longer. `cancelled`."""
    done, total, found = 0, sum(map(len, wanted.values())), False
    for number, pieces in wanted.items():
        file = artifact.files[number]
        bad = []
        for piece in pieces:
            if cancelled is not None and cancelled():
                raise ShardlineError("cancelled", "the check of a Shard was cancelled")
            if not file.is_whole(piece):
                bad.append(piece)
            done += 1
            if progress is not None:
                progress(done, total)
        if bad:
            found = True
            log.warning("pieces_damaged", content_id=artifact.content_id, file=file.name[:16], pieces=bad[:8])
            file.commit(Pieces(file.count), Pieces.of(file.count, bad))
    return found


def stored_shard(
    artifact: StoredArtifact,
    shard_files: ShardFiles,
    first: int,
    last: int,
    *,
    vocabulary: bool = False,
    checked: bool = False,
    progress: Progress | None = None,
    cancelled: Cancelled | None = None,
) -> Path:
    """The Shard file of [first, last), from the cache or made now from held pieces.

    `vocabulary`: the vocabulary file beside it, too. `checked`: `check_pieces` has just been called; else it is called
    where the Shard file must be made. Errors: those of `check_pieces`, `stored_model` and `ShardFiles.shard`.
    """
    if not checked and not shard_files.shard_path(artifact.content_id, first, last).exists():
        check_pieces(artifact, first, last, cancelled=cancelled)
        checked = True
    model = stored_model(artifact)
    path = shard_files.shard(
        model,
        artifact.content_id,
        first,
        last,
        growing=True,
        before=None if checked else partial(check_pieces, artifact, first, last, cancelled=cancelled),
        progress=progress,
        cancelled=cancelled,
    )
    if vocabulary:
        shard_files.vocabulary(model, artifact.content_id, cancelled=cancelled)
    return path
