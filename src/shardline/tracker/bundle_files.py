"""Gives the files of offered bundles: `GET /v1/artifacts/CONTENT_ID/bundle/PATH`, whole, as they lie on disk.

Owns which paths there are (those of the bundle as it was checked, no other file of its folder), how many are sent at a
time, in all and to one address, and for how long. A file is read as it is sent, so that one that nobody takes costs a
descriptor. Whoever gets a file checks it anew. Shown by tests/tracker/test_artifact_app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from io import FileIO

from starlette.types import Receive, Scope, Send

from shardline.artifact.bundle import bundle_paths, open_bundle_file
from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.offers import Offer

AT_A_TIME = 64
"""Files that are being sent; …"""
TO_ONE = 16
"""… and to one address: those that stand still must not keep everybody out."""
SEND_S = 60.0
"""Nobody takes longer for a file: who asks waits no longer either."""
CHUNK = 256 << 10
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
        self._sending: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            raise ShardlineError("method_not_allowed", f"files of a bundle do not have {scope['method'][:20]}")
        wanted = scope["path_params"]
        found = self._paths.get((wanted["content_id"], wanted["path"]))
        if found is None:
            raise ShardlineError("not_found", "no bundle that is offered here has such a file")
        bundle, limit = found
        with self._place(scope):
            file = await asyncio.to_thread(open_bundle_file, bundle, wanted["path"], limit)
            with file:
                await self._give(send, file)

    @contextlib.contextmanager
    def _place(self, scope: Scope) -> Iterator[None]:
        """One of those that are sent at a time; `queue_full` where there is none."""
        address = (scope.get("client") or ("",))[0]
        if self._sending.total() >= AT_A_TIME or self._sending[address] >= TO_ONE:
            raise ShardlineError("queue_full", "too many files of bundles are being sent", retry_after=1)
        self._sending[address] += 1
        try:
            yield
        finally:
            self._sending[address] -= 1
            if not self._sending[address]:
                del self._sending[address]

    async def _give(self, send: Send, file: FileIO) -> None:
        """In parts, each of which the client takes in time, and all of them."""
        size = os.fstat(file.fileno()).st_size
        length = (b"content-length", b"%d" % size)
        await send({"type": "http.response.start", "status": 200, "headers": [_BYTES, length]})
        ends = asyncio.get_running_loop().time() + SEND_S
        start = 0
        while True:
            part = await asyncio.to_thread(os.pread, file.fileno(), min(CHUNK, size - start), start)
            start += len(part)
            if not part and start < size:
                raise ShardlineError("artifact_invalid", "a file of the bundle became shorter while it was sent")
            due = min(ends, asyncio.get_running_loop().time() + self._settings.control_s)
            try:
                async with asyncio.timeout_at(due):
                    await send({"type": "http.response.body", "body": part, "more_body": start < size})
            except TimeoutError:
                raise ShardlineError("slow_client", f"a file of {size} bytes was not taken in time") from None
            if start >= size:
                return
