"""What this process gives to others: artifacts of the store, by content, only what is held.

Owns which artifacts are offered, and opens files for the server of pieces (transport/piece_server.py, which knows none
of this room). Opening blocks. Shown by tests/transport/test_piece_server.py.
"""

from __future__ import annotations

from io import FileIO

from shardline.artifact.store import StoredArtifact
from shardline.artifact.stored_file import StoredFile
from shardline.errors import ShardlineError
from shardline.wire.bitmap import HeldFile, HeldPieces


def held_file(file: StoredFile) -> HeldFile:
    """What is held of it, for others."""
    return HeldFile(
        root=file.name, size=file.tree.size, piece_length=file.tree.piece_length, pieces=file.held().to_bytes()
    )


class Shelf:
    """Artifacts that are given away. It closes none: whoever opened them does, after taking them from here."""

    def __init__(self) -> None:
        self._artifacts: dict[str, StoredArtifact] = {}

    def put(self, artifact: StoredArtifact) -> None:
        """Give it away from now on."""
        self._artifacts[artifact.content_id] = artifact

    def take(self, content_id: str) -> None:
        """No longer. Idempotent."""
        self._artifacts.pop(content_id, None)

    def offer(self, content_id: str) -> HeldPieces:
        """What is held of it; `not_found`."""
        return HeldPieces(content_id=content_id, files=tuple(map(held_file, self.artifact(content_id).files)))

    def size(self, content_id: str, root: str) -> int:
        """Bytes of the file with this root; `not_found`."""
        return self._file(content_id, root).tree.size

    def open(self, content_id: str, root: str, start: int, end: int) -> FileIO:
        """The file, to be read from `start` to `end` and closed; `artifact_incomplete` unless all of that is held."""
        return self._file(content_id, root).open(start, end)

    def artifact(self, content_id: str) -> StoredArtifact:
        """What is given away under this id; `not_found`."""
        found = self._artifacts.get(content_id)
        if found is None:
            raise ShardlineError("not_found", "no such artifact is given away here")
        return found

    def _file(self, content_id: str, root: str) -> StoredFile:
        for file in self.artifact(content_id).files:
            if file.name == root:
                return file
        raise ShardlineError("not_found", "no such file is in that artifact")
