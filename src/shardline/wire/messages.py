"""Control messages: every JSON body that one Shardline process sends to another, as typed structs.

One set for all parties. Optional fields are there from the start and null until they are built. Field names are
the protocol: tests/wire/test_messages.py reads a stored corpus of the first encodings, and docs/reference has the
JSON Schema that is generated from here. Pure.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shardline.wire.composite import UpstreamCall
from shardline.wire.embedding import Embed as Embed
from shardline.wire.embedding import Embedded as Embedded
from shardline.wire.embedding import Pooling as Pooling
from shardline.wire.prefix import Prefix
from shardline.wire.sampling import BIAS_FORCES as BIAS_FORCES
from shardline.wire.sampling import GRAMMAR_BYTES as GRAMMAR_BYTES
from shardline.wire.sampling import Grammar as Grammar
from shardline.wire.sampling import Sampling as Sampling
from shardline.wire.stream import Beat as Beat
from shardline.wire.stream import Closed as Closed
from shardline.wire.stream import Failed as Failed
from shardline.wire.stream import Finished as Finished
from shardline.wire.stream import HopTimes as HopTimes
from shardline.wire.stream import Opened as Opened
from shardline.wire.stream import Progress as Progress
from shardline.wire.stream import SeamCount as SeamCount
from shardline.wire.stream import StreamEvent as StreamEvent
from shardline.wire.stream import Token as Token
from shardline.wire.stream import TokenLogprob as TokenLogprob

Phase = Literal["queued", "routing", "opening", "prefill", "decode", "completed", "failed", "cancelled"]
ENDED: frozenset[str] = frozenset({"completed", "failed", "cancelled"})

ShardState = Literal["loading", "testing", "ready", "failed", "draining"]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine a Node runs. `engine_class` joins routes: backend, library build, quantisation, dtype."""

    backend: str
    engine_class: str
    build: str
    dtype: str
    quantisation: str
    device: str
    threads: int
    commit: str | None = None
    """Source revision of the engine's library."""
    kv_type: str | None = None
    """What keys and values are kept in."""
    context_tokens: int | None = None
    """KV tokens that the engine's buffer has room for."""


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    alive: bool
    running_step_age_ms: float | None = None
    restarts: int = 0
    pid: int | None = None
    last_error: str | None = None


class KvInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Hot KV State of a Node, in tokens; `reserved` and `cached` together are never more than `capacity`."""

    capacity_tokens: int = 0
    used_tokens: int = 0
    """In the caches of open sessions: what the engine reports of all its caches, less `cached`."""
    reserved_tokens: int = 0
    """Promised to open sessions."""
    cached_tokens: int = 0
    """Kept of sessions that have ended, for prompts that begin alike; gives way to any session."""
    sessions: int = 0


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured by the self-test, then a rolling median: one decode row, one prefill row."""

    decode_ms: float
    prefill_ms_per_row: float


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One Shard as its Node advertises it. Layers are half-open: [first, last)."""

    model: str
    content_id: str
    first: int
    last: int
    n_layers: int
    state: ShardState
    reason: str | None = None
    layout_in: str
    layout_out: str
    """Digests of the Seam layouts in front of and behind this Shard."""
    prefill_chunk: int
    context_length: int
    vocab_size: int
    kv_bytes_per_token: int
    rollback: bool = False
    text_digest: str | None = None
    times: StepTimes | None = None
    tensors_digest: str | None = None
    composite: bool = False
    """The whole model, known by name alone, behind another server: nobody says how many layers it has, so they are
    told as one, [0, 1). No text bundle, no token ids: sessions pass requests on (`OpenSession.call`)."""


class NodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    step_body_bytes: int
    queue_bytes: int


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/node` with the cluster credential, and what a Node registers with."""

    id: str
    protocol: int
    version: str
    url: str
    pid: int
    host: str
    memory_bytes: int
    rss_bytes: int
    engine: EngineInfo
    health: EngineHealth
    shards: list[ShardInfo]
    kv: KvInfo
    limits: NodeLimits
    queue_bytes: int = 0
    pieces: dict[str, str] | None = None
    """Model Artifact pieces this Node can prove that it holds (null until the artifact plane is built)."""


