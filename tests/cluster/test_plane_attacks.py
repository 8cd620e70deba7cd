"""What real machines do to the artifact plane: Nodes die, disks forget and fill, folders vanish, keys change."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from shardline.artifact.signing import new_key, public_pem
from shardline.cli.demo_model import demo_model
from shardline.transport.addresses import split_url
from tests.cluster.test_from_nothing import QUESTION, SMALL, ended
from tests.support.artifacts import sign_again, signed_bundle
from tests.support.cluster import Cluster, Process, until
from tests.support.plane import Json, Plane, events, fetched, plane, wanted_bytes
from tests.support.small_disk import mounted
from tests.support.split_models import split_model

pytestmark = [pytest.mark.llama, pytest.mark.smollm2, pytest.mark.timeout(300)]
pytest.importorskip("llama_cpp")

IN_FLIGHT = 12 << 20
"""What both transports bring in the second between two commits, and some more for a busy machine."""


async def killed(node: Process) -> None:
    """With all its children: whoever starts processes must not leave them behind."""
    children = psutil.Process(node.pid).children(recursive=True)
    node.signal(signal.SIGKILL)
    await node.end()

    async def gone() -> bool:
        return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)

    await until(gone, 20)


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
async def test_kills_of_a_node_that_fetches(tmp_path: Path, kills: int) -> None:
    """By HTTP and BitTorrent at once. What it would advertise is right after each, and little is fetched twice."""
    draw = random.Random(20)
    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed()
        before = 0
        for _ in range(kills):
            slow = await cluster.empty_node("node", "--layers", "0:15", *SMALL, fetch_bytes_per_s=2 << 20)
            await slow.until("fetching")
            await asyncio.sleep(draw.uniform(0.0, 1.5))
            await killed(slow)
            with cluster.stored("node") as artifact:
                held = artifact.held()[0]
                assert all(artifact.files[0].is_whole(piece) for piece in held)
                now = artifact.bytes_of({0: held})
            assert before <= now, "what was held stays held"
            assert before + int(slow.facts.get("fetched", 0)) - now <= IN_FLIGHT
            before = now
        node = await cluster.empty_node("node", "--layers", "0:15", *SMALL)
        await node.until("ready")
        with cluster.stored("node") as artifact:
            assert artifact.bytes_of(artifact.held()) == wanted_bytes(artifact, 0, 15)


async def test_two_nodes_of_one_machine_on_one_store(tmp_path: Path) -> None:
    """What both want is fetched once, and one goes on where the other is killed."""
    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed()
        shared = ("--store", str(tmp_path / "shared"))
        first = await cluster.empty_node("first", "--layers", "0:15", *shared, *SMALL, fetch_bytes_per_s=8 << 20)
        await first.until("fetching")
        second = await cluster.empty_node("second", "--layers", "15:30", *shared, *SMALL, fetch_bytes_per_s=16 << 20)
        third = await cluster.empty_node("third", "--layers", "10:20", *shared, *SMALL, fetch_bytes_per_s=16 << 20)
        await second.until("fetching")
        await killed(first)
        await second.until("ready")
        await third.until("ready")
        again = await cluster.empty_node("first", "--layers", "0:15", *shared, *SMALL)
        await again.until("ready")
        with cluster.stored("", tmp_path / "shared") as artifact:
            assert all(artifact.files[0].is_whole(piece) for piece in artifact.held()[0])
            whole = wanted_bytes(artifact, 0, 30)
            assert artifact.bytes_of(artifact.held()) == whole
        # The one that was killed told nothing: what it had brought is missing in this sum.
        assert sum(fetched(node)[0] for node in (second, third, again)) <= whole
        await cluster.until_served()
        assert await cluster.text(QUESTION, max_tokens=8)


async def test_a_disk_with_room_for_the_pieces_and_not_for_the_shard_file(tmp_path: Path) -> None:
    """Told before the first byte of the Shard, not after an hour of fetching."""
    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed()
        with mounted(cluster.home("node"), "110m"):
            node = await cluster.empty_node("node", "--layers", "0:15", *SMALL)
            assert await ended(node) == "disk_full"
            assert "more will be made of them" in str(node.facts["message"])
            with cluster.stored("node") as artifact:
                length = artifact.bundle.manifest.piece_length
                header = -(-artifact.bundle.manifest.files[0].data_offset // length) * length
                assert artifact.bytes_of(artifact.held()) == header
                assert header < wanted_bytes(artifact, 0, 15) < 100 << 20


async def test_a_store_that_goes_away_while_it_is_served(tmp_path: Path) -> None:
    """Nothing of it is advertised or given any more, the Node lives, and what comes back counts again."""
    async with plane(tmp_path, demo_model()) as cluster:
        seeder = await cluster.seed()
        node = await cluster.empty_node("node", "--layers", "0:30", *SMALL)
        await node.until("ready")
        await cluster.until_served()
        await seeder.end()
        store, away = cluster.home("node") / "artifacts", tmp_path / "away"

        async def covered(copies: int) -> None:
            async def told() -> bool:
                return bool((await cluster.artifacts())["coverage"] == [copies] * 30)

            await until(told, 40)

        async def asked() -> int:
            root = cluster.bundle.manifest.files[0].pieces_root
            url = f"{node.url}/v1/pieces/{cluster.content_id}/{root}"
            return (await cluster.control("GET", url, headers={"range": "bytes=0-99"})).status_code

        await covered(1)
        assert await asked() == 206
        store.rename(away)
        await covered(0)
        assert await asked() == 416
        copy = tmp_path / "copy"
        shutil.copytree(away, copy, symlinks=True)
        data = copy / cluster.content_id / "data" / cluster.bundle.manifest.files[0].pieces_root
        data.write_bytes(b"wrong" * 1000)
        store.symlink_to(copy)
        assert await asked() == 416, "another file than the one of the record"
        store.unlink()
        store.symlink_to("/proc")
        assert await asked() == 416
        store.unlink()
        away.rename(store)
        await covered(1)
        assert await asked() == 206
        assert await cluster.text(QUESTION, max_tokens=4)


async def test_a_store_that_cannot_be_written_any_more(tmp_path: Path) -> None:
    """A Node starts from what is held there, gives it, and shows blocks of it."""
    with mounted(tmp_path / "disk", "160m") as disk:
        async with plane(tmp_path, demo_model()) as cluster:
            flags = ("--layers", "0:3", "--store", str(disk / "store"), *SMALL)
            seeder = await cluster.seed()
            first = await cluster.empty_node("node", *flags)
            await first.until("ready")
            await first.end()
            await seeder.end()
            await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(disk)], check=True)
            node = await cluster.empty_node("node", *flags)
            await node.until("ready")
            root = cluster.bundle.manifest.files[0].pieces_root
            url = f"{node.url}/v1/pieces/{cluster.content_id}/{root}"
            assert (await cluster.control("GET", url, headers={"range": "bytes=0-99"})).status_code == 206

            async def proven() -> bool:
                found = [one for one in (await cluster.artifacts())["seeders"] if one["node"] == node.facts["node"]]
                return bool(found and found[0]["proven"] and found[0]["servable"] == [[0, 3]])

            await until(proven, 40)


async def test_a_disk_that_forgets_costs_a_node_its_place(tmp_path: Path) -> None:
    """Its wrong bytes are refused, named and told; it must show blocks, cannot, and is no source any more."""
    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed(upload_bytes_per_s=8 << 20)
        rotten = await cluster.empty_node("rotten", "--layers", "0:30", *SMALL, scrub_interval_s=3600)
        await rotten.until("ready")
        root = cluster.bundle.manifest.files[0].pieces_root
        with (cluster.home("rotten") / "artifacts" / cluster.content_id / "data" / root).open("r+b") as file:
            for piece in range(20, 370):
                file.seek(piece * cluster.bundle.manifest.piece_length + 5)
                file.write(b"rotten")
        node = await cluster.empty_node("node", "--layers", "0:15", *SMALL)
        await node.until("ready", 120)
        with cluster.stored("node") as artifact:
            assert all(artifact.files[0].is_whole(piece) for piece in artifact.held()[0])

        async def found_out() -> bool:
            of = {one["node"]: one for one in (await cluster.artifacts())["seeders"]}
            return of[rotten.facts["node"]]["proven"] is False and of[node.facts["node"]]["proven"] is True

        await until(found_out, 60)
        assert any(
            event["source"] in (rotten.url.removeprefix("http://"), rotten.facts["node"])
            for event in events(node, "source_banned")
        )
        url = f"{cluster.tracker.url}/v1/artifacts/{cluster.content_id}/sources?node={node.facts['node']}"
        named = [source["node"] for source in (await cluster.control("GET", url)).json()["sources"]]
        assert rotten.facts["node"] not in named and named


async def test_a_publisher_with_another_key(tmp_path: Path) -> None:
    """The same content, signed anew: what is held stays, the description is replaced, the old key opens nothing."""
    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed()
        node = await cluster.empty_node("node", "--trust", str(cluster.key), "--layers", "0:3", *SMALL)
        await node.until("ready")
        await node.end()
        moved, _ = fetched(node)
        port = split_url(cluster.tracker.url).port
        await cluster.tracker.end()
        key, old = new_key(), tmp_path / "old.pub"
        shutil.copyfile(cluster.key, old)
        sign_again(cluster.artifact, key)
        cluster.key.write_bytes(public_pem(key.public_key()))
        await cluster.offer(port)
        again = await cluster.empty_node("node", "--trust", str(cluster.key), "--layers", "0:3", *SMALL)
        await again.until("ready")
        assert fetched(again)[0] == moved, "nothing was fetched twice (the log has both lives)"
        await again.end()
        for name in ("node", "new"):
            refused = await cluster.empty_node(name, "--trust", str(old), "--layers", "0:3", *SMALL)
            assert await ended(refused) == "artifact_untrusted"


@pytest.mark.long
async def test_a_split_model_with_a_name_of_many_kinds_of_letters(tmp_path: Path) -> None:
    """Blanks, brackets, letters of several scripts: from nothing to the answer of the one file."""
    parts = split_model(demo_model(), tmp_path / "made", "Größe 1 – модель (二)", 3)
    original = tmp_path / "one.gguf"
    shutil.copyfile(demo_model(), original)
    async with plane(tmp_path, tmp_path / "made", named=parts[0].name) as cluster:
        alone = await cluster.start_node(str(original), "--layers", "0:30", "--kv-tokens", "2048")
        await alone.until("ready")
        await cluster.until_served()
        wanted = await cluster.text(QUESTION, max_tokens=12)
        await alone.end()
        await cluster.seed("--files", str(cluster.original.parent))
        name = cluster.bundle.manifest.name
        for own, (first, last) in (("first", (0, 15)), ("second", (15, 30))):
            node = await cluster.empty_node(own, "--artifact", name, "--layers", f"{first}:{last}", *SMALL)
            await node.until("ready")
            with cluster.stored(own) as artifact:
                assert len(artifact.files) == 3
                assert artifact.bytes_of(artifact.held()) == wanted_bytes(artifact, first, last)
                assert wanted_bytes(artifact, first, last) < artifact.bundle.manifest.total_bytes
        await cluster.until_served()
        assert await cluster.text(QUESTION, max_tokens=12) == wanted


async def test_one_name_and_two_contents_never_meet_in_a_route(tmp_path: Path) -> None:
    """And who asks can see from which files an answer came: from the fingerprint, and from the list of models."""
    contents = []
    for folder, change in (("one", 0), ("other", 1)):
        path = tmp_path / folder / "model.gguf"
        path.parent.mkdir()
        raw = bytearray(demo_model().read_bytes())
        raw[-1] ^= change
        path.write_bytes(raw)
        contents.append((path, signed_bundle(path, tmp_path / f"{folder}.artifact").manifest.content_id))
    (one, content_id), (other, other_id) = contents
    assert content_id != other_id
    cluster = Cluster(tmp_path, {})
    try:
        await cluster.start_tracker()
        await cluster.start_gateway()
        first = await cluster.start_node(str(one), "--layers", "0:15", "--kv-tokens", "2048")
        second = await cluster.start_node(str(other), "--layers", "15:30", "--kv-tokens", "2048")
        await first.until("ready")
        await second.until("ready")

        async def listed() -> list[Json]:
            return list((await cluster.http.get(f"{cluster.gateway.url}/v1/models")).json()["data"])

        for model in await listed():
            assert not model["ready"], "each lacks what only the other content has"
        cluster.model = "model"
        for asked in ("model", content_id, other_id):
            assert (await cluster.ask(model=asked, max_tokens=1)).status_code in (404, 503)
        third = await cluster.start_node(str(one), "--layers", "15:30", "--kv-tokens", "2048")
        await third.until("ready")

        async def served() -> bool:
            return (await cluster.ask(model=content_id, max_tokens=1)).status_code == 200

        await until(served, 30)
        answer = (await cluster.ask(model=content_id, max_tokens=1)).json()
        (entry,) = (model for model in await listed() if model["content_id"] == content_id)
        digest = hashlib.sha256(f"{entry['engine_class']}\n{content_id}".encode()).hexdigest()
        assert answer["system_fingerprint"] == "fp_" + digest[:16]
        assert (await cluster.ask(model=other_id, max_tokens=1)).status_code in (404, 503)
    finally:
        await cluster.stop()


async def test_offering_one_artifact_twice(tmp_path: Path) -> None:
    cluster = Plane(tmp_path, demo_model())
    try:
        twice = ("--artifact", str(cluster.artifact)) * 2
        tracker = await cluster.launch("tracker", "tracker", "--port", "0", *twice, "--trust", str(cluster.key))
        assert await ended(tracker) == "setting_invalid"
        assert "describe the same artifact" in str(tracker.facts["message"])
    finally:
        await cluster.stop()
