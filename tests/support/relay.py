"""A TCP relay in front of one address: what a network may do to a connection, without the code under test.

It knows no HTTP. It can hold everything back, cut what is open, refuse what is new, let only a part of what a client
sends through, and close connections that were silent towards the client for too long, as reverse proxies do.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable


class Relay:
    """`async with Relay(port)`: `url` leads to 127.0.0.1:port for as long as nothing below is changed."""

    def __init__(self, port: int, *, idle_s: float | None = None) -> None:
        self.target = port
        self.port = 0
        self.refuses = False
        """New connections are closed at once."""
        self.pass_bytes: int | None = None
        """So many bytes more get through to the server, over all connections; the rest is held, nothing is closed."""
        self.rewrite: Callable[[bytes], bytes] = bytes
        """What becomes of bytes on their way to the client; their number must stay."""
        self.swallows: Callable[[bytes], bool] = lambda data: False
        """Whether these bytes of a client meet a server that just closes: they are lost, and the connection is cut."""
        self.accepted = 0
        self._idle_s = idle_s
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def hold(self) -> None:
        """Nothing passes any more, in either direction; connections stay open, as with a cable that was pulled."""
        self._flows.clear()

    def release(self) -> None:
        """What was held passes now."""
        self._flows.set()

    def cut(self) -> None:
        """Reset all connections that are open."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        writers = [writer]
        try:
            if self.refuses:
                return
            await self._flows.wait()
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
            writers.append(up_writer)
            self._writers.update(writers)
            async with asyncio.TaskGroup() as group:
                up = group.create_task(self._copy(reader, up_writer, upwards=True))
                down = group.create_task(self._copy(up_reader, writer, upwards=False, idle_s=self._idle_s))
                await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
                up.cancel()
                down.cancel()
        except (OSError, asyncio.CancelledError):
            pass  # cancelled by `__aexit__` only, which waits; asyncio's streams report a cancelled task as an error
        finally:
            for each in writers:
                each.transport.abort()
                self._writers.discard(each)
            self._tasks.discard(task)

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        upwards: bool,
        idle_s: float | None = None,
    ) -> None:
        """Until one side is gone, or nothing came for `idle_s`."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                async with asyncio.timeout(idle_s):
                    data = await reader.read(65536)
                if not data:
                    return
                await self._flows.wait()
                if upwards and self.swallows(data):
                    return
                if not upwards:
                    data = self.rewrite(data)
                elif self.pass_bytes is not None:
                    data = data[: self.pass_bytes]
                    self.pass_bytes -= len(data)
                if data:
                    writer.write(data)
                    await writer.drain()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
