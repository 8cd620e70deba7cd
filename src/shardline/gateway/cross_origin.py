"""Which pages of other origins may use the API from a browser (CORS): those that the operator names, by default none.

Owns the setting `cors_origins`, preflights, and the header fields that let a browser show an answer to such a page.
Who may ask at all is decided by keys, behind this; credentials of the browser's own (cookies) are never let through.
Pure ASGI. Shown by tests/gateway/test_cross_origin.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.transport.bodies import header

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9_.\-\[\]:]+")
_NAMES = re.compile(r"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*")
_NAMES_LENGTH = 2048
_FIXED = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-max-age", b"600"),
)
_EXPOSED = b"shardline-route-session, x-request-id, retry-after, x-should-retry"


def origins_of(setting: str) -> frozenset[str]:
    """The origins of `cors_origins`: separated by commas, each as a browser sends it; or `*` alone. Raises
    `setting_invalid` for what no browser would send."""
    origins = [part.strip() for part in setting.split(",") if part.strip()]
    for origin in origins:
        if origin == ANY and len(origins) == 1:
            continue
        if not _ORIGIN.fullmatch(origin):
            raise _invalid(
                f"{origin!r:.100} is no origin: write scheme, host and port as the browser does, in lower case and "
                "without a slash at the end, such as https://chat.example.org or http://localhost:3000"
            )
    return frozenset(origins)


def check_origins(setting: str, *, keys: bool) -> frozenset[str]:
    """`origins_of`, at the start of a Gateway. Without keys `*` is refused: every page that anybody at this machine
    opens could use it."""
    origins = origins_of(setting)
    if ANY in origins and not keys:
        raise _invalid("'*' lets every web page in, and without API keys it could use this Gateway: name the origins")
    return origins


def _invalid(why: str) -> ShardlineError:
    return ShardlineError("setting_invalid", f"cors_origins: {why}", param="cors_origins")


class CrossOrigin:
    """Around the whole application, errors included. `keys()`: whether clients are asked for keys now."""

    def __init__(self, app: ASGIApp, origins: frozenset[str], keys: Callable[[], bool]) -> None:
        self._app = app
        self._origins = origins
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin") if scope["type"] == "http" else None
        if origin is None or not self._may(origin):
            await self._app(scope, receive, send)
            return
        fields = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None:
            await send({"type": "http.response.start", "status": 204, "headers": [*fields, *_FIXED, *_asked(scope)]})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        fields.append((b"access-control-expose-headers", _EXPOSED))

        async def send_with_fields(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *fields]}
            await send(message)

        await self._app(scope, receive, send_with_fields)

    def _may(self, origin: str) -> bool:
        return origin in self._origins or (ANY in self._origins and self._keys())


def _asked(scope: Scope) -> list[tuple[bytes, bytes]]:
    """What the preflight asks for, as far as it is granted."""
    fields = []
    # What a browser asks for is what a page's client happens to send; none of it is a secret of the browser's.
    names = header(scope, b"access-control-request-headers") or ""
    if len(names) <= _NAMES_LENGTH and _NAMES.fullmatch(names.strip()):
        fields.append((b"access-control-allow-headers", names.strip().encode("latin-1")))
    if header(scope, b"access-control-request-private-network") == "true":
        fields.append((b"access-control-allow-private-network", b"true"))
    return fields
