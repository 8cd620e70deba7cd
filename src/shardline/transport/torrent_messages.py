"""What crosses between a Node and its BitTorrent process: orders one way, reports the other, typed frames on a socket.

Owns the messages and their framing (u32 little-endian length, MessagePack of one tagged struct). Sets of pieces are
bytes as of `wire.bitmap.Pieces`, one set a file, files in the order of the manifest. Refuses to own processes and
libtorrent. Shown by tests/transport/test_torrent_messages.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

ORDER_BYTES = 96 << 20
"""A torrent has at most 64 MiB (artifact/torrent.py)."""
REPORT_BYTES = 8 << 20
_LENGTH = struct.Struct("<I")


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Where somebody takes connections: an address, never a name."""

    host: str
    port: int


class TorrentFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a torrent on this machine."""

    root: bytes
    """Its pieces root, 32 bytes: names it in the torrent, whatever it is called there."""
    path: str
    held: bytes


# Node -> process.


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First order. With keys (PEM) all connections are mutual TLS; without any they are plain."""

    host: str
    """Address to listen at and to call from."""
    port: int
    """0: any that is free."""
    authority: str
    certificate: str
    key: str
    download_bytes_per_s: int
    """0: no limit. Also of the next one."""
    upload_bytes_per_s: int
    queue_bytes: int
    """Received and not yet written: what a kill loses, and what memory it takes."""
    connections: int

    def __repr__(self) -> str:
        return f"Begin({self.host!r}, {self.port})"


class Keys(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """From the next handshake on."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return "Keys()"


class Add(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Have a torrent, and give of it what is held; nothing is asked of others before `Want`. Where it is there already
    it is ended first, and begins anew: answered by `Ready`, before which nothing of the old one is written any more."""

    content_id: str
    generation: int
    """Grows; reports about an older one are of the past."""
    torrent: bytes
    folder: str
    files: tuple[TorrentFile, ...]


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answered by `Removed`: from then on nothing of it is written or read."""

    content_id: str


class Allow(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Whom to call about which torrent; connections with all others are refused. Replaces what was said before."""

    peers: dict[str, tuple[Peer, ...]]


class Want(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Fetch these. Those that are there already are reported as written, too."""

    content_id: str
    file: int
    pieces: bytes


class Brought(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Others have written these into the file, and they were checked: give them away from now on."""

    content_id: str
    file: int
    pieces: bytes


Order = Begin | Keys | Add | Remove | Allow | Want | Brought

# Process -> Node.


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Answer to `Begin`."""

    port: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    content_id: str
    generation: int


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    content_id: str


class Written(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """These passed their hash and were flushed: they lie in the file, for whoever reads it. Not synced."""

    content_id: str
    generation: int
    file: int
    pieces: bytes


class Banned(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Somebody gave what is not of the torrent, and is disconnected."""

    content_id: str
    host: str
    port: int


class Corrupt(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A piece that came was thrown away; who was to blame was or will be `Banned`."""

    content_id: str
    file: int
    piece: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The torrent has ended: its files cannot be written, or are not what they were."""

    content_id: str
    generation: int
    disk_full: bool
    message: str


class PeerFigures(msgspec.Struct, frozen=True, array_like=True):
    """One connection."""

    host: str
    port: int
    """Of this connection."""
    listens: int
    """Where it says that it takes connections; 0 where it did not say."""
    received_bytes: int
    receives_per_s: int


class Seen(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Twice a second, of each torrent."""

    content_id: str
    generation: int
    available: tuple[bytes, ...]
    """What those that are connected have together."""
    peers: tuple[PeerFigures, ...]
    received_bytes: int
    """Of pieces, since `Ready`."""
    sent_bytes: int


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Twice a second."""


Report = Listening | Ready | Removed | Written | Banned | Corrupt | Failed | Seen | Alive


def frame(message: Order | Report) -> bytes:
    """One message as it crosses the socket."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


T = TypeVar("T")


class Frames(Generic[T]):
    """Puts what arrives together to messages. ValueError for what is none."""

    def __init__(self, kind: Any, limit: int) -> None:
        self._limit = limit
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._left = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        self._left += data
        while len(self._left) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._left)
            if length > self._limit:
                raise ValueError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._left) < end:
                return
            body = bytes(self._left[_LENGTH.size : end])
            del self._left[:end]
            try:
                yield self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise ValueError(str(error)) from None
