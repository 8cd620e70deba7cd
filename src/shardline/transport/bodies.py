"""Reading request bodies and writing whole answers, for raw ASGI applications.

Owns the body limits: announced size first, then streamed size, encoding, type, how long a body may take, and that large
ones wait for room (body_room.py). It does not route and knows no endpoint. Shown by tests/transport/test_bodies.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.transport.body_room import SMALL_BYTES, BodyRoom, Place

T = TypeVar("T")
BODY_GRACE_S = 10.0
"""How long a body may take, whatever its size …"""
BODY_BYTES_PER_S = 64 << 10
"""… and a second more for each of these many bytes that have come."""
ROOM = "shardline.body_room"
"""Where the server leaves its `BodyRoom` in `scope["state"]`."""
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_NAME = re.compile(r"`(str|int|float|bool)( \| null)?`")
_PATH = re.compile(r" - at `\$(?:\.)?(.*)`$")


class ClientLeft(Exception):
    """The client closed its connection before the request was read or answered; there is nobody to tell."""


def header(scope: Scope, name: bytes) -> str | None:
    """The value of the header field `name` (lower case); None if it is absent, ", " between several."""
    found = [value for key, value in scope["headers"] if key == name]
    return b", ".join(found).decode("latin-1") if found else None


class HeldBody:
    """A whole body, and the room that it takes."""

    def __init__(self, room: BodyRoom | None, limit: int, copies: int) -> None:
        self.data = b""
        self._copies = copies
        self._room = room
        self._limit = limit
        self._place: Place | None = None

    def free(self) -> None:
        """Its bytes are used up: they are dropped here, and others have their room. Idempotent."""
        self.data = b""
        place, self._place = self._place, None
        if place is not None and self._room is not None:
            self._room.give(place)

    async def _grow(self, received: int, wait: asyncio.Timeout, grace_s: float) -> None:
        """So much has come: beyond a small size it needs room for as much as is announced. Nothing is read meanwhile,
        and that time is not the client's."""
        if received > SMALL_BYTES and self._place is None and self._room is not None:
            wait.reschedule(None)
            self._place = await self._room.take(self._limit * self._copies, grace_s)
            self._place.reading = wait
        if self._place is not None:
            self._place.received = received

    async def _read(self, receive: Receive, grace_s: float) -> None:
        chunks: list[bytes] = []
        received = 0
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout_at(start + grace_s) as wait:
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientLeft
                    chunk: bytes = message.get("body", b"")
                    received += len(chunk)
                    if received > self._limit:
                        raise _too_large(self._limit, "the body is longer")
                    if chunk:
                        chunks.append(chunk)
                    waited_for_room = loop.time()
                    await self._grow(received, wait, grace_s)
                    start += loop.time() - waited_for_room
                    if not message.get("more_body", False):
                        break
                    wait.reschedule(start + grace_s + received / BODY_BYTES_PER_S)
        except TimeoutError:
            seconds = loop.time() - start
            raise ShardlineError("slow_body", f"{received} bytes of the body came in {seconds:.1f} s") from None
        finally:
            if self._place is not None:
                self._place.reading = None
        self.data = chunks[0] if len(chunks) == 1 else b"".join(chunks)


@asynccontextmanager
async def body_of(
    receive: Receive, scope: Scope, limit: int, *, copies: int = 1, grace_s: float = BODY_GRACE_S
) -> AsyncIterator[HeldBody]:
    """The whole body of at most `limit` bytes; its room is held until it is freed, or the context is left.

    `copies`: how often its bytes lie in memory, with what the caller makes of them.

    Raises `unsupported_media_type` (any Content-Encoding), `body_too_large` (before anything is read where the size
    is announced), `slow_body`, `resources_exhausted` (no room for it within `grace_s`), or `ClientLeft`.
    """
    length = _announced(scope, limit)
    body = HeldBody(scope.get("state", {}).get(ROOM), limit if length is None else length, copies)
    try:
        await body._read(receive, grace_s)
        yield body
    finally:
        body.free()


async def read_body(receive: Receive, scope: Scope, limit: int, *, grace_s: float = BODY_GRACE_S) -> bytes:
    """The whole body, for a caller that has used it up before it awaits anything; raises what `body_of` raises."""
    async with body_of(receive, scope, limit, grace_s=grace_s) as body:
        return body.data


async def read_json(receive: Receive, scope: Scope, kind: type[T], limit: int, *, grace_s: float = BODY_GRACE_S) -> T:
    """The body as `kind`; raises what `read_body` raises, `unsupported_media_type`, `invalid_json`, `invalid_value`."""
    media = header(scope, b"content-type")
    if media is not None and media.partition(";")[0].strip().lower() != "application/json":
        raise ShardlineError("unsupported_media_type", f"Content-Type {media[:80]} is not application/json")
    return decode_json(await read_body(receive, scope, limit, grace_s=grace_s), kind)


def decode_json(body: bytes, kind: type[T]) -> T:
    """`body` as `kind`; a wrong value is `invalid_value` with `param` naming where it stands."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        why = _NAME.sub(lambda name: f"{_JSON_NAMES[name[1]]}{name[2] or ''}", text[: found.start()] if found else text)
        raise ShardlineError("invalid_value", why, param=(found.group(1) or None) if found else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ShardlineError("invalid_json", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise ShardlineError("invalid_json", "the body is nested too deeply") from None


async def send_body(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = b"application/json",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """One whole answer."""
    fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_json(send: Send, value: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """One whole JSON answer; `value` is anything that msgspec encodes."""
    await send_body(send, status, msgspec.json.encode(value), headers=headers)


def _announced(scope: Scope, limit: int) -> int | None:
    """The announced size, None if there is none; refuses what is encoded, and what will be too large."""
    encoding = header(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise ShardlineError("unsupported_media_type", f"Content-Encoding {encoding[:40]} is not accepted")
    transfer = header(scope, b"transfer-encoding")
    if transfer is not None and transfer.strip().lower() != "chunked":
        raise ShardlineError("unsupported_media_type", f"Transfer-Encoding {transfer[:40]} is not accepted")
    length = header(scope, b"content-length")
    if length is None:
        return None
    if not length.isascii() or not length.isdigit() or int(length[:20]) > limit:
        raise _too_large(limit, f"the body has {length[:20]} bytes")
    return int(length)


def _too_large(limit: int, why: str) -> ShardlineError:
    return ShardlineError("body_too_large", f"{why}, the limit is {limit}", limit=limit)
