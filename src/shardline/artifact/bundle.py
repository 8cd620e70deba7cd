"""A bundle: the small folder that describes a Model Artifact. It is read here, and believed only as the policy allows.

    manifest.json   model.torrent   artifact.sig   files/…   (small files of the model: config, tokenizer, licence)

Owns the order of things: signature, digest of each file, then the first look into the manifest; then `content_id`, the
torrent, the small files. Each file is read once, bounded, never through a link. Files that are not signed are refused.
Reading blocks: call it in a thread. Shown by tests/artifact/test_bundle.py.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from shardline.artifact.identity import SMALL_FILE_LIMIT, SMALL_FILES, identity_of
from shardline.artifact.signing import SIGNATURE_BYTES_LIMIT, verify
from shardline.artifact.torrent import TORRENT_BYTES_LIMIT, read_torrent
from shardline.errors import ShardlineError
from shardline.formats.merkle import FileTree
from shardline.wire.manifest import (
    MANIFEST_BYTES_LIMIT,
    SMALL_FILES_LIMIT,
    FileEntry,
    Manifest,
    SmallFile,
    decode_manifest,
    manifest_digest,
)

MANIFEST_NAME = "manifest.json"
TORRENT_NAME = "model.torrent"
SIGNATURE_NAME = "artifact.sig"
SMALL_FOLDER = "files"
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """What is believed: a bundle signed by one of `keys`, or one whose `content_id` is pinned, or, where nothing of
    that is asked for and `allow_unsigned` says so, any. A pin vouches for the model's files, not for its licence, name
    or web seeds."""

    keys: tuple[EllipticCurvePublicKey, ...] = ()
    content_ids: frozenset[str] = frozenset()
    allow_unsigned: bool = False

    @property
    def takes_any(self) -> bool:
        return self.allow_unsigned and not self.keys and not self.content_ids


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was read and found true to itself and to the policy."""

    folder: Path
    manifest: Manifest
    manifest_digest: str
    """SHA-256 of `manifest.json` in hex."""
    trees: tuple[FileTree, ...]
    """The hashes of each file of the manifest, down to its pieces."""
    signed_by: str | None
    """`signing.key_id` of the trusted key that signed it; None where the policy asked for no signature."""

    def small_path(self, entry: SmallFile) -> Path:
        """Where a small file of the manifest lies."""
        return self.folder / SMALL_FOLDER / entry.path


def bundle_paths(bundle: Bundle) -> dict[str, int]:
    """The files that make this bundle, by their paths in it, and how many bytes each may have."""
    paths = {MANIFEST_NAME: MANIFEST_BYTES_LIMIT, TORRENT_NAME: TORRENT_BYTES_LIMIT}
    if (bundle.folder / SIGNATURE_NAME).is_file():
        paths[SIGNATURE_NAME] = SIGNATURE_BYTES_LIMIT
    return paths | {f"{SMALL_FOLDER}/{entry.path}": entry.size for entry in bundle.manifest.small_files}


