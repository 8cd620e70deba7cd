"""Where pieces come from over HTTP: other Nodes (`NodePieces`), and plain servers with Range (`WebSeed`).

Owns the requests and what an answer must be: 206, that very range, that very length, no encoding. Bytes are not checked
here: whoever stores them does. A Node gets the credential; a web seed gets nothing, and is called only at addresses
that others may make us call; it may redirect within its own host, nowhere else. Both classes are what artifact/fetch.py
calls a Source. Shown by tests/transport/test_piece_client.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, urljoin

from shardline.errors import ShardlineError
from shardline.transport import answers
from shardline.transport.addresses import host_port, resolve_checked, split_url
from shardline.transport.failures import HttpFailure
from shardline.transport.http_client import HttpClient, Response
from shardline.transport.pace import Pace
from shardline.transport.piece_server import PREFIX
from shardline.wire.bitmap import HeldPieces, Pieces

GRACE_S = 10.0
"""How long an answer may take, whatever its size …"""
SLOWEST_BYTES_PER_S = 32 << 10
"""… and a second more for each of these many bytes that were asked for: what is slower is given up."""
OFFER_BYTES = 32 << 20
REDIRECTS = 3
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_MOVED = frozenset({301, 302, 303, 307, 308})


class PieceFile(NamedTuple):
    """One file of an artifact, as sources need to know it."""

    root: str
    """In hex."""
    size: int
    piece_length: int
    path: str
    """Below the URL of a web seed (`Manifest.torrent_path`)."""


class NodePieces:
    """Another Node, or whoever serves `/v1/pieces/` at `url`, to a client with the cluster's credential or keys."""

    def __init__(self, client: HttpClient, url: str, content_id: str, files: Sequence[PieceFile], pace: Pace) -> None:
        parts = split_url(url)
        self.name = host_port(parts.host, parts.port)
        self._client = client
        self._url = f"{url.rstrip('/')}{PREFIX}{content_id}"
        self._content_id = content_id
        self._files = files
        self._pace = pace

    async def offer(self) -> Mapping[int, Pieces] | None:
        """What it holds, by file number."""
        try:
            offer = await self._client.json("GET", self._url, HeldPieces, max_body=OFFER_BYTES)
        except HttpFailure as failure:
            raise _failed(failure.why) from None
        held = {file.root: file for file in offer.files}
        try:
            return {
                number: held[file.root].in_pieces_of(file.size, file.piece_length)
                for number, file in enumerate(self._files)
                if file.root in held
            }
        except ShardlineError as error:
            raise _failed(f"its offer is wrong: {error.message}", final=True) from None

    async def read(self, number: int, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start` on. `source_failed`, or the error that it answered with."""
        file = self._files[number]
        await self._pace.take(len(into))
        try:
            response, filled = await _get(self._client, f"{self._url}/{file.root}", start, into)
            if response.status >= 400:
                raise answers.error_of(self.name, *response)
        except HttpFailure as failure:
            raise _failed(failure.why) from None
        _check(response, filled, start, into, file.size)


class WebSeed:
    """A plain HTTP server. `client` must have neither a credential nor keys of a cluster; `loopback_ok`: it may be on
    this machine."""

    def __init__(
        self, client: HttpClient, url: str, files: Sequence[PieceFile], pace: Pace, *, loopback_ok: bool = False
    ) -> None:
        parts = split_url(url)
        self.name = host_port(parts.host, parts.port)
        self._client = client
        self._url = url
        self._files = files
        self._pace = pace
        self._loopback_ok = loopback_ok
        self._moved: dict[int, str] = {}
        self._address: tuple[str, int] | None = None

    async def offer(self) -> None:
        """Web seeds have everything."""
        return

    async def read(self, number: int, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start` on, or `source_failed`."""
        file = self._files[number]
        await self._pace.take(len(into))
        url = self._moved.get(number) or self._url + quote(file.path)
        for _ in range(REDIRECTS + 1):
            address = await self._resolved()
            try:
                response, filled = await _get(self._client, url, start, into, address=address, authorize=False)
            except HttpFailure as failure:
                raise _failed(failure.why) from None
            if response.status not in _MOVED:
                _check(response, filled, start, into, file.size)
                self._moved[number] = url
                return
            url = self._followed(url, response)
        raise _failed(f"it redirects more than {REDIRECTS} times", final=True)

    async def _resolved(self) -> tuple[str, int]:
        """Resolved once: what a name leads to later is not asked."""
        if self._address is None:
            parts = split_url(self._url)
            self._address = await resolve_checked(parts.host, parts.port, self._loopback_ok)
        return self._address

    def _followed(self, url: str, response: Response) -> str:
        """Where a redirect leads, if that is the same server."""
        try:
            target = urljoin(url, response.headers.get("location", ""))
            here, there = split_url(url), split_url(target)
        except (ValueError, ShardlineError):
            raise _failed("it redirects to something that is no URL", final=True) from None
        if (here.scheme, here.host, here.port) != (there.scheme, there.host, there.port) or there.party is not None:
            raise _failed(f"it redirects to another server ({there.host[:100]}), which is not followed", final=True)
        return target


async def _get(
    client: HttpClient,
    url: str,
    start: int,
    into: memoryview,
    *,
    address: tuple[str, int] | None = None,
    authorize: bool = True,
) -> tuple[Response, bool]:
    return await client.fill(
        url,
        into,
        headers={
            "range": f"bytes={start}-{start + len(into) - 1}",
            "user-agent": "shardline",
            "accept-encoding": "identity",
        },
        timeout_s=GRACE_S + len(into) / SLOWEST_BYTES_PER_S,
        limit="pieces",
        # Errors have bodies, too.
        max_body=max(len(into), 64 << 10),
        authorize=authorize,
        address=address,
        retry_once=True,
    )


def _check(response: Response, filled: bool, start: int, into: memoryview, size: int) -> None:
    """See that the answer is what a Range request must get, and that its body is in its place."""
    status, headers, body = response
    if status != 206:
        final = status not in (408, 425, 429) and status < 500
        more = " instead of 206: it has no Range" if status == 200 else ""
        raise _failed(f"it answered {status}{more}", final=final)
    if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise _failed("it encodes what it sends", final=True)
    found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    if found is None or (int(found[1]), int(found[2]) + 1, int(found[3])) != (start, start + len(into), size):
        raise _failed(f"it sent another range than was asked for: {headers.get('content-range', 'none')[:80]!r}")
    if not filled:
        if len(body) != len(into):
            raise _failed(f"it sent {len(body)} bytes for a range of {len(into)}")
        into[:] = body


def _failed(why: str, *, final: bool = False) -> ShardlineError:
    return ShardlineError("source_failed", why, final=final)
