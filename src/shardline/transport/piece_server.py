"""Gives pieces of Model Artifacts to others: `GET /v1/pieces/CONTENT_ID` says which, `…/ROOT` with a Range gives bytes.

Owns the two endpoints, how many are answered at a time and how fast. Only what is held is given; a range with a hole is
refused as a whole (416). No session, nothing is written. Who may ask is for the gate before it: `ControlGate`, client
certificates. What is held is the shelf's. Shown by tests/transport/test_piece_server.py.
"""

from __future__ import annotations

import asyncio
import os
import re
from io import FileIO
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.bodies import header, send_body, send_json
from shardline.transport.boundary import ControlGate, ErrorBoundary, error_bytes, no_such_method
from shardline.transport.file_send import EXTENSION
from shardline.transport.pace import Pace
from shardline.wire.bitmap import HeldPieces

PREFIX = "/v1/pieces/"
CHUNK = 1 << 20
"""What is read at a time, and must be taken within `client_stall_s`; …"""
SENT_WHOLE = 8 << 20
"""… where nothing is read, because the system sends files, so much at a time, within as much more."""
_PATH = re.compile(r"(mac1-[0-9a-f]{64})(?:/([0-9a-f]{64}))?")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


class PieceShelf(Protocol):
    """Whoever has pieces. Each raises `not_found` for what is not given away, `artifact_incomplete` for holes."""

    def offer(self, content_id: str) -> HeldPieces: ...

    def size(self, content_id: str, root: str) -> int: ...

    def open(self, content_id: str, root: str, start: int, end: int) -> FileIO:
        """The file, to be read from `start` to `end` and closed. Blocks; called in a thread."""
        ...


class PieceServer:
    """An ASGI application for paths below `PREFIX`, to be mounted behind a gate."""

    def __init__(self, shelf: PieceShelf, settings: Settings) -> None:
        self._shelf = shelf
        self._settings = settings
        self.pace = Pace(settings.upload_bytes_per_s)
        """What other ways to give pieces move is taken from it, too."""
        self._running = 0
        self.sent_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        found = _PATH.fullmatch(scope["path"].removeprefix(PREFIX)) if scope["path"].startswith(PREFIX) else None
        if found is None:
            raise ShardlineError("not_found", "nothing is served at this path")
        if scope["method"] != "GET":
            raise no_such_method("GET")
        content_id, root = found.groups()
        if root is None:
            await send_json(send, await asyncio.to_thread(self._shelf.offer, content_id))
            return
        if self._running >= self._settings.upload_requests:
            raise ShardlineError("queue_full", f"{self._running} requests for pieces are being answered", retry_after=1)
        self._running += 1
        try:
            await self._give(content_id, root, scope, send)
        finally:
            self._running -= 1

    async def _give(self, content_id: str, root: str, scope: Scope, send: Send) -> None:
        size = self._shelf.size(content_id, root)
        try:
            start, end = _asked_range(header(scope, b"range"), size)
            file = await asyncio.to_thread(self._shelf.open, content_id, root, start, end)
        except ShardlineError as error:
            if error.code != "artifact_incomplete":
                raise
            fields = [(b"content-range", b"bytes */%d" % size)]
            await send_body(send, error.fault.status, error_bytes(error), headers=fields)
            return
        fields = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % (end - start)),
            (b"content-range", b"bytes %d-%d/%d" % (start, end - 1, size)),
            (b"cache-control", b"no-store"),
        ]
        with file:
            await send({"type": "http.response.start", "status": 206, "headers": fields})
            whole = EXTENSION in scope.get("extensions", ())
            while start < end:
                stop = min(end, start + (SENT_WHOLE if whole else CHUNK))
                await self.pace.take(stop - start)
                part = _file_part if whole else _read_part
                await self._send(send, await part(file, start, stop - start), stop - start, more=stop < end)
                start = stop

    async def _send(self, send: Send, message: Message, count: int, *, more: bool) -> None:
        limit_s = self._settings.client_stall_s * max(1, count // CHUNK)
        try:
            async with asyncio.timeout(limit_s):
                await send({**message, "more_body": more})
        except TimeoutError:
            raise ShardlineError("slow_client", f"{count} bytes were not taken in {limit_s:g} s") from None
        self.sent_bytes += count


async def _file_part(file: FileIO, start: int, count: int) -> Message:
    return {"type": EXTENSION, "file": file, "offset": start, "count": count}


async def _read_part(file: FileIO, start: int, count: int) -> Message:
    data = await asyncio.to_thread(os.pread, file.fileno(), count, start)
    if len(data) != count:
        raise ShardlineError("artifact_incomplete", "the file became shorter while it was sent")
    return {"type": "http.response.body", "body": data}


def piece_app(server: PieceServer, credential: str) -> ASGIApp:
    """`server` alone behind the gate of the control plane: for a process that does nothing else."""
    return ErrorBoundary(ControlGate(server, credential=credential))


def _asked_range(field: str | None, size: int) -> tuple[int, int]:
    """The bytes [start, end) that a Range field asks for; one range, counted from the front."""
    found = _RANGE.fullmatch((field or "").replace(" ", ""))
    if found is None:
        raise ShardlineError(
            "invalid_value", "pieces are asked for with one Range, such as bytes=0-16383", param="range"
        )
    start = int(found[1])
    end = size if found[2] is None else min(size, int(found[2]) + 1)
    if start >= end:
        raise ShardlineError("artifact_incomplete", f"the range begins behind its end, or behind byte {size}")
    return start, end
