"""Making a bundle from a model's original files, which are read once and never written.

Owns the steps and the folder that comes out: whole, synced and under its name, or not there at all. What stands in the
manifest is read by contents.py and hashing.py. Before it is given its name the bundle is read back as any stranger
would. Blocking: call it in a thread. Shown by tests/artifact/test_creation.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from shardline.artifact.bundle import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    SMALL_FOLDER,
    TORRENT_NAME,
    Bundle,
    TrustPolicy,
    expected_identity,
    load_bundle,
)
from shardline.artifact.contents import Contents, read_contents
from shardline.artifact.hashing import FileHashes, hash_once
from shardline.artifact.identity import SMALL_FILE_LIMIT, SMALL_FILES
from shardline.artifact.signing import sign
from shardline.artifact.torrent import piece_length_for, write_torrent
from shardline.errors import ShardlineError
from shardline.formats.safetensors import INDEX_NAME
from shardline.wire.manifest import (
    COLUMNS,
    SCHEMA,
    BitTorrent,
    FileEntry,
    Manifest,
    Origin,
    SmallFile,
    Transport,
    checked,
    encode_manifest,
)

SUFFIX = ".artifact"
"""Of the folder that is made beside a model where no other is named."""
LEGAL_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.txt", "README.md")

_PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")

Progress = Callable[[int, int], None]
"""Called with the bytes hashed so far and the bytes to hash; what it raises ends the work, with nothing left behind."""


@dataclass(frozen=True, slots=True)
class Description:
    """What the files themselves do not say."""

    created: str
    """RFC 3339, in UTC and whole seconds."""
    name: str | None = None
    """Else the file's or the folder's."""
    version: str | None = None
    license: str | None = None
    """SPDX expression; else what a GGUF file says."""
    source: tuple[Origin, ...] = ()
    webseeds: tuple[str, ...] = ()
    include: tuple[Path, ...] = ()
    """Small files to add, under their own names."""


def default_bundle(model: Path) -> Path:
    """Where the bundle of a model is looked for and made: beside it."""
    model = model.absolute()
    stem = model.name if model.is_dir() else _PART.sub("", model.name.removesuffix(".gguf"))
    return model.with_name(stem + SUFFIX)


def create_bundle(
    model: Path,
    output: Path,
    description: Description,
    *,
    key: EllipticCurvePrivateKey | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Describe the model at `model` (GGUF, any part of it, or a safetensors folder) in a new folder `output`.

    Errors: `model_file_invalid`; `artifact_invalid` where the model cannot be described (two equal files, names that no
    system stores); `setting_invalid` where `output` is there; `disk_full`, `state_unwritable`.
    """
    contents = read_contents(model)
    if os.path.lexists(output):
        raise ShardlineError("setting_invalid", f"{output.name!r:.200} is there already", param="output")
    if model.is_dir() and output.absolute().is_relative_to(model.absolute()):
        raise ShardlineError("setting_invalid", "the artifact would lie inside the model's own folder", param="output")
    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        (part / SMALL_FOLDER).mkdir(parents=True)
        try:
            _fill(part, output.name, contents, description, key, progress)
            if read_contents(model) != contents:
                raise _bad_model("the model's files changed while they were read: is a download still running?")
            made = load_bundle(part, TrustPolicy((key.public_key(),)) if key else TrustPolicy(allow_unsigned=True))
            os.rename(part, output)
            _sync(output.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    except OSError as error:
        raise _unwritable(error, output) from None
    return Bundle(output, made.manifest, made.manifest_digest, made.trees, made.signed_by)


def _fill(
    part: Path,
    name: str,
    contents: Contents,
    description: Description,
    key: EllipticCurvePrivateKey | None,
    progress: Progress | None,
) -> None:
    small_files = _copy_small_files(contents, description.include, part / SMALL_FOLDER)
    hashes = _hash_all(contents, progress)
    title = description.name or _title(contents)
    torrent = write_torrent(
        title,
        [(path, found.tree) for path, found in zip(contents.paths, hashes, strict=True)],
        webseeds=description.webseeds,
    )
    files = tuple(_entries(contents, hashes))
    manifest = checked(
        Manifest(
            schema=SCHEMA,
            content_id=expected_identity(contents.container, files, small_files),
            name=title,
            version=description.version,
            created=description.created,
            license=description.license or contents.license,
            source=description.source,
            format=contents.format,
            model=contents.model,
            files=files,
            tensor_columns=COLUMNS,
            tensors=contents.tensors,
            small_files=small_files,
            transport=Transport(
                bittorrent=BitTorrent(
                    meta_version=2,
                    piece_length=hashes[0].tree.piece_length,
                    info_hash_v2=torrent.info_hash,
                    torrent_sha256=hashlib.sha256(torrent.raw).hexdigest(),
                ),
                webseeds=description.webseeds,
            ),
        )
    )
    manifest_raw = encode_manifest(manifest)
    _write(part / MANIFEST_NAME, manifest_raw)
    _write(part / TORRENT_NAME, torrent.raw)
    if key is not None:
        digests = {f"{SMALL_FOLDER}/{entry.path}": entry.sha256 for entry in small_files}
        digests[MANIFEST_NAME] = hashlib.sha256(manifest_raw).hexdigest()
        digests[TORRENT_NAME] = hashlib.sha256(torrent.raw).hexdigest()
        _write(part / SIGNATURE_NAME, sign(key, name, digests))
    _sync(part / SMALL_FOLDER)
    _sync(part)


def _hash_all(contents: Contents, progress: Progress | None) -> list[FileHashes]:
    paths = [contents.folder / path for path in contents.paths]
    total = sum(path.stat().st_size for path in paths)
    piece_length = piece_length_for(total)
    hashes: list[FileHashes] = []
    for path in paths:
        before = sum(found.tree.size for found in hashes)
        hashes.append(hash_once(path, piece_length, _step(progress, before, total)))
    return hashes


def _step(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total) if progress is not None else None


def _entries(contents: Contents, hashes: Sequence[FileHashes]) -> Iterable[FileEntry]:
    for path, data_offset, found in zip(contents.paths, contents.data_offsets, hashes, strict=True):
        if found.tree.root is None:
            raise _bad_model(f"{path} is empty")
        yield FileEntry(
            path=path,
            size=found.tree.size,
            sha256=found.sha256,
            pieces_root=found.tree.root.hex(),
            data_offset=data_offset,
        )


def _copy_small_files(contents: Contents, include: Sequence[Path], target: Path) -> tuple[SmallFile, ...]:
    """What a folder has beside its tensors and somebody needs, and what the publisher adds, copied and hashed."""
    found: dict[str, Path] = {}
    if contents.container == "safetensors":
        for name in (*SMALL_FILES, INDEX_NAME, *LEGAL_FILES):
            if (contents.folder / name).is_file():
                found[name] = contents.folder / name
    for path in include:
        if contents.container == "safetensors" and path.name in SMALL_FILES:
            raise _bad_model(f"{path.name} is part of the model: put it into its folder")
        found[path.name] = path
    return tuple(_copied(name, path, target / name) for name, path in sorted(found.items()))


def _copied(name: str, source: Path, target: Path) -> SmallFile:
    try:
        with source.open("rb") as file:
            raw = file.read(SMALL_FILE_LIMIT + 1)
    except OSError as error:
        raise _bad_model(f"{name} cannot be read: {error.strerror}") from None
    if len(raw) > SMALL_FILE_LIMIT:
        raise _bad_model(f"{name} has more than {SMALL_FILE_LIMIT} bytes")
    _write(target, raw)
    return SmallFile(path=name, size=len(raw), sha256=hashlib.sha256(raw).hexdigest())


def _title(contents: Contents) -> str:
    """A single file's own name, so that clients of the torrent know it where it lies; else that of the folder."""
    if contents.container == "safetensors":
        return contents.folder.resolve().name
    return contents.paths[0] if len(contents.paths) == 1 else _PART.sub("", contents.paths[0].removesuffix(".gguf"))


def _write(path: Path, raw: bytes) -> None:
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(error: OSError, output: Path) -> ShardlineError:
    code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "state_unwritable"
    message = f"no artifact can be written to {output.name!r:.200}: {error.strerror or type(error).__name__}"
    return ShardlineError(code, message, advice="Make room there, or choose another folder: -o DIR")


def _bad_model(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", message, reason="damaged")
