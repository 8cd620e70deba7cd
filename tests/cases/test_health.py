"""A reported bug of such servers: "ready" while nothing can be served. Real processes, in every phase of a cluster."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster, until

SCRIPT = {"model": "scripted", "n_layers": 6, "answer": [" yes"], "load_ms": 700}
SETTINGS = {"tracker_heartbeat_s": 0.2, "tracker_expiry_s": 0.8}


async def seen(cluster: Cluster) -> tuple[int, str, Any]:
    """Status and code of `/readyz`, and the missing layers, which `/v1/models` must confirm. It is live all along."""
    live = await cluster.http.get(f"{cluster.gateway.url}/healthz")
    assert (live.status_code, live.json()) == (200, {"status": "live"})
    ready = await cluster.http.get(f"{cluster.gateway.url}/readyz")
    listed = await cluster.http.get(f"{cluster.gateway.url}/v1/models")
    again = await cluster.http.get(f"{cluster.gateway.url}/readyz")
    if (again.status_code, again.json()) != (ready.status_code, ready.json()):
        return await seen(cluster)  # it changed just now
    body = ready.json()
    if ready.status_code == 200:
        assert body == {"status": "ready", "models": ["scripted"]}
        assert [(m["id"], m["ready"]) for m in listed.json()["data"]] == [("scripted", True)]
        return 200, "", []
    error = body["error"]
    if error["code"] == "tracker_unreachable":
        assert (listed.status_code, listed.json()["error"]["code"]) == (503, "tracker_unreachable")
    else:
        assert all(not m["ready"] and m["missing"] for m in listed.json()["data"])
        assert error["missing"] == {m["id"]: m["missing"] for m in listed.json()["data"]}
    return ready.status_code, error["code"], error.get("missing")


async def reaches(cluster: Cluster, wanted: tuple[int, str, Any]) -> None:
    async def is_so() -> bool:
        return await seen(cluster) == wanted

    await until(is_so, 10)


async def test_ready_means_that_something_can_be_served(tmp_path: Path) -> None:
    """Start, loading, ready, a stopped Node, the same alive again, a dead one, a dead Tracker."""
    cluster = Cluster(tmp_path, SETTINGS)
    cluster.model = "scripted"
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    lacking = (503, "model_unavailable", {"scripted": [[3, 6]]})
    try:
        await cluster.start_tracker()
        await cluster.start_gateway()
        assert await seen(cluster) == (503, "model_unavailable", {})
        for span in ("0:3", "3:6"):
            await cluster.start_node(str(path), "--engine", "scripted", "--layers", span, "--inline")
        await cluster.nodes[1].until("listening")
        state = (await cluster.http.get(f"http://127.0.0.1:{cluster.node_port(1)}/healthz")).json()
        assert state == {"state": "loading"}
        status, code, missing = await seen(cluster)
        assert (status, code) == (503, "model_unavailable") and missing in ({}, {"scripted": [[0, 6]]}, lacking[2])
        for node in cluster.nodes:
            await node.until("ready")
        await reaches(cluster, (200, "", []))
        assert await cluster.text() == " yes"

        cluster.nodes[1].signal(signal.SIGSTOP)
        await reaches(cluster, lacking)
        assert (await cluster.ask()).json()["error"]["missing"] == [[3, 6]]
        cluster.nodes[1].signal(signal.SIGCONT)
        await reaches(cluster, (200, "", []))
        assert await cluster.text() == " yes"

        cluster.nodes[1].signal(signal.SIGKILL)
        await reaches(cluster, lacking)
        cluster.tracker.signal(signal.SIGKILL)
        await reaches(cluster, (503, "tracker_unreachable", None))
    finally:
        await cluster.stop()
