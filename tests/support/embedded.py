"""Vectors of prompts over a chain of Shards in this process, through the generators that worker processes have."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from shardline.model.backend import Backend, BackendEntry, SlotSpec
from shardline.model.generation import Generator, StepResult
from shardline.wire.messages import Pooling

SLOT = 3


def vector(shards: Sequence[Backend], chunks: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
    """Of a prompt that is computed in `chunks`; the caches are empty before and behind."""
    generators = [Generator(shard) for shard in shards]
    total, position, found = sum(map(len, chunks)), 0, StepResult()
    for generator in generators:
        generator.open(SLOT, SlotSpec(total, 0, pooling=pooling if generator is generators[-1] else None))
    for chunk in chunks:
        ids, last = struct.pack(f"<{len(chunk)}i", *chunk), position + len(chunk) == total
        hidden: tuple[bytes, ...] = ()
        for generator in generators:
            (result,) = generator.run([BackendEntry(SLOT, position, len(chunk), ids, hidden, last)])
            if isinstance(result, Exception):
                raise result
            found, hidden = result, tuple(bytes(buffer) for buffer in result.hidden)
        position += len(chunk)
    for generator in generators:
        assert generator.kv_tokens == total
        generator.close(SLOT)
        assert generator.kv_tokens == 0
    assert found.token is None
    assert found.pooled is not None
    assert found.pooled.pooling == pooling
    return np.frombuffer(found.pooled.vector, np.float32)
