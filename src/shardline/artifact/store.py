"""The store: Model Artifacts on this disk, whole or in parts, shared by all processes of the machine.

    CONTENT_ID/bundle/  the description   CONTENT_ID/data/ROOT  sparse   CONTENT_ID/held/ROOT  which pieces are held
    locks/CONTENT_ID.use  .claims

Owns which artifacts there are, who uses them, and the space that they take. Files of the model are called by their
roots, not by names that a publisher chose. Pieces are stored_file.py's. Blocking. Shown by
tests/artifact/test_store.py and test_store_processes.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardline.artifact.bundle import MANIFEST_NAME, Bundle, TrustPolicy, bundle_paths, read_bundle_file
from shardline.artifact.bundle import load_bundle as read_bundle
from shardline.artifact.locks import Claims, Lease, exclusive, sole_use
from shardline.artifact.ranges import pieces_of, servable, shard_ranges
from shardline.artifact.stored_file import StoredFile, unwritable, write_synced
from shardline.errors import ShardlineError
from shardline.wire.bitmap import Pieces

_CONTENT_ID = re.compile(r"mac1-[0-9a-f]{64}")
BUNDLE = "bundle"
_OLD = "bundle.old"
"""The description that was there, while another one takes its place."""
_GONE = ".gone-"

Wanted = Mapping[int, Sequence[int]]
"""Piece numbers by file number, as `ranges.pieces_of` gives them."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What the store has of one artifact."""

    content_id: str
    name: str
    held_bytes: int
    total_bytes: int
    servable: tuple[tuple[int, int], ...]
    """Layer ranges of which all pieces are held."""


class Store:
    """The store at `folder`, which is made at need. `reserve_bytes` of its disk stay free."""

    def __init__(self, folder: Path, *, reserve_bytes: int) -> None:
        self.folder = folder
        self.reserve_bytes = reserve_bytes
        self._claims: dict[str, Claims] = {}
        self._guard = threading.Lock()

    def add(self, bundle: Bundle) -> StoredArtifact:
        """Put the description there, where it is not yet, and open the artifact.

        A description that is there already, of the same content, is replaced by this one: what is held stays held.
        Errors: `disk_full`, `state_unwritable`, `artifact_in_use` while it is being removed.
        """
        content_id = bundle.manifest.content_id
        folder = self._folder_of(content_id)
        with self._naming_errors():
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            lease = Lease(self._lock(content_id, "use"))
            try:
                with exclusive(self._lock(content_id, "add")):
                    for name in ("data", "held"):
                        (folder / name).mkdir(parents=True, exist_ok=True)
                    _copy_bundle(bundle, folder)
            except BaseException:
                lease.close()
                raise
        return StoredArtifact(self, folder, bundle, lease)

    def open(self, content_id: str, policy: TrustPolicy) -> StoredArtifact:
        """An artifact that is there. `not_found`; else the errors of `load_bundle`: it is checked again."""
        folder = self._folder_of(content_id)
        manifest = folder / BUNDLE / MANIFEST_NAME
        if not manifest.is_file() and (folder / _OLD).is_dir():
            # Another process replaces the description at this moment, or was killed while it did.
            with self._naming_errors(), exclusive(self._lock(content_id, "add")):
                if not (folder / BUNDLE).exists() and (folder / _OLD).is_dir():
                    os.rename(folder / _OLD, folder / BUNDLE)
        if not manifest.is_file():
            raise ShardlineError(
                "not_found", f"{content_id} is not in the store", advice="Ask: shardline artifact list"
            )
        with self._naming_errors():
            lease = Lease(self._lock(content_id, "use"))
        try:
            bundle = read_bundle(folder / BUNDLE, policy)
            if bundle.manifest.content_id != content_id:
                raise ShardlineError("artifact_invalid", f"the folder {content_id} describes another artifact")
            return StoredArtifact(self, folder, bundle, lease)
        except BaseException:
            lease.close()
            raise

    def content_ids(self) -> list[str]:
        """What is there, sorted."""
        try:
            return sorted(name for name in os.listdir(self.folder) if _CONTENT_ID.fullmatch(name))
        except FileNotFoundError:
            return []

    def remove(self, content_id: str) -> int:
        """Forget an artifact and free its space; the bytes freed. `artifact_in_use` where any process has it open.

        Files of other programs that it refers to stay.
        """
        folder = self._folder_of(content_id)
        if not folder.is_dir():
            raise ShardlineError(
                "not_found", f"{content_id} is not in the store", advice="Ask: shardline artifact list"
            )
        with self._naming_errors(), sole_use(self._lock(content_id, "use")):
            freed = sum(found.stat().st_blocks * 512 for found in (folder / "data").glob("*"))
            gone = self.folder / (_GONE + content_id)
            shutil.rmtree(gone, ignore_errors=True)
            # From here on nobody finds it, whatever becomes of the rest.
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
        return freed

    def collect(self, keep: Iterable[str]) -> list[str]:
        """Remove all that is neither in `keep` nor in use by any process; what was removed."""
        removed = []
        for content_id in set(self.content_ids()) - set(keep):
            with contextlib.suppress(ShardlineError):
                self.remove(content_id)
                removed.append(content_id)
        with contextlib.suppress(OSError):
            for left in self.folder.glob(_GONE + "*"):
                shutil.rmtree(left, ignore_errors=True)
        return sorted(removed)

    def free_bytes(self) -> int:
        """What may still be written, the reserve left out; never negative."""
        with self._naming_errors():
            found = os.statvfs(self.folder)
        return max(0, found.f_bavail * found.f_frsize - self.reserve_bytes)

    def check_space(self, fetched: int, beside: int = 0) -> None:
        """`disk_full`, with `needed_bytes` and `free_bytes`, unless so many more bytes fit. `beside`: what will be
        written to the same disk, and is not fetched."""
        free, needed = self.free_bytes(), fetched + beside
        if free < needed:
            made = f", {beside} more will be made of them" if beside else ""
            message = f"{fetched} bytes are to be fetched{made}, and {free} are free on the disk of the store"
            advice = "Make room there, serve fewer layers, or lower the setting store_reserve_bytes."
            raise ShardlineError("disk_full", message, advice=advice, needed_bytes=needed, free_bytes=free)

    def claims(self, content_id: str) -> Claims:
        """Which pieces this process fetches."""
        with self._guard:
            if content_id not in self._claims:
                self._claims[content_id] = Claims(self._lock(content_id, "claims"))
            return self._claims[content_id]

    def close(self) -> None:
        """Free all claims. Artifacts are closed by who opened them."""
        with self._guard:
            for claims in self._claims.values():
                claims.close()
            self._claims.clear()

    def _folder_of(self, content_id: str) -> Path:
        if not _CONTENT_ID.fullmatch(content_id):
            raise ShardlineError("invalid_value", f"{content_id!r:.100} is not a content_id", param="content_id")
        return self.folder / content_id

    def _lock(self, content_id: str, kind: str) -> Path:
        return self.folder / "locks" / f"{content_id}.{kind}"

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(error, self.folder) from None


