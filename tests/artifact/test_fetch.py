"""Fetching: whatever sources do, what is held is right, the good ones are used, and the bad ones are named."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shardline.artifact.bundle import Bundle
from shardline.artifact.fetch import Fetch, FetchProgress
from shardline.artifact.store import Store, StoredArtifact
from shardline.errors import ShardlineError
from shardline.wire.bitmap import Pieces
from tests.support.small_disk import mounted
from tests.support.stores import ANYBODY, DeadSource, FileSource, content_of, filled, size_of

pytestmark = pytest.mark.anyio


def everything(artifact: StoredArtifact) -> Mapping[int, range]:
    return {number: range(file.count) for number, file in enumerate(artifact.files)}


async def run(fetch: Fetch) -> FetchProgress:
    async with asyncio.timeout(30):
        return await fetch.run()


def check_whole(artifact: StoredArtifact, model: Path) -> None:
    file = artifact.files[0]
    assert len(file.held()) == file.count
    assert content_of(file.data_path) == content_of(model)


async def test_a_shard_is_fetched_and_nothing_else(artifact: StoredArtifact, model: Path) -> None:
    source = FileSource(model)
    wanted = artifact.wanted(2, 4)
    fetch = Fetch(artifact, wanted, connections=2)
    fetch.add(source)
    told = await run(fetch)
    assert list(artifact.files[0].held()) == wanted[0]
    assert told.state == "done"
    assert told.done_bytes == told.total_bytes == told.fetched_bytes
    assert sum(end - start for start, end in source.asked) == told.total_bytes < 4 << 20
    artifact.check_held(2, 4)
    assert artifact.files[0].data_path.stat().st_blocks * 512 < told.total_bytes + (1 << 18)


async def test_what_is_held_is_not_fetched_again(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model, {0: range(10)})
    source = FileSource(model)
    fetch = Fetch(artifact, everything(artifact), connections=3)
    fetch.add(source)
    told = await run(fetch)
    assert min(source.asked)[0] == 10 * artifact.files[0].tree.piece_length
    assert told.fetched_bytes == told.total_bytes - min(source.asked)[0]
    again = Fetch(artifact, everything(artifact), connections=3)
    assert (await run(again)).fetched_bytes == 0
    check_whole(artifact, model)


async def test_a_source_that_lies_is_banned_and_named(artifact: StoredArtifact, model: Path) -> None:
    """One bad piece of a run: the others of it stay, the good source brings the bad one."""
    bad = FileSource(model, name="bad", wrong=[5, 6])
    fetch = Fetch(artifact, everything(artifact), connections=1)
    fetch.add(bad)
    with pytest.raises(ShardlineError, match="bad: piece 5 of file 0 is not what") as caught:
        await run(fetch)
    assert caught.value.code == "artifact_unavailable"
    held = artifact.files[0].held()
    assert 5 not in held
    assert 4 in held
    good = FileSource(model)
    fetch = Fetch(artifact, everything(artifact), connections=1)
    fetch.add(bad)
    fetch.add(good)
    told = await run(fetch)
    check_whole(artifact, model)
    states = {source.name: source for source in told.sources}
    assert states["good"].state == "active"
    asked_for_bad = any(start <= piece * (1 << 18) < end for start, end in bad.asked for piece in (5, 6))
    if asked_for_bad and states["bad"].state == "banned":
        assert states["bad"].bad_pieces[0] in {(0, 5), (0, 6)}


async def test_sources_with_a_part_each(artifact: StoredArtifact, model: Path) -> None:
    count = artifact.files[0].count
    third = count // 3
    cuts = [0, third, 2 * third, count]
    sources = [FileSource(model, name=f"s{i}", has=Pieces.span(count, cuts[i], cuts[i + 1])) for i in range(3)]
    fetch = Fetch(artifact, everything(artifact), connections=2)
    for source in sources:
        fetch.add(source)
    await run(fetch)
    check_whole(artifact, model)
    for i, source in enumerate(sources):
        size = min(cuts[i + 1] << 18, size_of(model)) - (cuts[i] << 18)
        assert sum(end - start for start, end in source.asked) == size


async def test_a_dead_source_is_given_up_and_the_other_used(artifact: StoredArtifact, model: Path) -> None:
    fetch = Fetch(artifact, everything(artifact), connections=1)
    fetch.add(DeadSource())
    fetch.add(FileSource(model, delay_s=0.01))
    await run(fetch)
    check_whole(artifact, model)


async def test_only_dead_sources_end_it_with_their_reasons(artifact: StoredArtifact) -> None:
    fetch = Fetch(artifact, everything(artifact), connections=4)
    fetch.add(DeadSource())
    with pytest.raises(ShardlineError, match="dead: no connection") as caught:
        await run(fetch)
    assert caught.value.code == "artifact_unavailable"
    assert caught.value.fault.retryable


async def test_no_source_at_all(artifact: StoredArtifact) -> None:
    with pytest.raises(ShardlineError, match="no source is known"):
        await run(Fetch(artifact, everything(artifact), connections=4))


async def test_sources_that_lack_a_piece_end_it_after_a_while(artifact: StoredArtifact, model: Path) -> None:
    count = artifact.files[0].count
    fetch = Fetch(artifact, everything(artifact), connections=2, stall_s=0.3)
    fetch.add(FileSource(model, name="partial", has=Pieces.span(count, 1, count)))
    with pytest.raises(ShardlineError, match="partial: does not have them"):
        await run(fetch)
    assert list(Pieces.all(count) - artifact.files[0].held()) == [0]


class Boaster(FileSource):
    """Offers everything, and has the first two pieces."""

    async def read(self, number: int, start: int, into: memoryview) -> None:
        self.asked.append((start, start + len(into)))
        if start + len(into) > 2 << 18:
            raise ShardlineError("artifact_incomplete", "the range is not all held")
        await super().read(number, start, into)


async def test_who_offers_what_it_has_not_holds_nothing_up(artifact: StoredArtifact, model: Path) -> None:
    boaster, good = Boaster(model, name="boaster"), FileSource(model, delay_s=0.01)
    fetch = Fetch(artifact, everything(artifact), connections=2)
    fetch.add(boaster)
    fetch.add(good)
    await run(fetch)
    check_whole(artifact, model)
    assert len(boaster.asked) <= artifact.files[0].count + 2, "not asked for the same again and again"


async def test_only_somebody_who_offers_what_it_has_not(artifact: StoredArtifact, model: Path) -> None:
    fetch = Fetch(artifact, everything(artifact), connections=2, stall_s=0.3)
    fetch.add(Boaster(model, name="boaster"))
    with pytest.raises(ShardlineError, match="boaster: ") as caught:
        await run(fetch)
    assert caught.value.code == "artifact_unavailable"


async def test_a_source_that_comes_later_is_used(artifact: StoredArtifact, model: Path) -> None:
    count = artifact.files[0].count
    fetch = Fetch(artifact, everything(artifact), connections=1)
    fetch.add(FileSource(model, name="first", has=Pieces.span(count, 0, 2)))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        task = group.create_task(fetch.run())
        while fetch.progress().done_bytes < 2 << 18:
            await asyncio.sleep(0.01)
        fetch.add(FileSource(model, name="second"))
    assert {source.name for source in task.result().sources} == {"first", "second"}
    check_whole(artifact, model)


async def test_what_a_slow_source_is_long_about_is_asked_of_another(
    artifact: StoredArtifact, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.artifact.fetch_plan.SLOW_S", 0.1)
    fetch = Fetch(artifact, everything(artifact), connections=1)
    fetch.add(FileSource(model, name="slow", delay_s=3600))
    fetch.add(FileSource(model, name="good"))
    told = await run(fetch)
    check_whole(artifact, model)
    assert {s.name: s.fetched_bytes for s in told.sources} == {"slow": 0, "good": size_of(model)}


async def test_cancelling_keeps_what_was_checked(artifact: StoredArtifact, model: Path) -> None:
    fetch = Fetch(artifact, everything(artifact), connections=1)
    fetch.add(FileSource(model, delay_s=0.02))
    task = asyncio.get_running_loop().create_task(fetch.run())
    async with asyncio.timeout(20):
        while fetch.progress().done_bytes == 0:
            await asyncio.sleep(0.005)
    done = fetch.progress().done_bytes
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert artifact.bytes_of(artifact.held()) >= done
    # Nothing stays claimed.
    assert artifact.claims.take(0, artifact.files[0].count) == artifact.files[0].count


async def test_progress_says_bytes_rate_and_time_left(artifact: StoredArtifact, model: Path) -> None:
    seen: list[FetchProgress] = []
    fetch = Fetch(artifact, everything(artifact), connections=1, progress=seen.append)
    fetch.add(FileSource(model, delay_s=0.15))
    await run(fetch)
    assert [told.done_bytes for told in seen] == sorted(told.done_bytes for told in seen)
    running = [told for told in seen if 0 < told.done_bytes < told.total_bytes]
    assert running
    assert all(told.bytes_per_s > 0 and told.seconds_left and told.sources[0].fetched_bytes for told in running)
    assert seen[-1].state == "done"


async def test_space_is_checked_before_the_first_byte(tmp_path: Path, bundle: Bundle, model: Path) -> None:
    store = Store(tmp_path / "store", reserve_bytes=1 << 60)
    source = FileSource(model)
    with store.add(bundle) as artifact:
        fetch = Fetch(artifact, everything(artifact), connections=1)
        fetch.add(source)
        with pytest.raises(ShardlineError) as caught:
            await run(fetch)
    assert caught.value.code == "disk_full"
    assert caught.value.details["needed_bytes"] == size_of(model)
    assert source.asked == []
    store.close()


async def test_a_lost_record_is_made_again_from_what_is_on_disk(artifact: StoredArtifact, model: Path) -> None:
    filled(artifact, model, {0: range(5)})
    file = artifact.files[0]
    (file.data_path.parent.parent / "held" / file.name).unlink()
    assert not file.held()
    source = FileSource(model)
    fetch = Fetch(artifact, everything(artifact), connections=1)
    fetch.add(source)
    await run(fetch)
    assert min(source.asked)[0] == 5 << 18
    check_whole(artifact, model)


async def test_two_fetches_in_one_store_fetch_no_piece_twice(artifact: StoredArtifact, model: Path) -> None:
    """Also of two that share some pieces: one waits for what the other brings."""
    source = FileSource(model, delay_s=0.02)
    other = artifact.store.open(artifact.content_id, ANYBODY)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for which in (artifact, other):
            fetch = Fetch(which, everything(which), connections=2)
            fetch.add(source)
            group.create_task(fetch.run())
    other.close()
    check_whole(artifact, model)
    assert sum(end - start for start, end in source.asked) == size_of(model)


async def test_what_another_program_delivers_counts(artifact: StoredArtifact, model: Path) -> None:
    """The seam for BitTorrent: it writes the data file, and says so."""
    file = artifact.files[0]
    fetch = Fetch(artifact, everything(artifact), connections=1)
    fetch.add(FileSource(model, has=Pieces.span(file.count, 0, 3)))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        task = group.create_task(fetch.run())
        while fetch.progress().done_bytes < 3 << 18:
            await asyncio.sleep(0.01)
        rest = Pieces.span(file.count, 3, file.count)
        assert await fetch.delivered(0, rest) == list(rest)
        with file.data_path.open("r+b") as data:
            data.write(content_of(model))
        assert await fetch.delivered(0, rest) == []
    assert task.result().fetched_bytes == 3 << 18
    check_whole(artifact, model)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MiB, of which 6 are taken; the model has 8."""
    with mounted(tmp_path / "disk", "12m") as mount:
        yield mount


