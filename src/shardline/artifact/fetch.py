"""Fetching pieces into the store, from several sources at once, whoever they are.

Owns the tasks: bounded requests to each source, every piece checked as it comes, commits in batches, what happens when
a source lies, fails or is slow, when the disk is full, and when another process fetches the same. Which piece is asked
of whom is fetch_plan.py's; how a source is reached is the sources' own. Cancel `run` at any time: checked pieces stay.
Shown by tests/artifact/test_fetch.py and test_store_processes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import structlog

from shardline.artifact.fetch_plan import RUN_BYTES, FetchPlan, Row, Run
from shardline.artifact.locks import is_stopped
from shardline.artifact.piece_writer import PieceWriter
from shardline.artifact.scrub import recover
from shardline.artifact.sources import Accounts, PlacingSource, Rate, Source, SourceAccount, SourceProgress
from shardline.artifact.store import StoredArtifact, Wanted
from shardline.artifact.stored_file import unwritable
from shardline.errors import ShardlineError
from shardline.wire.bitmap import Pieces

COMMIT_BYTES = 64 << 20
COMMIT_S = 1.0
"""What was written is held after at most so many bytes or seconds: the most that a killed process fetches again."""
TICK_S = 0.25
OFFER_S = 2.0
"""Sources fetch, too: one that had not all pieces is asked again so often."""
STALL_S = 20.0
"""Nobody has what is missing for so long: the fetch fails."""
ELSEWHERE = 10
"""So many times longer, where another process of this machine fetches it, and is not stopped."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is."""

    state: Literal["fetching", "paused", "done"]
    """`paused`: the disk is full."""
    done_bytes: int
    """Of `total_bytes`, those that were there before included."""
    total_bytes: int
    fetched_bytes: int
    """Through this fetch, from all sources."""
    bytes_per_s: float
    seconds_left: float | None
    """None: not known."""
    sources: tuple[SourceProgress, ...]
    elsewhere: int | None = None
    """A process of this machine that fetches some of it for itself: what it brings is there for all."""


