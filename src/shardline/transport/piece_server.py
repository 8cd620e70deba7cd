"""Gives pieces of Model Artifacts to others: `GET /v1/pieces/CONTENT_ID` says which, `…/ROOT` with a Range gives bytes.

Owns the two endpoints, how many are answered at a time and how fast. Only what is held is given; a range with a hole is
refused as a whole (416). No session, nothing is written. Who may ask is for the gate before it: `ControlGate`, client
certificates. What is held is the shelf's. Shown by tests/transport/test_piece_server.py.
"""

from __future__ import annotations

import asyncio
import re
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.bodies import header, send_body, send_json
from shardline.transport.boundary import ControlGate, ErrorBoundary, error_bytes
from shardline.transport.pace import Pace
from shardline.wire.bitmap import HeldPieces

PREFIX = "/v1/pieces/"
CHUNK = 1 << 20
_PATH = re.compile(r"(mac1-[0-9a-f]{64})(?:/([0-9a-f]{64}))?")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


class PieceShelf(Protocol):
    """Whoever has pieces. Each raises `not_found` for what is not given away, `artifact_incomplete` for holes."""

    def offer(self, content_id: str) -> HeldPieces: ...

    def size(self, content_id: str, root: str) -> int: ...

    def check(self, content_id: str, root: str, start: int, end: int) -> None: ...

    def read(self, content_id: str, root: str, start: int, end: int) -> bytes:
        """Blocks; called in a thread."""
        ...


class PieceServer:
    """An ASGI application for paths below `PREFIX`, to be mounted behind a gate."""

    def __init__(self, shelf: PieceShelf, settings: Settings) -> None:
        self._shelf = shelf
        self._settings = settings
        self._pace = Pace(settings.upload_bytes_per_s)
        self._running = 0
        self.sent_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        found = _PATH.fullmatch(scope["path"].removeprefix(PREFIX)) if scope["path"].startswith(PREFIX) else None
        if found is None:
            raise ShardlineError("not_found", "nothing is served at this path")
        if scope["method"] != "GET":
            raise ShardlineError("method_not_allowed", f"pieces do not have {scope['method'][:20]}")
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
            self._shelf.check(content_id, root, start, end)
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
        # The first bytes are read before the head is sent: what cannot be read is still refused properly.
        chunk = await self._read(content_id, root, start, end)
        await send({"type": "http.response.start", "status": 206, "headers": fields})
        while True:
            start += len(chunk)
            await self._send(send, chunk, more=start < end)
            if start >= end:
                return
            chunk = await self._read(content_id, root, start, end)

    async def _read(self, content_id: str, root: str, start: int, end: int) -> bytes:
        stop = min(end, start + CHUNK)
        await self._pace.take(stop - start)
        return await asyncio.to_thread(self._shelf.read, content_id, root, start, stop)

    async def _send(self, send: Send, chunk: bytes, *, more: bool) -> None:
        limit_s = self._settings.client_stall_s
        try:
            async with asyncio.timeout(limit_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
        except TimeoutError:
            raise ShardlineError("slow_client", f"{len(chunk)} bytes were not taken in {limit_s:g} s") from None
        self.sent_bytes += len(chunk)


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
