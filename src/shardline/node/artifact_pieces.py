"""Pieces of one Model Artifact, brought into the store of this machine from whoever has them.

Owns whom to ask: the Nodes that the Tracker names, asked for again as long as a fetch runs, BitTorrent with them where
there is any, and the web seeds of the publisher; who gave a wrong piece is not asked again. Where nobody has what is
missing it says so, waits and tries again. How pieces travel is artifact/fetch.py's and transport/piece_client.py's.
Shown by tests/node/test_artifact_pieces.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from shardline.artifact.fetch import Fetch, FetchProgress
from shardline.artifact.store import StoredArtifact, Wanted
from shardline.artifact.stored_shard import drop_damaged
from shardline.errors import ShardlineError
from shardline.node.swarm import Swarm
from shardline.options import Announce
from shardline.settings import Settings
from shardline.transport.http_client import HttpClient
from shardline.transport.pace import Pace
from shardline.transport.piece_client import NodePieces, PieceFile, WebSeed
from shardline.wire.artifacts import Fetching, Source
from shardline.wire.manifest import Manifest

SOURCES_S = 3.0
"""The Tracker is asked so often who has pieces, while some are missing."""
AGAIN_S = 10.0
"""A source that was given up is tried again after so long, if the Tracker still names it."""
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
        self._sources = sources
        self._client = client
        self._settings = settings
        self._announce = announce
        self._files = piece_files(artifact.bundle.manifest)
        self._strangers = HttpClient(settings)
        self._banned: set[str] = set()
        self._accused: list[str] = []
        self._turn = asyncio.Lock()
        self._waiting_for = ""

    def ban(self, node: str) -> None:
        """A Node gave a wrong piece by another way: ask it for nothing any more."""
        if node not in self._banned:
            self._banned.add(node)
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
        )
        for url in self.artifact.bundle.manifest.transport.webseeds:
            seed = WebSeed(self._strangers, url, self._files, self.pace)
            if seed.name not in self._banned:
                fetch.add(seed)
        if self.swarm is not None and (torrent := self.swarm.source(self.artifact.content_id)) is not None:
            fetch.add(torrent)
        known = _Known(fetch, self._banned, self._source)
        known.add(await self._asked())
        failure: ShardlineError | None = None
        async with asyncio.TaskGroup() as tasks:
            naming = tasks.create_task(self._name_sources(known))
            try:
                await fetch.run()
            except ShardlineError as error:
                failure = error
            finally:
                naming.cancel()
                self._account(fetch.progress(), known.nodes)
        if failure is not None:
            raise failure

    def _account(self, told: FetchProgress, nodes: Mapping[str, str]) -> None:
        """Who gave what, at the end of a fetch. `nodes`: by the names of sources."""
        banned = {source.name for source in told.sources if source.state == "banned"}
        self._accused += [nodes[name] for name in banned - self._banned if name in nodes]
        self._banned |= banned
        given = {source.name: source.fetched_bytes for source in told.sources if source.fetched_bytes}
        log.info(
            "pieces_fetched", bytes=told.fetched_bytes, of=told.total_bytes, sources=given, banned=sorted(self._banned)
        )

    async def _name_sources(self, known: _Known) -> None:
        while True:
            await asyncio.sleep(SOURCES_S)
            known.add(await self._asked())

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
        busiest = max(told.sources, key=lambda source: source.bytes_per_s, default=None)
        facts: dict[str, str | int] = {"done": told.done_bytes, "total": told.total_bytes}
        facts |= {"bytes_per_s": round(told.bytes_per_s), "fetched": told.fetched_bytes, "state": told.state}
        if busiest is not None and busiest.bytes_per_s > 0:
            facts["source"] = busiest.name
        if told.seconds_left is not None:
            facts["seconds_left"] = round(told.seconds_left)
        self._announce("fetching", **facts)


class _Known:
    """The Nodes that one fetch asks, and when they were added."""

    def __init__(self, fetch: Fetch, banned: set[str], source: Callable[[str], NodePieces]) -> None:
        self._fetch = fetch
        self._banned = banned
        self._source = source
        self._since: dict[str, float] = {}
        self.nodes: dict[str, str] = {}
        """Who is asked, by the name of the source."""

    def add(self, sources: Sequence[Source]) -> None:
        """Those that are new, and those that were given up a while ago."""
        now = asyncio.get_running_loop().time()
        active = {one.name for one in self._fetch.progress().sources if one.state == "active"}
        for named in sources:
            since = self._since.get(named.url)
            try:
                source = self._source(named.url)
            except ShardlineError as error:
                log.warning("source_refused", url=named.url[:200], reason=error.message)
                continue
            again = since is not None and source.name not in active and now - since > AGAIN_S
            banned = source.name in self._banned or named.node in self._banned
            if not banned and (since is None or again):
                self._since[named.url] = now
                self.nodes[source.name] = named.node
                self._fetch.add(source)
