"""Which pieces are asked of whom next.

Owns the choice: pieces that only this source has before others, from the front; runs that grow while a source is quick
and shrink while it is slow; what another source is long about once more, when nothing else is left. Pieces of all files
are numbered in one row here. Pure: the clock is an argument. Shown by tests/artifact/test_fetch_plan.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from shardline.artifact.sources import SourceAccount
from shardline.wire.bitmap import Pieces

RUN_BYTES = (1 << 20, 8 << 20)
"""What is asked for at a time, at first and at most; never less than a piece."""
PLACED_BYTES = 32 << 20
"""The most that is asked of many at once, who write it themselves: they need work ahead, and memory is theirs."""
QUICK_S = 0.5
"""A run that took less is followed by a larger one …"""
SLOW_S = 3.0
"""… and one that took longer by a smaller one; after that long others may ask for the same."""


class Row:
    """All pieces of all files, one after the other."""

    def __init__(self, counts: Iterable[int]) -> None:
        self.starts = [0, *accumulate(counts)]
        self.count = self.starts[-1]

    def joined(self, by_file: Mapping[int, Pieces]) -> Pieces:
        bits = 0
        for number, pieces in by_file.items():
            bits |= pieces.bits << self.starts[number]
        return Pieces(self.count, bits)

    def of_file(self, number: int, pieces: Pieces) -> Pieces:
        return Pieces(self.count, pieces.bits << self.starts[number])

    def split(self, run: Run) -> tuple[int, int]:
        """(file, first piece in it)."""
        return run.file, run.first - self.starts[run.file]

    def file_of(self, piece: int) -> int:
        low, high = 0, len(self.starts) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.starts[middle] <= piece else (low, middle)
        while self.starts[low] == self.starts[low + 1]:
            low += 1
        return low


@dataclass(eq=False, slots=True)
class Run:
    """Pieces [first, end) of the row, all of one file, asked of one source."""

    account: SourceAccount
    file: int
    first: int
    end: int
    since: float
    doubled: bool = False
    """Asked of a second source too."""
    second: bool = False
    """It is the one that asks again."""


class FetchPlan:
    """What is left to do. `piece_bytes` is the length of a piece."""

    def __init__(self, row: Row, missing: Pieces, piece_bytes: int) -> None:
        self.row = row
        self.missing = missing
        """Not held, whether asked for or not."""
        self._piece_bytes = piece_bytes
        self._asked = Pieces(row.count)
        self._elsewhere = Pieces(row.count)
        self._runs: set[Run] = set()

    @property
    def running(self) -> bool:
        return bool(self._runs)

    @property
    def elsewhere(self) -> int | None:
        """A piece that is missing and is fetched by another process."""
        return next(iter(self._elsewhere & self.missing), None)

    def take(self, account: SourceAccount, others: Iterable[SourceAccount], now: float) -> Run | None:
        """The next run for this source; None where it has nothing that is needed now."""
        offered = account.offered
        if offered is None:
            return None
        mine = (self.missing - self._asked - self._elsewhere) & offered
        if not mine:
            return self._double(account, now)
        alone = mine
        for other in others:
            if other is not account and other.state == "active" and other.offered is not None:
                alone -= other.offered
        most = max(1, account.run_bytes // self._piece_bytes)
        found = (alone or mine).first_run(most)
        if found is None:
            return None
        file = self.row.file_of(found[0])
        return self._begin(account, file, found[0], min(found[1], self.row.starts[file + 1]), now)

    def shorten(self, run: Run, end: int) -> None:
        """Only the pieces up to `end` could be claimed: the next one is another process's for now."""
        self._asked -= Pieces.span(self.row.count, end, run.end)
        if end < run.end:
            self._elsewhere |= Pieces.span(self.row.count, end, end + 1)
        run.end = end
        if end <= run.first:
            self._runs.discard(run)

    def look_again(self) -> None:
        """Other processes may have stopped: ask them anew."""
        self._elsewhere = Pieces(self.row.count)

    def ended(self, run: Run) -> None:
        """The run is over; what it did not bring is asked for again."""
        self._runs.discard(run)
        self._asked -= Pieces.span(self.row.count, run.first, run.end)
        for other in self._runs:
            self._asked |= Pieces.span(self.row.count, other.first, other.end)

    def brought(self, pieces: Pieces) -> None:
        """These are here, whoever brought them."""
        self.missing -= pieces

    @staticmethod
    def paced(account: SourceAccount, took_s: float) -> None:
        """Ask for more or less next time, as the last run took so long."""
        if took_s < QUICK_S:
            most = PLACED_BYTES if account.placing else RUN_BYTES[1]
            account.run_bytes = min(most, max(RUN_BYTES[0], account.run_bytes * 2))
        elif took_s > SLOW_S:
            account.run_bytes //= 2

    def _begin(self, account: SourceAccount, file: int, first: int, end: int, now: float) -> Run:
        run = Run(account, file, first, end, now)
        self._runs.add(run)
        self._asked |= Pieces.span(self.row.count, first, end)
        return run

    def _double(self, account: SourceAccount, now: float) -> Run | None:
        """The first pieces of the run that another source has been longest about."""
        if account.placing:
            return None
        for other in sorted(self._runs, key=lambda run: run.since):
            offered = account.offered
            if (
                other.account is account
                or other.account.placing
                or other.doubled
                or now - other.since < SLOW_S
                or offered is None
            ):
                continue
            left = self.missing & offered & Pieces.span(self.row.count, other.first, other.end)
            found = left.first_run(max(1, account.run_bytes // self._piece_bytes))
            if found is not None:
                other.doubled = True
                run = self._begin(account, other.file, found[0], found[1], now)
                run.doubled = run.second = True
                return run
        return None
