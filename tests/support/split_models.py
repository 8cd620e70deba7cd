"""A GGUF model written anew in several parts, as public tools split one: the same keys, the same tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.gguf_writer import Typed, encode_value, string

_ALIGNMENT = 32


def split_model(model: Path, folder: Path, stem: str, parts: int) -> list[Path]:
    """The parts of `model`, in order: STEM-00001-of-0000N.gguf."""
    import gguf  # of the tests alone: another reader than the one that they are about

    reader = gguf.GGUFReader(model)
    raw = model.read_bytes()
    first_info = min(int(tensor.field.offset) for tensor in reader.tensors)
    (n_keys,) = struct.unpack_from("<Q", raw, 16)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(parts):
        counted = {
            "split.no": Typed("u16", number),
            "split.count": Typed("u16", parts),
            "split.tensors.count": Typed("i32", len(reader.tensors)),
        }
        keys = b"".join(string(name) + encode_value(value) for name, value in counted.items())
        if number == 0:
            keys = raw[24:first_info] + keys
        count = len(counted) + (n_keys if number == 0 else 0)
        path = folder / f"{stem}-{number + 1:05d}-of-{parts:05d}.gguf"
        share = -(-len(reader.tensors) // parts)
        path.write_bytes(_part(raw, keys, count, reader.tensors[number * share : (number + 1) * share]))
        paths.append(path)
    return paths


def _part(raw: bytes, keys: bytes, n_keys: int, tensors: Iterable[Any]) -> bytes:
    infos, data = b"", b""
    taken = list(tensors)
    for tensor in taken:
        shape = [int(dim) for dim in tensor.shape]
        infos += string(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += struct.pack("<IQ", int(tensor.tensor_type), len(data))
        content = raw[tensor.data_offset : tensor.data_offset + int(tensor.n_bytes)]
        data += content + bytes(-len(content) % _ALIGNMENT)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(taken), n_keys) + keys + infos
    return head + bytes(-len(head) % _ALIGNMENT) + data
