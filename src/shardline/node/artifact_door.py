"""What a Node gives of the Model Artifacts that it holds: pieces to whoever fetches, and blocks that the Tracker draws.

Owns the paths `/v1/pieces/…` and `POST /v1/possession` on the Node's port, and who may ask the second. Nothing is
written, nothing is given that is not held. Shown by tests/node/test_artifact_door.py.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from shardline.artifact import possession
from shardline.artifact.shelf import Shelf
from shardline.artifact.store import StoredArtifact
from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.authority import TRACKER, uri_of
from shardline.transport.bodies import read_json, send_body
from shardline.transport.boundary import no_such_method
from shardline.transport.guard import PARTIES
from shardline.transport.pace import Pace
from shardline.transport.piece_server import PREFIX, PieceServer
from shardline.wire.artifacts import POSSESSION_PATH, Challenge

CHALLENGES_LIMIT = 2
"""Answered at a time: each reads and hashes a piece for every block."""


class ArtifactDoor:
    """An ASGI application for its paths, to be mounted behind the gate of the control plane."""

    def __init__(self, settings: Settings) -> None:
        self.shelf = Shelf()
        self._settings = settings
        self._pieces = PieceServer(self.shelf, settings)
        self._challenges = 0

    @property
    def pace(self) -> Pace:
        """How fast pieces leave, by whatever way."""
        return self._pieces.pace

    def put(self, artifact: StoredArtifact) -> None:
        """Give it away from now on; who opened it closes it, after the server has ended."""
        self.shelf.put(artifact)

    @staticmethod
    def leads(path: str) -> bool:
        """Whether a path is one of its own."""
        return path == POSSESSION_PATH or path.startswith(PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != POSSESSION_PATH:
            await self._pieces(scope, receive, send)
            return
        if scope["method"] != "POST":
            raise no_such_method("POST")
        parties = scope.get("state", {}).get(PARTIES)
        if parties is not None and uri_of(TRACKER) not in parties:
            raise ShardlineError("forbidden", "only the Tracker asks a Node to show what it holds")
        challenge = await read_json(receive, scope, Challenge, self._settings.control_body_bytes)
        await send_body(send, 200, await self._answer(challenge), b"application/octet-stream")

    async def _answer(self, challenge: Challenge) -> bytes:
        artifact = self.shelf.artifact(challenge.content_id)
        if self._challenges >= CHALLENGES_LIMIT:
            raise ShardlineError("queue_full", f"{self._challenges} challenges are being answered", retry_after=1)
        self._challenges += 1
        try:
            return await asyncio.to_thread(possession.answer, artifact.files, challenge.blocks)
        finally:
            self._challenges -= 1
