"""Bytes of a file as a response body, from the page cache to the socket: ASGI's `http.response.zerocopysend`.

Owns that one message, on plain connections of uvicorn; everything else goes on to it as it is. What TLS encrypts must
be read first: there the extension is not offered. Threads are held only while the socket takes bytes. Shown by
tests/transport/test_file_send.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from shardline.errors import ShardlineError
from shardline.transport.bodies import ClientLeft

EXTENSION = "http.response.zerocopysend"


def with_files(scope: Scope, send: Send) -> Send:
    """`send` with the extension, where the connection and the system have it; the scope then says so."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or scope["scheme"] != "http" or not hasattr(os, "sendfile"):
        return send
    extensions: MutableMapping[str, Any] = scope.setdefault("extensions", {})
    extensions[EXTENSION] = {}
    return _FileSend(cycle)


class _FileSend:
    """`send` of one request."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    async def __call__(self, message: Message) -> None:
        if message["type"] != EXTENSION:
            await self._cycle.send(message)  # type: ignore[arg-type]
            return
        count: int = message["count"]
        await self._send_file(message["file"].fileno(), message["offset"], count)
        self._cycle.expected_content_length -= count
        if not message.get("more_body", False):
            await self._cycle.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_file(self, file: int, offset: int, count: int) -> None:
        """All of it, or `ClientLeft`; `artifact_incomplete` where the file ends before."""
        cycle, end = self._cycle, offset + count
        await self._emptied(cycle.transport)
        if cycle.disconnected or cycle.transport.is_closing():
            raise ClientLeft
        # A descriptor of our own: the loop may close its one while we use it, and the next file gets that number.
        own = os.dup(cycle.transport.get_extra_info("socket").fileno())
        try:
            while True:
                offset += await _in_thread(own, file, offset, end - offset)
                if offset == end:
                    return
                await _writable(own)
                if cycle.disconnected:
                    raise ClientLeft
        finally:
            os.close(own)

    async def _emptied(self, transport: asyncio.Transport) -> None:
        """What was written before has left the transport: it must not come behind the file."""
        transport.set_write_buffer_limits(0)
        try:
            if self._cycle.flow.write_paused:
                await self._cycle.flow.drain()
        finally:
            transport.set_write_buffer_limits()


async def _in_thread(target: int, file: int, offset: int, count: int) -> int:
    """`_sent` in a thread, which has ended when this does, however it does: then the files may be closed."""
    future = asyncio.get_running_loop().run_in_executor(None, _sent, target, file, offset, count)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        # Not for long: the socket does not block.
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()
        raise


async def _writable(target: int) -> None:
    """The socket takes bytes again, or will say why it never does."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(target, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(target)


def _sent(target: int, file: int, offset: int, count: int) -> int:
    """Bytes that went before the socket was full."""
    done = 0
    try:
        while done < count:
            sent = os.sendfile(target, file, offset + done, count - done)
            if not sent:
                raise ShardlineError("artifact_incomplete", "the file became shorter while it was sent")
            done += sent
    except BlockingIOError:
        pass
    except ConnectionError:
        raise ClientLeft from None
    return done
