"""A Gateway that cannot open a connection says so, and takes no Node out of service for it."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import NoReturn

import pytest

from shardline.errors import ShardlineError
from tests.support.local_cluster import LocalCluster, local_cluster


async def end_of(cluster: LocalCluster) -> ShardlineError | None:
    try:
        await cluster.generate(prompt=20, max_tokens=3)
    except ShardlineError as error:
        return error
    return None


async def test_sessions_without_a_file_for_their_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_file(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    async with local_cluster(tmp_path) as cluster:
        await cluster.generate(prompt=20, max_tokens=3)
        with monkeypatch.context() as lack:
            lack.setattr(asyncio.get_running_loop(), "create_connection", no_file)
            # One of them has the connections that are there, the others would need new ones.
            async with asyncio.TaskGroup() as group:
                ends = [group.create_task(end_of(cluster)) for _ in range(4)]
        failed = [error for end in ends if (error := end.result()) is not None]
        assert failed and {error.code for error in failed} == {"resources_exhausted"}
        assert all("node" not in error.details for error in failed)
        # Nobody was reported: the very next request is served.
        await cluster.generate(prompt=20, max_tokens=3)
        await cluster.until_free()
