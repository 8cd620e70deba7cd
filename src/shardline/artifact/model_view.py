"""A model of the store under the names of its publisher, for engines that go by names: a folder of links.

    CONTENT_ID/model/FILE -> data/ROOT, or the file of another program;  SMALL FILE -> bundle/files/…

Owns that folder. Files have holes where pieces are not held, and a link does not say so: whoever opens one has asked
the store before (stored_shard.py). Blocking. Shown by tests/artifact/test_model_view.py.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shardline.artifact.bundle import SMALL_FOLDER
from shardline.artifact.store import BUNDLE, StoredArtifact
from shardline.artifact.stored_file import unwritable

FOLDER = "model"


def model_path(artifact: StoredArtifact) -> Path:
    """What `make_view` makes and an engine is given: the first GGUF file, or the folder of a safetensors model."""
    manifest, folder = artifact.bundle.manifest, artifact.folder / FOLDER
    return folder / manifest.files[0].path if manifest.format.container == "gguf" else folder


def make_view(artifact: StoredArtifact) -> Path:
    """`model_path`, once all links are there and lead to where the bytes are now. `disk_full`, `state_unwritable`."""
    manifest, folder = artifact.bundle.manifest, artifact.folder / FOLDER
    targets = {folder / entry.path: file.path() for entry, file in zip(manifest.files, artifact.files, strict=True)}
    if manifest.format.container == "safetensors":
        small = artifact.folder / BUNDLE / SMALL_FOLDER
        targets |= {folder / entry.path: small / entry.path for entry in manifest.small_files}
    try:
        for link, target in targets.items():
            _link(link, target.absolute())
    except OSError as error:
        raise unwritable(error, artifact.folder) from None
    return model_path(artifact)


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and os.readlink(link) == str(target):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    part = link.with_name(f"{link.name}.{os.getpid()}.part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    part.symlink_to(target)
    os.replace(part, link)
