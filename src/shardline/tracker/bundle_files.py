"""Gives the files of offered bundles: `GET /v1/artifacts/CONTENT_ID/bundle/PATH`, whole, as they lie on disk.

Owns which paths there are (those of the bundle as it was checked, no other file of its folder), and how many are read
and sent at a time. Whoever gets a file checks it anew. Shown by tests/tracker/test_artifact_app.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from shardline.artifact.bundle import bundle_paths, read_bundle_file
from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.offers import Offer

AT_A_TIME = 4
"""Files that are in memory at a time."""
CHUNK = 1 << 20
_BYTES = (b"content-type", b"application/octet-stream")


class BundleFiles:
    """An ASGI application for a route with the parameters `content_id` and `path`."""

    def __init__(self, offers: Iterable[Offer], settings: Settings) -> None:
        self._paths = {
            (offer.content_id, path): (offer.bundle, limit)
            for offer in offers
            for path, limit in bundle_paths(offer.bundle).items()
        }
        self._settings = settings
        self._room = asyncio.Semaphore(AT_A_TIME)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            raise ShardlineError("method_not_allowed", f"files of a bundle do not have {scope['method'][:20]}")
        wanted = scope["path_params"]
        found = self._paths.get((wanted["content_id"], wanted["path"]))
        if found is None:
            raise ShardlineError("not_found", "no bundle that is offered here has such a file")
        bundle, limit = found
        async with self._room:
            raw = await asyncio.to_thread(read_bundle_file, bundle, wanted["path"], limit)
            await self._give(send, raw)

    async def _give(self, send: Send, raw: bytes) -> None:
        """In parts, each of which the client takes in time: four that stand still must not keep everybody out."""
        length = (b"content-length", b"%d" % len(raw))
        await send({"type": "http.response.start", "status": 200, "headers": [_BYTES, length]})
        limit_s = self._settings.control_s
        view = memoryview(raw)
        for start in range(0, max(len(raw), 1), CHUNK):
            part = bytes(view[start : start + CHUNK])
            try:
                async with asyncio.timeout(limit_s):
                    await send({"type": "http.response.body", "body": part, "more_body": start + CHUNK < len(raw)})
            except TimeoutError:
                raise ShardlineError("slow_client", f"{len(part)} bytes were not taken in {limit_s:g} s") from None