class Fetch:
    """One fetch of some pieces of one artifact. Add sources before it runs or while it does."""

    def __init__(
        self,
        artifact: StoredArtifact,
        wanted: Wanted,
        *,
        connections: int,
        space_wait_s: float = 0.0,
        beside_bytes: int = 0,
        stall_s: float = STALL_S,
        progress: Callable[[FetchProgress], None] | None = None,
        banned: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`connections`: requests to one source at a time. `space_wait_s`: a full disk is waited for so long.
        `beside_bytes`: what else will be written to the disk of the store, made of these pieces. `banned`: is told
        the name of a source that gave a wrong piece, at once."""
        self.artifact = artifact
        self.writer = PieceWriter(artifact)
        self._row = Row(file.count for file in artifact.files)
        self._wanted = self._row.joined({n: Pieces.of(artifact.files[n].count, p) for n, p in wanted.items()})
        self._piece_bytes = artifact.bundle.manifest.piece_length
        self._plan = FetchPlan(self._row, self._wanted, self._piece_bytes)
        self._connections = connections
        self._space_wait_s = space_wait_s
        self._beside_bytes = beside_bytes
        self._stall_s = stall_s
        self._progress = progress
        self._banned = banned
        self._accounts = Accounts()
        self._elsewhere: int | None = None
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self._changed = asyncio.Event()
        self._batch = asyncio.Event()
        self._room = asyncio.Lock()
        self._hands = asyncio.Semaphore(1 + (os.cpu_count() or 1))
        """Runs that are hashed and written at once: with many more than processors, threads only take turns."""
        self._claimed: list[Run] = []
        """Their pieces are written and not yet held: other processes still leave them to us."""
        self._failure: ShardlineError | None = None
        self._paused = False
        self._rate: Rate | None = None
        self._last_news = 0.0

    def add(self, source: Source | PlacingSource) -> None:
        """One more source, or one again that was given up; call it on the loop that runs the fetch."""
        account = SourceAccount(source, Rate(_now()), run_bytes=max(RUN_BYTES[0], self._piece_bytes))
        self._accounts.add(account)
        if self._group is not None and not self._over.is_set():
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(self._group.create_task(self._serve(account)))

    def asks(self, name: str) -> bool:
        """Whether a source of this name is asked for pieces at the moment."""
        return any(account.source.name == name for account in self._accounts.active())

    @property
    def active(self) -> int:
        """How many sources are asked."""
        return len(self._accounts.active())

    async def run(self) -> FetchProgress:
        """Returns when all wanted pieces are held.

        Errors: `disk_full` (before the first byte, or when it gets full and stays so), `state_unwritable`;
        `artifact_unavailable` where no source is left that has what is missing.
        """
        await asyncio.to_thread(self._prepare)
        self._rate = Rate(_now())
        self._last_news = _now()
        try:
            if self._plan.missing:
                async with asyncio.TaskGroup() as group:
                    self._group = group
                    self._tasks += [group.create_task(self._serve(account)) for account in self._accounts]
                    self._tasks += [group.create_task(self._commit_often()), group.create_task(self._watch())]
                    await self._over.wait()
                    for task in self._tasks:
                        task.cancel()
        finally:
            self._group = None
            self._over.set()
            try:
                await asyncio.to_thread(self.writer.finish)
            except ShardlineError as error:
                log.warning("fetch_not_committed", reason=error.message)
                self._fail(error)
            finally:
                self._give(self._claimed)
        if self._failure is not None:
            raise self._failure
        self._tell()
        return self.progress()

    async def delivered(self, number: int, pieces: Pieces) -> list[int]:
        """Another program has written these pieces into the data file: the numbers of those that do not lie there."""
        bad = await self._guarded(self.writer.confirm, number, pieces)
        self._brought(number, pieces - Pieces.of(pieces.count, bad or ()))
        return bad or []

    def progress(self) -> FetchProgress:
        """How far it is now."""
        now = _now()
        total, missing = self._bytes(self._wanted), self._bytes(self._plan.missing)
        rate = 0.0 if self._rate is None else self._rate.per_s(now)
        return FetchProgress(
            state="paused" if self._paused else "fetching" if self._plan.missing else "done",
            done_bytes=total - missing,
            total_bytes=total,
            fetched_bytes=self._accounts.fetched_bytes,
            bytes_per_s=rate,
            seconds_left=missing / rate if rate > 0 else None,
            sources=tuple(row for account in self._accounts for row in account.shown(now)),
            elsewhere=self._elsewhere,
        )

    # Beginning and end.

    def _prepare(self) -> None:
        """What is there already, and whether the rest fits. Blocking."""
        for file in self.artifact.files:
            recover(file)
        self._plan.brought(self._row.joined(self.artifact.held()))
        if self._plan.missing:
            self.artifact.store.check_space(self._bytes(self._plan.missing), self._beside_bytes)

    def _fail(self, error: ShardlineError) -> None:
        if self._failure is None:
            self._failure = error
        self._over.set()

    def _brought(self, number: int, pieces: Pieces) -> None:
        self._plan.brought(self._row.of_file(number, pieces))
        self._last_news = _now()
        self._wake()
        if not self._plan.missing:
            self._over.set()

    def _wake(self) -> None:
        """Whoever waits for a piece looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # One source.

    async def _serve(self, account: SourceAccount) -> None:
        while account.state == "active" and account.offered is None:
            await self._ask_offer(account)
        if account.state == "active":
            async with asyncio.TaskGroup() as group:
                for _ in range(self._connections):
                    group.create_task(self._work(account))
                group.create_task(self._renew(account))
        self._wake()

    async def _ask_offer(self, account: SourceAccount) -> None:
        try:
            offer = await account.source.offer()
        except ShardlineError as error:
            await self._failed(account, error)
            return
        account.offered = Pieces.all(self._row.count) if offer is None else self._row.joined(offer)
        self._wake()

    async def _renew(self, account: SourceAccount) -> None:
        while account.state == "active" and account.offered is not None and (self._wanted - account.offered):
            await asyncio.sleep(OFFER_S)
            if self._plan.missing - account.offered:
                await self._ask_offer(account)

    async def _work(self, account: SourceAccount) -> None:
        """One request after the other, always into the same memory."""
        room = _Room()
        while account.state == "active" and self._plan.missing:
            run = self._next(account)
            if run is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._changed.wait()
                continue
            pause = None
            try:
                pause = await self._fetch(account, run, room)
            finally:
                self._end(run)
            if pause is not None:
                await asyncio.sleep(pause)

    def _next(self, account: SourceAccount) -> Run | None:
        while (run := self._plan.take(account, self._accounts, _now())) is not None:
            if run.second:
                return run
            try:
                end = self.artifact.claims.take(run.first, run.end)
            except OSError as error:
                self._plan.shorten(run, run.first)
                self._fail(unwritable(error, self.artifact.folder))
                return None
            if end < run.end:
                self._plan.shorten(run, end)
            if end == run.first:
                continue
            # Between our last look and the claim, another process may have brought it.
            here = self._row.of_file(run.file, self.artifact.files[run.file].held())
            here &= Pieces.span(self._row.count, run.first, run.end)
            if not here:
                return run
            self._plan.brought(here)
            self._end(run)
        return None

    def _end(self, run: Run) -> None:
        written = Pieces.span(self._row.count, run.first, run.end) - self._plan.missing
        self._plan.ended(run)
        if not run.second:
            self._claimed.append(run)
            if not written:
                self._give([run])
        self._wake()

    def _give(self, runs: list[Run]) -> None:
        """Others may have these pieces: they are held, or they did not come."""
        for run in list(runs):
            self.artifact.claims.give(run.first, run.end)
            self._claimed.remove(run)

    async def _fetch(self, account: SourceAccount, run: Run, room: _Room) -> float | None:
        """Ask for a run, and store it. How long to leave the source alone, where it failed."""
        if isinstance(account.source, PlacingSource):
            return await self._fetch_placed(account, account.source, run)
        number, first = self._row.split(run)
        tree = self.artifact.files[number].tree
        start, end = tree.piece_range(first)[0], tree.piece_range(first + run.end - run.first - 1)[1]
        data = room.of(end - start)
        began = _now()
        try:
            await account.source.read(number, start, data)
        except ShardlineError as error:
            return self._gave_nothing(account, run, error)
        async with self._hands:
            bad = await self._guarded(self.writer.put, number, first, data)
        if bad is None:
            return None
        self._plan.paced(account, _now() - began)
        self._gave(account, len(data) - tree.bytes_of(bad))
        if bad:
            account.gave_wrong(number, bad)
            log.warning("source_banned", source=account.source.name, file=number, pieces=bad[:8])
            self._banned(account.source.name)
        count = self.artifact.files[number].count
        self._brought(number, Pieces.span(count, first, first + run.end - run.first) - Pieces.of(count, bad))
        if self.writer.uncommitted_bytes >= COMMIT_BYTES:
            self._batch.set()
        return None

    async def _fetch_placed(self, account: SourceAccount, source: PlacingSource, run: Run) -> float | None:
        """Have a run written into the data file, and check what lies there as it comes."""
        number, first = self._row.split(run)
        tree = self.artifact.files[number].tree
        began = _now()
        try:
            async with contextlib.aclosing(source.place(number, first, first + run.end - run.first)) as placed:
                async for pieces in placed:
                    bad = Pieces.of(pieces.count, await self.delivered(number, pieces))
                    self._gave(account, tree.bytes_of(pieces - bad))
                    if bad:
                        raise ShardlineError(
                            "source_failed", f"{len(bad)} pieces do not lie in the file as they should"
                        )
                    if self.writer.uncommitted_bytes >= COMMIT_BYTES:
                        self._batch.set()
        except ShardlineError as error:
            if error.code == "disk_full":
                if not await self._wait_for_room():
                    self._fail(error)
                return TICK_S
            return self._gave_nothing(account, run, error)
        self._plan.paced(account, _now() - began)
        return None

    def _gave(self, account: SourceAccount, count: int) -> None:
        account.gave(_now(), count)
        if self._rate is not None:
            self._rate.add(_now(), count)

    def _gave_nothing(self, account: SourceAccount, run: Run, error: ShardlineError) -> float | None:
        """How long to leave a source alone that did not give a run, or not all of it."""
        if error.code == "artifact_incomplete" and account.offered is not None:
            # It had them, and has found them damaged since: they are not asked of it before its next offer.
            account.offered -= Pieces.span(self._row.count, run.first, run.end)
            return TICK_S
        account.run_bytes = 0
        return self._note_failure(account, error)

    async def _failed(self, account: SourceAccount, error: ShardlineError) -> None:
        pause = self._note_failure(account, error)
        if pause is not None:
            await asyncio.sleep(pause)

    def _note_failure(self, account: SourceAccount, error: ShardlineError) -> float | None:
        pause = account.failed(error)
        level = "source_given_up" if pause is None else "source_failed"
        log.warning(level, source=account.source.name, reason=error.message)
        return pause

    # The disk.

    async def _guarded(self, call: Callable[..., list[int]], *args: object) -> list[int] | None:
        """Carry out something that writes; where the disk is full, wait for room and do it again. None: it failed."""
        while True:
            try:
                return await asyncio.to_thread(call, *args)
            except ShardlineError as error:
                if error.code != "disk_full" or not await self._wait_for_room():
                    self._fail(error)
                    return None

    async def _wait_for_room(self) -> bool:
        """Whether there is room for what is missing, at the latest after `space_wait_s`."""
        async with self._room:
            needed = self._bytes(self._plan.missing) + self._beside_bytes
            deadline = _now() + self._space_wait_s
            with self._pausing(needed):
                while not self._over.is_set():
                    try:
                        if await asyncio.to_thread(self.artifact.store.free_bytes) >= needed:
                            return True
                    except ShardlineError as error:
                        # The folder went away while it was full.
                        self._fail(error)
                        return False
                    if _now() >= deadline:
                        return False
                    await asyncio.sleep(TICK_S)
            return False

    @contextlib.contextmanager
    def _pausing(self, needed: int) -> Iterator[None]:
        log.warning("fetch_paused", reason="the disk of the store is full", needed_bytes=needed)
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._last_news = _now()

    async def _commit_often(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_S):
                    await self._batch.wait()
            self._batch.clear()
            if self.writer.uncommitted_bytes or self._claimed:
                written = list(self._claimed)
                if await self._guarded(self._commit) is not None:
                    self._give(written)

    def _commit(self) -> list[int]:
        self.writer.commit()
        return []

    # Watching.

    async def _watch(self) -> None:
        """Look what other processes have brought, tell how far it is, and see when nothing can come any more."""
        while True:
            await asyncio.sleep(TICK_S)
            news = self._row.joined(self.artifact.held()) & self._plan.missing
            if news:
                self._plan.brought(news)
                self._last_news = _now()
            if not self._plan.missing:
                self._over.set()
            if self._plan.running:
                self._last_news = _now()
            elsewhere = self._plan.elsewhere
            self._elsewhere = None if elsewhere is None else self.artifact.claims.holder(elsewhere)
            moves = elsewhere is not None and not (self._elsewhere and is_stopped(self._elsewhere))
            patience = self._stall_s * (ELSEWHERE if moves else 1)
            no_one = elsewhere is None and not self.active
            if self._plan.missing and (no_one or _now() - self._last_news > patience):
                self._fail(self._unavailable())
            self._plan.look_again()
            self._wake()
            self._tell()

    def _unavailable(self) -> ShardlineError:
        missing = self._bytes(self._plan.missing)
        reasons = [f"{a.source.name}: {a.reason or 'does not have them'}" for a in self._accounts]
        why = "; ".join(reasons[:8]) or "no source is known"
        if (process := self._elsewhere) is not None:
            stands = ", and is stopped: let it go on, or end it" if is_stopped(process) else ""
            why = f"process {process} of this machine has claimed some{stands}; {why}"
        message = f"{len(self._plan.missing)} pieces ({missing} bytes) are missing, and nobody gives them: {why}"
        return ShardlineError("artifact_unavailable", message[:2000], missing_bytes=missing)

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.progress())

    def _bytes(self, pieces: Pieces) -> int:
        starts = self._row.starts
        by_file = {}
        for number, file in enumerate(self.artifact.files):
            some = (pieces.bits >> starts[number]) & ((1 << file.count) - 1)
            if some:
                by_file[number] = Pieces(file.count, some)
        return self.artifact.bytes_of(by_file)


class _Room:
    """Memory for one run after the other: fresh memory costs as much as the copy into it."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, size: int) -> memoryview:
        """`size` bytes, for one use at a time."""
        if len(self._memory) < size:
            # As much as any run may have: what is not used is only promised by the system.
            self._memory = bytearray(max(size, RUN_BYTES[1]))
        return memoryview(self._memory)[:size]


def _now() -> float:
    return asyncio.get_running_loop().time()
