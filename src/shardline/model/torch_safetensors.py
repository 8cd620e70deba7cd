"""The weights of a Shard from a safetensors folder, through transformers' own conversions of checkpoints.

Owns the way from the names of the files to the names of the model (renamings, experts that are stored one by one and
kept as one tensor) and the order of reading, for every file whose conversion transformers states so (`load_converted`).
Only bytes of tensors that the Shard uses are read. Headers are checked by formats/safetensors.py. Shown by
tests/model/test_torch_split.py and test_torch_weights.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from shardline.errors import ShardlineError
from shardline.formats.layers import SizedTensor
from shardline.formats.safetensors import SafetensorsFolder, TensorInfo
from shardline.model.torch_weights import OpenFiles, ShardWeights, StoredTensor, file_invalid, fill_plain

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
Tensor = TypeVar("Tensor", bound=SizedTensor)
ENGINE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_config(folder: SafetensorsFolder) -> PreTrainedConfig:
    """The folder's configuration as transformers reads it; code that lies in the folder is never run."""
    try:
        return AutoConfig.from_pretrained(folder.folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        kind = folder.config.get("model_type")
        raise ShardlineError(
            "architecture_unsupported",
            f"transformers does not read the configuration of {kind!r:.80}: {error!s:.400}",
            architecture=str(kind)[:80],
        ) from None


def checkpoint_dtype(folder: SafetensorsFolder, config: PreTrainedConfig) -> torch.dtype:
    """The dtype that the checkpoint is meant to run in: its configuration's, else that of its first real tensor."""
    dtype: object = config.dtype
    if not isinstance(dtype, torch.dtype):
        names = (info.dtype for info in folder.tensors.values() if info.dtype.startswith(("F", "BF")))
        dtype = DTYPES.get(next(names, "F32"))
    if not isinstance(dtype, torch.dtype) or dtype not in ENGINE_DTYPES:
        raise file_invalid(f"the checkpoint has the dtype {dtype}; choose float32, bfloat16 or float16 for the engine")
    return dtype


@dataclass(slots=True)
class _Job(Generic[Tensor]):
    """Stored tensors that together make the parameter `target` (and its companions)."""

    target: str
    converter: WeightConverter | None
    sources: list[tuple[str, Tensor]] = field(default_factory=list)
    """Pattern of the converter that the name matched, and the tensor; in the order of their numbers."""

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for _, info in self.sources)

    def names(self) -> list[str]:
        """All parameters that it makes."""
        if self.converter is None:
            return [self.target]
        first, *others = self.converter.target_patterns
        return [self.target, *(self.target.replace(first, other) for other in others)]


class _Names:
    """From the names of a checkpoint to those of the model, by the rules that transformers loads with."""

    def __init__(self, weights: ShardWeights, transforms: Sequence[WeightTransform]) -> None:
        self._model = weights.skeleton.model
        self._meta = weights.meta
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}

    def find(self, stored: str) -> tuple[str, str | None]:
        """Name in the model (or what would be one), and the pattern of the converter where one applies."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(stored, self._renamings, self._converters, prefix, self._meta)
        if name not in self._meta and stored in self._meta:
            name, pattern = rename_source_key(stored, [], [], prefix, self._meta)
        return name, pattern

    def converter(self, pattern: str) -> WeightConverter:
        return copy.deepcopy(self._by_pattern[pattern])


def load_safetensors(folder: SafetensorsFolder, weights: ShardWeights) -> None:
    """Fill the Shard's parameters. Raises `model_file_invalid` with the name of what is missing, unexpected or odd."""
    with OpenFiles() as files:
        transforms = get_model_conversion_mapping(weights.skeleton.model)
        load_converted(folder.tensors, transforms, partial(_stored, folder, files), weights)


def load_converted(
    tensors: Mapping[str, Tensor],
    transforms: Sequence[WeightTransform],
    stored: Callable[[Tensor], StoredTensor],
    weights: ShardWeights,
) -> None:
    """Fill the Shard's parameters from a table of tensors, as `transforms` make the model's of them; `stored` gives one
    to be read. Errors: those of `load_safetensors`."""
    names = _Names(weights, transforms)
    jobs: dict[str, _Job[Tensor]] = {}
    for found in sorted(tensors, key=dot_natural_key):
        name, pattern = names.find(found)
        weights.check_known(name, found)
        if name in weights.meta:
            job = jobs.get(name)
            if job is None:
                job = jobs[name] = _Job(name, None if pattern is None else names.converter(pattern))
            elif pattern is None or job.converter is None:
                raise file_invalid(f"two tensors for {name}, one of them {found}", tensors=[found])
            job.sources.append((pattern or "", tensors[found]))
    weights.plan(made for job in jobs.values() for made in job.names())
    wanted = [job for job in jobs.values() if any(weights.wants(name) for name in job.names())]
    # What is merged needs its memory twice for a moment: the largest first, while the least else is there.
    wanted.sort(key=lambda job: (job.converter is None, -job.nbytes if job.converter else 0))
    for job in wanted:
        if job.converter is None:
            weights.read(job.target, stored(job.sources[0][1]))
        else:
            _convert(job, job.converter, stored, weights)


def _stored(folder: SafetensorsFolder, files: OpenFiles, info: TensorInfo) -> StoredTensor:
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        raise file_invalid(f"tensor {info.name} has the dtype {info.dtype}, which this engine does not read")
    path = folder.folder / folder.files[info.file]
    return StoredTensor(info.name, info.shape, dtype, info.nbytes, partial(fill_plain, files, path, info.offset, dtype))


def _convert(
    job: _Job[Tensor], converter: WeightConverter, stored: Callable[[Tensor], StoredTensor], weights: ShardWeights
) -> None:
    dtype = weights.dtype(job.target)
    for pattern, info in job.sources:
        tensor = stored(info)
        kept = dtype if tensor.dtype.is_floating_point else tensor.dtype
        converter.add_tensor(job.target, tensor.name, pattern, partial(tensor.load, kept))
    model = weights.skeleton.model
    try:
        made = converter.convert(job.target, model=model, config=model.config)
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
        raise file_invalid(f"the tensors for {job.target} do not fit together: {error!s:.200}") from None
    for name in list(made):
        values = made.pop(name)
        weights.put(_without_wildcard(name), values[0] if isinstance(values, list) else values)


def _without_wildcard(name: str) -> str:
    return re.sub(r"\*\.", "0.", name)
