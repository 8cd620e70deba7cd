"""A cluster with keys in one process: joining, what strangers meet, certificates renewed while sessions run."""

from __future__ import annotations

from pathlib import Path

from tests.support.keyed_cluster import keyed_cluster


async def test_a_route_over_nodes_that_joined(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        ids, end = await cluster.generate()
        assert (len(ids), end.reason) == (8, "length")
        assert all(node.url.startswith("https://") for node in cluster.nodes)
        assert len(set(cluster.tracker.lines)) == 1 + len(cluster.nodes)
        await cluster.until_free()
