"""Where pieces go, whoever delivers them: checked, written, and held from the next commit on.

Owns what was written and is not yet in the records, and the batches in which it gets there. It fetches nothing: pieces
come as bytes (`put`), or lie in the data file already, written by another program (`confirm`). Threads may call it at
once. Blocking. Shown by tests/artifact/test_store.py and test_store_processes.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from shardline.artifact.store import StoredArtifact
from shardline.artifact.stored_file import StoredFile
from shardline.wire.bitmap import Pieces

_FINISH_S = 30.0


class PieceWriter:
    """Writes pieces of one artifact. Close it: what is not committed then is fetched again."""

    def __init__(self, artifact: StoredArtifact) -> None:
        self.artifact = artifact
        self._written: dict[int, Pieces] = {}
        self._prepared: set[int] = set()
        self._guard = threading.Lock()
        self._idle = threading.Condition(self._guard)
        self._putting = 0
        self._committing = threading.Lock()
        self.uncommitted_bytes = 0
        """Written since the last commit, about."""

    def put(self, number: int, first: int, data: bytes | memoryview) -> list[int]:
        """Pieces of file `number` in a row, from `first` on; the numbers of those that are not what they should be.

        Errors: `disk_full`, `state_unwritable`. No byte that is wrong is ever written.
        """
        with self._busy():
            file = self._ready(number)
            good, bad = file.put(first, data)
            self._note(number, file, Pieces.of(file.count, good))
        return bad

    def confirm(self, number: int, pieces: Pieces) -> list[int]:
        """Pieces that another program has written into the data file: the numbers of those that do not lie there."""
        file = self._ready(number)
        found = [piece for piece in pieces if file.is_whole(piece, own=True)]
        good = Pieces.of(file.count, found)
        self._note(number, file, good)
        return list(pieces - good)

    def written(self, number: int) -> Pieces:
        """Pieces that were written and are not yet held."""
        with self._guard:
            return self._written.get(number, Pieces(self.artifact.files[number].count))

    def commit(self) -> None:
        """What was written so far is held when this returns. Errors as of `put`: then it stays written, try again."""
        with self._committing:
            with self._guard:
                batch = dict(self._written)
                self.uncommitted_bytes = 0
            for number, pieces in batch.items():
                self.artifact.files[number].commit(pieces)
                with self._guard:
                    left = self._written[number] - pieces
                    if left:
                        self._written[number] = left
                    else:
                        del self._written[number]

    def drop(self, bad: Mapping[int, Pieces]) -> None:
        """These are not held any more, from now on."""
        for number, pieces in bad.items():
            file = self.artifact.files[number]
            file.commit(Pieces(file.count), pieces)

    def finish(self) -> None:
        """Wait for what is being written in other threads, commit, close. Errors as of `commit`; closed in any case."""
        with self._idle:
            self._idle.wait_for(lambda: self._putting == 0, timeout=_FINISH_S)
        try:
            self.commit()
        finally:
            self.close()

    def close(self) -> None:
        """Free the files. Idempotent."""
        for file in self.artifact.files:
            file.rest()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        with self._guard:
            self._putting += 1
        try:
            yield
        finally:
            with self._idle:
                self._putting -= 1
                self._idle.notify_all()

    def _ready(self, number: int) -> StoredFile:
        file = self.artifact.files[number]
        with self._guard:
            if number not in self._prepared:
                file.prepare()
                self._prepared.add(number)
        return file

    def _note(self, number: int, file: StoredFile, good: Pieces) -> None:
        with self._guard:
            self._written[number] = self._written.get(number, Pieces(file.count)) | good
            if not self._written[number]:
                del self._written[number]
            self.uncommitted_bytes += len(good) * file.tree.piece_length
