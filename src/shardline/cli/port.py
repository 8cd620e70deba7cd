"""The look at a port before a cluster is started on it: taken ones are told before anything loads.

Owns what is said of who is there (another cluster of this machine, by its entry; else a process) and what to do. The
port is taken for good by the part that listens. Shown by tests/cli/test_port.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardline.cli.running import RunningCluster
from shardline.errors import ShardlineError
from shardline.transport.addresses import split_url


def check_port(host: str, port: int, flag: str, clusters: Sequence[RunningCluster], *, by_make: bool = False) -> None:
    """Raise `address_in_use` for a port that is taken, with what runs there; port 0 takes any free one.

    `by_make`: `make demo` was typed, by somebody who knows no flag of ours.
    """
    from shardline.transport.http_server import bind

    try:
        bind(host, port).close()
    except ShardlineError as error:
        if error.code != "address_in_use":
            raise
        holder = next((c for c in clusters if port in (split_url(c.gateway).port, split_url(c.tracker).port)), None)
        free = _next_free(host, port)
        other = f"make demo PORT={free}" if by_make else f"{flag} {free}"
        if holder is None:
            raise ShardlineError(
                error.code, error.message, advice=f"End that process, or choose another port: {other}", port=port
            ) from None
        raise ShardlineError(
            error.code,
            f"port {port} on {host} is taken by a cluster that runs already: {holder}",
            advice=f"Use that one (shardline chat --gateway {holder.gateway}), end it, or choose another port: {other}",
            port=port,
        ) from None


def _next_free(host: str, port: int) -> int:
    """The next port that nobody listens on now; a suggestion, no promise."""
    from shardline.transport.http_server import bind

    for candidate in range(port + 1, min(port + 100, 65536)):
        try:
            bind(host, candidate).close()
        except ShardlineError:
            continue
        return candidate
    return 0