async def test_a_disk_that_gets_full_ends_it_with_what_came_held(small_disk: Path, bundle: Bundle, model: Path) -> None:
    store = Store(small_disk / "store", reserve_bytes=0)
    with store.add(bundle) as artifact:
        source, blocker = FileSource(model, delay_s=0.05), small_disk / "blocker"
        fetch = Fetch(artifact, everything(artifact), connections=1)
        fetch.add(source)
        task = asyncio.get_running_loop().create_task(run(fetch))
        while not source.asked:
            await asyncio.sleep(0.001)
        blocker.write_bytes(bytes(6 << 20))
        with pytest.raises(ShardlineError) as caught:
            await task
        assert caught.value.code == "disk_full"
        held = artifact.files[0].held()
        assert len(held) >= 8
        assert all(artifact.files[0].is_whole(piece) for piece in held)
        blocker.unlink()
        source.asked.clear()
        again = Fetch(artifact, everything(artifact), connections=1)
        again.add(source)
        await run(again)
        assert sum(end - start for start, end in source.asked) <= size_of(model) - (len(held) << 18)
        check_whole(artifact, model)
    store.close()


async def test_a_disk_that_takes_nothing_ends_it_by_name(small_disk: Path, bundle: Bundle, model: Path) -> None:
    """Also where the claim of a piece is the first thing that cannot be written."""
    store = Store(small_disk / "store", reserve_bytes=0)
    with store.add(bundle) as artifact:
        filled(artifact, model, {0: [0]})
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with store.open(bundle.manifest.content_id, ANYBODY) as artifact:
        fetch = Fetch(artifact, everything(artifact), connections=2)
        fetch.add(FileSource(model))
        with pytest.raises(ShardlineError) as caught:
            await run(fetch)
        assert caught.value.code == "state_unwritable"
        assert list(artifact.held()[0]) == [0]
        assert artifact.files[0].read(0, 100) == content_of(model)[:100]
    store.close()


