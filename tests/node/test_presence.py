"""How a Node is known at the Tracker: it goes in good order, and does not fight over its name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shardline.errors import ShardlineError
from shardline.node.info import brief
from shardline.settings import Settings
from shardline.tracker.bounds import TEXT_LIMIT
from tests.support.local_cluster import LocalCluster, local_cluster, read
from tests.support.relay import Relay, free_port

SETTINGS = Settings(drain_s=3.0, tracker_heartbeat_s=0.1, tracker_expiry_s=2.0)


async def states(cluster: LocalCluster) -> dict[str, str]:
    return {n["id"]: n["state"] for n in (await cluster.tracker_client.nodes())["nodes"]}


async def test_a_node_that_is_told_to_stop_has_left(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)], settings=SETTINGS, identity_path=tmp_path / "id") as cluster:
        node = cluster.nodes[0]
        await node.end()
        assert await states(cluster) == {node.node: "left"}
        again = await cluster.start_node(0, 6, identity_path=tmp_path / "id")
        await again.until("ready")
        assert await states(cluster) == {node.node: "ready"}
        assert (await cluster.generate(max_tokens=2))[1].reason == "length"
        cluster.nodes.remove(node)


async def test_a_node_whose_identity_another_process_took_over_says_so_and_ends(tmp_path: Path) -> None:
    """The first one was cut off when the second one came with the same key. It hears why it is not wanted, lets its
    session end, and ends; the second one serves on, undisturbed."""
    script: dict[str, Any] = {"eos": False, "decode_ms": 10}
    async with local_cluster(tmp_path, layers=[], script=script, settings=SETTINGS) as cluster:
        port = free_port()
        async with Relay(port) as relay:
            key = tmp_path / "id"
            first = await cluster.start_node(0, 6, port=port, advertise_url=relay.url, identity_path=key)
            await first.until("ready")
            relay.cut()  # the connection over which the Tracker called back
            running = cluster.start(max_tokens=100)
            await running.wait_open()
            relay.refuses = True  # what is open stays open: the session
            second = await cluster.start_node(0, 6, identity_path=key)
            await second.until("ready")
            assert first.task is not None
            with pytest.raises(ShardlineError) as ended:
                await asyncio.wait_for(asyncio.shield(first.task), 8)
            assert ended.value.code == "identity_in_use"
            assert second.url in ended.value.message
            assert (await read(running))[1].reason == "length"
            assert first.phases[-1] == "draining"
            assert await states(cluster) == {second.node: "ready"}
            assert (await cluster.generate(max_tokens=2))[1].reason == "length"
            cluster.nodes.remove(first)


async def test_a_call_back_that_comes_too_late_once_is_tried_again(tmp_path: Path) -> None:
    """A machine that is busy loading; one that is never reached is told so, after a few tries."""
    settings = Settings(drain_s=3.0, tracker_heartbeat_s=0.1, dial_back_s=0.3)
    async with local_cluster(tmp_path, layers=[], settings=settings) as cluster:
        port = free_port()
        async with Relay(port) as relay:
            relay.hold()
            node = await cluster.start_node(0, 3, port=port, advertise_url=relay.url)
            async with asyncio.timeout(5):
                while relay.accepted < 2:
                    await asyncio.sleep(0.01)
            relay.release()
            await node.until("ready")
            assert await states(cluster) == {node.node: "ready"}
        async with Relay(free_port()) as nowhere:
            nowhere.hold()
            lost = await cluster.start_node(3, 6, advertise_url=nowhere.url)
            assert lost.task is not None
            with pytest.raises(ShardlineError, match="called back and did not answer") as ended:
                await asyncio.wait_for(asyncio.shield(lost.task), 8)
            assert (ended.value.code, nowhere.accepted) == ("registration_refused", 3)
            cluster.nodes.remove(lost)


async def test_a_node_whose_shard_does_not_load_ends_with_the_engines_own_reason(tmp_path: Path) -> None:
    script: dict[str, Any] = {"faults": [{"kind": "oom", "phase": "load", "node": 3}]}
    async with local_cluster(tmp_path, layers=[(0, 3)], script=script, settings=SETTINGS) as cluster:
        node = await cluster.start_node(3, 6)
        assert node.task is not None
        with pytest.raises(ShardlineError, match="the Shard did not load: ") as ended:
            await asyncio.wait_for(asyncio.shield(node.task), 8)
        assert ended.value.code == "engine_out_of_memory"
        cluster.nodes.remove(node)


def test_whatever_an_engine_says_fits_into_what_the_tracker_takes() -> None:
    """An error of many lines must not keep its Node from telling of it."""
    said = brief("no\nmemory\x1b[2J" + "é" * 5000)
    assert said is not None
    assert said.startswith("no memory [2J")
    assert said.isprintable()
    assert len(said) <= TEXT_LIMIT
    assert brief(None) is None
