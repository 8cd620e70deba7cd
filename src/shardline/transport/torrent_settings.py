"""What the BitTorrent process sets: every way to look for others, or to be found by them, is off; the rest is small.

Owns names and values; who knows the names is libtorrent (torrent_worker.py), which refuses those that it does not. Pure
but for `free_port`. Shown by tests/transport/test_torrent_process.py and tests/node/test_swarm.py.
"""

from __future__ import annotations

import socket

from shardline.transport.torrent_messages import Begin

WILDCARDS = ("0.0.0.0", "::")
_NO_ENCRYPTION = 2
"""`enc_policy.pe_disabled` of libtorrent. TLS is what keeps others out."""


def settings_of(begin: Begin, port: int) -> dict[str, bool | int | str]:
    """All that libtorrent would else look for, open or tell is off; names that it does not know are a KeyError."""
    suffix = "s" if begin.authority else ""
    host = f"[{begin.host}]" if ":" in begin.host else begin.host
    interfaces = f"{host}:{port}{suffix}"
    if begin.host == "::":
        interfaces += f",0.0.0.0:{port}{suffix}"
    return {
        "listen_interfaces": interfaces,
        "outgoing_interfaces": "" if begin.host in WILDCARDS else begin.host,
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "dht_bootstrap_nodes": "",
        "webtorrent_stun_server": "",
        # The port that was asked for or none: others are told it.
        "max_retry_port_bind": 0,
        "listen_system_port_fallback": False,
        # Over loopback it was a tenth as fast as TCP.
        "enable_incoming_utp": False,
        "enable_outgoing_utp": False,
        # BitTorrent's own encryption says nothing of who is there, and is one more reader of strangers' bytes.
        "in_enc_policy": _NO_ENCRYPTION,
        "out_enc_policy": _NO_ENCRYPTION,
        "user_agent": "shardline",
        # Who calls says so where it takes calls itself. Who lies about it can only be taken for one of its own address.
        "peer_fingerprint": f"-SL{port:05}-",
        "allow_multiple_connections_per_ip": True,
        # Who has all it wants today may want another layer range, or give it, tomorrow.
        "close_redundant_connections": False,
        "min_reconnect_time": 1,
        "max_failcount": 1_000_000,
        "connections_limit": begin.connections,
        "unchoke_slots_limit": begin.connections,
        "max_queued_disk_bytes": begin.queue_bytes,
        "aio_threads": 4,
        "hashing_threads": 2,
        "tick_interval": 100,
        "alert_queue_size": 20_000,
        "download_rate_limit": begin.download_bytes_per_s,
        "upload_rate_limit": begin.upload_bytes_per_s,
    }


def free_port(host: str) -> int:
    """libtorrent takes another free port at each address of a machine; others are told one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
