"""One artifact in the swarm of the cluster: what the BitTorrent process knows, what it is asked for, who gave what.

Owns the agreement of two bitmaps, the store's and the process's. A piece that others brought is told to the process;
one that the store lost makes it begin anew, without that piece. So does a run that ends early: the process then writes
nothing any more that others may be asked for. It owns no process (swarm.py) and believes none: what is said to be
written is read back by the fetch. Shown by tests/node/test_swarm.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from shardline.artifact.bundle import TORRENT_NAME, read_bundle_file
from shardline.artifact.sources import SourceProgress
from shardline.artifact.store import StoredArtifact
from shardline.artifact.torrent import TORRENT_BYTES_LIMIT
from shardline.errors import ShardlineError
from shardline.node.bans import Bans
from shardline.transport.addresses import host_port
from shardline.transport.torrent_messages import (
    Add,
    Banned,
    Brought,
    Corrupt,
    Failed,
    Order,
    Peer,
    PeerFigures,
    Ready,
    Seen,
    TorrentFile,
    Want,
    Written,
)
from shardline.wire.bitmap import Pieces

OFFER_S = 2.0
"""Who asks what the swarm has waits so long for somebody to be there."""
READY_S = 15.0
"""The process has so long to begin with a torrent, also anew."""
STALL_S = 10.0
"""Nothing at all came for so long …"""
SLOWEST_BYTES_PER_S = 64 << 10
"""… or a run takes longer than at this rate, and 30 s: it is given back, for others."""
_PATIENCE_S = 30.0
AGAIN_S = 2.0
"""After a torrent failed in the process (a full disk) it is tried again."""

log = structlog.get_logger(__name__)

Send = Callable[[Order], None]
TorrentReport = Ready | Written | Banned | Corrupt | Failed | Seen


class State(NamedTuple):
    """What the store says, at one moment."""

    paths: tuple[str, ...]
    held: tuple[Pieces, ...]


@dataclass(eq=False)
class Member:
    """Somebody who was seen in the swarm."""

    name: str
    blamed: bool = False
    """It gave something wrong, and it is not yet known what."""
    received_bytes: int = 0
    receives_per_s: int = 0
    bad: list[tuple[int, int]] = field(default_factory=list)
    connection: dict[tuple[str, int], int] = field(default_factory=dict)
    """Bytes of each of its connections that is open."""


@dataclass(eq=False)
class Run:
    """Pieces that the process was asked for and that are not yet written."""

    file: int
    left: Pieces
    written: Pieces
    since: float
    news: asyncio.Event = field(default_factory=asyncio.Event)
    failure: ShardlineError | None = None


class SwarmTorrent:
    """Also the source that a fetch asks (`artifact.sources.PlacingSource`)."""

    name = "BitTorrent"

    def __init__(self, artifact: StoredArtifact, raw: bytes, bans: Bans, on_banned: Callable[[str], None]) -> None:
        """`raw`: the torrent. `bans`: by names, of whatever way; `on_banned` is told of who gave a wrong piece here."""
        self.artifact = artifact
        self.peers: dict[Peer, str] = {}
        """Who was named, and as whom they are known."""
        self.received_bytes = 0
        self.sent_bytes = 0
        self.gone: str | None = "it has not begun"
        """Why no process has it."""
        self._raw = raw
        self._bans = bans
        self._on_banned = on_banned
        self._refused: set[str] = set()
        """Whom the process has banned, by itself: until the torrent begins anew."""
        self._send: Send | None = None
        self._kill: Callable[[], None] = lambda: None
        self._generation = 0
        self._ready = asyncio.Event()
        self._has: list[Pieces] = []
        self._vouched: list[Pieces] = []
        """Of what the process has, what the store held at some time."""
        self._paths: tuple[str, ...] = ()
        self._again_at = 0.0
        self._runs: list[Run] = []
        self._members: dict[str, Member] = {}
        self._available = self._none()
        self._seen_bytes = (0, 0)
        self._news_at = 0.0
        self._seen = asyncio.Event()

    # ---- towards the process -------------------------------------------------------------------------------------

    def state(self) -> State:
        """Blocking."""
        paths, held = [], []
        for file in self.artifact.files:
            some = file.held()
            held.append(some)
            # Of a file of another program that is not what it was nothing is held: what comes goes into our own.
            paths.append(str(file.path() if some else file.data_path))
        return State(tuple(paths), tuple(held))

    def begin(self, send: Send, kill: Callable[[], None], state: State) -> None:
        """A process is there. `kill` ends it at once."""
        self._send, self._kill = send, kill
        self._begin_anew(state)

    def leave(self, why: str) -> None:
        """The process is asked for nothing any more, and `lost` follows when it writes nothing any more."""
        self._send = None
        self.gone = why
        self._ready.clear()

    def lost(self, why: str) -> None:
        """The process is gone. Idempotent."""
        self._send = None
        self.gone = why
        self._ready.set()  # who waits for it learns that it is gone
        self._forget_connections()
        for run in self._runs:
            self._fail(run, _failed(why))

    def follow(self, state: State) -> None:
        """Tell the process what has changed in the store."""
        if self._send is None or not self._ready.is_set():
            return
        if self.gone is not None:
            if _now() >= self._again_at:
                self._begin_anew(state)
            return
        lost = any(vouched - held for vouched, held in zip(self._vouched, state.held, strict=True))
        # Who may come again is let in by a torrent that has just begun; nobody's work is ended for that.
        again = not self._runs and any(not self._bans.holds(name, _now()) for name in self._refused)
        if lost or again or state.paths != self._paths:
            self._begin_anew(state)
            return
        for number, held in enumerate(state.held):
            if new := held - self._has[number]:
                self._send(Brought(self.artifact.content_id, number, new.to_bytes()))
            self._has[number] |= held
            self._vouched[number] |= held

    def allowed(self) -> tuple[Peer, ...]:
        """Whom to call, and whom to let in."""
        now = _now()
        return tuple(peer for peer, name in self.peers.items() if not self._bans.holds(name, now))

    def _begin_anew(self, state: State) -> None:
        if self._send is None:
            return
        self._generation += 1
        self._refused.clear()
        self._ready.clear()
        self._paths = state.paths
        self._has, self._vouched = list(state.held), list(state.held)
        self._seen_bytes = (0, 0)
        self._forget_connections()
        files = tuple(
            TorrentFile(file.tree.root or b"", path, held.to_bytes())
            for file, path, held in zip(self.artifact.files, state.paths, state.held, strict=True)
        )
        folder = str(self.artifact.files[0].data_path.parent)
        self._send(Add(self.artifact.content_id, self._generation, self._raw, folder, files))

    # ---- what the process says -----------------------------------------------------------------------------------

    def take(self, report: TorrentReport) -> None:
        """ValueError, IndexError for what no honest process says."""
        if not isinstance(report, Banned | Corrupt) and report.generation != self._generation:
            return
        match report:
            case Ready():
                self.gone = None
                self._ready.set()
                for run in self._runs:
                    self._ask(run)
            case Written():
                self._written(report.file, Pieces.from_bytes(self.artifact.files[report.file].count, report.pieces))
            case Seen():
                self._note(report)
            case Banned():
                self._ban(report)
            case Corrupt():
                log.warning("piece_corrupt", content_id=report.content_id, file=report.file, piece=report.piece)
                for member in reversed(self._members.values()):
                    if member.blamed:
                        member.bad.append((report.file, report.piece))
                        member.blamed = False
                        break
            case Failed():
                self._failed(report)

    def _written(self, number: int, pieces: Pieces) -> None:
        self._has[number] |= pieces
        self._news_at = _now()
        for run in self._runs:
            if run.file == number and (came := run.left & pieces):
                run.left -= came
                run.written |= came
                run.news.set()

    def _note(self, seen: Seen) -> None:
        received, sent = seen.received_bytes, seen.sent_bytes
        if received > self._seen_bytes[0]:
            self._news_at = _now()
        self.received_bytes += max(0, received - self._seen_bytes[0])
        self.sent_bytes += max(0, sent - self._seen_bytes[1])
        self._seen_bytes = (received, sent)
        self._available = {
            number: Pieces.from_bytes(self.artifact.files[number].count, raw)
            for number, raw in enumerate(seen.available)
        }
        if any(self._available.values()):
            self._seen.set()
        open_now: dict[Member, dict[tuple[str, int], int]] = {member: {} for member in self._members.values()}
        for member in self._members.values():
            member.receives_per_s = 0
        for figures in seen.peers:
            member = self._member(figures)
            at = (figures.host, figures.port)
            member.received_bytes += max(0, figures.received_bytes - member.connection.get(at, 0))
            member.receives_per_s += figures.receives_per_s
            open_now.setdefault(member, {})[at] = figures.received_bytes
        for member, connection in open_now.items():
            member.connection = connection

    def _member(self, figures: PeerFigures) -> Member:
        name = self._name(Peer(figures.host, figures.listens or figures.port))
        return self._members.setdefault(name, Member(name))

    def _name(self, peer: Peer) -> str:
        """By where it takes connections; of who called us only the address is known, which may be enough."""
        if peer in self.peers:
            return self.peers[peer]
        names = [name for named, name in self.peers.items() if named.host == peer.host]
        return names[0] if len(names) == 1 else host_port(peer.host, peer.port)

    def _ban(self, report: Banned) -> None:
        at = (report.host, report.port)
        # Who called us did so from any port; who it is was seen before.
        name = next((one.name for one in self._members.values() if at in one.connection), self._name(Peer(*at)))
        self._members.setdefault(name, Member(name)).blamed = True
        self._refused.add(name)
        if self._bans.ban(name, _now()):
            log.warning("source_banned", source=name, content_id=report.content_id, transport=self.name)
            self._on_banned(name)

    def _failed(self, report: Failed) -> None:
        self.gone = report.message
        self._again_at = _now() + AGAIN_S
        self._ready.set()
        self._forget_connections()
        log.warning("torrent_failed", content_id=report.content_id, reason=report.message)
        for run in self._runs:
            code = "disk_full" if report.disk_full else "source_failed"
            self._fail(run, ShardlineError(code, f"{self.name}: {report.message}"))

    def _fail(self, run: Run, failure: ShardlineError) -> None:
        run.failure = failure
        run.news.set()

    def _forget_connections(self) -> None:
        self._available = self._none()
        self._seen.clear()
        for member in self._members.values():
            member.connection = {}
            member.receives_per_s = 0

    def _none(self) -> dict[int, Pieces]:
        return {number: Pieces(file.count) for number, file in enumerate(self.artifact.files)}

    # ---- towards a fetch -----------------------------------------------------------------------------------------

    async def offer(self) -> Mapping[int, Pieces]:
        """What those that are connected have together: it may grow."""
        try:
            async with asyncio.timeout(OFFER_S):
                await self._seen.wait()
        except TimeoutError:
            pass  # nobody is there: that is an offer, too
        return self._available

    async def place(self, number: int, first: int, end: int) -> AsyncGenerator[Pieces, None]:
        """As of `PlacingSource`. `disk_full`; `source_failed`, `artifact_incomplete` where others should be asked."""
        file = self.artifact.files[number]
        await asyncio.to_thread(file.prepare)
        await self._wait_until_ready()
        run = Run(number, Pieces.span(file.count, first, end), Pieces(file.count), _now())
        self._runs.append(run)
        deadline = _now() + _PATIENCE_S + (end - first) * file.tree.piece_length / SLOWEST_BYTES_PER_S
        self._news_at = _now()
        try:
            self._ask(run)
            while run.left or run.written:
                await self._news(run, deadline)
                came, run.written = run.written, Pieces(file.count)
                if came:
                    yield came
                elif run.failure is not None:
                    raise run.failure
        finally:
            self._runs.remove(run)
            if run.left:
                await self._call_back()

    def members(self) -> Sequence[SourceProgress]:
        """All that were seen, also those that have left."""
        now = _now()
        return [
            SourceProgress(
                name=f"{member.name} ({self.name})",
                state="banned" if self._bans.holds(member.name, now) else "active",
                fetched_bytes=member.received_bytes,
                bytes_per_s=float(member.receives_per_s),
                reason="it gave a piece that is not what the artifact says" if member.bad or member.blamed else None,
                bad_pieces=tuple(member.bad),
            )
            for member in self._members.values()
        ]

    def _ask(self, run: Run) -> None:
        if self._send is not None and run.left:
            self._send(Want(self.artifact.content_id, run.file, run.left.to_bytes()))

    async def _news(self, run: Run, deadline: float) -> None:
        """Wait until something of a run is written; raises where that takes too long."""
        while not run.news.is_set() and run.failure is None:
            now = _now()
            if now - self._news_at > STALL_S or now > deadline:
                if not run.left & self._available[run.file]:
                    raise ShardlineError("artifact_incomplete", "nobody in the swarm has these pieces any more")
                raise _failed("what was asked for does not come")
            try:
                async with asyncio.timeout(1.0):
                    await run.news.wait()
            except TimeoutError:
                continue
        run.news.clear()

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await self._ready.wait()
        except TimeoutError:
            self._kill()
            raise _failed(f"the torrent has not begun after {READY_S:g} s") from None
        if self._send is None or self.gone is not None:
            raise _failed(self.gone or "it has ended")

    async def _call_back(self) -> None:
        """Return when the process writes nothing any more but what the runs that go on asked for."""
        if self.gone is not None and self._ready.is_set():
            return
        try:
            if self._ready.is_set():
                state = await asyncio.to_thread(self.state)
                if self._ready.is_set():
                    # Else another run has done it meanwhile, without this one.
                    self._begin_anew(state)
            async with asyncio.timeout(READY_S):
                await self._ready.wait()
        except TimeoutError:
            # One that is dead writes nothing, either.
            self._kill()
        except BaseException:
            self._kill()
            raise


def torrent_of(artifact: StoredArtifact) -> bytes:
    """Its torrent, as the bundle in the store has it: it was checked when the artifact was opened. Blocking.
    `artifact_invalid` where it is gone by now."""
    return read_bundle_file(artifact.bundle, TORRENT_NAME, TORRENT_BYTES_LIMIT)


def _failed(why: str) -> ShardlineError:
    return ShardlineError("source_failed", f"BitTorrent: {why}")


def _now() -> float:
    return asyncio.get_running_loop().time()
