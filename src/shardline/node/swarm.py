"""The private swarm of a cluster, as one Node sees it: BitTorrent with the Nodes that the Tracker names, nobody else.

Owns the BitTorrent process (started, restarted a few times, given up), who is named to it, its keys and limits. A fetch
asks `source`; without BitTorrent there is none, and pieces come by HTTP. Without the cluster's keys it is spoken on
loopback only: nothing but addresses would keep strangers out. Artifacts are swarm_torrent.py's. Shown by
tests/node/test_swarm.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from shardline.artifact.store import StoredArtifact
from shardline.errors import ShardlineError
from shardline.model.engine import Restarts
from shardline.node.bans import Bans
from shardline.node.swarm_torrent import READY_S, SwarmTorrent, torrent_of
from shardline.settings import Settings
from shardline.transport.addresses import is_loopback
from shardline.transport.pace import Pace
from shardline.transport.tls import ClusterTls, Pems
from shardline.transport.torrent_messages import Alive, Allow, Begin, Keys, Listening, Peer, Remove, Removed, Report
from shardline.transport.torrent_process import TorrentProcess, missing, torrent_process
from shardline.wire.artifacts import Source

SOURCES_S = 3.0
"""The Tracker is asked so often who is in the swarm: also by who only gives, to let them in."""
SHARE = 0.75
"""Of a limit on bytes, what BitTorrent takes at most: the rest, and what it leaves, is for pieces over HTTP."""

log = structlog.get_logger(__name__)

AskSources = Callable[[str], Awaitable[Sequence[Source]]]
_NO_KEYS = Pems(b"", b"", b"")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9.]+):([0-9]{1,5})")


class Swarm:
    """`run()` it beside the Node, until cancelled. Artifacts may come and go before and while it runs."""

    def __init__(
        self,
        settings: Settings,
        host: str,
        sources: AskSources,
        *,
        environment: Mapping[str, str],
        tls: ClusterTls | None = None,
        download_pace: Pace | None = None,
        upload_pace: Pace | None = None,
        bans: Bans | None = None,
        on_banned: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`host`: where the Node listens. `sources`: asks the Tracker about a content. The paces are those of pieces
        over HTTP: what BitTorrent moved is taken from them. `bans`: those of all ways together; `on_banned` hears of a
        Node that gave a wrong piece by this one."""
        self.port: int | None = None
        """For others: `Advertisement.bittorrent_port`. None while nothing listens."""
        self.settled = asyncio.Event()
        """Set once it listens, or will not."""
        self._last_port = 0
        self.off = _why_not(settings, host, tls)
        """Why there is no BitTorrent here; None: there is."""
        self._settings = settings
        self._host = host
        self._sources = sources
        self._environment = environment
        self._tls = tls
        self._paces = (download_pace, upload_pace)
        self._charged = (0, 0)
        self._bans = Bans() if bans is None else bans
        self._on_banned = on_banned
        self._torrents: dict[str, SwarmTorrent] = {}
        self._process: TorrentProcess | None = None
        self._begun: set[str] = set()
        """Those that the process was told of."""
        self._shown = _NO_KEYS
        self._allowed: dict[str, tuple[Peer, ...]] = {}
        self._removing: dict[str, asyncio.Event] = {}
        self._news = asyncio.Event()

    def put(self, artifact: StoredArtifact) -> None:
        """Give its pieces away from now on, and let fetches ask for it. Who opened it closes it, after `take`.
        Errors: those of `torrent_of`."""
        if self.off is None and artifact.content_id not in self._torrents:
            torrent = SwarmTorrent(artifact, torrent_of(artifact), self._bans, self._on_banned)
            self._torrents[artifact.content_id] = torrent
            self._news.set()

    async def take(self, content_id: str) -> None:
        """When this returns, nothing of it is read or written any more. Idempotent."""
        torrent = self._torrents.pop(content_id, None)
        why = "it was taken away"
        process = self._process
        if torrent is not None and process is not None and content_id in self._begun:
            self._begun.discard(content_id)
            torrent.leave(why)
            try:
                await self._removed(process, content_id)
            finally:
                torrent.lost(why)
            return
        if torrent is not None:
            torrent.lost(why)
        if (removed := self._removing.get(content_id)) is not None:
            # Of the one that was there before, or of another caller.
            await removed.wait()

    async def _removed(self, process: TorrentProcess, content_id: str) -> None:
        """The process has neither the torrent nor its files any more; one that does not say so has ended."""
        removed = self._removing[content_id] = asyncio.Event()
        process.send(Remove(content_id))
        try:
            async with asyncio.timeout(READY_S):
                await removed.wait()
        except TimeoutError:
            process.kill()
        except BaseException:
            process.kill()
            raise
        finally:
            removed.set()
            self._removing.pop(content_id, None)

    def source(self, content_id: str) -> SwarmTorrent | None:
        """For `Fetch.add`, once a fetch. None where there is no BitTorrent."""
        return self._torrents.get(content_id) if self.off is None else None

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Until cancelled; where BitTorrent cannot be spoken, or not any more, it says so once and returns."""
        if self.off is not None:
            self.settled.set()
            log.info("bittorrent_off", reason=self.off, goes_on="pieces come over HTTP")
            return
        async with asyncio.TaskGroup() as group:
            naming = group.create_task(self._name_peers())
            await self._live()
            naming.cancel()

    # ---- the process ---------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Returns when it has ended too often."""
        restarts = Restarts(self._settings)
        while True:
            began, reason = _now(), "it ended"
            try:
                await self._one_life()
            except ShardlineError as error:
                reason = error.message
            pause_s = restarts.next_delay_s(_now() - began)
            if pause_s is None:
                self._give_up(reason)
                return
            log.warning("bittorrent_ended", reason=reason, again_in_s=pause_s, restarts=restarts.count)
            await asyncio.sleep(pause_s)

    async def _one_life(self) -> None:
        pems = self._shown = self._pems()
        queue = max(self._settings.bittorrent_queue_bytes, 1 << 20)
        begin = Begin(
            self._host,
            self._last_port or self._settings.bittorrent_port,
            pems.authority.decode("ascii"),
            pems.certificate.decode("ascii"),
            pems.key.decode("ascii"),
            _share(self._settings.fetch_bytes_per_s),
            _share(self._settings.upload_bytes_per_s),
            queue,
            self._settings.bittorrent_connections,
        )
        why = "it was stopped"
        try:
            async with torrent_process(begin, self._environment) as process:
                self._process = process
                self.port = self._last_port = process.port
                self.settled.set()
                self._news.set()
                await self._tend(process)
                async for report in process.reports():
                    self._take(report)
                    if isinstance(report, Alive):
                        await self._tend(process)
        except ShardlineError as error:
            why = error.message
            if self.port is None:
                # It never listened: another program may have the port by now.
                self._last_port = 0
            raise
        except (ValueError, IndexError, KeyError) as error:
            why = f"BitTorrent on this machine: it said what cannot be: {error}"[:500]
            raise ShardlineError("source_failed", why) from None
        finally:
            self._process = self.port = None
            self._begun.clear()
            self._allowed = {}
            for removed in self._removing.values():
                removed.set()
            for torrent in self._torrents.values():
                torrent.lost(why)

    def _give_up(self, reason: str) -> None:
        log.error("bittorrent_given_up", reason=reason, goes_on="pieces come over HTTP")
        self.off = reason
        self.settled.set()

    def _take(self, report: Report) -> None:
        if isinstance(report, Alive | Listening):
            return
        if isinstance(report, Removed):
            if (removed := self._removing.get(report.content_id)) is not None:
                removed.set()
            return
        torrent = self._torrents.get(report.content_id)
        if torrent is not None:
            torrent.take(report)

    async def _tend(self, process: TorrentProcess) -> None:
        """Tell it what has changed: artifacts, what the store holds, who may connect, keys."""
        for content_id, torrent in list(self._torrents.items()):
            state = await asyncio.to_thread(torrent.state)
            if self._torrents.get(content_id) is not torrent:
                continue
            if content_id in self._begun:
                torrent.follow(state)
            elif content_id not in self._removing:
                self._begun.add(content_id)
                torrent.begin(process.send, process.kill, state)
        self._allow(process)
        if (pems := self._pems()) != self._shown:
            self._shown = pems
            process.send(Keys(pems.certificate.decode("ascii"), pems.key.decode("ascii")))
        self._charge()

    def _allow(self, process: TorrentProcess) -> None:
        allowed = {content_id: torrent.allowed() for content_id, torrent in self._torrents.items()}
        if allowed != self._allowed:
            self._allowed = allowed
            process.send(Allow(allowed))

    def _charge(self) -> None:
        """What was moved since the last time is taken from what HTTP may move."""
        moved = (
            sum(torrent.received_bytes for torrent in self._torrents.values()),
            sum(torrent.sent_bytes for torrent in self._torrents.values()),
        )
        for pace, now, before in zip(self._paces, moved, self._charged, strict=True):
            if pace is not None and now > before:
                pace.place(_now(), now - before)
        self._charged = moved

    def _pems(self) -> Pems:
        return _NO_KEYS if self._tls is None else self._tls.pems

    # ---- who is in it --------------------------------------------------------------------------------------------

    async def _name_peers(self) -> None:
        """Ask the Tracker, again and again. While it is away, those that were named stay."""
        while True:
            for content_id, torrent in list(self._torrents.items()):
                try:
                    sources = await self._sources(content_id)
                except ShardlineError as error:
                    log.debug("sources_unknown", reason=error.message)
                    continue
                torrent.peers = {peer: one.node for one in sources if (peer := _peer(one)) is not None}
            if self._process is not None:
                self._allow(self._process)
            self._news.clear()
            try:
                async with asyncio.timeout(SOURCES_S):
                    await self._news.wait()
            except TimeoutError:
                continue


def _peer(source: Source) -> Peer | None:
    """Where a Node takes BitTorrent connections, if it does: an address of one machine, and a port. What else stands
    there, whoever wrote it, is as nothing; so is an address with a zone, which libtorrent cannot keep apart."""
    found = _ADDRESS.fullmatch(source.bittorrent or "")
    if found is None:
        return None
    try:
        address = ipaddress.ip_address(found[1].strip("[]"))
    except ValueError:
        return None
    port = int(found[2])
    if address.is_unspecified or address.is_multicast or not 0 < port < 65536:
        return None
    return Peer(str(address), port)


def _why_not(settings: Settings, host: str, tls: ClusterTls | None) -> str | None:
    if not settings.bittorrent_connections:
        return "bittorrent_connections is 0"
    if (why := missing()) is not None:
        return why
    if tls is None and not is_loopback(host):
        return "the cluster has no keys, and this Node listens to other machines"
    if tls is not None and not tls.pems.certificate:
        return "this Node has no certificate"
    return None


def _share(limit: int) -> int:
    return max(1, int(limit * SHARE)) if limit else 0


def _now() -> float:
    return asyncio.get_running_loop().time()
