"""The open response of `POST /v1/sessions`: one JSON object a line, from the Node to the Gateway.

Owns the lines that wait to be written and the end of the stream. The host puts events in, the request's own task
writes them out; whatever piled up meanwhile leaves in one write. Shown by tests/node/test_trust.py.
"""

from __future__ import annotations

import asyncio

import msgspec

from shardline.wire.messages import StreamEvent

_encoder = msgspec.json.Encoder()


class SessionStream:
    """Lines of one session. Bounded by what a session can say: its tokens, and a beat each half second."""

    def __init__(self, limit: int) -> None:
        self._lines: list[bytes] = []
        self._wake = asyncio.Event()
        self._limit = limit
        self.ended = False
        self.overflowed = False

    def emit(self, event: StreamEvent) -> None:
        if self.ended:
            return
        if len(self._lines) >= self._limit:
            # The Gateway has not read for long: the host's watch over beats ends this session.
            self.overflowed = True
            return
        self._lines.append(_encoder.encode(event) + b"\n")
        self._wake.set()

    def end(self) -> None:
        """No more lines; those that wait are still written."""
        self.ended = True
        self._wake.set()

    async def next_chunk(self) -> bytes | None:
        """All lines that wait, or None when the stream has ended."""
        while not self._lines:
            if self.ended:
                return None
            self._wake.clear()
            await self._wake.wait()
        lines, self._lines = self._lines, []
        return b"".join(lines)
