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

    # Liveness (design, section 3).
    beat_interval_s: float = 0.5
    beat_timeout_s: float = 2.5
    late_timer_s: float = 0.5
    tracker_heartbeat_s: float = 1.0
    tracker_expiry_s: float = 4.0
    # Waits, each named in the error that ends it.
    connect_s: float = 2.0
    open_s: float = 5.0
    push_s: float = 2.5
    prefill_chunk_s: float = 120.0
    step_s: float = 60.0
    client_stall_s: float = 60.0
    session_s: float = 3600.0
    control_s: float = 5.0
    drain_s: float = 5.0
    dial_back_s: float = 2.0
    template_s: float = 2.0
    text_s: float = 30.0
    """Fetching a text bundle of some megabytes from a Node."""
    header_s: float = 10.0
    # Keep-alive: a client drops an idle connection before its server does.
    server_idle_s: float = 75.0
    client_idle_s: float = 30.0
    # Admission at the Gateway.
    queue_limit: int = 64
    queue_wait_s: float = 30.0
    default_max_tokens: int = 1024
    keep_alive_comment_s: float = 5.0
    telemetry_comment_s: float = 0.5
    # Bodies and queues.
    api_body_bytes: int = 16 << 20
    control_body_bytes: int = 1 << 20
    step_body_bytes: int = 64 << 20
    header_bytes: int = 32 << 10
    queue_bytes: int = 256 << 20
    # Records of ended sessions.
    record_ttl_s: float = 3600.0
    record_limit: int = 1000
    record_events: int = 512
    # Prefill.
    prefill_chunk_max: int = 512
    prefill_chunk_min: int = 16
    prefill_chunk_target_ms: float = 250.0
    prefill_queue_per_session: int = 2
    # Routes.
    ticket_ttl_s: float = 30.0
    # Engine worker.
    worker_restarts: int = 5
    worker_silent_s: float = 1.5
    worker_start_s: float = 300.0
    worker_backoff_s: float = 1.0
    """Pause before the first restart; doubled for each further one."""
    worker_good_run_s: float = 300.0
    """A worker that served this long starts the count of restarts anew."""
    worker_stop_s: float = 2.0
