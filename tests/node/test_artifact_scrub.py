"""What rots on disk is found in the background, and the Node is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from shardline.artifact.store import Store
from shardline.node.artifact_scrub import scrub_often
from shardline.settings import Settings
from tests.support.stores import described, filled, layered_model
from tests.transport.loopback import until

SETTINGS = msgspec.structs.replace(Settings(), scrub_interval_s=0.05, scrub_bytes_per_s=1 << 30)


async def test_a_damaged_piece_is_found_and_brought_again(tmp_path: Path) -> None:
    model = layered_model(tmp_path / "model", layers=2)
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(described(model, tmp_path / "bundle")) as artifact:
        filled(artifact, model)
        file, begin, brought = artifact.files[0], asyncio.Event(), []

        async def damaged() -> None:
            filled(artifact, model, {0: [3]})
            brought.append(3 in file.held())

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(scrub_often(artifact, SETTINGS, begin, damaged))
            with file.data_path.open("r+b") as handle:
                handle.seek(3 * file.tree.piece_length)
                handle.write(b"rotten")
            await asyncio.sleep(0.05)
            assert 3 in file.held(), "nobody has looked yet"
            begin.set()
            await until(lambda: brought == [True])
            task.cancel()
        assert file.is_whole(3)
    store.close()
