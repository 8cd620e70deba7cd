"""How long an engine call may take, and what is told when it took longer.

Owns the names of the limits; who watches is model/worker_process.py and model/engine.py. Shown by
tests/model/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry
from shardline.settings import Settings


def step_limit(entries: Sequence[BackendEntry], settings: Settings) -> tuple[str, float]:
    """Name and seconds of the limit that a batch runs under."""
    if all(entry.rows == 1 for entry in entries):
        return "step", settings.step_s
    return "prefill_chunk", settings.prefill_chunk_s


def over_limit(name: str, limit_s: float) -> ShardlineError:
    return ShardlineError("deadline", f"the engine did not answer within {limit_s:g} s", limit=name)