class NodeProof(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/node?nonce=…` without credential: who answers here, and nothing else."""

    id: str
    protocol: int
    proof: str
    """Statement `Nonce`, signed by the Node's key in the domain "node"."""


class Nonce(msgspec.Struct, frozen=True, kw_only=True):
    nonce: str
    url: str


# Node <-> Tracker


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Signed by the Node (domain "register"). Covers the Tracker's nonce, the URL and the time."""

    public_key: str
    nonce: str
    time: float
    info: NodeInfo


class Signed(msgspec.Struct, frozen=True, kw_only=True):
    statement: str


class TrackerNonce(msgspec.Struct, frozen=True, kw_only=True):
    nonce: str
    protocol: int


class RegisterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    ticket_key: str
    """Ed25519 public key (hex) that signs this Tracker's tickets."""
    epoch: str
    """Changes when the Tracker restarts."""
    heartbeat_s: float
    waiting: list[tuple[int, int]] = []
    """Layer ranges of this Node's model that nobody serves yet."""


class PeerProbe(msgspec.Struct, frozen=True, kw_only=True):
    peer: str
    rtt_ms: float | None
    ok: bool


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Signed by the Node (domain "heartbeat"); `count` grows, so an old one cannot be played again."""

    node: str
    epoch: str
    count: int
    info: NodeInfo
    peers: list[PeerProbe] = []
    leaving: bool = False
    csr: str | None = None
    """Cluster with keys: a signing request (base64 of DER) for the Node's next certificate."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    url: str
    public_key: str = ""
    """Ed25519 key (hex) with which this Node proves that it is the one that answers a probe."""
    layers: tuple[int, int] | None = None
    """Of its Shard, in the list of a model's head Nodes."""


class HeartbeatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    peers: list[Peer] = []
    certificate: str | None = None
    """PEM, for the key of the heartbeat's signing request."""
    expelled: list[str] = []
    """Parties that are out, whose certificates have not ended yet: who calls with one is refused."""


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A Node asks which layers to take. `bytes_per_layer` and friends come from the model's header."""

    content_id: str
    engine_class: str
    n_layers: int
    memory_bytes: int
    layer_bytes: list[int]
    embedding_bytes: int
    output_bytes: int
    kv_reserve_bytes: int = 0
    legal_cuts: list[int] | None = None
    illegal_parts: list[tuple[int, int]] | None = None
    """Ranges between legal cuts that cannot be served all the same."""
    node: str | None = None
    """Who asks; asking again replaces the claim that the last answer left."""
    host: str | None = None
    host_memory_bytes: int | None = None
    """Memory of the machine, which all Nodes on `host` share. Null: the largest that one of them names."""


class PlacementAnswer(msgspec.Struct, frozen=True, kw_only=True):
    first: int
    last: int
    reason: str


# Gateway <-> Tracker


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    kv_tokens: int
    gateway: str
    avoid_nodes: list[str] = []
    avoid_links: list[tuple[str, str]] = []
    reusable_tokens: dict[str, int] | None = None
    """Node id -> tokens at the beginning of the prompt that this Node is believed to have kept."""
    prefix_digests: list[str] | None = None


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    node: str
    url: str
    first: int
    last: int
    engine_class: str
    content_id: str
    health: str = "ready"
    rtt_ms: float | None = None
    """Measured round trip to the next hop (of the tail: back to the head)."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A sticky Inference Route: hops cover [0, n_layers) in order, with no gap and no overlap."""

    id: str
    model: str
    content_id: str
    engine_class: str
    n_layers: int
    hops: list[Hop]
    prefill_chunk: int
    context_length: int
    vocab_size: int
    text_digest: str
    """Empty of a composite Node."""
    estimate_ms_per_token: float | None = None


class RouteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    route: Route
    tickets: list[str]
    """One signed `Ticket` a hop (domain "ticket")."""


class TicketPeer(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    url: str


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The Tracker's permission to open one session on one hop. Single use, until `not_after` (Unix seconds)."""

    id: str
    route: str
    gateway: str
    node: str
    hop: int
    hops: int
    content_id: str
    first: int
    last: int
    kv_tokens: int
    prefill_chunk: int
    previous: TicketPeer | None
    """None: the Gateway (the head of the route)."""
    next: TicketPeer
    """Where this hop pushes: the next hop, or of the tail the head."""
    layout_in: str
    layout_out: str
    not_after: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/routes/{id}/outcome`. `node` or `link` name what failed, if something did."""

    status: Literal["completed", "failed", "cancelled"]
    code: str | None = None
    node: str | None = None
    link: tuple[str, str] | None = None
    phase: str | None = None
    tokens: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One served model, as the Tracker sees it (`GET /v1/models` of the Tracker)."""

    model: str
    content_id: str
    engine_class: str
    n_layers: int
    context_length: int
    vocab_size: int
    text_digest: str | None
    text_nodes: list[Peer]
    """Ready head and tail Nodes: they serve the text bundle."""
    head_nodes: list[Peer]
    """Ready head Nodes: they tokenise."""
    ready: bool
    missing: list[tuple[int, int]]
    returning: bool = False
    """Not whole, but Nodes that are being loaded, or started again, would make it so: it comes back by itself."""
    kv_capacity_tokens: int
    """KV capacity of the smallest Node of the best route; the longest session that can ever be admitted."""
    composite: bool = False
    """Served by composite Nodes: known by name alone, without layers and token ids."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    models: list[ModelInfo]


# Gateway <-> Node


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/sessions`. Only the tail reads `sampling`; no field names a URL."""

    ticket: str
    key: str
    """32 hex digits; made by the Gateway, sent here and nowhere else."""
    prompt_tokens: int
    max_tokens: int
    sampling: Sampling = Sampling()
    layout_in: str
    layout_out: str
    prefix: Prefix | None = None
    """Null: nothing is reused, and nothing kept."""
    call: UpstreamCall | None = None
    """To a composite Node, instead of steps; `prompt_tokens` is then 0, as nobody knows it."""
    embed: Embed | None = None
    """Null: a text is wanted. Else the vector of the prompt, and `max_tokens` is 0; only the tail reads how."""


class Beats(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/beats`: a Gateway lives. One per Gateway and Node, for all its sessions there."""

    gateway: str


class Reject(msgspec.Struct, frozen=True, kw_only=True):
    entry: int
    code: str
    message: str = ""


class StepAck(msgspec.Struct, frozen=True, kw_only=True):
    rejected: list[Reject] = []


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str
    add_special: bool = False
    """Add the tokens that the model wants around a prompt (BOS)."""
    parse_special: bool = True
    """Read special tokens that stand in the text as such (chat templates need it)."""
    content_id: str | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]


LOG_LINES = 200
"""So many of its last log lines does a Node keep for others."""
LOG_CHARS = 400
"""The longest of them; what was longer is cut."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    """Counted from 1 since the process began."""
    time: float
    """Unix seconds."""
    level: str
    text: str
    """One line of printable characters."""


class LogLines(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/log?boot=B&after=N` of a Node: its last log lines, those behind N where B is still the same process."""

    boot: str
    """Of this process alone: another one counts from 1 again."""
    lines: list[LogLine]


class TextBundle(msgspec.Struct, frozen=True, kw_only=True):
    """All that a Gateway must know of a model to turn tokens into text, as MessagePack; its SHA-256 names it."""

    pieces: list[bytes]
    """The bytes of every token id (special tokens: their text)."""
    special: list[int]
    """Control tokens: never shown as text."""
    eog: list[int]
    """End-of-generation ids."""
    bos: int | None
    eos: int | None
    add_bos: bool
    chat_template: str | None
    context_length: int
    fim: dict[str, int] | None = None
