"""Every number that an operator may want to change, in one frozen Struct; read once, in the CLI.

Owns names, defaults and units. Times are seconds, sizes are bytes, KV is counted in tokens.
`docs/reference/settings.md` is generated from here.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 1
"""Major version of the Seam protocol and of the control messages (header `Shardline-Protocol`)."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All limits and intervals. Tests build one with other values; nothing mutates it."""

    # Liveness.
    beat_interval_s: float = 0.5
    """Pause between two signs of life, of a Node on each session stream and of a Gateway towards each Node."""
    beat_timeout_s: float = 2.5
    """Silence after which the other side of a session counts as lost (limit `heartbeat`)."""
    late_timer_s: float = 0.5
    """A timer that fires later than this begins anew once: nobody is declared lost for a pause of our own."""
    tracker_heartbeat_s: float = 1.0
    """Pause between two heartbeats of a Node to the Tracker."""
    tracker_expiry_s: float = 4.0
    """A Node silent for so long is in no new route."""
    # Waits, each named in the error that ends it.
    connect_s: float = 2.0
    """Opening a connection (limit `connect`)."""
    open_s: float = 5.0
    """From asking all Nodes of a route to the last answer (limit `open`)."""
    push_s: float = 2.5
    """From handing steps to the next Node to its answer; past it the link counts as lost (limit `push`)."""
    prefill_chunk_s: float = 120.0
    """One prefill chunk, waiting for room included (limit `prefill_chunk`)."""
    step_s: float = 60.0
    """One decode step in an engine (limit `step`)."""
    client_stall_s: float = 60.0
    """A client that reads nothing for so long is cancelled (limit `client_stall`)."""
    session_s: float = 3600.0
    """The whole of a Route Session (limit `session`)."""
    control_s: float = 5.0
    """One control request between processes of the cluster."""
    drain_s: float = 5.0
    """What runs may still run for so long when its process is told to end."""
    dial_back_s: float = 2.0
    """The Tracker calling a Node back at its URL, the whole exchange."""
    template_s: float = 2.0
    """Processor time for rendering a chat template; by the clock it may take five times as long (limit `template`)."""
    text_s: float = 30.0
    """Fetching a text bundle of some megabytes from a Node."""
    header_s: float = 10.0
    """Receiving the head of a request."""
    # Keep-alive: a client drops an idle connection before its server does.
    server_idle_s: float = 75.0
    """A server closes a connection that was idle for so long."""
    client_idle_s: float = 30.0
    """A client stops using one before that; must be less."""
    # Admission at the Gateway.
    queue_limit: int = 64
    """Requests that wait for a free route; the next one is refused with `queue_full`."""
    queue_wait_s: float = 30.0
    """How long one of them waits before `capacity`."""
    default_max_tokens: int = 1024
    """Tokens reserved for an answer whose request names no limit."""
    keep_alive_comment_s: float = 5.0
    """A silent stream carries a comment line at least this often."""
    telemetry_comment_s: float = 0.5
    """Least pause between two telemetry comments in a stream."""
    cors_origins: str = ""
    """Origins of web pages that may use the API from a browser, as http://localhost:3000, separated by commas.
    `*`: all, only where keys are asked for. Empty: none."""
    # Bodies and queues.
    api_body_bytes: int = 16 << 20
    """Largest request to the OpenAI API."""
    control_body_bytes: int = 1 << 20
    """Largest control message."""
    body_memory_bytes: int = 256 << 20
    """Memory for bodies over 64 KiB, and for what is made of them before a request begins. The next ones wait for room,
    then are refused (`resources_exhausted`)."""
    step_body_bytes: int = 64 << 20
    """Largest step document that a Node accepts."""
    header_bytes: int = 32 << 10
    """Largest head of a request."""
    queue_bytes: int = 256 << 20
    """Rows that wait for the engine of one Node; the next ones are refused with `queue_overflow`."""
    # Records of ended sessions.
    record_ttl_s: float = 3600.0
    """How long the account of an ended Route Session is kept."""
    record_limit: int = 1000
    """How many accounts are kept at most."""
    record_events: int = 512
    """Telemetry events kept of each."""
    record_bytes: int = 64 << 20
    """Memory of all accounts together; past it the one that ended longest ago goes first."""
    # Prefill.
    prefill_chunk_max: int = 512
    """Largest prefill chunk in tokens; a power of two."""
    prefill_chunk_min: int = 16
    """Smallest prefill chunk in tokens; a power of two."""
    prefill_chunk_target_ms: float = 250.0
    """The chunk is the largest one that the slowest hop computes in this time, up to 64 tokens in four times this."""
    prefill_queue_per_session: int = 2
    """Chunks of one session that a Node takes before it has computed them."""
    # What is kept of sessions that have ended, for prompts that begin alike.
    prefix_share: float = 0.25
    """Share of a Node's KV capacity that it may take; it gives way to any session."""
    prefix_tokens: int = 4096
    """How many tokens it may take at most: on an engine with one buffer for all caches they cost each step time."""
    prefix_sessions: int = 32
    """How many of them a Node keeps at most; the least recently used goes first. 0: nothing is kept, nor asked for."""
    # Model Artifacts.
    store_reserve_bytes: int = 1 << 30
    """Of the disk of the store so much stays free: what would take it is not fetched (`disk_full`)."""
    fetch_connections: int = 4
    """Requests to one source of pieces at a time."""
    fetch_bytes_per_s: int = 0
    """Most that is fetched in a second, from all sources together, three quarters of it by BitTorrent. 0: no limit."""
    upload_bytes_per_s: int = 0
    """Most pieces that are sent in a second, to all together, three quarters of it by BitTorrent. 0: no limit."""
    upload_requests: int = 32
    """Requests for pieces that are answered at a time; the next ones are refused with `queue_full`."""
    bittorrent_port: int = 0
    """Where a Node takes BitTorrent connections of its cluster. 0: any port that is free."""
    bittorrent_connections: int = 64
    """Most of them at a time. 0: no BitTorrent, pieces come over HTTP."""
    bittorrent_queue_bytes: int = 4 << 20
    """Received by BitTorrent and not yet written, at most; from 1 MiB on."""
    scrub_bytes_per_s: int = 16 << 20
    """How fast pieces on disk are read again and checked."""
    possession_s: float = 10.0
    """A Node that is asked to show blocks at random has so long to answer (limit `possession`)."""
    possession_every_s: float = 180.0
    """Pause between two such questions to a Node that answered the last one."""
    scrub_interval_s: float = 86400.0
    """Pause between two rounds of that in a process that gives pieces away."""
    # Routes.
    ticket_ttl_s: float = 30.0
    """A ticket of the Tracker opens a session for so long."""
    # Cluster keys.
    certificate_s: float = 86400.0
    """Life of a certificate in a cluster with keys; heartbeats renew it from half of that on."""
    certificate_grace_s: float = 604800.0
    """A Node whose certificate has ended may still renew it for so long; then it must join anew."""
    invitation_s: float = 86400.0
    """A line for joining works once, for so long."""
    # Engine worker.
    llama_window_library: str = ""
    """The patched library of llama.cpp for --engine llama-window, a path. Empty: the one that `make upstream` built."""
    worker_restarts: int = 5
    """How often a Node starts its engine again."""
    worker_silent_s: float = 1.5
    """A worker process whose counter stands still for so long counts as hung."""
    worker_start_s: float = 300.0
    """Loading a Shard and testing it."""
    worker_backoff_s: float = 1.0
    """Pause before the first restart; doubled for each further one."""
    worker_good_run_s: float = 300.0
    """A worker that served this long starts the count of restarts anew."""
    worker_stop_s: float = 2.0
    """A worker that was told to end has so long before it is killed."""
