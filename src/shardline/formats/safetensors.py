"""Bounded reader of safetensors headers, of one file and of a model folder with its index.

Owns the header: names, dtypes, shapes and the places of the tensors, which must cover the data with no hole, no overlap
and no byte more. It reads no tensor data. Refusals are `model_file_invalid` with a `reason`: not_a_model, damaged,
newer, unsupported, incomplete. `read_folder` opens the files that the folder's own index names, and nothing beyond the
folder. Limits: docs/decisions/0003-own-readers.md. Shown by tests/formats/test_safetensors.py.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shardline.errors import ShardlineError
from shardline.formats.foreign import SNIFF_BYTES, describe_foreign

HEADER_BYTES_LIMIT = 32 << 20
TENSORS_LIMIT = 200_000
NAME_BYTES_LIMIT = 512
DIMS_LIMIT = 8
ELEMENTS_LIMIT = 1 << 48
INDEX_BYTES_LIMIT = 64 << 20
CONFIG_BYTES_LIMIT = 4 << 20
FILES_LIMIT = 10_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element; the data of a tensor are whole bytes."""

Reason = Literal["not_a_model", "damaged", "newer", "unsupported", "incomplete"]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_JSON_KEY = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"[ \t\r\n]*(:?)', re.DOTALL)


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_row = msgspec.json.Decoder(_Row)
_metadata = msgspec.json.Decoder(dict[str, str])
_index = msgspec.json.Decoder(_Index)
_object = msgspec.json.Decoder(dict[str, Any])


def _bad(reason: Reason, message: str, **details: Any) -> ShardlineError:
    lead = {
        "not_a_model": "not a safetensors model",
        "damaged": "damaged safetensors model",
        "newer": "safetensors file for a newer program",
        "unsupported": "safetensors model not supported",
        "incomplete": "safetensors header not complete",
    }[reason]
    return ShardlineError("model_file_invalid", f"{lead}: {message}", reason=reason, **details)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor, checked: the bytes [offset, offset + nbytes) lie inside the file."""

    name: str
    dtype: str
    """As in the file: F32, BF16 …"""
    shape: tuple[int, ...]
    """Outermost dimension first; the data are in C order."""
    offset: int
    """From the start of the file."""
    nbytes: int
    file: int = 0
    """Index in `SafetensorsFolder.files`."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header."""

    file_size: int
    data_offset: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    """In the order of the data."""


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """A model folder: all tensors of all its files."""

    folder: Path
    files: tuple[str, ...]
    """File names inside the folder, sorted, which is their split order."""
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    """`config.json`."""
    warnings: list[str]


def read_header(path: Path | str) -> SafetensorsHeader:
    """Read and check the header of one safetensors file."""
    path = Path(path)
    try:
        if not path.is_file():
            raise _bad("not_a_model", f"{path.name!r:.200} is not a file")
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            head = file.read(SNIFF_BYTES)
            length = _header_end(head, file_size)
            return parse_header(head + file.read(max(0, length - len(head))), file_size)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _bad("not_a_model", f"{path.name!r:.200} cannot be read: {reason}") from None