def read_bundle_file(bundle: Bundle, path: str, limit: int) -> bytes:
    """One file of `bundle_paths`, as it is now; `artifact_invalid` where it is gone, larger, or a link. Blocking."""
    try:
        return _read(bundle.folder, path, limit)
    except OSError as error:
        raise _bad(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None


def open_bundle_file(bundle: Bundle, path: str, limit: int) -> FileIO:
    """The same, to be read piece by piece; who opens it closes it. Errors as of `read_bundle_file`. Blocking."""
    handle, _ = _open(bundle.folder, path, limit)
    return FileIO(handle, "rb")


def load_manifest(folder: Path, policy: TrustPolicy) -> Manifest:
    """The manifest of the bundle in `folder`. Errors: those of `load_bundle`."""
    return load_bundle(folder, policy).manifest


def load_bundle(folder: Path, policy: TrustPolicy) -> Bundle:
    """Read and check a whole bundle.

    Errors: `artifact_untrusted` where the policy does not allow it; `artifact_invalid` where a part is missing, too
    large, or differs from what was signed or from what the manifest says.
    """
    try:
        return _load(folder, policy)
    except OSError as error:
        raise _bad(f"{folder.name!r:.200} cannot be read: {error.strerror or type(error).__name__}") from None


def _load(folder: Path, policy: TrustPolicy) -> Bundle:
    signed, signed_by = _signed_digests(folder, policy)
    manifest_raw = _read(folder, MANIFEST_NAME, MANIFEST_BYTES_LIMIT)
    torrent_raw = _read(folder, TORRENT_NAME, TORRENT_BYTES_LIMIT)
    if signed is not None:
        _check_file_set(folder, signed)
        for name, raw in ((MANIFEST_NAME, manifest_raw), (TORRENT_NAME, torrent_raw)):
            if signed.get(name) != hashlib.sha256(raw).hexdigest():
                raise _bad(f"{name} is not the file that was signed")
    manifest = decode_manifest(manifest_raw)
    _check_identity(manifest)
    if signed is None and not policy.takes_any and manifest.content_id not in policy.content_ids:
        raise ShardlineError("artifact_untrusted", f"{manifest.content_id} is not one of those that are pinned")
    trees = read_torrent(torrent_raw, manifest)
    _check_small_files(folder, manifest, signed)
    return Bundle(folder, manifest, manifest_digest(manifest_raw), trees, signed_by)


def expected_identity(container: str, files: tuple[FileEntry, ...], small_files: tuple[SmallFile, ...]) -> str:
    """The `content_id` of these files, as artifact/identity.py makes it from the files themselves.

    Of the small files those of a safetensors folder count that change what the model does.
    """
    large = [(entry.size, entry.pieces_root) for entry in files]
    counted = small_files if container == "safetensors" else ()
    return identity_of(large, [(entry.path, entry.sha256) for entry in counted if entry.path in SMALL_FILES])


def _signed_digests(folder: Path, policy: TrustPolicy) -> tuple[Mapping[str, str] | None, str | None]:
    """What the signature says, and whose it is; None where the policy goes without one."""
    if policy.keys:
        try:
            signed = verify(_read(folder, SIGNATURE_NAME, SIGNATURE_BYTES_LIMIT), policy.keys)
            return signed.digests, signed.key_id
        except ShardlineError:
            if not policy.content_ids:
                raise
    if not policy.content_ids and not policy.takes_any:
        raise ShardlineError("artifact_untrusted", "no key and no content_id is trusted, so no artifact is")
    return None, None


def _check_identity(manifest: Manifest) -> None:
    made = expected_identity(manifest.format.container, manifest.files, manifest.small_files)
    if made != manifest.content_id:
        raise _bad(f"the manifest says {manifest.content_id}, but its files make {made}")


def _check_file_set(folder: Path, signed: Mapping[str, str]) -> None:
    present = set(_walk(folder)) - {SIGNATURE_NAME}
    if more := present - signed.keys():
        raise _bad(f"{min(more)!r:.200} is in the folder, but was not signed")
    if missing := signed.keys() - present:
        raise _bad(f"{min(missing)!r:.200} was signed, but is missing")


def _walk(folder: Path) -> Iterator[str]:
    """Paths of all files below `folder`, bounded; a link or a device among them is refused."""
    waiting, count = [""], 0
    while waiting:
        prefix = waiting.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                count += 1
                if count > 4 * SMALL_FILES_LIMIT:
                    raise _bad("the folder has more files than a bundle can have")
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{prefix}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    yield prefix + entry.name
                else:
                    raise _bad(f"{prefix + entry.name!r:.200} is neither a file nor a folder")


def _check_small_files(folder: Path, manifest: Manifest, signed: Mapping[str, str] | None) -> None:
    for entry in manifest.small_files:
        name = f"{SMALL_FOLDER}/{entry.path}"
        size, digest = _digest(folder, name)
        if (size, digest) != (entry.size, entry.sha256):
            raise _bad(f"{name} is not the file that the manifest describes")
        if signed is not None and signed.get(name) != digest:
            raise _bad(f"{name} is not the file that was signed")
    described = {MANIFEST_NAME, TORRENT_NAME, *(f"{SMALL_FOLDER}/{entry.path}" for entry in manifest.small_files)}
    if signed is not None and (more := signed.keys() - described):
        raise _bad(f"{min(more)!r:.200} was signed, but is not in the manifest")


def _open(folder: Path, name: str, limit: int) -> tuple[int, int]:
    """Descriptor and size of a plain file of the bundle."""
    try:
        handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _bad(f"{name} is missing in {folder.name!r:.200}") from None
    except OSError as error:
        raise _bad(f"{name} cannot be read: {error.strerror}") from None
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_size <= limit:
        return handle, found.st_size
    os.close(handle)
    raise _bad(f"{name} is not a plain file of at most {limit} bytes")


def _read(folder: Path, name: str, limit: int) -> bytes:
    handle, _ = _open(folder, name, limit)
    with os.fdopen(handle, "rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise _bad(f"{name} grows while it is read")
    return raw


def _digest(folder: Path, name: str) -> tuple[int, str]:
    handle, size = _open(folder, name, SMALL_FILE_LIMIT)
    digest, done = hashlib.sha256(), 0
    with os.fdopen(handle, "rb", buffering=0) as file:
        while done <= size and (chunk := file.read(_READ)):
            digest.update(chunk)
            done += len(chunk)
    return done, digest.hexdigest()


def _bad(message: str) -> ShardlineError:
    return ShardlineError("artifact_invalid", f"invalid artifact: {message}")
