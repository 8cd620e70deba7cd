"""Whether files are those of a Model Artifact: their bytes against the digests, their headers against the table.

Owns the comparison. `check_header` needs the first bytes of one file only, and is what stands between bytes from a
stranger and any reader of tensors; `verify_model` reads whole files and says of each what is wrong. Blocking. Shown by
tests/artifact/test_verification.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

import msgspec

from shardline.artifact.bundle import SMALL_FOLDER, Bundle
from shardline.artifact.contents import (
    CONFIG_BYTES_LIMIT,
    folder_facts,
    gguf_facts,
    gguf_rows,
    safetensors_rows,
)
from shardline.artifact.hashing import hash_once
from shardline.errors import ShardlineError
from shardline.formats import gguf, safetensors
from shardline.formats.layers import place_of
from shardline.formats.merkle import FileTree
from shardline.wire.manifest import FileEntry, Manifest, Model, TensorRow

HEADER_BYTES_LIMIT = 128 << 20

Progress = Callable[[int, int], None]
State = Literal["ok", "missing", "wrong size", "damaged", "unreadable"]


@dataclass(frozen=True, slots=True)
class FileReport:
    """What became of one file."""

    path: str
    state: State
    size: int
    """Bytes that it should have."""
    bad_pieces: tuple[int, ...] = ()
    """Of a damaged file of the right size."""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a model."""

    files: tuple[FileReport, ...]
    fault: str | None
    """How headers differ from the manifest; None where they agree, or where files are not whole."""
    warnings: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.fault is None and all(report.state == "ok" for report in self.files)


def verify_model(bundle: Bundle, folder: Path, *, progress: Progress | None = None) -> Report:
    """Read all files of the manifest below `folder`, and judge them. Raises nothing for what it finds in them."""
    manifest = bundle.manifest
    reports: list[FileReport] = []
    done = 0
    for entry, tree in zip(manifest.files, bundle.trees, strict=True):
        reports.append(_file_report(entry, tree, folder / entry.path, _step(progress, done, manifest.total_bytes)))
        done += entry.size
    fault = None
    if all(report.state == "ok" for report in reports):
        try:
            check_files(bundle, folder)
        except ShardlineError as error:
            fault = error.message
    return Report(tuple(reports), fault, tuple(_warnings(manifest)))


def held_pieces(bundle: Bundle, folder: Path, *, progress: Progress | None = None) -> dict[int, frozenset[int]]:
    """The numbers of the pieces that are whole in the files below `folder`, by file number; all are read and hashed.

    Files that are absent, cut short or full of holes have fewer. Raises `model_file_invalid` where reading fails.
    """
    manifest, held, done = bundle.manifest, {}, 0
    for number, (entry, tree) in enumerate(zip(manifest.files, bundle.trees, strict=True)):
        held[number] = frozenset(_whole_pieces(folder / entry.path, tree, _step(progress, done, manifest.total_bytes)))
        done += entry.size
    return held


def check_files(bundle: Bundle, folder: Path) -> None:
    """Compare the headers of all files below `folder` with the manifest; holes behind the headers do not matter.

    Errors: `artifact_mismatch`, `model_file_invalid`.
    """
    manifest = bundle.manifest
    for number, entry in enumerate(manifest.files):
        check_header(manifest, number, _header_bytes(folder / entry.path, entry))
    if manifest.format.container == "safetensors":
        check_folder_facts(bundle)


def check_header(manifest: Manifest, number: int, raw: bytes) -> None:
    """Compare the header of file `number`, whose first `data_offset` bytes are `raw`, with the signed table.

    Both readers must then be fooled in the same way by the same bytes. Of a GGUF model the first file's metadata are
    compared too; of a safetensors folder that is `check_folder_facts`.
    Errors: `model_file_invalid` where our reader refuses it, `artifact_mismatch` where the two differ.
    """
    entry = manifest.files[number]
    data_offset, rows, facts = _parsed(manifest, number, raw)
    if data_offset != entry.data_offset:
        raise _differs(f"the header of {entry.path} ends at byte {data_offset}, not at {entry.data_offset}")
    _check_rows(entry.path, rows, [row for row in manifest.tensors if row.file == number])
    if facts is not None:
        _check_facts(manifest.model, facts)


def check_folder_facts(bundle: Bundle) -> None:
    """Compare what the small files of a safetensors bundle say with its manifest; errors as of `check_header`."""
    small = bundle.folder / SMALL_FOLDER
    config = safetensors.read_object(small / "config.json", CONFIG_BYTES_LIMIT)
    _check_facts(bundle.manifest.model, folder_facts(small, config, bundle.manifest.tensors))


