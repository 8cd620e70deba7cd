"""Nodes that begin with nothing: real processes, each with a disk of its own, that fetch what they serve."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from shardline.cli.demo_model import demo_model
from tests.support.cluster import Process, until
from tests.support.plane import Plane, fetched, plane, range_bytes, wanted_bytes
from tests.support.relay import free_port
from tests.support.small_disk import mounted

pytestmark = [pytest.mark.llama, pytest.mark.smollm2, pytest.mark.timeout(240)]
pytest.importorskip("llama_cpp")

QUESTION = "What is a shard, in one sentence?"
SLOW = {"fetch_bytes_per_s": 12 << 20}
"""Seconds for a Shard: time to be killed, to be left alone, to be watched."""
SMALL = ("--kv-tokens", "2048", "--no-adopt")


async def until_held(cluster: Plane, name: str, at_least: int) -> None:
    async def held() -> bool:
        if not (cluster.home(name) / "artifacts" / cluster.content_id / "bundle" / "manifest.json").exists():
            return False
        with cluster.stored(name) as artifact:
            return artifact.bytes_of(artifact.held()) >= at_least

    await until(held, 60)


async def ended(process: Process) -> str:
    """The code of the error with which a process ended."""
    async with asyncio.timeout(60):
        await process.process.wait()
    await process.end()
    assert process.phases[-1] == "failed", process.log.read_text()[-2000:]
    return str(process.facts["code"])


async def test_two_empty_machines_answer_as_the_unsplit_model(tmp_path: Path) -> None:
    async with plane(tmp_path, demo_model()) as cluster:
        alone = await cluster.start_node(str(cluster.original), "--layers", "0:30", "--kv-tokens", "2048")
        await alone.until("ready")
        await cluster.until_served()
        wanted = await cluster.text(QUESTION, max_tokens=24)
        await alone.end()

        # The Gateway's machine sends slowly, so that the second Node has reason to ask the first.
        await cluster.seed(upload_bytes_per_s=20 << 20)
        first = await cluster.empty_node("first", "--layers", "0:15", *SMALL)
        await first.until("ready")
        second = await cluster.empty_node("second", "--layers", "15:30", *SMALL)
        await second.until("ready")
        await cluster.until_served()
        assert await cluster.text(QUESTION, max_tokens=24) == wanted

        for node, name, layers in ((first, "first", (0, 15)), (second, "second", (15, 30))):
            assert node.phases.index("chosen") < node.phases.index("listening") < node.phases.index("verifying")
            total, _ = fetched(node)
            with cluster.stored(name) as artifact:
                assert total == wanted_bytes(artifact, *layers), "no byte more than the pieces of the Shard"
                assert total <= 1.02 * range_bytes(artifact, *layers)
                on_disk = artifact.files[0].data_path.stat().st_blocks * 512
                assert on_disk <= total + (1 << 20), "its disk has the Shard, not the model"
        _, sources = fetched(second)
        # By either transport: HTTP names an address, BitTorrent a Node.
        from_first = (sources.get(name, 0) for name in (first.url.removeprefix("http://"), first.facts["node"]))
        assert sum(from_first) > 0, "the embedding lies on both"

        async def proven() -> bool:
            seeders = (await cluster.artifacts())["seeders"]
            return len(seeders) == 3 and all(seeder["proven"] for seeder in seeders)

        await until(proven, 30)
        found = await cluster.artifacts()
        assert found["served"] == [1] * 30 and found["coverage"] == [2] * 30


async def test_a_node_with_the_file_gives_it_without_being_told_to(tmp_path: Path) -> None:
    """By content: it was offered elsewhere, under another path. Its store refers to the file, and copies nothing."""
    async with plane(tmp_path, demo_model()) as cluster:
        mine = tmp_path / "mine.gguf"
        mine.write_bytes(demo_model().read_bytes())
        owner = await cluster.start_node(str(mine), "--layers", "0:15", "--kv-tokens", "2048")
        other = await cluster.empty_node("other", "--layers", "15:30", *SMALL)
        await other.until("ready", 60)
        total, sources = fetched(other)
        assert total and set(sources) <= {owner.url.removeprefix("http://"), f"{owner.facts['node']} (BitTorrent)"}
        (told,) = (one for one in (await cluster.artifacts())["seeders"] if one["node"] == owner.facts["node"])
        assert told["servable"] == [[0, 30]]
        assert [*(tmp_path / "state" / "artifacts").glob("*/data/*")] == []
        await cluster.until_served()
        assert await cluster.text(QUESTION, max_tokens=4)
        mine.write_bytes(bytes(1 << 20))

        async def gone() -> bool:
            return not any(one["servable"] == [[0, 30]] for one in (await cluster.artifacts())["seeders"])

        await until(gone, 30)


async def test_placement_says_what_a_node_takes_and_why(tmp_path: Path) -> None:
    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed()
        node = await cluster.empty_node("node", "--memory", "150MiB", *SMALL)
        await node.until("placed")
        assert node.facts["model"] == "SmolLM2-135M-Instruct.Q4_1"
        assert 0 <= node.facts["first"] < node.facts["last"] <= 30 and node.facts["reason"]
        await node.until("ready")


async def test_killed_in_mid_fetch_it_goes_on(tmp_path: Path) -> None:
    async with plane(tmp_path, demo_model(), SLOW) as cluster:
        await cluster.seed()
        node = await cluster.empty_node("node", "--layers", "0:15", *SMALL)
        await until_held(cluster, "node", 12 << 20)
        node.signal(signal.SIGKILL)
        await node.process.wait()
        with cluster.stored("node") as artifact:
            held = artifact.held()[0]
            assert all(artifact.files[0].is_whole(piece) for piece in held)
            left = wanted_bytes(artifact, 0, 15) - artifact.bytes_of({0: held})
        again = await cluster.empty_node("node", "--layers", "0:15", *SMALL)
        await again.until("ready")
        # The log has both lives; of the first nothing, as it was killed before its fetch ended, but for the header.
        with cluster.stored("node") as artifact:
            header = artifact.bundle.manifest.files[0].data_offset
            length = artifact.bundle.manifest.piece_length
        assert fetched(again)[0] == left + -(-header // length) * length


async def test_a_seeder_that_dies_and_another_that_comes(tmp_path: Path) -> None:
    async with plane(tmp_path, demo_model(), SLOW) as cluster:
        seeder = await cluster.seed()
        node = await cluster.empty_node("node", "--layers", "0:15", *SMALL)
        await until_held(cluster, "node", 12 << 20)
        seeder.signal(signal.SIGKILL)
        await node.until("waiting", 60)
        assert "missing, and nobody gives them" in str(node.facts["reason"])
        await cluster.seed(name="other")
        await node.until("ready")
        assert fetched(node)[0] > 0


async def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """Told before the first byte of the Shard; what is held stays, and with more room it goes on."""
    with mounted(tmp_path / "disk", "20m") as disk:
        async with plane(tmp_path, demo_model()) as cluster:
            await cluster.seed()
            flags = ("--layers", "0:15", "--store", str(disk / "store"), *SMALL)
            assert await ended(await cluster.empty_node("node", *flags)) == "disk_full"
            with cluster.stored("node", disk / "store") as artifact:
                header = artifact.held()[0]
                assert header, "of the header nothing is lost"
            remount = ["mount", "-o", "remount,size=120m", str(disk)]
            await asyncio.to_thread(subprocess.run, remount, check=True, capture_output=True)
            node = await cluster.empty_node("node", *flags)
            await node.until("ready")
            with cluster.stored("node", disk / "store") as artifact:
                assert fetched(node)[0] == wanted_bytes(artifact, 0, 15)


async def test_another_publisher_is_refused(tmp_path: Path) -> None:
    from shardline.artifact.signing import new_key, public_pem

    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed()
        other = tmp_path / "other.pub"
        other.write_bytes(public_pem(new_key().public_key()))
        assert await ended(await cluster.empty_node("node", "--trust", str(other), *SMALL)) == "artifact_untrusted"
        assert list((cluster.home("node") / "artifacts").glob("mac1-*")) == []
        right = await cluster.empty_node("right", "--trust", str(cluster.key), "--layers", "0:3", *SMALL)
        await right.until("ready")


async def test_another_content_is_refused(tmp_path: Path) -> None:
    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed()
        node = await cluster.empty_node("node", "--artifact", "mac1-" + "0" * 64, *SMALL)
        assert await ended(node) == "artifact_unavailable"
        assert f"it offers SmolLM2-135M-Instruct.Q4_1.gguf ({cluster.content_id})" in node.facts["message"]
        named = await cluster.empty_node(
            "named", "--artifact", "SmolLM2-135M-Instruct.Q4_1.gguf", "--layers", "0:3", *SMALL
        )
        await named.until("ready")
        assert named.facts["content_id"] == cluster.content_id


async def test_it_starts_from_its_own_disk_when_nobody_offers(tmp_path: Path) -> None:
    port = free_port()
    async with plane(tmp_path, demo_model()) as cluster:
        seeder = await cluster.seed()
        node = await cluster.empty_node("node", "--layers", "0:30", *SMALL)
        await node.until("ready")
        for part in (node, seeder, cluster.tracker, cluster.gateway):
            await part.end()
        # The Tracker comes later, and knows of no artifact.
        again = await cluster.empty_node("node", "--layers", "0:30", "--tracker", f"http://127.0.0.1:{port}", *SMALL)
        await again.until("listening")
        await cluster.start_tracker(port)
        await again.until("ready")
        await cluster.start_gateway()
        await cluster.until_served()
        assert fetched(again)[0] == fetched(node)[0]


async def test_a_seeder_names_the_file_that_is_missing(tmp_path: Path) -> None:
    async with plane(tmp_path, demo_model()) as cluster:
        moved = tmp_path / "elsewhere"
        moved.mkdir()
        cluster.original.rename(moved / "renamed.bin")
        with pytest.raises(AssertionError, match="ended before ready"):
            await cluster.seed()
        seeder = cluster.processes[-1]
        assert seeder.facts["code"] == "artifact_incomplete" and cluster.original.name in seeder.facts["message"]
        assert str(cluster.artifact.parent) in seeder.facts["message"]
        found = await cluster.seed("--files", str(moved))
        assert found.facts["held"] == found.facts["total"]


@pytest.mark.long
@pytest.mark.torch
async def test_pytorch_from_the_same_pieces(tmp_path: Path) -> None:
    async with plane(tmp_path, demo_model()) as cluster:
        await cluster.seed()
        for name, layers in (("first", "0:15"), ("second", "15:30")):
            node = await cluster.empty_node(name, "--engine", "torch", "--layers", layers, *SMALL)
            await node.until("ready", 120)
        await cluster.until_served()
        assert await cluster.text(QUESTION, max_tokens=4)
        for name, (first, last) in (("first", (0, 15)), ("second", (15, 30))):
            with cluster.stored(name) as artifact:
                assert artifact.bytes_of(artifact.held()) == wanted_bytes(artifact, first, last)


@pytest.mark.torch
async def test_a_safetensors_folder_by_tensor_range(tmp_path: Path) -> None:
    """Nobody named an engine: what reads such a folder is taken."""
    transformers = pytest.importorskip("transformers")
    from tests.support.torch_models import SIZES, save

    wide = {**SIZES, "hidden_size": 256, "intermediate_size": 1024}
    save(transformers.LlamaConfig(**wide), tmp_path / "wide")
    async with plane(tmp_path, tmp_path / "wide") as cluster:
        await cluster.seed()
        for name, (first, last) in (("first", (0, 2)), ("second", (2, 4))):
            node = await cluster.empty_node(name, "--layers", f"{first}:{last}", *SMALL)
            await node.until("ready", 120)
            with cluster.stored(name) as artifact:
                held = artifact.bytes_of(artifact.held())
                assert held == wanted_bytes(artifact, first, last) < 0.7 * artifact.bundle.manifest.total_bytes
        nodes = (await cluster.control("GET", f"{cluster.tracker.url}/v1/nodes")).json()["nodes"]
        engines = [node["engine"]["backend"] for node in nodes if node["shards"]]
        assert engines == ["torch", "torch"]
