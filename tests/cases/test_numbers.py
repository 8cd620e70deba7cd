"""A reported bug of such systems: one Node sends NaN, and the user reads `!!!!!!`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.settings import Settings
from tests.support.api_cluster import COUNTING, api_cluster, until

PATIENT = Settings(drain_s=0.3, tracker_heartbeat_s=30.0, tracker_expiry_s=60.0, prefill_chunk_max=16)
"""A Node that is out comes back with its next heartbeat, which is far away here."""


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"kind": "nan", "phase": "decode", "node": 2, "step": 4}, " t0 t1 t2 t3 t4"),
        ({"kind": "inf", "phase": "decode", "node": 2, "step": 4}, " t0 t1 t2 t3 t4"),
        ({"kind": "nan", "phase": "prefill", "node": 2, "step": 1}, ""),
        ({"kind": "nan", "phase": "decode", "node": 4, "step": 4}, " t0 t1 t2 t3 t4"),
        ({"kind": "inf", "phase": "prefill", "node": 4, "step": 2}, ""),
    ],
    ids=["decode nan", "decode inf", "prefill nan", "logits nan", "logits inf"],
)
async def test_values_that_are_not_finite(tmp_path: Path, fault: dict[str, Any], text: str) -> None:
    """In step 4 of a Node in the middle, in its prefill, and in the logits: the session ends with `numerical_error`,
    which names the Node and where it was; no token is made of it; the Tracker's list shows why that Node is out."""
    script = {**COUNTING, "faults": [{**fault, "flag": "once"}]}
    async with api_cluster(tmp_path, layers=[(0, 2), (2, 4), (4, 6)], script=script, settings=PATIENT) as cluster:
        (tmp_path / "once").touch()
        stream = await cluster.read("p" * 40, max_tokens=20)
        guilty = cluster.nodes[fault["node"] // 2].node
        error = stream.error
        assert error is not None and not stream.done
        assert (error["code"], error["node"], error["phase"]) == ("numerical_error", guilty, fault["phase"])
        assert stream.text == text
        assert (await cluster.record(stream.session_id))["failure"]["node"] == guilty
        if fault["node"] == 2:
            # Seen by the one that received it: the number of the step is in its words.
            assert f"step {2 + fault['step'] + 1 if fault['phase'] == 'decode' else fault['step']} " in error["message"]

        async def is_out() -> bool:
            nodes = (await cluster.tracker_client.nodes())["nodes"]
            (entry,) = [node for node in nodes if node["id"] == guilty]
            return entry["state"] == "out" and "numerical_error" in entry["reason"]

        await until(is_out)
        await cluster.until_free()
