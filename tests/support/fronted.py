"""Two clusters of which one stands behind the other: a Gateway of ours is the upstream of a composite Node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shardline.settings import Settings
from tests.support.api_cluster import ApiCluster
from tests.support.local_cluster import SCRIPT
from tests.support.upstreams import CompositeCluster, composite_cluster


@asynccontextmanager
async def fronted_cluster(folder: Path, **script: Any) -> AsyncIterator[tuple[CompositeCluster, ApiCluster]]:
    for name in ("front", "behind"):
        (folder / name).mkdir()
    behind = ApiCluster(folder / "behind", Settings(drain_s=0.5))
    behind.script.write_text(json.dumps({**SCRIPT, **script}))
    try:
        behind.content_id = f"mac1-{hashlib.sha256(behind.script.read_bytes()).hexdigest()}"
        await behind.start_tracker()
        for first, last in ((0, 3), (3, 6)):
            await (await behind.start_node(first, last)).until("ready")
        await behind.start_gateway()
        url = f"{behind.url}/v1"
        async with composite_cluster(folder / "front", [url], model=behind.model) as front:
            yield front, behind
    finally:
        await behind.stop()
