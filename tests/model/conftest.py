"""Scripts, entries and engines for the tests of the model room."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import pytest

from shardline.model.backend import BackendEntry, Buffer, ShardSpec
from shardline.model.engine import BatchResult, Engine


class WriteScript(Protocol):
    def __call__(self, **fields: Any) -> Path: ...


class MakeEntry(Protocol):
    def __call__(
        self,
        position: int,
        tokens: Iterable[int],
        hidden: tuple[Buffer, ...] = (),
        *,
        slot: int = 0,
        want_output: bool = True,
    ) -> BackendEntry: ...


@pytest.fixture
def script(tmp_path: Path) -> WriteScript:
    """Writes a script file; fields that are not given are those of a small plain model."""

    def write(**fields: Any) -> Path:
        path = tmp_path / "script.json"
        plain = {"model": "demo", "n_layers": 6, "answer": ["alpha", " beta", " gamma"]}
        path.write_text(json.dumps({**plain, **fields}))
        return path

    return write


@pytest.fixture
def spec(script: WriteScript) -> Callable[..., ShardSpec]:
    def make(first: int = 0, last: int = 6, **fields: Any) -> ShardSpec:
        return ShardSpec(model=str(script(**fields)), first=first, last=last)

    return make


@pytest.fixture
def entry() -> MakeEntry:
    def make(
        position: int,
        tokens: Iterable[int],
        hidden: tuple[Buffer, ...] = (),
        *,
        slot: int = 0,
        want_output: bool = True,
    ) -> BackendEntry:
        ids = list(tokens)
        return BackendEntry(slot, position, len(ids), struct.pack(f"<{len(ids)}i", *ids), hidden, want_output)

    return make


@pytest.fixture
def submit() -> Callable[..., Any]:
    """Runs one batch and waits for it."""

    async def run(engine: Engine, *entries: BackendEntry) -> BatchResult:
        future: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
        engine.submit(entries, future.set_result)
        async with asyncio.timeout(20):
            return await future

    return run