def _parsed(manifest: Manifest, number: int, raw: bytes) -> tuple[int, tuple[TensorRow, ...], Model | None]:
    """End of the header, its rows, and of the first GGUF file what it says of the model."""
    size = manifest.files[number].size
    if manifest.format.container == "safetensors":
        found = safetensors.parse_header(raw, size)
        return found.data_offset, safetensors_rows(found.tensors.values()), None
    header = gguf.parse_header(raw, size)
    facts = None
    if number == 0:
        stated = manifest.format
        if (header.version, header.alignment) != (stated.gguf_version, stated.alignment):
            raise _differs(
                f"the file has GGUF version {header.version} and alignment {header.alignment}, "
                f"the manifest says {stated.gguf_version} and {stated.alignment}"
            )
        facts = gguf_facts(header, manifest.tensors)
    return header.data_offset, gguf_rows(header.tensors.values()), facts


def _check_rows(path: str, found: tuple[TensorRow, ...], stated: list[TensorRow]) -> None:
    there = {row.name: _place(row) for row in found}
    here = {row.name: _place(row) for row in stated}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise _differs(
                f"tensor {name!r:.100} of {path}: the header has {there.get(name, 'nothing')!s:.100}, "
                f"the manifest {here.get(name, 'nothing')!s:.100} (offset, bytes, type, shape)"
            )


def _place(row: TensorRow) -> tuple[int, int, str, tuple[int, ...]]:
    return row.offset, row.nbytes, row.type, row.shape


def _check_facts(stated: Model, found: Model) -> None:
    for field in msgspec.structs.fields(Model):
        ours, theirs = getattr(stated, field.name), getattr(found, field.name)
        if ours != theirs:
            raise _differs(f"model.{field.name} is {ours!s:.120} in the manifest, but {theirs!s:.120} in the files")


def _file_report(entry: FileEntry, tree: FileTree, path: Path, step: Callable[[int], None]) -> FileReport:
    try:
        size = path.stat().st_size
        if not path.is_file():
            return FileReport(entry.path, "unreadable", entry.size, reason="it is not a file")
    except FileNotFoundError:
        return FileReport(entry.path, "missing", entry.size)
    except OSError as error:
        return FileReport(entry.path, "unreadable", entry.size, reason=error.strerror)
    if size != entry.size:
        return FileReport(entry.path, "wrong size", entry.size, reason=f"it has {size} bytes, expected {entry.size}")
    try:
        found = hash_once(path, tree.piece_length, step)
    except ShardlineError as error:
        return FileReport(entry.path, "unreadable", entry.size, reason=error.message)
    if (found.sha256, found.tree.root) == (entry.sha256, entry.root):
        return FileReport(entry.path, "ok", entry.size)
    bad = tuple(i for i, (a, b) in enumerate(zip(found.tree.layer, tree.layer, strict=True)) if a != b)
    if bad:
        return FileReport(entry.path, "damaged", entry.size, bad, f"{len(bad)} of {len(tree.layer)} pieces are wrong")
    reason = "its SHA-256 in the manifest is wrong, though all pieces are right: blame the publisher"
    return FileReport(entry.path, "damaged", entry.size, (), reason)


def _whole_pieces(path: Path, tree: FileTree, step: Callable[[int], None]) -> Iterator[int]:
    try:
        with path.open("rb", buffering=0) as file:
            for index in range(len(tree.layer)):
                start, end = tree.piece_range(index)
                file.seek(start)
                if tree.verify_piece(index, _read_fully(file, end - start)):
                    yield index
                step(end)
    except FileNotFoundError:
        return
    except OSError as error:
        message = f"{path.name!r:.200} cannot be read: {error.strerror}"
        raise ShardlineError("model_file_invalid", message, reason="damaged") from None


def _read_fully(file: FileIO, size: int) -> bytes:
    """`size` bytes, or all that are left: one `read` may give fewer."""
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _header_bytes(path: Path, entry: FileEntry) -> bytes:
    if entry.data_offset > HEADER_BYTES_LIMIT:
        raise _differs(f"the header of {entry.path} has {entry.data_offset} bytes, the limit is {HEADER_BYTES_LIMIT}")
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != entry.size:
                raise _differs(f"{entry.path} has another size than the manifest says")
            return file.read(entry.data_offset)
    except OSError as error:
        raise _differs(f"{entry.path} cannot be read: {error.strerror}") from None


def _step(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total) if progress is not None else None


def _warnings(manifest: Manifest) -> Iterator[str]:
    """The column `layer` is for other programs: this one goes by the names, whose rules may have grown since."""
    other = [row.name for row in manifest.tensors if row.layer != place_of(row.name)]
    if other:
        yield f"{len(other)} tensors stand under another layer than their names say, such as {other[0]!r:.100}"


def _differs(message: str) -> ShardlineError:
    return ShardlineError("artifact_mismatch", message)
