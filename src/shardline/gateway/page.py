"""The page at `/`: static files of the wheel, and the headers that keep the page to itself.

Owns the list of files, read once at the start (no path of a request ever reaches the disk), and the policy that lets
the page load from, and talk to, its own origin only. What the page shows it asks of `/v1/`. Shown by
tests/gateway/test_page.py and tests/page/.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.transport.bodies import header, send_body

INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # No string becomes markup: what Nodes and models say is hostile text, and can only be shown as text.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "txt": b"text/plain; charset=utf-8",
}
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    # Asked anew each time, and answered with 304: no browser keeps the page of an older version.
    (b"cache-control", b"no-cache"),
)


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    kind: bytes
    tag: str


class Page:
    """Raw ASGI endpoint of `/` and `/page/NAME`. Raises `not_found` for what is not part of the page."""

    def __init__(self) -> None:
        self._files = {name: _file(entry) for name, entry in _found(files("shardline") / "dashboard")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope.get("path_params", {}).get("name", INDEX)
        file = self._files.get(name)
        if file is None:
            raise ShardlineError("not_found", "the page has no such file")
        fields = [*HEADERS, (b"etag", file.tag.encode())]
        if header(scope, b"if-none-match") == file.tag:
            await send({"type": "http.response.start", "status": 304, "headers": fields})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await send_body(send, 200, file.data, file.kind, headers=fields)


def _found(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    """Every file that a browser may have, by its name below the folder."""
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _found(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in TYPES:
            found.append((prefix + entry.name, entry))
    return found


def _file(entry: Traversable) -> _File:
    data = entry.read_bytes()
    return _File(data, TYPES[entry.name.rpartition(".")[2]], f'"{hashlib.sha256(data).hexdigest()[:32]}"')
