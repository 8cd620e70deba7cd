"""Messages of the artifact plane: what a Tracker offers, who has which pieces, and the challenge to prove it.

JSON bodies as typed structs, of the same contract as messages.py; that pieces are sets of bits is bitmap.py's. An
answer to a challenge is no JSON: artifact/possession.py. Pure. Shown by tests/wire/test_messages.py.
"""

from __future__ import annotations

from typing import Final

import msgspec

from shardline.wire.bitmap import HeldFile

ADVERTISEMENT_DOMAIN: Final = "pieces"
"""The word that a Node signs an `Advertisement` for (wire/tickets.py)."""
ADVERTISEMENT_S: Final = 60.0
"""An advertisement is true for so long; it is sent anew well before."""
ADVERTISE_EVERY_S: Final = 20.0
"""Pause between two advertisements of what has not changed."""
ADVERTISE_PAUSE_S: Final = 2.0
"""Least pause between two, whatever changes."""
POSSESSION_PATH: Final = "/v1/possession"
"""Where a Node answers a `Challenge`."""
CHALLENGE_BLOCKS: Final = 64
"""Most blocks of one challenge."""
SOURCES_LIMIT: Final = 64
"""Sources that are named to one Node at a time; it takes no more from any Tracker."""


class Fetching(msgspec.Struct, frozen=True, kw_only=True):
    """What a Node fetches now: the pieces of Shard [first, last) that it lacks."""

    first: int
    last: int
    done_bytes: int
    """Of `total_bytes`: held and read back, whether fetched or found on its own disk."""
    total_bytes: int
    bytes_per_s: float


class Advertisement(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/nodes/{id}/pieces`, signed by the Node (`ADVERTISEMENT_DOMAIN`): the pieces of one Model Artifact that
    it gives to others. It takes the place of the last one about the same content. Only what was read back and synced.
    """

    node: str
    content_id: str
    sequence: int
    """Grows with every advertisement of this Node, over restarts too: Unix time in milliseconds will do."""
    expires: float
    """Unix seconds, at most `ADVERTISEMENT_S` ahead."""
    files: list[HeldFile]
    """In any order; files of which nothing is held may be left out. [] takes all back."""
    bittorrent_port: int | None = None
    """Where it takes BitTorrent connections, at the address of its URL."""
    fetching: Fetching | None = None
    accused: list[str] = []
    """Nodes that gave it wrong bytes of this content since the last advertisement: the Tracker makes them prove
    themselves."""


class Seeder(msgspec.Struct, frozen=True, kw_only=True):
    """A Node that has pieces of an artifact, or fetches them."""

    node: str
    url: str
    """As the Node names it."""
    host: str
    """The machine that it runs on."""
    held_bytes: int
    servable: list[tuple[int, int]]
    """The longest layer ranges [first, last) of which it has every piece."""
    bittorrent: str | None = None
    """`host:port`."""
    fetching: Fetching | None = None
    proven: bool | None = None
    """Whether it could show blocks that were asked of it at random. Null: it was not judged yet. False: it is no source
    for others, and its Shard does not count for placement, until it can."""
    reason: str | None = None
    """Why not, where `proven` is false."""


class ArtifactInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One Model Artifact of the cluster. Of one that is served from files only (`offered` is false) the Tracker knows
    what its Shards say: name, layers, who serves them."""

    content_id: str
    name: str
    offered: bool
    """Whether the Tracker gives its bundle to whoever asks."""
    n_layers: int
    total_bytes: int | None = None
    manifest_digest: str | None = None
    """SHA-256 of the bundle's `manifest.json`, in hex."""
    publisher: str | None = None
    """Id of the key that signed the bundle, if that was asked for and found true."""
    architecture: str | None = None
    quantisation: str | None = None
    """The tensor type with most bytes."""
    coverage: list[int]
    """For each layer: how many Nodes a Node that lacks it could fetch it from, pieces of several Nodes not joined."""
    served: list[int]
    """For each layer: how many ready Shards hold it."""
    seeders: list[Seeder] = []


class ArtifactList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/artifacts`: sorted by name and content, offered ones first."""

    artifacts: list[ArtifactInfo]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A Node to fetch pieces from."""

    node: str
    url: str
    """As the Tracker dialled it: an address, never a name; in a cluster with keys it names the party."""
    same_host: bool = False
    """On the machine of the Node that asks."""
    bittorrent: str | None = None
    """`host:port`."""


class SourceList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/artifacts/{content_id}/sources?node=ID`: whom to ask, the nearest first; never the one that asks."""

    sources: list[Source]


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/possession` on a Node: show these blocks of 16 KiB, of pieces that it has advertised or serves.

    The Tracker draws them at random and names them: what the Node holds may have changed since it said so, and then two
    drawings from it would differ. The answer is made by `artifact.possession.answer`.
    """

    content_id: str
    blocks: list[tuple[int, int]]
    """(file number in the manifest, block number in that file); at most `CHALLENGE_BLOCKS`."""
