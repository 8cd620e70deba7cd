"""BitTorrent between Nodes: only what is wanted, from whoever was named, one bitmap with all other sources."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from shardline.artifact.adoption import adopt
from shardline.artifact.bundle import Bundle
from shardline.artifact.fetch import Fetch, FetchProgress
from shardline.artifact.store import Wanted
from shardline.errors import ShardlineError
from shardline.node import bans as banning
from shardline.node import swarm as swarming
from shardline.node import swarm_torrent
from shardline.settings import Settings
from shardline.transport.torrent_messages import Peer
from shardline.transport.torrent_process import missing
from shardline.wire.artifacts import Source
from shardline.wire.bitmap import Pieces
from tests.support.certificates import authority, party
from tests.support.rogue_peer import Way, rogue_peer
from tests.support.small_disk import mounted
from tests.support.stores import ANYBODY, FileSource, content_of, described, layered_model, size_of, store_at
from tests.support.swarms import Member, Named, member, until

WHY = missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=WHY or "")
ROOT = Path(__file__).resolve().parents[2]
LAYERS = 8
KILLS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("model"), layers=LAYERS)


@pytest.fixture(scope="module")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return described(model, tmp_path_factory.mktemp("bundle") / "a")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarming, "SOURCES_S", 0.2)
    monkeypatch.setattr(swarm_torrent, "STALL_S", 3.0)


def everything(of: Member) -> Wanted:
    return {0: range(of.artifact.files[0].count)}


async def fetched(to: Member, wanted: Wanted, *others: FileSource, stall_s: float = 20.0) -> FetchProgress:
    fetch = Fetch(to.artifact, wanted, connections=2, stall_s=stall_s)
    source = to.swarm.source(to.artifact.content_id)
    if source is not None:
        fetch.add(source)
    for other in others:
        fetch.add(other)
    return await fetch.run()


async def connected(of: Member) -> None:
    """To somebody who has something."""
    source = of.swarm.source(of.artifact.content_id)
    assert source is not None
    async with asyncio.timeout(20):
        while not any((await source.offer()).values()):
            pass


def is_the_model(of: Member, model: Path) -> bool:
    return content_of(of.artifact.files[0].data_path) == content_of(model)


def all_whole(of: Member) -> bool:
    file = of.artifact.files[0]
    return all(file.is_whole(piece) for piece in file.held())


def data_of(path: Path) -> list[tuple[int, int]]:
    """Where a sparse file has data."""
    found, at = [], 0
    with path.open("rb") as file:
        while True:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return found
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found.append((start, at))


async def test_only_the_pieces_of_a_shard_are_fetched_and_lie_on_disk(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path, model=model),
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        wanted = two.artifact.wanted(2, 4)
        told = await fetched(two, wanted)
        file = two.artifact.files[0]
        held = Pieces.of(file.count, wanted[0])
        assert file.held() == held
        assert told.fetched_bytes == two.artifact.bytes_of({0: held})
        length = file.tree.piece_length
        for start, end in data_of(file.data_path):
            assert held.covers(start // length, -(-min(end, file.tree.size) // length))
        assert [source.name for source in told.sources] == ["n-one (BitTorrent)"]


async def test_three_thirds_make_a_whole(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    count = bundle.trees[0].layer.__len__()
    async with AsyncExitStack() as stack:
        for number in range(3):
            part = {0: range(number, count, 3)}
            await stack.enter_async_context(member(named, f"n-{number}", bundle, tmp_path, model=model, pieces=part))
        last = await stack.enter_async_context(member(named, "n-last", bundle, tmp_path))
        told = await fetched(last, everything(last))
        assert is_the_model(last, model)
        assert {source.name for source in told.sources} == {f"n-{number} (BitTorrent)" for number in range(3)}


NO_ADDRESSES = (
    *("", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1: 80", "a.host:80"),
    *("127.0.0.1:\u00b2", "127.0.0.1:\u0663", "127.0.0.1:" + "9" * 5000, "127.0.0.1:80:80", "1.2.3:80"),
    *("[fe80::1%25lo]:80", "[fe80::1%lo]:80", "[::]:80", "0.0.0.0:80", "[ff02::1]:80", "224.0.0.1:80", "[::1:80"),
)


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_what_is_no_address_of_a_machine_is_called_by_nobody(text: str) -> None:
    """Whatever a Tracker says: it ends neither the Node nor its BitTorrent."""
    assert swarming._peer(Source(node="n-1", url="http://127.0.0.1:9", bittorrent=text)) is None


def test_addresses_of_machines() -> None:
    for text, peer in (("127.0.0.1:80", Peer("127.0.0.1", 80)), ("[::1]:65535", Peer("::1", 65535))):
        assert swarming._peer(Source(node="n-1", url="http://127.0.0.1:9", bittorrent=text)) == peer


async def test_a_ban_ends_and_who_gives_right_pieces_by_then_is_used(
    model: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banning, "FIRST_S", 1.5)
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path, model=model) as one,
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        data = one.artifact.files[0].data_path
        right = content_of(data)
        data.write_bytes(bytes(len(right)))
        running = asyncio.create_task(fetched(two, everything(two)))
        await until(lambda: two.banned == ["n-one"])
        data.write_bytes(right)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await connected(two)
        await fetched(two, everything(two))
        assert is_the_model(two, model)


async def test_taken_away_in_the_middle_of_a_fetch_it_writes_nothing_more(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    """And the fetch hears of it no sooner than that."""
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path, model=model, settings=Settings(upload_bytes_per_s=2 << 20)),
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        await connected(two)
        source = two.swarm.source(two.artifact.content_id)
        assert source is not None
        running = asyncio.create_task(fetched(two, everything(two), stall_s=1.0))
        await until(lambda: source.received_bytes > 0)
        taking = asyncio.create_task(two.swarm.take(two.artifact.content_id))
        await asyncio.sleep(0)
        assert not any(run.failure for run in source._runs)
        await taking
        with pytest.raises(ShardlineError, match="taken away"):
            await running
        assert all_whole(two) and two.swarm.pid is not None
        await fetched(two, everything(two), FileSource(model))
        assert is_the_model(two, model)


async def test_taken_twice_at_once_and_put_again_it_is_let_go_once_and_begins_anew(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path, model=model) as one,
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        await connected(two)
        process = one.swarm.pid
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.swarm.take(one.artifact.content_id))
            await asyncio.sleep(0)
            second = tasks.create_task(one.swarm.take(one.artifact.content_id))
            await asyncio.sleep(0)
            assert not second.done(), "it is still read"
            one.swarm.put(one.artifact)
        await fetched(two, everything(two))
        assert is_the_model(two, model)
        assert one.swarm.pid == process, "it was let go in time"


async def test_who_lies_is_banned_and_named_and_the_fetch_completes(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    named = Named()
    async with AsyncExitStack() as stack:
        liar = await stack.enter_async_context(member(named, "n-liar", bundle, tmp_path, model=model))
        with liar.artifact.files[0].data_path.open("r+b") as file:
            for piece in range(0, 33, 2):
                file.seek(piece * (1 << 18) + 5)
                file.write(b"\0liar\0")
        victim = await stack.enter_async_context(member(named, "n-victim", bundle, tmp_path))
        fetch = Fetch(victim.artifact, everything(victim), connections=2)
        source = victim.swarm.source(victim.artifact.content_id)
        assert source is not None
        fetch.add(source)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(fetch.run())
            await until(lambda: victim.banned == ["n-liar"])
            await stack.enter_async_context(member(named, "n-good", bundle, tmp_path, model=model))
            told = await running
        states = {source.name: (source.state, source.reason) for source in told.sources}
        assert states["n-liar (BitTorrent)"] == ("banned", "it gave a piece that is not what the artifact says")
        assert states["n-good (BitTorrent)"] == ("active", None)
        assert is_the_model(victim, model)


@pytest.mark.parametrize(
    "way", ["silent", "garbage", *(pytest.param(way, marks=pytest.mark.long) for way in ("slow", "rude"))]
)
async def test_a_peer_that_means_harm_costs_some_seconds(
    model: Path, bundle: Bundle, tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it has everything. What was asked of it is asked of somebody else in the end."""
    monkeypatch.setattr("shardline.artifact.sources._BACKOFF_S", (0.01, 0.01))
    monkeypatch.setattr(swarm_torrent, "STALL_S", 0.5)
    monkeypatch.setattr(swarm_torrent, "_PATIENCE_S", 1.5)
    monkeypatch.setattr(swarm_torrent, "SLOWEST_BYTES_PER_S", 1 << 30)
    named = Named()
    info_hash = bytes.fromhex(bundle.manifest.transport.bittorrent.info_hash_v2)
    async with rogue_peer(info_hash, way) as rogue, member(named, "n-two", bundle, tmp_path) as two:
        named.others.append(Source(node="n-rogue", url="http://127.0.0.1:9", bittorrent=f"127.0.0.1:{rogue.port}"))
        await connected(two)
        async with asyncio.timeout(25):
            await fetched(two, everything(two), FileSource(model, delay_s=0.05))
        assert rogue.asked, "it had its chance"
        assert is_the_model(two, model)
        assert (two.banned == ["n-rogue"]) == (way == "garbage")


