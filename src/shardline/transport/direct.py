"""The direct lane of a server: requests that are answered from within the socket's read, without a task of their own.

For the one request that is made for every token and hop (`POST /v1/steps`). Owns the contract with its handler and
the bytes of its answers; the parsing is guard.py's. Whatever a handler does not admit goes the ordinary way, which
also says why it is refused. Shown by tests/transport/test_direct.py; measured by `make bench`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from shardline.errors import ShardlineError
from shardline.transport.boundary import error_bytes, error_headers

Headers = Sequence[tuple[bytes, bytes]]


class DirectLane(Protocol):
    """One POST path. Called on the event loop, from within a socket's read."""

    path: bytes
    limit: int
    """Longest body in bytes."""

    def admits(self, headers: Headers) -> bool:
        """Whether the head is in order (credential, protocol); names are lower case. Never raises."""

    def take(self, body: bytes) -> bytes | Coroutine[Any, Any, bytes]:
        """The JSON body of a 202 answer, or what will give it later. Raises ShardlineError to refuse."""


def content_length(headers: Headers) -> int | None:
    """The announced length, where the request is of the plain kind: one length, no encoding, no expectation."""
    length: int | None = None
    for name, value in headers:
        if name == b"content-length":
            if length is not None or not value.isdigit():
                return None
            length = int(value[:20])
        elif name in (b"transfer-encoding", b"content-encoding", b"expect", b"connection", b"upgrade"):
            return None
    return length


def accepted(body: bytes) -> bytes:
    return b"HTTP/1.1 202 Accepted\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


def refused(error: ShardlineError) -> bytes:
    body = error_bytes(error)
    lines = [STATUS_LINE[error.fault.status], b"content-type: application/json\r\n"]
    lines += [b"%s: %s\r\n" % pair for pair in error_headers(error)]
    return b"".join([*lines, b"content-length: %d\r\n\r\n" % len(body), body])
