"""The parameters of one Shard while they are filled from a file: each exactly once, or the load fails by name.

Owns allocation, shape and dtype checks, tied matrices, and the account of what is missing or unexpected. A source of
tensors (torch_safetensors.py, torch_gguf.py) says what its file holds and fills memory that is handed to it, so that
nothing outside of the Shard is read and no tensor is held twice. Shown by tests/model/test_torch_weights.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardline.errors import ShardlineError
from shardline.model.torch_build import Skeleton

CHUNK_BYTES = 256 << 10
"""Converted at a time: what is in work stays in the processor's cache."""
_READ_LIMIT = 1 << 30

Progress = Callable[[int, int], None]
"""Called with bytes of parameters that are filled, and of all there will be."""


def file_invalid(message: str, **details: Any) -> ShardlineError:
    return ShardlineError("model_file_invalid", message, **details)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a model file. `shape` is row-major; `dtype` holds its values without loss."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    """In the file."""
    fill: Callable[[torch.Tensor], None]
    """Read it into a contiguous tensor of `shape` and of any floating dtype."""

    def load(self, dtype: torch.dtype) -> torch.Tensor:
        result = torch.empty(self.shape, dtype=dtype)
        self.fill(result)
        return result


class OpenFiles:
    """Files of a model, opened at first use and closed together. Reads at offsets, never past the end."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._files: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill `into` (bytes) from `offset` of the file."""
        fd = self._files.get(path)
        try:
            if fd is None:
                fd = self._files[path] = self._stack.enter_context(path.open("rb", buffering=0)).fileno()
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done : done + _READ_LIMIT]], offset + done)
                if count == 0:
                    raise file_invalid(f"{path.name} ends at byte {offset + done}, inside a tensor")
                done += count
        except OSError as error:
            raise file_invalid(f"{path.name} cannot be read: {error.strerror or type(error).__name__}") from None


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, writable."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def fill_plain(files: OpenFiles, path: Path, offset: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Read values that are stored as `dtype` into `out`: in place if it has that dtype, else converted in chunks."""
    if out.dtype == dtype:
        files.read(path, offset, raw_bytes(out))
        return
    flat = out.view(-1)
    chunk = torch.empty(max(1, CHUNK_BYTES // dtype.itemsize), dtype=dtype)
    for start in range(0, flat.numel(), chunk.numel()):
        part = chunk[: min(chunk.numel(), flat.numel() - start)]
        files.read(path, offset + start * dtype.itemsize, raw_bytes(part))
        flat[start : start + part.numel()].copy_(part)


class ShardWeights:
    """What a Shard [first, last) needs of the parameters of its skeleton, and what it has of them."""

    def __init__(self, skeleton: Skeleton, first: int, last: int, progress: Progress | None = None) -> None:
        self._skeleton = skeleton
        self._range = range(first, last)
        self._meta: dict[str, torch.Tensor] = skeleton.model.state_dict()
        self._wanted = skeleton.wanted(first, last)
        self._filled: dict[str, torch.Tensor] = {}
        self._given: dict[str, list[str]] = {}
        self._shared: dict[str, str] = {}
        self._progress = progress
        self._done = self._total = 0

    @property
    def skeleton(self) -> Skeleton:
        return self._skeleton

    @property
    def meta(self) -> dict[str, torch.Tensor]:
        """Every parameter of the whole model, without data, by full name."""
        return self._meta

    @property
    def nbytes(self) -> int:
        """Bytes of what is filled; a matrix that is used twice counts once."""
        return sum(t.nbytes for t in {id(t): t for t in self._filled.values()}.values())

    def plan(self, available: Iterable[str], called: Mapping[str, Sequence[str]] | None = None) -> None:
        """Tell which parameters of the model the file holds; to be called once, before anything is read.

        Raises `model_file_invalid` with the names of those that the Shard needs and the file does not have; `called`
        has the names that the file would have for them, where they are others.
        """
        available = set(available)
        self._given = {name: [name] for name in available if name in self._wanted}
        for target, source in self._skeleton.tied.items():
            for name, other in ((target, source), (source, target)):
                if name not in self._wanted or name in available:
                    continue
                if other in self._wanted:
                    self._shared[name] = other
                elif other in available:
                    self._given.setdefault(other, []).append(name)
        found = {name for names in self._given.values() for name in names}
        self._total = sum(self._meta[name].numel() * self._wanted[name].itemsize for name in found)
        missing = [n for n in self._wanted if n not in found and self._shared.get(n) not in found]
        if missing:
            names = [stored for name in missing for stored in (called or {}).get(name, [name])]
            raise file_invalid(f"{_some(names)} missing in the model file", tensors=names[:20])

    def wants(self, name: str) -> bool:
        """Whether the file's values for the model's parameter `name` are to be read."""
        return name in self._given

    def check_known(self, name: str, stored_name: str) -> None:
        """Raise `model_file_invalid` for a tensor of the file that this model has no parameter for, unless it
        belongs to another layer or transformers knows it as one to pass over."""
        if name in self._meta:
            return
        layer = self._skeleton.layer_of(name)
        if layer is not None and layer not in self._range:
            return
        passed = {r"rotary_emb\.inv_freq", *(self._skeleton.model._keys_to_ignore_on_load_unexpected or ())}
        if not any(re.search(pattern, name) for pattern in passed):
            raise file_invalid(f"tensor {stored_name} is not part of this model", tensors=[stored_name])

    def dtype(self, name: str) -> torch.dtype:
        """The engine's dtype for the values of `name`."""
        return self._wanted[self._given[name][0]]

    def empty(self, name: str) -> torch.Tensor:
        """Memory for the values of `name`, to be given to `put`."""
        return torch.empty(self._meta[name].shape, dtype=self.dtype(name))

    def read(self, name: str, stored: StoredTensor) -> None:
        """Read a stored tensor as it is into the parameter `name`."""
        self._check_shape(name, stored.shape)
        self.put(name, stored.load(self.dtype(name)))

    def put(self, name: str, values: torch.Tensor) -> None:
        """Make `values` the parameter `name`; they are converted where the engine keeps it in another dtype."""
        if not self.wants(name):
            raise file_invalid(f"tensor for {name} is not part of this Shard", tensors=[name])
        self._check_shape(name, values.shape)
        for target in self._given[name]:
            if target in self._filled:
                raise file_invalid(f"two tensors for {target}", tensors=[target])
            self._set(target, values.to(self._wanted[target]).contiguous())
            self._done += self._filled[target].nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Share tied parameters and check that nothing of the Shard is left without values."""
        for name, other in self._shared.items():
            self._set(name, self._filled[other])
        for target, source in self._skeleton.tied.items():
            one, two = self._filled.get(target), self._filled.get(source)
            if one is not None and two is not None and one is not two and torch.equal(one, two):
                self._set(target, two)
        missing = [name for name in self._wanted if name not in self._filled]
        if missing:
            raise file_invalid(f"{_some(missing)} missing in the model file", tensors=missing[:20])

    def _check_shape(self, name: str, shape: Iterable[int]) -> None:
        expected = tuple(self._meta[name].shape)
        if tuple(shape) != expected:
            raise file_invalid(f"tensor for {name} has the shape {tuple(shape)}, expected {expected}", tensors=[name])

    def _set(self, name: str, values: torch.Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        module = self._skeleton.model.get_submodule(path)
        if attribute in module._buffers:
            module._buffers[attribute] = values
        else:
            module._parameters[attribute] = nn.Parameter(values, requires_grad=False)
        self._filled[name] = values


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more are" if len(names) > 3 else " is" if len(names) == 1 else " are"
    return f"{', '.join(names[:3])}{more}"
