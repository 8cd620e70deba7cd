"""One request id in the log lines of Gateway, Tracker and every Node, while others ask at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from tests.support.api_cluster import COUNTING, TEXT, ApiCluster, api_cluster

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WANTED = {"route_given", "session_opened", "session_ended"}


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    """Log lines of all parts, which run in this process, as they would be written."""
    capture = LogCapture()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, capture])
    yield capture.entries
    structlog.reset_defaults()


async def asked(cluster: ApiCluster, request_id: str, tokens: int) -> None:
    headers = {"x-request-id": request_id, "traceparent": PARENT}
    answer = await cluster.http.post(cluster.url + TEXT, json=cluster.body(max_tokens=tokens), headers=headers)
    assert answer.status_code == 200 and answer.headers["x-request-id"] == request_id


async def test_one_id_through_all_parts(tmp_path: Path, lines: list[Any]) -> None:
    async with api_cluster(tmp_path, script=COUNTING) as cluster:
        async with asyncio.TaskGroup() as tasks:
            for n in range(3):
                tasks.create_task(asked(cluster, f"mine-{n}", 3 + n))
        deadline = time.monotonic() + 5
        while sum(line["event"] == "session_ended" for line in lines) < 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
    for n in range(3):
        mine = [line for line in lines if line.get("request_id") == f"mine-{n}"]
        events = [line["event"] for line in mine]
        assert {event: events.count(event) for event in WANTED} == {
            "route_given": 1,
            "session_opened": 2,
            "session_ended": 1,
        }
        (ended,) = (line for line in mine if line["event"] == "session_ended")
        assert ended["tokens"] == 3 + n and ended["status"] == "completed"
        routes = {line["route"] for line in mine if "route" in line}
        assert len(routes) == 1
        assert all(line["trace_id"] == PARENT[3:35] for line in mine)
    others = [line for line in lines if line["event"] not in WANTED and str(line.get("request_id")).startswith("mine-")]
    assert not others
