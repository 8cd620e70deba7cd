"""A peer that speaks enough of BitTorrent to be asked for pieces, says that it has all of them, and means harm."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Literal

Way = Literal["silent", "slow", "garbage", "rude"]
_PROTOCOL = b"\x13BitTorrent protocol"
_RESERVED = bytes([0, 0, 0, 0, 0, 0, 0, 0x14])
"""It knows the fast extension and version 2."""
_UNCHOKE, _REQUEST, _PIECE, _HAVE_ALL = 1, 6, 7, 14


class RoguePeer:
    """`silent`: answers nothing that is asked. `slow`: a block a second. `garbage`: blocks of the right length, all
    wrong. `rude`: what no message is."""

    def __init__(self, info_hash: bytes, way: Way) -> None:
        self.port = 0
        self.asked = 0
        """Blocks."""
        self.writers: list[asyncio.StreamWriter] = []
        self._info_hash = info_hash[:20]
        self._way = way

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            await reader.readexactly(68)
            peer_id = b"-SL%05d-" % self.port + bytes(11)
            writer.write(_PROTOCOL + _RESERVED + self._info_hash + peer_id)
            writer.write(_message(_HAVE_ALL) + _message(_UNCHOKE))
            while True:
                (length,) = struct.unpack(">I", await reader.readexactly(4))
                body = await reader.readexactly(length)
                if body[:1] == bytes([_REQUEST]):
                    self.asked += 1
                    await self._answer(writer, *struct.unpack(">III", body[1:13]))
                await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, piece: int, start: int, size: int) -> None:
        if self._way == "garbage":
            writer.write(_message(_PIECE, struct.pack(">II", piece, start) + bytes(size)))
        elif self._way == "slow":
            await asyncio.sleep(1.0)
            writer.write(_message(_PIECE, struct.pack(">II", piece, start) + bytes(size)))
        elif self._way == "rude":
            writer.write(struct.pack(">I", 0xFFFFFFFF) + bytes(size))


def _message(kind: int, body: bytes = b"") -> bytes:
    return struct.pack(">IB", 1 + len(body), kind) + body


@asynccontextmanager
async def rogue_peer(info_hash: bytes, way: Way) -> AsyncIterator[RoguePeer]:
    """One that listens on loopback."""
    peer = RoguePeer(info_hash, way)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.port = server.sockets[0].getsockname()[1]
    try:
        yield peer
    finally:
        server.close()
        for writer in peer.writers:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()
