"""What each process is started with: one frozen value a role, built by the CLI and passed down by argument.

Owns the shape of these values, and names that several rooms share, nothing else: the CLI parses, checks and fills them;
`node`, `gateway` and `tracker` read them. Secrets in them (credential, API keys) are kept out of `repr`, so that no log
or traceback shows one. A role's `async def run(options)` works until it is cancelled; it then frees everything and
returns within `drain_s`. Shown by tests/cli/test_options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from shardline.settings import Settings

StartPhase = Literal[
    "chosen",
    "placed",
    "listening",
    "inviting",
    "adopting",
    "offering",
    "fetching",
    "waiting",
    "verifying",
    "cutting",
    "loading",
    "testing",
    "ready",
    "draining",
]

LLAMA_ENGINES = frozenset({"llama", "llama-window"})
"""Engines that are llama.cpp: they read GGUF files as they are and reserve their KV when they load."""
LOAD_STEPS = 1000
"""`total` of `loading` where an engine counts neither layers nor bytes: thousandths."""
KEYS_FILE = "api-keys.json"
OPERATOR_FILE = "operator-key"
JOINED = "joined"
"""Names in the state folder: of the keys that a Gateway takes, of the one that the commands of this machine send, and
of the folder with a folder for each line for joining that was used here."""


STORE_FOLDER: Final = "artifacts"
"""Name in the state folder: pieces of Model Artifacts."""


class Announce(Protocol):
    """How a role tells whoever started it how far it is; never blocks, never raises.

    Of a Node without a file: `chosen` (name, content_id, reason): which model. `fetching` (done, total, bytes_per_s,
    source, seconds_left): bytes of its Shard. `waiting` (reason): nobody has what is missing, or nobody says who.
    `verifying` (done, total): pieces. `cutting` (done, total): bytes of the Shard file. `placed` (first, last,
    n_layers, model, reason): by the Tracker. Of a seeder: `adopting` (name): files are read; `offering` (name,
    content_id, held, total): bytes.

    `listening` (url): the socket is bound. `inviting` (line): what `node --join` takes, once; of a Tracker with
    cluster keys, at its start and after each join. `loading` (done, total): bytes or layers of a Shard. `testing`: the
    self-test runs. `ready`: it serves (of a Node: registered and counted for routes). `draining`: it ends.
    """

    def __call__(self, phase: StartPhase, /, **facts: str | int) -> None: ...


class LogReader(Protocol):
    """The last lines of the log of this process (`LogLines` of wire/messages.py): those behind number `after` of the
    process `boot`."""

    def __call__(self, boot: str, after: int) -> object: ...


def unannounced(phase: StartPhase, /, **facts: str | int) -> None:
    """For a role that nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerOptions:
    """`shardline tracker`."""

    settings: Settings
    host: str
    port: int
    """0: any free port; the process announces which."""
    credential: str = field(repr=False)
    """The cluster credential: every process of one cluster has the same."""
    state_dir: Path
    insecure_plain_http: bool = False
    keys: bool = False
    """A cluster with keys: HTTPS, certificates and lines for joining; what a Tracker beyond loopback has."""
    advertise: str | None = None
    """URL or `host[:port]` for lines for joining; None: made from the address that it listens on."""
    key_path: Path | None = None
    """Ed25519 key that signs tickets; None: `tracker.key` in the state directory, made where it is missing."""
    artifacts: tuple[Path, ...] = ()
    """Artifact folders that are offered to Nodes."""
    trusted_keys: tuple[bytes, ...] = ()
    """Public keys (PEM) of publishers, by one of which each of them must be signed."""
    allow_unsigned: bool = False
    """Without keys: offer what nobody signed."""
    announce: Announce = field(default=unannounced, repr=False, compare=False)
    spans: Callable[[Any], None] | None = field(default=None, repr=False, compare=False)
    """Takes spans (wire/spans.py) for export; None: none are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """`shardline gateway`."""

    settings: Settings
    tracker_url: str
    host: str
    port: int
    credential: str = field(repr=False)
    state_dir: Path
    join: str | None = field(default=None, repr=False)
    """Line by which it joins a cluster with keys, from a machine other than the Tracker's."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that clients must send; empty: everybody who reaches the listener may use it (loopback only)."""
    insecure_plain_http: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """PEM files of the public listener; both, or none."""
    finding_flags: tuple[str, ...] = ()
    """Global flags with which a command on this machine finds the same state folder."""
    announce: Announce = field(default=unannounced, repr=False, compare=False)
    spans: Callable[[Any], None] | None = field(default=None, repr=False, compare=False)
    """Takes spans (wire/spans.py) for export; None: none are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """`shardline node`. `first` and `last` are both given, or both None: the Tracker then places the Node."""

    settings: Settings
    tracker_url: str
    model: str | None
    """Path of a GGUF file, a safetensors folder, or a script for the scripted engine; None: what the Tracker offers,
    fetched into the store of this machine."""
    engine: str
    """Name of an engine: `llama`, `torch`, `scripted` or `llama-window`."""
    host: str
    port: int
    credential: str = field(repr=False)
    state_dir: Path
    first: int | None = None
    last: int | None = None
    memory_bytes: int | None = None
    """What placement may use; None: what the machine has free."""
    kv_tokens: int | None = None
    """KV capacity in tokens; None: as many as fit into the memory left."""
    threads: int = 0
    """Compute threads of the engine; 0: as the engine thinks right."""
    advertise_url: str | None = None
    """URL, or `host[:port]`, that others reach this Node by; None: made from host and port."""
    join: str | None = field(default=None, repr=False)
    """Line by which it joins a cluster with keys: HTTPS, a certificate, and the credential from there."""
    identity_path: Path | None = None
    """Ed25519 key of this Node; None: a fresh identity for this run."""
    inline: bool = False
    """Run the scripted engine inside the Node instead of in a worker process."""
    insecure_plain_http: bool = False
    content_id: str | None = None
    """Expected digest of the Model Artifact; another one is refused."""
    artifact: str | None = None
    """Without a model: content_id or name of the one to take; None: what the cluster lacks most."""
    engine_is_default: bool = False
    """Nobody chose the engine: where it does not read what the artifact consists of, another one does."""
    trusted_keys: tuple[bytes, ...] = ()
    """Public keys (PEM) of publishers; none: the content that the Tracker names is believed."""
    store: Path | None = None
    """Where pieces are kept; None: `artifacts` in the state directory."""
    look_in: tuple[Path, ...] = ()
    """Folders whose files are used, read only, where they are files of the artifact."""
    dtype: str | None = None
    context_length: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of this process; the engine's worker gets the few of them that engines need."""
    announce: Announce = field(default=unannounced, repr=False, compare=False)
    spans: Callable[[Any], None] | None = field(default=None, repr=False, compare=False)
    """Takes spans (wire/spans.py) for export; None: none are made."""
    log_lines: LogReader | None = field(default=None, repr=False, compare=False)
    """What Gateways may read of its log; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositeOptions:
    """`shardline node --upstream URL`: a Node whose engine is another server of OpenAI's API."""

    settings: Settings
    tracker_url: str
    upstream: str
    """Base URL of that API."""
    model: str
    """Its name there, and here."""
    host: str
    port: int
    credential: str = field(repr=False)
    state_dir: Path
    upstream_key: str | None = field(default=None, repr=False)
    upstream_ca: Path | None = None
    """Certificates (PEM) that an https upstream is verified by; None: the system's."""
    upstream_fields: frozenset[str] = frozenset()
    """What it does beside OpenAI's own fields."""
    places: int = 8
    """Sessions at a time."""
    context_length: int | None = None
    """None: as the upstream says."""
    advertise_url: str | None = None
    join: str | None = field(default=None, repr=False)
    identity_path: Path | None = None
    insecure_plain_http: bool = False
    announce: Announce = field(default=unannounced, repr=False, compare=False)
    spans: Callable[[Any], None] | None = field(default=None, repr=False, compare=False)
    """Takes spans (wire/spans.py) for export; None: none are made."""
    log_lines: LogReader | None = field(default=None, repr=False, compare=False)
    """What Gateways may read of its log; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeederOptions:
    """`shardline artifact seed --tracker URL`: a Node that computes nothing and gives pieces away."""

    settings: Settings
    tracker_url: str
    host: str
    port: int
    credential: str = field(repr=False)
    state_dir: Path
    store: Path
    bundles: tuple[Path, ...] = ()
    """Artifact folders, of which all files must be found."""
    look_in: tuple[Path, ...] = ()
    """Folders in which they are looked for, beside the artifact folders and what lies beside these."""
    content_ids: tuple[str, ...] = ()
    """Artifacts of the store, given as far as they are held; where no bundle is named either, all of them."""
    trusted_keys: tuple[bytes, ...] = ()
    """Public keys (PEM) of publishers, by one of which each bundle must be signed."""
    allow_unsigned: bool = False
    """Without keys: give what nobody signed."""
    advertise_url: str | None = None
    join: str | None = field(default=None, repr=False)
    identity_path: Path | None = None
    insecure_plain_http: bool = False
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of this process; that of BitTorrent gets the few of them that it needs."""
    announce: Announce = field(default=unannounced, repr=False, compare=False)
    log_lines: LogReader | None = field(default=None, repr=False, compare=False)
    """What Gateways may read of its log; None: nothing."""
