"""What a fetch wants of a source of pieces, and the account that is kept of each.

Owns the contract (whoever delivers bytes implements `Source`: Nodes and web seeds in transport/; whoever writes them
into the data file itself `PlacingSource`: BitTorrent) and when a source is done with: banned for one wrong piece, given
up after failures in a row. No I/O. Shown by tests/artifact/test_fetch.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from shardline.errors import ShardlineError
from shardline.wire.bitmap import Pieces

FAILURES_LIMIT = 4
"""So many failures in a row, and a source is given up."""
GONE_LIMIT = 64
"""Sources that are not asked any more and are still told of."""
_BACKOFF_S = (0.25, 1.0, 3.0)
_BUSY_S = 1.0
_WINDOW_S = 5.0

State = Literal["active", "banned", "given up"]


class Source(Protocol):
    """Somebody who has pieces. Every call has a limit of its own, and raises ShardlineError when it has no answer."""

    @property
    def name(self) -> str:
        """For people: `host:port`, or who it is."""
        ...

    async def offer(self) -> Mapping[int, Pieces] | None:
        """What it has, by file number, in pieces of the artifact; None: all of it."""
        ...

    async def read(self, number: int, start: int, into: memoryview) -> None:
        """Fill `into` (bytes, writable) with those of a file from `start` on, not yet checked."""
        ...


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """One source, for people and APIs."""

    name: str
    state: State
    fetched_bytes: int
    bytes_per_s: float
    reason: str | None
    bad_pieces: tuple[tuple[int, int], ...]
    """(file, piece) that it gave wrong."""


@runtime_checkable
class PlacingSource(Protocol):
    """Many who have pieces, behind a program that writes what they give into the data file of the store itself."""

    @property
    def name(self) -> str:
        """For people, as of `Source`."""
        ...

    async def offer(self) -> Mapping[int, Pieces] | None:
        """What they have together, as of `Source`."""
        ...

    def place(self, number: int, first: int, end: int) -> AsyncGenerator[Pieces, None]:
        """Have the pieces [first, end) of a file written; yields those that now lie in the data file, to be checked.

        From its end on, however it ends (`aclose` included), nothing that was not yielded is written there any more: so
        others may be asked for it, and what they bring stays as it is. Errors as of `Source.read`.
        """
        ...

    def members(self) -> Sequence[SourceProgress]:
        """Who they are, and what each gave."""
        ...


class Rate:
    """Bytes in the last seconds. Times are seconds of one clock."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._marks: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, now: float, count: int) -> None:
        self._marks.append((now, count))
        self._sum += count
        self._drop(now)

    def per_s(self, now: float) -> float:
        self._drop(now)
        return self._sum / max(0.1, min(_WINDOW_S, now - self._began))

    def _drop(self, now: float) -> None:
        while self._marks and self._marks[0][0] < now - _WINDOW_S:
            self._sum -= self._marks.popleft()[1]


@dataclass(eq=False)
class SourceAccount:
    """One source in one fetch."""

    source: Source | PlacingSource
    rate: Rate
    state: State = "active"
    reason: str | None = None
    """Why it is not active, or what failed last."""
    offered: Pieces | None = None
    """Of all pieces of the artifact in a row; None: not asked yet."""
    fetched_bytes: int = 0
    bad_pieces: list[tuple[int, int]] = field(default_factory=list)
    """(file, piece) that it gave wrong."""
    failures: int = 0
    """In a row."""
    run_bytes: int = 0
    """How much is asked of it at a time."""
    placing: bool = field(init=False)
    """What it was asked for is asked of nobody else meanwhile: two programs would write one piece."""

    def __post_init__(self) -> None:
        self.placing = isinstance(self.source, PlacingSource)

    def gave(self, now: float, count: int) -> None:
        self.failures = 0
        self.fetched_bytes += count
        self.rate.add(now, count)

    def gave_wrong(self, number: int, pieces: list[int]) -> None:
        """Wrong bytes are never an accident of the network: it is asked nothing more."""
        self.bad_pieces += [(number, piece) for piece in pieces]
        self.state = "banned"
        self.reason = f"piece {pieces[0]} of file {number} is not what the artifact says"

    def failed(self, error: ShardlineError) -> float | None:
        """How long to leave it alone; None: for good. One that is busy has not failed; an error with the detail `final`
        will not get better."""
        self.reason = error.message
        if error.code == "queue_full":
            return _BUSY_S
        self.failures += 1
        if self.failures >= FAILURES_LIMIT or not error.fault.retryable or error.details.get("final"):
            self.state = "given up"
            return None
        return _BACKOFF_S[min(self.failures, len(_BACKOFF_S)) - 1]

    def shown(self, now: float) -> Sequence[SourceProgress]:
        """For people: its members, where it stands for several."""
        if isinstance(self.source, PlacingSource) and self.state == "active" and (members := self.source.members()):
            return members
        return [
            SourceProgress(
                name=self.source.name,
                state=self.state,
                fetched_bytes=self.fetched_bytes,
                bytes_per_s=self.rate.per_s(now),
                reason=self.reason,
                bad_pieces=tuple(self.bad_pieces),
            )
        ]


class Accounts:
    """All sources of one fetch: those that are asked, and the last ones that were given up or banned."""

    def __init__(self) -> None:
        self._all: list[SourceAccount] = []
        self._forgotten_bytes = 0

    def __iter__(self) -> Iterator[SourceAccount]:
        return iter(tuple(self._all))

    def add(self, account: SourceAccount) -> None:
        """It takes the place of one of the same name that is not asked any more, with what that one gave."""
        gone = [one for one in self._all if one.state != "active"]
        for old in gone:
            if old.source.name == account.source.name:
                self._all.remove(old)
                account.fetched_bytes += old.fetched_bytes
                account.bad_pieces += old.bad_pieces
        if len(gone) > GONE_LIMIT and gone[0] in self._all:
            self._all.remove(gone[0])
            self._forgotten_bytes += gone[0].fetched_bytes
        self._all.append(account)

    def active(self) -> list[SourceAccount]:
        """Those that are asked now."""
        return [account for account in self._all if account.state == "active"]

    @property
    def fetched_bytes(self) -> int:
        """From all there ever were."""
        return self._forgotten_bytes + sum(account.fetched_bytes for account in self._all)