class StoredArtifact:
    """One artifact of a store, in use until `close`. Threads may share it."""

    def __init__(self, store: Store, folder: Path, bundle: Bundle, lease: Lease) -> None:
        self.store = store
        self.folder = folder
        self.bundle = bundle
        self.files = tuple(StoredFile(folder, tree) for tree in bundle.trees)
        self.claims = store.claims(bundle.manifest.content_id)
        self._lease = lease

    @property
    def content_id(self) -> str:
        return self.bundle.manifest.content_id

    def close(self) -> None:
        """Others may remove it from now on. Idempotent."""
        self._lease.close()

    def __enter__(self) -> StoredArtifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def held(self) -> dict[int, Pieces]:
        """All that may be read and advertised, by file number."""
        return {number: file.held() for number, file in enumerate(self.files)}

    def wanted(self, first: int, last: int) -> dict[int, list[int]]:
        """The pieces of Shard [first, last)."""
        manifest = self.bundle.manifest
        return pieces_of(manifest, shard_ranges(manifest, first, last))

    def missing(self, wanted: Wanted) -> dict[int, Pieces]:
        """Those of `wanted` that are not held, by file number; files without any are left out."""
        found = {}
        for number, pieces in wanted.items():
            file = self.files[number]
            if left := Pieces.of(file.count, pieces) - file.held():
                found[number] = left
        return found

    def bytes_of(self, pieces: Mapping[int, Pieces]) -> int:
        """How many bytes these pieces have."""
        return sum(self.files[number].tree.bytes_of(some) for number, some in pieces.items())

    def check_held(self, first: int, last: int) -> None:
        """`artifact_incomplete` unless all pieces of Shard [first, last) are held."""
        missing = self.missing(self.wanted(first, last))
        if missing:
            count = sum(map(len, missing.values()))
            message = f"layers {first}:{last} lack {count} pieces ({self.bytes_of(missing)} bytes)"
            raise ShardlineError("artifact_incomplete", message, missing_bytes=self.bytes_of(missing))

    def holding(self) -> Holding:
        """What there is of it, in figures."""
        manifest, held = self.bundle.manifest, self.held()
        ranges = tuple(servable(manifest, held))
        return Holding(self.content_id, manifest.name, self.bytes_of(held), manifest.total_bytes, ranges)


def _copy_bundle(bundle: Bundle, folder: Path) -> None:
    """The files of the description, put there together, in place of those that are there and differ."""
    source, target = bundle.folder, folder / BUNDLE
    if source.absolute() == target.absolute() or _is_same(bundle, target):
        return
    part = folder / (BUNDLE + ".part")
    shutil.rmtree(part, ignore_errors=True)
    for name in bundle_paths(bundle):
        path = part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, (source / name).read_bytes())
    old = folder / _OLD
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.rename(part, target)
    shutil.rmtree(old, ignore_errors=True)


def _is_same(bundle: Bundle, target: Path) -> bool:
    """Whether the very same description lies in the store, signature and small files included."""
    there, paths = replace(bundle, folder=target), bundle_paths(bundle)
    try:
        return bundle_paths(there) == paths and all(
            read_bundle_file(there, path, limit) == read_bundle_file(bundle, path, limit)
            for path, limit in paths.items()
        )
    except ShardlineError:
        # One that cannot be read is put there anew.
        return False