async def test_pieces_come_by_both_ways_into_one_bitmap_and_none_twice(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path, model=model, settings=Settings(upload_bytes_per_s=3 << 20)),
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        await connected(two)
        http = FileSource(model, delay_s=0.3)
        told = await fetched(two, everything(two), http)
        assert is_the_model(two, model)
        assert told.fetched_bytes == size_of(model)
        by_http = sum(end - start for start, end in http.asked)
        assert 0 < by_http < size_of(model)


async def test_what_came_by_http_is_given_on_by_bittorrent(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path) as one,
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        await fetched(one, everything(one), FileSource(model))
        await fetched(two, everything(two))
        assert is_the_model(two, model)


async def test_a_piece_that_the_store_lost_is_given_no_more(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path, model=model) as one,
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        await connected(two)
        source = two.swarm.source(two.artifact.content_id)
        assert source is not None
        file = one.artifact.files[0]
        await asyncio.to_thread(file.commit, Pieces(file.count), Pieces.of(file.count, [3]))
        await until(lambda: len(source._available[0]) == file.count - 1)
        assert 3 not in (await source.offer())[0]


async def test_a_file_of_another_program_is_seeded_and_never_written(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    named = Named()
    theirs = tmp_path / "theirs.gguf"
    theirs.write_bytes(content_of(model))
    theirs.chmod(0o444)
    before = theirs.stat()
    async with member(named, "n-one", bundle, tmp_path) as one, member(named, "n-two", bundle, tmp_path) as two:
        await asyncio.to_thread(adopt, one.artifact, 0, theirs)
        await fetched(two, everything(two))
        assert is_the_model(two, model)
        assert not one.artifact.files[0].data_path.exists()
        after = theirs.stat()
        assert (after.st_mtime_ns, after.st_ino, after.st_size) == (before.st_mtime_ns, before.st_ino, before.st_size)


async def test_the_process_dies_and_the_fetch_goes_on(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    """By HTTP meanwhile, and by a new process after that."""
    named = Named()
    slow = Settings(upload_bytes_per_s=2 << 20)
    async with (
        member(named, "n-one", bundle, tmp_path, model=model, settings=slow),
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        await connected(two)
        source = two.swarm.source(two.artifact.content_id)
        assert source is not None
        async with asyncio.TaskGroup() as group:
            running = group.create_task(fetched(two, everything(two), FileSource(model, delay_s=0.6)))
            await until(lambda: source.received_bytes > 0)
            first = two.swarm.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            told = await running
        assert told.state == "done"
        assert is_the_model(two, model)
        await until(lambda: two.swarm.pid not in (None, first))


async def test_a_process_that_always_dies_is_given_up(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    settings = Settings(worker_backoff_s=0.05, worker_restarts=1)
    async with member(named, "n-two", bundle, tmp_path, settings=settings) as two:
        killed: set[int] = set()

        def gone() -> bool:
            pid = two.swarm.pid
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            return two.swarm.off is not None

        await until(gone)
        assert len(killed) == 2
        assert two.swarm.source(two.artifact.content_id) is None
        assert two.swarm.port is None
        await fetched(two, everything(two), FileSource(model))


async def test_a_fetch_that_is_stopped_leaves_nothing_that_is_still_written(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path, model=model, settings=Settings(upload_bytes_per_s=2 << 20)),
        member(named, "n-two", bundle, tmp_path) as two,
    ):
        source = two.swarm.source(two.artifact.content_id)
        assert source is not None
        running = asyncio.create_task(fetched(two, everything(two)))
        await until(lambda: source.received_bytes > 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not source._runs
        # The same pieces are free for others at once, and what was held stays.
        held = two.artifact.files[0].held()
        assert two.artifact.claims.take(0, 33) == 33
        two.artifact.claims.give(0, 33)
        assert all_whole(two)
        await fetched(two, everything(two), FileSource(model))
        assert not held - two.artifact.files[0].held()
        assert is_the_model(two, model)


async def test_nobody_in_the_swarm_has_it_and_http_does(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    async with member(named, "n-two", bundle, tmp_path) as two:
        with pytest.raises(ShardlineError) as refused:
            await fetched(two, everything(two), stall_s=1.0)
        assert refused.value.code == "artifact_unavailable"
        assert "BitTorrent" in refused.value.message
        await fetched(two, everything(two), FileSource(model))
        assert is_the_model(two, model)


async def test_a_full_disk_is_told_and_what_is_held_stays(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    with mounted(tmp_path / "small", "6m") as small:
        async with (
            member(named, "n-one", bundle, tmp_path, model=model),
            member(named, "n-two", bundle, small) as two,
        ):
            fetch = Fetch(two.artifact, everything(two), connections=2)
            two.artifact.store.check_space = lambda fetched, beside=0: None  # type: ignore[method-assign]
            source = two.swarm.source(two.artifact.content_id)
            assert source is not None
            fetch.add(source)
            with pytest.raises(ShardlineError) as refused:
                await fetch.run()
            assert refused.value.code == "disk_full"
            assert all_whole(two)


# ---- who is let in -----------------------------------------------------------------------------------------------


async def test_nobody_is_let_in_who_was_not_named(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    named.unseen.add("n-two")
    async with (
        member(named, "n-one", bundle, tmp_path, model=model),
        member(named, "n-two", bundle, tmp_path, host="127.0.0.2") as two,
    ):
        with pytest.raises(ShardlineError) as refused:
            await fetched(two, everything(two), stall_s=3.0)
        assert refused.value.code == "artifact_unavailable"
        assert not two.artifact.files[0].held()
        named.unseen.clear()
        await fetched(two, everything(two))
        assert two.artifact.files[0].held() == Pieces.all(33)


async def test_without_a_certificate_of_the_cluster_nobody_gets_anything(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    named = Named()
    ours, theirs = authority(tmp_path), authority(tmp_path, "theirs")
    async with (
        member(named, "n-one", bundle, tmp_path, model=model, tls=party(ours, "n-1111111111111111")),
        member(named, "n-two", bundle, tmp_path, tls=party(ours, "n-2222222222222222")) as two,
        member(named, "n-plain", bundle, tmp_path) as plain,
        member(named, "n-other", bundle, tmp_path, tls=party(theirs, "n-3333333333333333")) as other,
        member(named, "n-feint", bundle, tmp_path, tls=party(theirs, "n-4444444444444444", trusts=ours)) as feint,
    ):
        await fetched(two, everything(two))
        assert is_the_model(two, model)
        for outsider in (plain, other, feint):
            with pytest.raises(ShardlineError):
                await fetched(outsider, everything(outsider), stall_s=1.0)
            assert not outsider.artifact.files[0].held()


async def test_a_renewed_certificate_is_shown_from_the_next_connection_on(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    named = Named()
    ours = authority(tmp_path)
    mine = party(ours, "n-1111111111111111", ended_s=60.0)
    async with (
        member(named, "n-one", bundle, tmp_path, model=model, tls=mine),
        member(named, "n-two", bundle, tmp_path, tls=party(ours, "n-2222222222222222")) as two,
    ):
        with pytest.raises(ShardlineError):
            await fetched(two, everything(two), stall_s=1.0)
        fresh = party(ours, "n-1111111111111111").pems
        mine.swap(fresh.certificate, fresh.key)
        await fetched(two, everything(two))


async def test_all_sockets_are_at_the_address_that_was_given(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    async with (
        member(named, "n-one", bundle, tmp_path, model=model, host="127.0.0.3") as one,
        member(named, "n-two", bundle, tmp_path, host="127.0.0.4") as two,
    ):
        await fetched(two, everything(two))
        for node in (one, two):
            assert node.swarm.pid is not None
            inet = [
                c
                for c in psutil.Process(node.swarm.pid).net_connections()
                if c.family in (socket.AF_INET, socket.AF_INET6)
            ]
            assert {c.laddr.ip for c in inet} == {node.host}
            assert {c.laddr.port for c in inet if c.status == psutil.CONN_LISTEN} == {node.swarm.port}
            assert {c.raddr.ip for c in inet if c.raddr} <= {"127.0.0.3", "127.0.0.4"}


async def test_without_keys_only_this_machine_is_served(bundle: Bundle, tmp_path: Path) -> None:
    named = Named()
    async with member(named, "n-one", bundle, tmp_path, host="0.0.0.0") as one:
        assert one.swarm.off == "the cluster has no keys, and this Node listens to other machines"
        assert one.swarm.source(one.artifact.content_id) is None


async def test_without_libtorrent_there_is_no_source_and_a_reason(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarming, "missing", lambda: "libtorrent is not installed")
    async with member(Named(), "n-one", bundle, tmp_path) as one:
        assert one.swarm.off == "libtorrent is not installed"
        assert one.swarm.source(one.artifact.content_id) is None


# ---- everything is killed ----------------------------------------------------------------------------------------


async def test_whatever_is_killed_no_piece_that_is_held_is_wrong(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    """Node and BitTorrent process at once, at random times, again and again on the same store."""
    store_at(tmp_path / "n-two").add(bundle).close()
    slow = Settings(upload_bytes_per_s=3 << 20)
    before = 0
    named = Named()
    # Where it takes connections is another port each time: it calls.
    named.others.append(Source(node="n-two", url="http://127.0.0.1:9", bittorrent="127.0.0.1:9"))
    async with member(named, "n-one", bundle, tmp_path, model=model, settings=slow) as one:
        for turn in range(KILLS):
            command = [sys.executable, "-m", "tests.support.swarming", str(tmp_path / "n-two"), one.artifact.content_id]
            child = await asyncio.create_subprocess_exec(
                *command,
                f"127.0.0.1:{one.swarm.port}",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=ROOT,
            )
            assert child.stdout is not None
            family = [psutil.Process(child.pid)]
            try:
                async with asyncio.timeout(30):
                    assert await child.stdout.readline() == b"begun\n"
                    await child.stdout.readexactly(1 + turn % 3)
                family += family[0].children(recursive=True)
                await asyncio.sleep(random.Random(turn).random() * 0.05)
            finally:
                for process in family:
                    # The second may be gone already: it dies with the first.
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                await child.communicate()
            with store_at(tmp_path / "n-two").open(one.artifact.content_id, ANYBODY) as artifact:
                file = artifact.files[0]
                assert all(file.is_whole(piece) for piece in file.held())
                assert len(file.held()) >= before
                before = len(file.held())
    assert before
