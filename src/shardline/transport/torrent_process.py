"""One life of the BitTorrent process, seen from the Node: started, spoken to, watched, buried.

Owns the child process and its socket. It restarts nothing and knows no artifact (node/swarm.py). The process gets no
secret by its environment or a file; keys go through the socket. Shown by tests/transport/test_torrent_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import BinaryIO

import structlog

from shardline.errors import ShardlineError
from shardline.transport.torrent_messages import REPORT_BYTES, Begin, Frames, Listening, Order, Report, frame

LIBRARY = "libtorrent"
START_S = 20.0
SILENT_S = 10.0
"""It says twice a second that it is alive; one that says nothing for so long is ended."""
_REAP_S = 5.0
_READ_BYTES = 256 << 10
_WORDS_BYTES = 2000
_INHERITED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")

log = structlog.get_logger(__name__)


def missing() -> str | None:
    """Why this machine cannot speak BitTorrent; None: it can."""
    if importlib.util.find_spec(LIBRARY) is None:
        return "libtorrent is not installed: pip install 'shardline[bt]'"
    return None


class TorrentProcess:
    """One that runs. `send` never waits; `reports` is read by one task."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        words: BinaryIO,
    ) -> None:
        self.port = 0
        """Where it takes connections."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._words = words
        self._frames: Frames[Report] = Frames(Report, REPORT_BYTES)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, order: Order) -> None:
        """To one that has ended: nothing. Who reads the reports learns of that."""
        self._writer.write(frame(order))

    def kill(self) -> None:
        """It writes nothing any more when this returns. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def reports(self) -> AsyncGenerator[Report, None]:
        """What it says, as long as it lives; then `source_failed`, with its last words."""
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    data = await self._reader.read(_READ_BYTES)
            except TimeoutError:
                raise _failed(f"it has said nothing for {SILENT_S:g} s") from None
            except OSError:
                data = b""
            if not data:
                raise _failed(await self._last_words())
            try:
                for report in self._frames.feed(data):
                    yield report
            except ValueError as error:
                raise _failed(f"it sent what cannot be read: {error}"[:500]) from None

    async def _last_words(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await self._process.wait()
        self._words.seek(max(0, os.fstat(self._words.fileno()).st_size - _WORDS_BYTES))
        lines = [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:500] if lines else f"it ended with {self._process.returncode}"

    async def bury(self) -> None:
        """End it, and free what it had."""
        self.kill()
        self._writer.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await self._process.wait()
        self._words.close()


@asynccontextmanager
async def torrent_process(begin: Begin, environment: Mapping[str, str]) -> AsyncIterator[TorrentProcess]:
    """A process that listens, until the end of the block. Errors: `source_failed`, with why it does not start."""
    if (why := missing()) is not None:
        raise _failed(why)
    try:
        process = await _spawned(environment)
    except OSError as error:
        raise _failed(f"the system does not start it: {error.strerror}") from None
    try:
        process.send(begin)
        process.port = await _port(process)
        log.info("bittorrent_started", port=process.port, pid=process.pid)
        yield process
    finally:
        await process.bury()


async def _port(process: TorrentProcess) -> int:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S), contextlib.aclosing(process.reports()) as reports:
            async for report in reports:
                if isinstance(report, Listening):
                    return report.port
    raise _failed(f"it does not listen after {START_S:g} s")


async def _spawned(environment: Mapping[str, str]) -> TorrentProcess:
    kept = {name: value for name, value in environment.items() if name in _INHERITED}
    kept |= {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part), "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as opened:
        kept_open = contextlib.ExitStack()
        opened.push(lambda kind, error, trace: kept_open.close() if kind is not None else None)
        words = kept_open.enter_context(tempfile.TemporaryFile())
        ours, theirs = socket.socketpair()
        opened.callback(theirs.close)
        kept_open.callback(ours.close)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-X", "faulthandler", "-m", "shardline.transport.torrent_worker"),
            *("--channel", str(theirs.fileno()), "--parent", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            pass_fds=(theirs.fileno(),),
            env=kept,
            start_new_session=True,
        )
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
    return TorrentProcess(process, reader, writer, words)


def _failed(why: str) -> ShardlineError:
    return ShardlineError("source_failed", f"BitTorrent on this machine: {why}")
