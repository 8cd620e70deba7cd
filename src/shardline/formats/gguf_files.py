"""A GGUF model as files: one, or the parts `NAME-00001-of-0000N.gguf` of one.

Owns the naming of parts and the joined tensor table; each header is read by gguf.py, its text is checked by
vocabulary.py. It opens the parts that lie beside the file that was named, and nothing else.
Shown by tests/formats/test_gguf_files.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardline.errors import ShardlineError
from shardline.formats.gguf import TENSORS_LIMIT, GGUFHeader, TensorInfo, read_beginning, read_header
from shardline.formats.vocabulary import check_vocabulary, has_vocabulary

PARTS_LIMIT = 10_000
SHARD_LAYERS = "shardline.source.layers"
"""Key of the file of a Shard: first layer, the one behind its last, layers of the model."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """All parts of a model. `TensorInfo.file` is an index into `paths` and `headers`."""

    paths: tuple[Path, ...]
    headers: tuple[GGUFHeader, ...]
    tensors: Mapping[str, TensorInfo]

    @property
    def header(self) -> GGUFHeader:
        """The first part's: it has the model's metadata."""
        return self.headers[0]

    @property
    def warnings(self) -> list[str]:
        return [f"{p.name}: {w}" for p, header in zip(self.paths, self.headers, strict=True) for w in header.warnings]


def part_paths(path: Path | str) -> list[Path]:
    """All parts of the model that `path` (any part of it) belongs to, in split order; a missing one is named."""
    path = Path(path)
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= count <= PARTS_LIMIT:
        raise _bad(f"the file name {path.name!r:.200} counts its parts wrongly")
    names = [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise _bad(f"{len(missing)} of {count} parts are missing: {', '.join(missing[:5])}")
    return [path.with_name(name) for name in names]


def read_model(path: Path | str, *, beginnings: bool = False) -> GGUFModel:
    """Read the headers of all parts and join their tables; `model_file_invalid` where they do not fit together,
    or are the file of a Shard, or the vocabulary has a defect. `beginnings`: files may end behind their headers."""
    paths = part_paths(path)
    headers = tuple(read_beginning(p) if beginnings else read_header(p) for p in paths)
    _check_whole(paths[0], headers[0])
    tensors: dict[str, TensorInfo] = {}
    for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
        _check_part(part, header, number, len(paths))
        for info in header.tensors.values():
            if info.name in tensors:
                raise _bad(f"tensor {info.name} stands in {paths[tensors[info.name].file].name} and in {part.name}")
            tensors[info.name] = replace(info, file=number) if number else info
        if len(tensors) > TENSORS_LIMIT:
            raise _bad(f"more than {TENSORS_LIMIT} tensors in all parts")
    declared = headers[0].integer("split.tensors.count", len(tensors))
    if declared != len(tensors):
        raise _bad(f"the parts have {len(tensors)} tensors, but key split.tensors.count is {declared}")
    if has_vocabulary(headers[0]):
        check_vocabulary(headers[0])
    return GGUFModel(tuple(paths), headers, tensors)


def _check_whole(path: Path, header: GGUFHeader) -> None:
    """Refuse the file of a Shard (shard_gguf.py), which looks like a smaller model with a tiny vocabulary."""
    if SHARD_LAYERS in header.kv:
        first, last, n_layers = (*header.numbers(SHARD_LAYERS), 0, 0, 0)[:3]
        raise ShardlineError(
            "model_file_invalid",
            f"{path.name} is a part of a model, its layers {first}:{last} of {n_layers}, cut out by Shardline",
            advice="Name the whole model: Nodes cut their layers out for themselves. A part is for tools of llama.cpp.",
            reason="part",
        )


def _check_part(path: Path, header: GGUFHeader, number: int, count: int) -> None:
    declared, stands_at = header.integer("split.count", 1), header.integer("split.no", 0)
    if declared > 1 and count == 1:
        raise _bad(f"{path.name} is one of {declared} parts: give it its name back (NAME-00001-of-{declared:05d}.gguf)")
    if max(declared, 1) != count or stands_at != number:
        raise _bad(
            f"{path.name} says that it is part {stands_at + 1} of {declared}, its name says {number + 1} of {count}"
        )


def _bad(message: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", message, reason="damaged")
