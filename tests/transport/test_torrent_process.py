"""The BitTorrent process: it starts, says where it listens, and ends with a reason, with its Node, or when told to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from shardline.errors import ShardlineError
from shardline.transport import torrent_process as processes
from shardline.transport.torrent_messages import Alive, Begin, Remove, Removed, Want
from shardline.transport.torrent_process import TorrentProcess, missing, torrent_process

WHY = missing()
needed = pytest.mark.skipif(WHY is not None, reason=WHY or "")
ROOT = Path(__file__).resolve().parents[2]


def begin(port: int = 0) -> Begin:
    return Begin("127.0.0.1", port, "", "", "", 0, 0, 1 << 20, 8)


async def said(process: TorrentProcess, kind: type) -> object:
    async with asyncio.timeout(10):
        async for report in process.reports():
            if isinstance(report, kind):
                return report
    raise AssertionError


@needed
async def test_it_listens_answers_and_is_gone_after_the_block() -> None:
    async with torrent_process(begin(), os.environ) as process:
        listening = psutil.Process(process.pid).net_connections("tcp")
        assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", process.port)]
        assert await said(process, Alive) == Alive()
        process.send(Remove("mac1-unknown"))
        assert await said(process, Removed) == Removed("mac1-unknown")
        pid = process.pid
    assert not psutil.pid_exists(pid)


@needed
async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ShardlineError) as refused:
            async with torrent_process(begin(other.getsockname()[1]), os.environ):
                raise AssertionError
    assert refused.value.code == "source_failed"
    assert "127.0.0.1" in refused.value.message


@needed
async def test_one_that_is_killed_says_so_to_who_reads() -> None:
    async with torrent_process(begin(), os.environ) as process:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ShardlineError) as lost:
            await said(process, Removed)
        assert "-9" in lost.value.message
        process.send(Remove("mac1-unknown"))


@needed
async def test_an_order_that_no_node_gives_ends_it_with_its_last_words() -> None:
    async with torrent_process(begin(), os.environ) as process:
        process.send(begin())
        with pytest.raises(ShardlineError) as lost:
            await said(process, Removed)
        assert "it has begun already" in lost.value.message


@needed
async def test_what_is_wanted_of_an_unknown_torrent_is_of_the_past() -> None:
    async with torrent_process(begin(), os.environ) as process:
        process.send(Want("mac1-unknown", 0, b"\x80"))
        assert await said(process, Alive) == Alive()


@needed
async def test_silence_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with torrent_process(begin(), os.environ) as process:
        monkeypatch.setattr(processes, "SILENT_S", 0.1)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ShardlineError, match=r"said nothing"):
            await said(process, Removed)


@needed
async def test_it_dies_with_its_node() -> None:
    script = """
import asyncio, os, sys
import structlog
from shardline.transport.torrent_messages import Begin
from shardline.transport.torrent_process import torrent_process
async def main():
    async with torrent_process(Begin("127.0.0.1", 0, "", "", "", 0, 0, 1 << 20, 8), os.environ) as process:
        print(process.pid, flush=True)
        await asyncio.sleep(60)
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
asyncio.run(main())
"""
    node = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    assert node.stdout is not None
    try:
        async with asyncio.timeout(30):
            pid = int(await node.stdout.readline())
    finally:
        node.kill()
        await node.communicate()
    async with asyncio.timeout(10):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIBRARY", "a_library_that_is_not_there")
    with pytest.raises(ShardlineError, match=r"pip install 'shardline\[bt\]'"):
        async with torrent_process(begin(), os.environ):
            raise AssertionError
