"""Who answers at a URL, where it is not whom a command asked: another part of a cluster, or the other kind of HTTP.

Owns the second look that comes after a refusal. It sends no secret and is short; where it tells nothing, the refusal
stands as it was. Shown by tests/cli/test_recognition.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator

from shardline.errors import ShardlineError
from shardline.transport.addresses import split_url

LOOK_S = 2.0
MISTAKABLE = frozenset({"not_found", "method_not_allowed", "unauthorized", "protocol_mismatch"})
"""Codes by which one part refuses what was meant for another."""
_BODY_LIMIT = 4096
_WHERE = {
    "Gateway": "Name the Gateway, whose URL clients of the API use: --gateway URL",
    "Tracker": "Name the Tracker, whose URL is printed where it was started: --tracker URL",
}


@contextlib.contextmanager
def unproved_connection(url: str) -> Iterator[http.client.HTTPConnection]:
    """A connection for one short question. Who answers need not prove who that is: nothing is sent that anybody could
    want, and the answer only makes a sentence."""
    parts = split_url(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        unproved = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(parts.host, parts.port, timeout=LOOK_S, context=unproved)
    else:
        connection = http.client.HTTPConnection(parts.host, parts.port, timeout=LOOK_S)
    with contextlib.closing(connection):
        yield connection


def part_at(url: str) -> str | None:
    """`Gateway`, `Tracker` or `Node`, by how what answers at `url` says that it lives; None if it is none of them."""
    try:
        with unproved_connection(url) as connection:
            connection.request("GET", split_url(url).target.rstrip("/") + "/healthz")
            response = connection.getresponse()
            said = json.loads(response.read(_BODY_LIMIT))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    if response.status != 200 or response.getheader("x-request-id") is None or not isinstance(said, dict):
        return None
    if "state" in said:
        return "Node"
    return {"live": "Gateway", "ok": "Tracker"}.get(str(said.get("status")))


def mistaken(who: str, url: str) -> ShardlineError | None:
    """The error of having asked another part than `who` (`Gateway` or `Tracker`); None where that cannot be told."""
    found = part_at(url)
    if found is None or found == who:
        return None
    why = f"what answers at {url} is a {found}, not a {who}"
    return ShardlineError("setting_invalid", why, param=who.lower(), advice=_WHERE[who])


def speaks_tls(url: str) -> bool:
    """Whether whoever listens at `url` shakes hands as HTTPS does."""
    parts = split_url(url)
    context = ssl._create_unverified_context()
    with (
        contextlib.suppress(OSError),
        socket.create_connection((parts.host, parts.port), timeout=LOOK_S) as sock,
        context.wrap_socket(sock, server_hostname=parts.host),
    ):
        return True
    return False
