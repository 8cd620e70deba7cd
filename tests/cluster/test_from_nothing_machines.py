"""Two empty machines and one with the model: cluster keys, addresses of their own, and no way to anywhere else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardline.artifact.bundle import TrustPolicy
from shardline.artifact.signing import public_pem
from shardline.artifact.store import Store
from shardline.cli.demo_model import demo_model
from tests.support.artifacts import publisher, signed_bundle
from tests.support.machines import READY, Machines, Typed, machines
from tests.support.namespaces import Host, why_not
from tests.support.plane import range_bytes, wanted_bytes

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.llama,
    pytest.mark.smollm2,
    pytest.mark.timeout(240),
]
pytest.importorskip("llama_cpp")

QUESTION = "What is a shard, in one sentence?"
FLAGS = "--kv-tokens 2048 --threads 1 --no-adopt"


def received(host: Host) -> int:
    """Bytes that came in over the machine's link."""
    (link,) = json.loads(host.ip("-s", "-j", "link", "show", "eth0"))
    return int(link["stats64"]["rx"]["bytes"])


def sent(host: Host) -> int:
    (link,) = json.loads(host.ip("-s", "-j", "link", "show", "eth0"))
    return int(link["stats64"]["tx"]["bytes"])


async def pasted(cluster: Machines, host: Host, flags: str) -> Typed:
    """The printed line on an empty machine, with no model behind it."""
    line = await cluster.printed_line()
    typed = await cluster.type(host, f"{line} {FLAGS} {flags}")
    await typed.until(READY)
    return typed


def sources(typed: Typed) -> dict[str, int]:
    """Who gave how many bytes, as the Node logged it."""
    given: dict[str, int] = {}
    for line in typed.text.splitlines():
        told: Any = json.loads(line) if line.startswith("{") else {}
        for name, count in told.get("sources", {}).items() if told.get("event") == "pieces_fetched" else ():
            given[name] = given.get(name, 0) + count
    return given


async def test_a_served_route_on_two_machines_that_had_nothing(tmp_path: Path) -> None:
    home = tmp_path / "publisher"
    home.mkdir()
    model = Path(shutil.copyfile(demo_model(), home / demo_model().name))
    content_id = signed_bundle(model, home / "it.artifact").manifest.content_id
    (home / "key.pub").write_bytes(public_pem(publisher().public_key()))
    async with machines(tmp_path, 3, {}) as cluster:
        await cluster.serve(f"--artifact {home}/it.artifact --trust {home}/key.pub")
        assert "Offers to Nodes" in cluster.served.text and "--model" not in cluster.served.text
        first, second = cluster.hosts[1:]
        nodes, moved = {}, {}
        for host, layers in ((first, "0:15"), (second, "15:30")):
            before = received(host), sent(first)
            nodes[host] = await pasted(cluster, host, f"--layers {layers}")
            moved[host] = received(host) - before[0]
            given_by_first = sent(first) - before[1]
        # What the second Node has of the first: the header and the embedding lie on both.
        named = {name: count for name, count in sources(nodes[second]).items() if count}
        (first_id,) = (node["id"] for node in await cluster.listed() if first.address in node["url"])
        from_first = sum(count for name, count in named.items() if first.address in name or name == first_id)
        assert from_first > 0 and given_by_first >= from_first

        policy = TrustPolicy(content_ids=frozenset({content_id}))
        for host, layers_of in ((first, (0, 15)), (second, (15, 30))):
            (folder,) = (tmp_path / host.namespace).rglob("artifacts")
            store = Store(folder, reserve_bytes=0)
            with store.open(content_id, policy) as artifact:
                shard = wanted_bytes(artifact, *layers_of)
                assert sum(sources(nodes[host]).values()) == shard
                own = range_bytes(artifact, *layers_of)
                assert shard <= 1.02 * own
                assert artifact.files[0].data_path.stat().st_blocks * 512 <= shard + (1 << 20)
            store.close()
            # All that the link carried: TLS, TCP and the control plane are in it, the rest of the model is not.
            assert shard <= moved[host] <= 1.03 * own

        cluster.model = demo_model().stem
        answer = await cluster.ask(QUESTION, max_tokens=12)
        assert answer.status_code == 200, answer.text
        hops = (await cluster.record(answer.headers["shardline-route-session"]))["route"]["hops"]
        assert [hop["layers"] for hop in hops] == [[0, 15], [15, 30]]
        assert {hop["content_id"] for hop in hops} == {content_id}
        assert answer.json()["choices"][0]["message"]["content"].strip()
