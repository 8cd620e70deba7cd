"""Hostile headers, signed and offered as any model: fetched whole, and refused before an engine hears of them."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shardline.artifact.bundle import Bundle
from shardline.artifact.fetch import Fetch
from shardline.artifact.store import Store
from shardline.errors import ShardlineError
from shardline.node.plan import inspect_stored
from shardline.options import NodeOptions
from shardline.settings import Settings
from tests.formats.test_gguf_hostile import HOSTILE as GGUF
from tests.formats.test_safetensors import HOSTILE as SAFETENSORS
from tests.support.artifacts import big_gguf, safetensors_folder, signed_bundle
from tests.support.hostile import TAIL, lying_bundle
from tests.support.stores import FileSource

SECONDS, MEMORY = 1.0, 50 << 20
SMALL = 1 << 20
"""Files above it are themselves larger than what reading them may cost."""


@pytest.fixture(scope="module")
def true(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("true")
    gguf = signed_bundle(big_gguf(folder), folder / "gguf.artifact")
    model = safetensors_folder(folder / "model")
    return {"gguf": gguf, "safetensors": signed_bundle(model, folder / "safetensors.artifact")}


async def refusal(bundle: Bundle, raw: bytes, tmp_path: Path, engine: str) -> ShardlineError:
    """What a Node says that has fetched the headers: the way of `from_nothing`, from the first byte on."""
    model = tmp_path / "model"
    model.write_bytes(raw + bytes(TAIL))
    options = NodeOptions(
        settings=Settings(),
        tracker_url="http://127.0.0.1:1",
        model="",
        engine=engine,
        host="127.0.0.1",
        port=0,
        credential="c",
        state_dir=tmp_path / "state",
    )
    store = Store(tmp_path / "store", reserve_bytes=0)
    try:
        with store.add(bundle) as artifact:
            length = bundle.manifest.piece_length
            fetch = Fetch(artifact, {0: range(-(-len(raw) // length))}, connections=1)
            fetch.add(FileSource(model))
            await fetch.run()
            with pytest.raises(ShardlineError) as caught:
                measured(artifact, options, raw)
            assert not (artifact.folder / "model").exists(), "no engine was given a path to it"
            return caught.value
    finally:
        store.close()


def measured(artifact: Any, options: NodeOptions, raw: bytes) -> None:
    """Read it twice: for the time of the processor, and for the memory, which takes longer to count than to use."""
    began = time.process_time()
    with pytest.raises(ShardlineError):
        inspect_stored(artifact, options)
    assert time.process_time() - began < SECONDS
    tracemalloc.start()
    try:
        inspect_stored(artifact, options)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY + (2 * len(raw) if len(raw) > SMALL else 0)


@pytest.mark.parametrize("raw", [row[1] for row in GGUF if row[1]], ids=[row[0] for row in GGUF if row[1]])
async def test_gguf(true: dict[str, Bundle], tmp_path: Path, raw: bytes) -> None:
    bundle = lying_bundle(true["gguf"], raw, "model.gguf", tmp_path / "lie")
    error = await refusal(bundle, raw, tmp_path, "llama")
    assert error.code in ("model_file_invalid", "artifact_mismatch"), error.message
    assert len(error.message) < 1000


@pytest.mark.parametrize(
    "raw", [row[1] for row in SAFETENSORS if row[1]], ids=[row[0] for row in SAFETENSORS if row[1]]
)
async def test_safetensors(true: dict[str, Bundle], tmp_path: Path, raw: bytes) -> None:
    bundle = lying_bundle(true["safetensors"], raw, "model.safetensors", tmp_path / "lie")
    error = await refusal(bundle, raw, tmp_path, "torch")
    assert error.code in ("model_file_invalid", "artifact_mismatch"), error.message


async def test_a_true_header_with_another_table(true: dict[str, Bundle], tmp_path: Path) -> None:
    """Accepted by the reader, and not what was signed."""
    raw = struct.pack("<4sIQQ", b"GGUF", 3, 0, 0) + bytes(8)
    bundle = lying_bundle(true["gguf"], raw, "model.gguf", tmp_path / "lie")
    assert (await refusal(bundle, raw, tmp_path, "llama")).code in ("artifact_mismatch", "model_file_invalid")