def parse_header(data: bytes | bytearray | memoryview, file_size: int) -> SafetensorsHeader:
    """Check the header at the start of `data`, the first bytes of a file of `file_size` bytes.

    Where the header goes on behind `data`, the error has reason `incomplete` and `needed_bytes`.
    """
    view = memoryview(data)[:file_size]
    data_offset = _header_end(view[:SNIFF_BYTES], file_size)
    if len(view) < data_offset:
        raise _bad("incomplete", f"it ends at byte {data_offset}, {len(view)} are here", needed_bytes=data_offset)
    rows, metadata = _decode(bytes(view[8:data_offset]))
    infos = [_check_row(name, row, data_offset) for name, row in rows.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _check_cover(infos, data_offset, file_size)
    return SafetensorsHeader(file_size, data_offset, metadata, {info.name: info for info in infos})


def read_folder(folder: Path | str) -> SafetensorsFolder:
    """Read `config.json` and the headers of all safetensors files of a model folder."""
    folder = Path(folder)
    weight_map, files = _list_files(folder)
    config = read_object(folder / "config.json", CONFIG_BYTES_LIMIT)
    tensors: dict[str, TensorInfo] = {}
    for number, name in enumerate(files):
        for info in read_header(folder / name).tensors.values():
            if info.name in tensors:
                raise _bad("damaged", f"tensor {info.name} stands in {files[tensors[info.name].file]} and in {name}")
            if len(tensors) >= TENSORS_LIMIT:
                raise _bad("unsupported", f"more than {TENSORS_LIMIT} tensors")
            tensors[info.name] = replace(info, file=number)
    warnings = [] if weight_map is None else _check_index(weight_map, files, tensors)
    return SafetensorsFolder(folder, files, tensors, config, warnings)


def weight_files(folder: Path | str) -> tuple[str, ...]:
    """The names of the files that hold a folder's tensors, in split order; a missing one is named."""
    return _list_files(Path(folder))[1]


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """A JSON object from a file of at most `limit` bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _bad("not_a_model", f"{path.name!r:.200} cannot be read: {reason}") from None
    if len(raw) > limit:
        raise _bad("unsupported", f"{path.name} has more than {limit} bytes")
    try:
        return _object.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad("damaged", f"{path.name} is not a JSON object: {error!s:.200}") from None


def _header_end(head: bytes | memoryview, file_size: int) -> int:
    """Where the header ends, from the first bytes; refuses what cannot be a safetensors file."""
    if file_size >= 9 and len(head) < 9:
        raise _bad("incomplete", "the first bytes are missing", needed_bytes=9)
    length = int.from_bytes(head[:8], "little")
    if file_size < 10 or head[8:9] != b"{":
        raise _bad("not_a_model", f"the file looks like {describe_foreign(bytes(head), file_size)}")
    if length > file_size - 8:
        raise _bad("damaged", f"the header has {length} bytes, but {file_size - 8} are left: the file is cut short")
    if length > HEADER_BYTES_LIMIT:
        raise _bad("unsupported", f"the header has {length} bytes, the limit is {HEADER_BYTES_LIMIT}")
    return 8 + length


def _decode(raw: bytes) -> tuple[dict[str, _Row], dict[str, str]]:
    try:
        members = _members.decode(raw)
        annotated = "__metadata__" in members
        metadata = _metadata.decode(members.pop("__metadata__")) if annotated else {}
        if len(members) > TENSORS_LIMIT:
            raise _bad("unsupported", f"{len(members)} tensors, the limit is {TENSORS_LIMIT}")
        rows = {name: _row.decode(value) for name, value in members.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad("damaged", f"header: {error!s:.200}") from None
    # Of two equal keys the decoder keeps the last in silence, at every level: count all keys that there are.
    keys = sum(1 for found in _JSON_KEY.finditer(raw) if found[1])
    if keys != 4 * len(rows) + len(metadata) + annotated:
        raise _bad("damaged", "a name stands twice in the header")
    return rows, metadata


def _check_row(name: str, row: _Row, data_offset: int) -> TensorInfo:
    if not 1 <= len(name.encode("utf-8", "replace")) <= NAME_BYTES_LIMIT or not name.isprintable():
        raise _bad("damaged", f"the tensor name {name[:60]!r} is not 1 to {NAME_BYTES_LIMIT} printable bytes")
    bits = DTYPE_BITS.get(row.dtype)
    if bits is None:
        raise _bad("newer", f"tensor {name} has the unknown dtype {row.dtype!r:.40}")
    elements = math.prod(row.shape) if len(row.shape) <= DIMS_LIMIT else ELEMENTS_LIMIT + 1
    if elements > ELEMENTS_LIMIT:
        raise _bad("damaged", f"tensor {name} has the shape {row.shape!s:.80}: too many dimensions or elements")
    start, end = row.data_offsets
    if elements * bits != 8 * (end - start):
        place = f"[{start}, {end}]"
        raise _bad("damaged", f"tensor {name} lies at {place:.80}, but {row.dtype} {row.shape} has another size")
    return TensorInfo(name, row.dtype, tuple(row.shape), data_offset + start, end - start)


def _check_cover(infos: Sequence[TensorInfo], data_offset: int, file_size: int) -> None:
    end = data_offset
    for info in infos:
        if info.offset != end:
            kind = "a hole" if info.offset > end else "an overlap"
            raise _bad("damaged", f"{kind} in front of tensor {info.name}: it begins at {info.offset}, expected {end}")
        end += info.nbytes
    if end != file_size:
        hint = "the file is cut short" if end > file_size else "the file has bytes that belong to no tensor"
        raise _bad("damaged", f"the tensors end at byte {end}, the file has {file_size}: {hint}")


def _list_files(folder: Path) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    if not folder.is_dir():
        raise _bad("not_a_model", f"{folder.name!r:.200} is not a folder")
    weight_map = _read_index(folder)
    files = (SINGLE_NAME,) if weight_map is None else tuple(sorted(set(weight_map.values())))
    if len(files) > FILES_LIMIT:
        raise _bad("unsupported", f"{len(files)} files, the limit is {FILES_LIMIT}")
    if weight_map is None and not any(folder.glob("*.safetensors")):
        raise _no_model(folder)
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise _bad("damaged", _absent_message(folder, absent, indexed=weight_map is not None))
    return weight_map, files


def _no_model(folder: Path) -> ShardlineError:
    name = folder.resolve().name
    found = sorted(entry.name for entry in folder.glob("*.gguf"))
    if found:
        advice = f"Name the GGUF file in it: {folder / found[0]}"
    else:
        advice = "Name a GGUF file, or a folder with config.json and safetensors files."
    message = f"there is no model in the folder {name!r:.200}: no safetensors files"
    return ShardlineError("model_file_invalid", message, advice=advice, reason="not_a_model")


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(INDEX_BYTES_LIMIT + 1)
        if len(raw) > INDEX_BYTES_LIMIT:
            raise _bad("unsupported", f"{INDEX_NAME} has more than {INDEX_BYTES_LIMIT} bytes")
        weight_map = _index.decode(raw).weight_map
    except OSError as error:
        raise _bad("not_a_model", f"{INDEX_NAME} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad("damaged", f"{INDEX_NAME}: {error!s:.200}") from None
    for name in set(weight_map.values()):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,240}\.safetensors", name):
            raise _bad("damaged", f"{INDEX_NAME} names the file {name[:60]!r}, which is no plain safetensors file name")
    if not weight_map:
        raise _bad("damaged", f"{INDEX_NAME} names no tensor")
    return weight_map


def _check_index(weight_map: Mapping[str, str], files: Sequence[str], tensors: Mapping[str, TensorInfo]) -> list[str]:
    for name, file in weight_map.items():
        info = tensors.get(name)
        if info is None or files[info.file] != file:
            raise _bad("damaged", f"tensor {name[:100]!r} is not in {file}, where {INDEX_NAME} has it")
    more = len(tensors) - len(weight_map)
    return [f"{more} tensors are in the files but not in {INDEX_NAME}"] if more else []


def _absent_message(folder: Path, absent: Sequence[str], *, indexed: bool) -> str:
    if indexed:
        return f"{len(absent)} of the files that {INDEX_NAME} names are missing: {', '.join(absent[:5])}"
    found = sorted(entry.name for entry in folder.glob("*.safetensors"))
    if found:
        return f"{INDEX_NAME} is missing (and there is no {SINGLE_NAME}); found: {', '.join(found[:5])}"
    return f"{SINGLE_NAME} is missing"
