"""The BitTorrent process of a Node: `python -m shardline.transport.torrent_worker --channel FD --parent PID`.

The only file that imports libtorrent. Owns the session: version 2 torrents over TCP, with no way to find anybody but
being told, and nobody let in who was not named. It knows nothing of stores, bitmaps on disk or Trackers, and what it
reports as written is believed only after it was read back. Whatever it does not understand ends it; the Node starts
another one (torrent_process.py). Shown by tests/transport/test_torrent_process.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import libtorrent as lt

from shardline.transport.torrent_messages import (
    ORDER_BYTES,
    Add,
    Alive,
    Allow,
    Banned,
    Begin,
    Brought,
    Corrupt,
    Failed,
    Frames,
    Keys,
    Listening,
    Order,
    Peer,
    PeerFigures,
    Ready,
    Remove,
    Removed,
    Report,
    Seen,
    Want,
    Written,
    frame,
)
from shardline.transport.torrent_settings import WILDCARDS, free_port, settings_of
from shardline.wire.bitmap import Pieces

TICK_S = 0.5
FLUSH_S = 0.02
"""Pause between two flushes of one torrent: a run ends with one, and nothing is asked in its place before."""
SEEN_S = 0.1
"""Least pause between two accounts of one torrent: of many pieces they cost milliseconds."""
PLACING_BYTES = 8 << 20
"""Pieces that others brought, on their way through libtorrent at a time."""
EXIT_ORPHAN = 71
_LISTEN_S = 5.0
_READ_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ALERTS = (
    lt.alert.category_t.error_notification
    | lt.alert.category_t.status_notification
    | lt.alert.category_t.storage_notification
    | lt.alert.category_t.piece_progress_notification
    | lt.alert.category_t.peer_notification
)
_EVERYTHING = (("0.0.0.0", "255.255.255.255"), ("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"))
_SAID_PORT = re.compile(rb"-SL([0-9]{5})-")
_NO_TLS_GROUP = "[dh params]"
"""libtorrent wants parameters of a key exchange that TLS 1.3 does not have, and says so for each certificate."""


class Torrent:
    """One torrent of the session, in the Node's words. Piece numbers are libtorrent's: over all files."""

    def __init__(self, order: Add, layout: Any) -> None:
        self.content_id = order.content_id
        self.generation = order.generation
        self.paths = [file.path for file in order.files]
        self.handle: Any = None
        """libtorrent's, once it has it."""
        self.piece_length: int = layout.piece_length()
        by_root = _files_by_root(layout)
        self.numbers = [by_root[file.root] for file in order.files]
        self.firsts: list[int] = [layout.piece_index_at_file(number) for number in self.numbers]
        self.sizes: list[int] = [layout.file_size(number) for number in self.numbers]
        self.counts = [-(-size // self.piece_length) for size in self.sizes]
        self.ready = False
        self.wanted: set[int] = set()
        self.fresh: set[int] = set()
        """Wanted, passed its hash, not yet flushed."""
        self.flushing: set[int] | None = None
        self.flush_at = 0.0
        self.seen_at = 0.0
        self.waiting: list[int] = []
        """Brought by others, not yet known to libtorrent."""
        self.placing: set[int] = set()

    def pieces(self, file: int, raw: bytes) -> list[int]:
        return [self.firsts[file] + piece for piece in Pieces.from_bytes(self.counts[file], raw)]

    def split(self, pieces: Iterable[int]) -> dict[int, Pieces]:
        """By file."""
        chosen = sorted(set(pieces))
        found = {}
        for file, (first, count) in enumerate(zip(self.firsts, self.counts, strict=True)):
            low, high = bisect_left(chosen, first), bisect_left(chosen, first + count)
            if low < high:
                found[file] = Pieces.of(count, (piece - first for piece in chosen[low:high]))
        return found

    def read(self, piece: int) -> bytes:
        """A piece as it lies in its file. OSError."""
        [(file, only)] = self.split([piece]).items()
        number = next(iter(only))
        start = number * self.piece_length
        size = min(self.piece_length, self.sizes[file] - start)
        with open(self.paths[file], "rb") as source:
            source.seek(start)
            data = source.read(size)
        if len(data) != size:
            raise OSError(errno.EIO, "the file is shorter than it was")
        return data


def _files_by_root(layout: Any) -> dict[bytes, int]:
    """Number of each real file: there are others, which fill up to the next piece."""
    files = range(layout.num_files())
    return {layout.root(i).to_bytes(): i for i in files if not layout.file_flags(i) & lt.file_flags_t.flag_pad_file}


class Session:
    """Carries out orders; what happens goes to `report`."""

    def __init__(self, begin: Begin, report: Callable[[Report], None], wake: int) -> None:
        """`wake`: a descriptor that libtorrent writes to when there is something to drain. OSError, RuntimeError where
        nothing listens."""
        self._report = report
        self._authority = begin.authority
        self._keys = Keys(begin.certificate, begin.key)
        self._torrents: dict[Any, Torrent] = {}
        self._ending: dict[Any, tuple[str, Add | Failed | None]] = {}
        """By handle: of which content, and what is to begin or to be told when it has ended."""
        self._peers: dict[str, tuple[Peer, ...]] = {}
        self._tick_at = 0.0
        port = begin.port or free_port(begin.host)
        params = lt.session_params()
        params.settings = {**settings_of(begin, port), "alert_mask": _ALERTS}
        self._session = lt.session(params)
        everybody = lt.ip_filter()
        for start, end in _EVERYTHING:
            # Else neighbours in the same network are under no limit.
            everybody.add_rule(start, end, 1 << self._session.global_peer_class_id)
        self._session.set_peer_class_filter(everybody)
        self._filter()
        self._wait_until_it_listens(anywhere=begin.host in WILDCARDS)
        self._session.set_alert_fd(wake)
        report(Listening(port))

    def _wait_until_it_listens(self, *, anywhere: bool) -> None:
        """`anywhere`: one address of the machine is enough."""
        deadline = time.monotonic() + _LISTEN_S
        why = f"nothing listens after {_LISTEN_S:g} s"
        while time.monotonic() < deadline:
            for alert in self._session.pop_alerts():
                if isinstance(alert, lt.listen_succeeded_alert):
                    return
                if isinstance(alert, lt.listen_failed_alert):
                    why = alert.message()
                    if not anywhere:
                        raise RuntimeError(why)
            self._session.wait_for_alert(100)
        raise RuntimeError(why)

    # ---- orders --------------------------------------------------------------------------------------------------

    def carry_out(self, order: Order) -> None:
        """ValueError, KeyError, RuntimeError for what no Node would say."""
        match order:
            case Add():
                self._end(order.content_id, order)
            case Remove():
                self._end(order.content_id, None)
            case Allow():
                self._peers = order.peers
                self._filter()
                self._call()
            case Want():
                self._want(order)
            case Brought():
                if torrent := self._torrent(order.content_id):
                    torrent.waiting += torrent.pieces(order.file, order.pieces)
                    self._place(torrent)
            case Keys():
                self._keys = order
                for torrent in self._torrents.values():
                    self._show_keys(torrent.handle)
            case Begin():
                raise ValueError("it has begun already")

    def _torrent(self, content_id: str) -> Torrent | None:
        return next((torrent for torrent in self._torrents.values() if torrent.content_id == content_id), None)

    def _end(self, content_id: str, following: Add | Failed | None) -> None:
        torrent = self._torrent(content_id)
        if torrent is not None:
            del self._torrents[torrent.handle]
            self._ending[torrent.handle] = (content_id, following)
            # `torrent_removed_alert` comes when the last write of it is done.
            self._session.remove_torrent(torrent.handle)
            return
        for handle, (ending, _) in self._ending.items():
            if ending == content_id:
                self._ending[handle] = (content_id, following)
                return
        self._follow(content_id, following)

    def _follow(self, content_id: str, following: Add | Failed | None) -> None:
        match following:
            case Add():
                self._add(following)
            case Failed():
                self._report(following)
            case None:
                self._report(Removed(content_id))

    def _add(self, order: Add) -> None:
        params = lt.load_torrent_buffer(order.torrent)
        layout = params.ti.layout()
        torrent = Torrent(order, layout)
        held = [False] * layout.num_pieces()
        for number, file in enumerate(order.files):
            for piece in torrent.pieces(number, file.held):
                held[piece] = True
        params.save_path = order.folder
        params.renamed_files = dict(zip(torrent.numbers, torrent.paths, strict=True))
        params.have_pieces = held
        params.piece_priorities = [0] * len(held)
        # Web seeds are asked by the Node itself, with limits of its own.
        params.url_seeds = []
        params.trackers = []
        params.dht_nodes = []
        params.root_certificate = self._authority
        flags = lt.torrent_flags
        params.flags &= ~(flags.auto_managed | flags.paused)
        params.flags |= flags.disable_dht | flags.disable_lsd | flags.disable_pex | flags.apply_ip_filter
        torrent.handle = self._session.add_torrent(params)
        self._torrents[torrent.handle] = torrent
        self._show_keys(torrent.handle)

    def _show_keys(self, handle: Any) -> None:
        if self._keys.certificate:
            handle.set_ssl_certificate_buffer(self._keys.certificate, self._keys.key, "")

    def _want(self, order: Want) -> None:
        torrent = self._torrent(order.content_id)
        if torrent is None:
            return
        pieces = torrent.pieces(order.file, order.pieces)
        torrent.wanted.update(pieces)
        have = torrent.handle.status(lt.status_flags_t.query_pieces).pieces
        torrent.fresh.update(piece for piece in pieces if have[piece])
        # Pieces only: of a file that is left out libtorrent would write what it gets into a file of its own.
        torrent.handle.prioritize_pieces([(piece, 4) for piece in pieces if not have[piece]])

    def _place(self, torrent: Torrent) -> None:
        """Let libtorrent write once more what lies in the file, the same bytes: there is no other way to tell it."""
        most = max(1, PLACING_BYTES // torrent.piece_length)
        while torrent.ready and torrent.waiting and len(torrent.placing) < most:
            piece = torrent.waiting.pop()
            if not torrent.handle.have_piece(piece):
                try:
                    data = torrent.read(piece)
                except OSError as error:
                    self._fail(torrent, error.errno or 0, str(error))
                    return
                torrent.placing.add(piece)
                torrent.handle.add_piece(piece, data, 0)

    # ---- who may connect -----------------------------------------------------------------------------------------

    def _filter(self) -> None:
        rules = lt.ip_filter()
        for start, end in _EVERYTHING:
            rules.add_rule(start, end, 1)
        for peers in self._peers.values():
            for peer in peers:
                rules.add_rule(peer.host, peer.host, 0)
        self._session.set_ip_filter(rules)

    def _call(self) -> None:
        """Connect to whoever was named and is not there."""
        for torrent in self._torrents.values():
            named = self._peers.get(torrent.content_id, ())
            if not named or not torrent.ready:
                continue
            there = torrent.handle.get_peer_info()
            here = {(info.ip[0], _listens(info)) for info in there}
            for peer in named:
                if (peer.host, peer.port) not in here:
                    torrent.handle.connect_peer((peer.host, peer.port))

    # ---- what happens --------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take note of what libtorrent says. An alert is dead, and reading it a crash, once the next ones are taken:
        so none leaves this loop."""
        for alert in self._session.pop_alerts():
            if isinstance(alert, lt.alerts_dropped_alert):
                raise RuntimeError("libtorrent had more to say than there is room for")
            if isinstance(alert, lt.torrent_removed_alert):
                if (ended := self._ending.pop(alert.handle, None)) is not None:
                    self._follow(*ended)
            elif isinstance(alert, lt.torrent_alert) and (torrent := self._torrents.get(alert.handle)) is not None:
                self._note(torrent, alert)

    def _note(self, torrent: Torrent, alert: Any) -> None:
        match alert:
            case lt.piece_finished_alert():
                if alert.piece_index in torrent.placing:
                    torrent.placing.discard(alert.piece_index)
                    self._place(torrent)
                elif alert.piece_index in torrent.wanted:
                    torrent.fresh.add(alert.piece_index)
            case lt.torrent_checked_alert():
                torrent.ready = True
                self._report(Ready(torrent.content_id, torrent.generation))
                self._place(torrent)
                self._call()
            case lt.cache_flushed_alert():
                self._flushed(torrent)
            case lt.peer_ban_alert():
                host, port = alert.ip
                self._report(Banned(torrent.content_id, host, port))
            case lt.hash_failed_alert() if alert.piece_index in torrent.placing:
                # It has rotted since it was brought: nobody is to blame, and it is not given away.
                torrent.placing.discard(alert.piece_index)
                self._place(torrent)
            case lt.hash_failed_alert():
                [(file, pieces)] = torrent.split([alert.piece_index]).items()
                self._report(Corrupt(torrent.content_id, file, next(iter(pieces))))
            case lt.file_error_alert() | lt.torrent_error_alert():
                if _NO_TLS_GROUP not in alert.message():
                    self._fail(torrent, alert.error.value(), alert.message())
            case lt.fastresume_rejected_alert():
                self._fail(torrent, 0, alert.message())

    def _fail(self, torrent: Torrent, code: int, message: str) -> None:
        """Once: a disk that is full would else be told thousands of times."""
        if torrent.handle in self._torrents:
            failed = Failed(torrent.content_id, torrent.generation, code in _FULL, message[:500])
            self._end(torrent.content_id, failed)

    def _flush(self, torrent: Torrent, now: float) -> None:
        if torrent.fresh and torrent.flushing is None and now >= torrent.flush_at:
            torrent.flushing, torrent.fresh = torrent.fresh, set()
            torrent.flush_at = now + FLUSH_S
            torrent.handle.flush_cache()

    def _flushed(self, torrent: Torrent) -> None:
        # One flush that libtorrent began by itself may be taken for ours, a moment too early: it is read back anyway.
        if torrent.flushing is not None:
            if time.monotonic() >= torrent.seen_at:
                # Before what it brought: whoever brought it is known by then.
                self._see(torrent)
            for file, pieces in torrent.split(torrent.flushing).items():
                self._report(Written(torrent.content_id, torrent.generation, file, pieces.to_bytes()))
            torrent.flushing = None

    def turn(self, now: float) -> None:
        """What is due by the clock."""
        for torrent in self._torrents.values():
            self._flush(torrent, now)
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._report(Alive())
            for torrent in self._torrents.values():
                if torrent.ready:
                    self._see(torrent)
            self._call()

    def _see(self, torrent: Torrent) -> None:
        torrent.seen_at = time.monotonic() + SEEN_S
        self._report(_seen(torrent))

    @property
    def busy(self) -> bool:
        """Whether something is to be flushed soon."""
        return any(torrent.fresh for torrent in self._torrents.values())


def _listens(info: Any) -> int:
    """The port at which the other end takes connections: the one that was called, or what its name says."""
    if info.flags & lt.peer_info.local_connection:
        port: int = info.ip[1]
        return port
    said = _SAID_PORT.match(info.pid.to_bytes())
    return int(said[1]) if said else 0


def _seen(torrent: Torrent) -> Seen:
    infos = torrent.handle.get_peer_info()
    status = torrent.handle.status(0)
    # Empty for who has all: it needs nothing.
    found = torrent.handle.piece_availability() if infos else []
    available = _available(torrent, found)
    return Seen(
        torrent.content_id,
        torrent.generation,
        tuple(pieces.to_bytes() for pieces in available),
        tuple(
            PeerFigures(info.ip[0], info.ip[1], _listens(info), info.total_download, info.payload_down_speed)
            for info in infos
            if not info.flags & (lt.peer_info.connecting | lt.peer_info.handshake)
        ),
        status.total_payload_download,
        status.total_payload_upload,
    )


def _available(torrent: Torrent, found: list[int]) -> list[Pieces]:
    """By file: the pieces that somebody has. `found`: how many have each; empty: nobody has any."""
    if not found:
        return [Pieces(count) for count in torrent.counts]
    # As the digits of a number, the last piece first: of a hundred thousand pieces in milliseconds.
    return [
        Pieces(count, int(bytes(48 + (has > 0) for has in reversed(found[first : first + count])), 2))
        for first, count in zip(torrent.firsts, torrent.counts, strict=True)
    ]


def detach(parent: int) -> None:
    """End with the Node, at once: what it claimed to be fetching is free for others then. Leave Ctrl-C to it; leave no
    memory with keys behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(EXIT_ORPHAN)


def serve(channel: socket.socket) -> None:
    """Until the Node closes its end."""
    orders: Frames[Order] = Frames(Order, ORDER_BYTES)
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    session: Session | None = None
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    while True:
        pause_s = FLUSH_S if session is not None and session.busy else TICK_S
        ready = {descriptor for descriptor, _ in poll.poll(pause_s * 1000)}
        if channel.fileno() in ready:
            data = channel.recv(_READ_BYTES)
            if not data:
                return
            for order in orders.feed(data):
                if session is not None:
                    session.carry_out(order)
                elif isinstance(order, Begin):
                    session = Session(order, lambda report: channel.sendall(frame(report)), wake_write)
                else:
                    raise ValueError("it has not begun")
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
        if session is not None:
            session.drain()
            session.turn(time.monotonic())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("channel", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args(arguments)
    detach(given.parent)
    serve(socket.socket(fileno=given.channel))
    # Not by way of libtorrent's own farewell, which takes seconds: what it holds back was never promised to anybody.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
