"""Pieces of one Model Artifact, brought into the store of this machine from whoever has them.

Owns whom to ask: the Nodes that the Tracker names, asked for again as long as a fetch runs, BitTorrent with them where
there is any, and the web seeds of the publisher; who gave a wrong piece is banned for a while. Where nobody has what is
missing it says so, waits and tries again. How pieces travel is artifact/fetch.py's and transport/piece_client.py's.
Shown by tests/node/test_artifact_pieces.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import structlog

from shardline.artifact.fetch import Fetch, FetchProgress
from shardline.artifact.sources import PlacingSource
from shardline.artifact.sources import Source as PieceSource
from shardline.artifact.store import StoredArtifact, Wanted
from shardline.artifact.stored_shard import drop_damaged
from shardline.errors import ShardlineError
from shardline.node.bans import Bans
from shardline.node.swarm import Swarm
from shardline.options import Announce
from shardline.settings import Settings
from shardline.transport.http_client import HttpClient
from shardline.transport.pace import Pace
from shardline.transport.piece_client import NodePieces, PieceFile, WebSeed
from shardline.wire.artifacts import SOURCES_LIMIT, Fetching, Source
from shardline.wire.manifest import Manifest

SOURCES_S = 3.0
"""The Tracker is asked so often who has pieces, while some are missing."""
AGAIN_S = 10.0
"""A source that was given up is tried again after so long, if the Tracker still names it."""
SOURCES_AT_A_TIME = 2 * SOURCES_LIMIT
"""No more are asked, whomever a Tracker names."""
_ROUNDS = 3
"""So often headers are fetched that are found damaged; then the disk is to blame."""
SPACE_WAIT_S = 60.0
"""A disk that gets full is waited for so long, then the fetch fails. What is held stays."""

log = structlog.get_logger(__name__)

AskSources = Callable[[], Awaitable[Sequence[Source]]]


def piece_files(manifest: Manifest) -> list[PieceFile]:
    """The files of an artifact as sources need to know them."""
    return [
        PieceFile(entry.pieces_root, entry.size, manifest.piece_length, manifest.torrent_path(entry))
        for entry in manifest.files
    ]


class ArtifactPieces:
    """One opened artifact, and the ways to get more of it. Fetches run one at a time."""

    def __init__(
        self,
        artifact: StoredArtifact,
        *,
        sources: AskSources,
        client: HttpClient,
        settings: Settings,
        announce: Announce,
    ) -> None:
        """`sources`: asks the Tracker. `client`: with the cluster's credential or keys; web seeds get another."""
        self.artifact = artifact
        self.fetching: Fetching | None = None
        """What is fetched now, for others."""
        self.doing: str | None = None
        """The same for people; also, why it waits."""
        self.swarm: Swarm | None = None
        """BitTorrent with the same Nodes, where there is any."""
        self.pace = Pace(settings.fetch_bytes_per_s)
        self.bans = Bans()
        """Nodes, by their ids, and web seeds, whatever the way by which the wrong bytes came."""
        self._sources = sources
        self._client = client
        self._settings = settings
        self._announce = announce
        self._files = piece_files(artifact.bundle.manifest)
        self._strangers = HttpClient(settings)
        self._accused: list[str] = []
        self._turn = asyncio.Lock()
        self._waiting_for = ""

    def accuse(self, node: str) -> None:
        """A Node gave a wrong piece, and is banned: the Tracker is to hear of it."""
        if node not in self._accused:
            self._accused.append(node)

    def accused(self) -> list[str]:
        """The Nodes that gave wrong pieces since this was asked last."""
        told, self._accused = self._accused, []
        return told

    async def aclose(self) -> None:
        """Free the connections to web seeds. The artifact is closed by who opened it."""
        await self._strangers.aclose()

    async def bring_headers(self) -> None:
        """The pieces with the headers of all files, hashed once more: they are read before all others, and one that
        has rotted would else be taken for a publisher's lie. Errors as of `bring`, and `artifact_incomplete`."""
        length = self.artifact.bundle.manifest.piece_length
        headers = {n: range(-(-e.data_offset // length)) for n, e in enumerate(self.artifact.bundle.manifest.files)}
        for _ in range(_ROUNDS):
            await self._bring(headers, None, 0)
            if not await asyncio.to_thread(drop_damaged, self.artifact, headers):
                return
        raise ShardlineError("artifact_incomplete", "pieces with headers are damaged as soon as they are on the disk")

    async def bring(self, first: int, last: int, beside_bytes: int = 0) -> None:
        """Return when all pieces of Shard [first, last) are held, however long nobody has them. `beside_bytes`: what
        will be made of them on the same disk, which must have room for both.

        Errors: `disk_full`, before the first byte or when it gets full and stays so; `state_unwritable`.
        """
        await self._bring(self.artifact.wanted(first, last), (first, last), beside_bytes)

    async def _bring(self, wanted: Wanted, layers: tuple[int, int] | None, beside_bytes: int) -> None:
        async with self._turn:
            while await asyncio.to_thread(self.artifact.missing, wanted):
                try:
                    await self._fetch(wanted, layers, beside_bytes)
                except ShardlineError as error:
                    if error.code != "artifact_unavailable":
                        raise
                    self._wait_for(error.message)
                    await asyncio.sleep(SOURCES_S)
                finally:
                    self.fetching = None
            self._waiting_for, self.doing = "", None

    async def _fetch(self, wanted: Wanted, layers: tuple[int, int] | None, beside_bytes: int) -> None:
        fetch = Fetch(
            self.artifact,
            wanted,
            connections=self._settings.fetch_connections,
            space_wait_s=SPACE_WAIT_S,
            beside_bytes=beside_bytes,
            progress=lambda told: self._tell(told, layers),
            banned=lambda name: self._ban(known.nodes.get(name), name),
        )
        known = _Known(fetch, self.bans)
        known.add(self._web_seeds())
        known.add(self._swarming())
        known.add(self._named(await self._asked()))
        failure: ShardlineError | None = None
        async with asyncio.TaskGroup() as tasks:
            naming = tasks.create_task(self._name_sources(known))
            try:
                await fetch.run()
            except ShardlineError as error:
                failure = error
            finally:
                naming.cancel()
                self._account(fetch.progress())
        if failure is not None:
            raise failure

    def _ban(self, node: str | None, name: str) -> None:
        """`node`: which one the source `name` is; None: a web seed."""
        if self.bans.ban(node or name, _now()) and node is not None:
            self.accuse(node)

    def _account(self, told: FetchProgress) -> None:
        """Who gave what, at the end of a fetch."""
        given = {source.name: source.fetched_bytes for source in told.sources if source.fetched_bytes}
        banned = self.bans.names(_now())
        log.info("pieces_fetched", bytes=told.fetched_bytes, of=told.total_bytes, sources=given, banned=banned)

    async def _name_sources(self, known: _Known) -> None:
        while True:
            await asyncio.sleep(SOURCES_S)
            known.add(self._swarming())
            known.add(self._named(await self._asked()))

    def _web_seeds(self) -> Iterator[tuple[WebSeed, None]]:
        """Once a fetch: they are machines of strangers."""
        for url in self.artifact.bundle.manifest.transport.webseeds:
            yield WebSeed(self._strangers, url, self._files, self.pace), None

    def _swarming(self) -> Iterator[tuple[PlacingSource, None]]:
        if self.swarm is not None and (torrent := self.swarm.source(self.artifact.content_id)) is not None:
            yield torrent, None

    def _named(self, sources: Sequence[Source]) -> Iterator[tuple[NodePieces, str]]:
        """Those that it names, and which Node each is."""
        for named in sources:
            try:
                yield self._source(named.url), named.node
            except ShardlineError as error:
                log.warning("source_refused", url=named.url[:200], reason=error.message)

    async def _asked(self) -> Sequence[Source]:
        """Whom the Tracker names; nobody where it is away: those that are known go on."""
        try:
            return await self._sources()
        except ShardlineError as error:
            log.info("sources_unknown", reason=error.message)
            return ()

    def _source(self, url: str) -> NodePieces:
        return NodePieces(self._client, url, self.artifact.content_id, self._files, self.pace)

    def _wait_for(self, reason: str) -> None:
        """Said once for each new reason."""
        self.doing = f"waiting for pieces: {reason}"
        if reason != self._waiting_for:
            self._waiting_for = reason
            log.warning("pieces_unavailable", reason=reason, goes_on="asking")
            self._announce("waiting", reason=reason)

    def _tell(self, told: FetchProgress, layers: tuple[int, int] | None) -> None:
        if layers is not None:
            self.fetching = Fetching(
                first=layers[0],
                last=layers[1],
                done_bytes=told.done_bytes,
                total_bytes=told.total_bytes,
                bytes_per_s=told.bytes_per_s,
            )
        self.doing = f"{told.state}: {told.done_bytes} of {told.total_bytes} bytes, {told.bytes_per_s / 1e6:.1f} MB/s"
        if told.elsewhere is not None:
            self.doing += f"; process {told.elsewhere} of this machine fetches some of it"
        busiest = max(told.sources, key=lambda source: source.bytes_per_s, default=None)
        facts: dict[str, str | int] = {"done": told.done_bytes, "total": told.total_bytes}
        facts |= {"bytes_per_s": round(told.bytes_per_s), "fetched": told.fetched_bytes, "state": told.state}
        if busiest is not None and busiest.bytes_per_s > 0:
            facts["source"] = busiest.name
        if told.seconds_left is not None:
            facts["seconds_left"] = round(told.seconds_left)
        self._announce("fetching", **facts)


class _Known:
    """The sources that one fetch asks, and when each was added."""

    def __init__(self, fetch: Fetch, bans: Bans) -> None:
        self._fetch = fetch
        self._bans = bans
        self._since: dict[str, float] = {}
        self.nodes: dict[str, str] = {}
        """Which Nodes are asked, by the names of the sources."""

    def add(self, sources: Iterable[tuple[PieceSource | PlacingSource, str | None]]) -> None:
        """Those that are new, and those that were given up, or whose ban ended, a while ago."""
        now = _now()
        for source, node in sources:
            recent = now - self._since.get(source.name, -AGAIN_S) < AGAIN_S
            if recent or self._fetch.asks(source.name) or self._bans.holds(node or source.name, now):
                continue
            if self._fetch.active >= SOURCES_AT_A_TIME:
                return
            self._since[source.name] = now
            if node is not None:
                self.nodes[source.name] = node
            self._fetch.add(source)


def _now() -> float:
    return asyncio.get_running_loop().time()
