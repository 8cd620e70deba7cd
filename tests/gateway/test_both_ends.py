from __future__ import annotations

from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from tests.support.local_cluster import local_cluster, read

ENDLESS = {"answer": [" a", " b"], "eos": False, "decode_ms": 20}


async def test_a_cut_link_that_both_ends_report_is_a_lost_link_and_no_lost_node(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=((0, 3), (3, 6)), script=ENDLESS) as cluster:
        generation = cluster.start(max_tokens=500)
        await generation.wait_open()
        session = generation._session
        assert session is not None
        first, second = (node.node for node in cluster.nodes)
        for line, source, to in zip(session._lines, (first, second), (second, first), strict=True):
            said = '{"event":"failed","error":{"code":"seam_lost","message":"x","from":"%s","to":"%s"}}'
            session._heard(line, (said % (source, to)).encode())
        with pytest.raises(ShardlineError) as caught:
            await read(generation)
        assert caught.value.code == "seam_lost"
        assert (caught.value.details["from"], caught.value.details["to"]) == (first, second)
