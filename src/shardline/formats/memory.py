"""How many bytes a Shard takes: weights, and Hot KV State per token.

Owns the arithmetic over tensor tables and model shapes, for planning before anything is loaded; what an engine really
holds, it says itself. Pure. Shown by tests/formats/test_memory.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardline.formats.layers import (
    KV_MATRICES,
    SizedTensor,
    check_range,
    is_of_other_modality,
    is_routed_expert,
    is_tied,
    is_token_matrix,
    place_of,
)
from shardline.formats.shape import ModelShape


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a model's weights by place. Parts of other modalities and prediction layers are not counted."""

    layers: tuple[int, ...]
    embedding: int
    output: int
    """Norm and matrix behind the last layer; 0 for the matrix where it is tied."""
    tied: int
    """What a tail that is not the head loads of the embedding; 0 where the model has an output matrix."""
    shared: int
    """On every Shard."""

    def of_shard(self, first: int, last: int) -> int:
        """Bytes of Shard [first, last); `layers_invalid` outside the model."""
        check_range(first, last, len(self.layers))
        total = self.shared + sum(self.layers[first:last])
        if first == 0:
            total += self.embedding
        if last == len(self.layers):
            total += self.output + (self.tied if first else 0)
        return total


def weight_bytes(tensors: Mapping[str, SizedTensor], n_layers: int, *, element_bytes: int | None = None) -> WeightBytes:
    """Bytes as they lie in the file (`element_bytes` None), or with every element in an engine dtype of that size."""
    layers = [0] * n_layers
    embedding = output = shared = matrix = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes if element_bytes is None else math.prod(tensor.shape) * element_bytes
        place = place_of(name)
        if isinstance(place, int):
            if place < n_layers:
                layers[place] += size
        elif place == "embedding":
            embedding += size
            matrix += size if is_token_matrix(name) else 0
        elif place == "output":
            output += size
        elif not is_of_other_modality(name):
            shared += size
    return WeightBytes(tuple(layers), embedding, output, matrix if is_tied(tensors) else 0, shared)


def expert_bytes(
    tensors: Mapping[str, SizedTensor], n_layers: int, *, element_bytes: int | None = None
) -> tuple[int, ...]:
    """Bytes of routed experts, layer by layer: of those a token is computed with a few only. As in `weight_bytes`."""
    layers = [0] * n_layers
    for name, tensor in tensors.items():
        place = place_of(name)
        if isinstance(place, int) and place < n_layers and is_routed_expert(name):
            layers[place] += tensor.nbytes if element_bytes is None else math.prod(tensor.shape) * element_bytes
    return tuple(layers)


def kv_elements_of_tensors(tensors: Mapping[str, SizedTensor], n_layers: int) -> tuple[int, ...] | None:
    """Numbers that each layer keeps for a token, from the shapes of a GGUF file's matrices; None where it is not told.

    A row of what makes keys and values is as long as they are; a latent row (MLA) is kept as it is.
    """
    found = [0] * n_layers
    for name, tensor in tensors.items():
        place = place_of(name)
        if isinstance(place, int) and place < n_layers and name.endswith(KV_MATRICES) and len(tensor.shape) == 2:
            found[place] += tensor.shape[1]
    return tuple(found) if all(found) else None


def kv_bytes_per_token(shape: ModelShape, first: int, last: int, *, element_bytes: int) -> int | None:
    """Hot KV State of Shard [first, last) for one token, without regard to sliding windows (an upper bound); None
    where the model's files do not say it. `layers_invalid` outside the model."""
    check_range(first, last, shape.n_layers)
    total = 0
    for layer in range(first, last):
        elements = shape.cache_elements(layer)
        if elements is None:
            return None
        total += elements * element_bytes
    return total