async def test_a_full_disk_whose_folder_goes_away_ends_it_by_name(
    small_disk: Path, bundle: Bundle, model: Path
) -> None:
    store = Store(small_disk / "store", reserve_bytes=0)
    with store.add(bundle) as artifact:
        seen: list[FetchProgress] = []
        fetch = Fetch(artifact, everything(artifact), connections=1, space_wait_s=20.0, progress=seen.append)
        fetch.add(FileSource(model, delay_s=0.05))
        task = asyncio.get_running_loop().create_task(run(fetch))
        while fetch.progress().done_bytes == 0:
            await asyncio.sleep(0.001)
        (small_disk / "blocker").write_bytes(bytes(6 << 20))
        async with asyncio.timeout(20):
            while not any(told.state == "paused" for told in seen):
                await asyncio.sleep(0.01)
        store.folder.rename(small_disk / "away")
        with pytest.raises(ShardlineError) as caught:
            await task
        assert caught.value.code == "state_unwritable"
    store.close()


class Refuses(DeadSource):
    """For good."""

    async def read(self, number: int, start: int, into: memoryview) -> None:
        raise ShardlineError("source_failed", "no", final=True)


async def test_a_source_that_was_given_up_takes_its_place_again(artifact: StoredArtifact, model: Path) -> None:
    """However often it comes back, it is one source; and those that are gone do not pile up."""
    fetch = Fetch(artifact, everything(artifact), connections=1)
    has = Pieces.of(artifact.files[0].count, [0])
    fetch.add(FileSource(model, name="slow", has=has))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run(fetch))
        for turn in range(70):
            dead = Refuses()
            dead.name = f"dead {turn % 69}"
            fetch.add(dead)
            while fetch.asks(dead.name):
                await asyncio.sleep(0)
        names = [source.name for source in fetch.progress().sources]
        assert names.count("dead 0") == 1 and len(names) <= 68
        fetch.add(FileSource(model))
        await task
    check_whole(artifact, model)


async def test_a_paused_fetch_goes_on_by_itself(small_disk: Path, bundle: Bundle, model: Path) -> None:
    store = Store(small_disk / "store", reserve_bytes=0)
    with store.add(bundle) as artifact:
        seen: list[FetchProgress] = []
        blocker = small_disk / "blocker"
        fetch = Fetch(artifact, everything(artifact), connections=1, space_wait_s=20.0, progress=seen.append)
        fetch.add(FileSource(model, delay_s=0.05))
        task = asyncio.get_running_loop().create_task(run(fetch))
        while fetch.progress().done_bytes == 0:
            await asyncio.sleep(0.001)
        blocker.write_bytes(bytes(6 << 20))
        async with asyncio.timeout(20):
            while not any(told.state == "paused" for told in seen):
                await asyncio.sleep(0.01)
        blocker.unlink()
        await task
        check_whole(artifact, model)
    store.close()
