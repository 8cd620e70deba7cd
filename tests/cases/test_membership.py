"""Reported bugs of such servers, tried on a whole cluster: who is in, under which address, with which files, and what
is said about it while that changes. Every part of the cluster runs in the loop of the test."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway import run as gateway_run
from shardline.node import run as node_run
from shardline.options import GatewayOptions, NodeOptions, TrackerOptions
from shardline.settings import Settings
from shardline.tracker import run as tracker_run
from shardline.transport.credentials import identity_key
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.tickets import node_id_of, public_bytes
from tests.support.api_cluster import CHAT, COUNTING, TEXT, ApiCluster, Json, api_cluster, until
from tests.support.local_cluster import CREDENTIAL, Role
from tests.support.relay import Relay, free_port

QUICK = Settings(drain_s=0.3, tracker_heartbeat_s=0.1, tracker_expiry_s=0.8, worker_backoff_s=0.5)
HAS_IPV6 = Path("/proc/net/if_inet6").exists() or sys.platform == "darwin"
THIRTY: Json = {**COUNTING, "n_layers": 30}
TENS = [(0, 10), (10, 20), (20, 30)]


async def views(cluster: ApiCluster) -> tuple[bool, bool, Any]:
    """What `/readyz` says, what `/v1/models` says, and the missing layers of either."""
    status, ready = await cluster.get("/readyz")
    _, listed = await cluster.get("/v1/models")
    if (await cluster.get("/readyz"))[0] != status:
        return await views(cluster)  # it changed just now
    missing = ready["error"]["missing"] if status == 503 else None
    models = {entry["id"]: entry for entry in listed["data"]}
    entry = models.get(cluster.model, {"ready": False, "missing": None})
    if missing:
        assert entry["missing"] == missing[cluster.model]
    return status == 200, entry["ready"], entry["missing"]


async def is_refused(cluster: ApiCluster, missing: list[list[int]]) -> None:
    """All three say the same: the list of models, readiness, and the router, which touches no Node."""
    answer = await cluster.ask(max_tokens=1)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["missing"]) == (503, "model_unavailable", missing), error
    assert int(answer.headers["retry-after"]) >= 1
    assert await views(cluster) == (False, False, missing)
    assert (await cluster.get("/healthz"))[0] == 200


async def is_served(cluster: ApiCluster) -> None:
    async def ready() -> bool:
        return (await views(cluster))[:2] == (True, True)

    await until(ready)
    assert await cluster.text(max_tokens=2) == " t0 t1"


async def shown(cluster: ApiCluster, node: str) -> Json:
    """A Node as the Tracker shows it."""
    nodes = (await cluster.tracker_client.nodes())["nodes"]
    return next((dict(entry) for entry in nodes if entry["id"] == node), {})


# ---- Shards that do not serve ------------------------------------------------------------------------------------


async def beginning(cluster: ApiCluster, layers: list[tuple[int, int]]) -> None:
    """Tracker, Gateway, and Nodes that need not become ready."""
    await cluster.start_tracker()
    cluster.tracker_client = TrackerClient(cluster.client, cluster.tracker.url)
    await cluster.start_gateway()
    for first, last in layers:
        role = await cluster.start_node(first, last)
        await role.until("listening")


@pytest.mark.parametrize("fault", [{"kind": "error"}, {"kind": "slow", "ms": 60_000}], ids=["fails", "takes a minute"])
async def test_a_shard_that_does_not_load_is_in_no_route(tmp_path: Path, fault: Json) -> None:
    """Three Nodes of ten layers; loading fails on the second, or takes a minute: no route until then, the gap is
    named, and whoever started the Node learns why."""
    script = {**THIRTY, "faults": [{"phase": "load", "node": 10, **fault}]}
    cluster = ApiCluster(tmp_path, QUICK)
    cluster.script.write_text(json.dumps({"model": cluster.model, **script}))
    try:
        await beginning(cluster, TENS)
        for number in (0, 2):
            await cluster.nodes[number].until("ready")
        await is_refused(cluster, [[10, 20]])
        middle = cluster.nodes[1]
        assert middle.task is not None
        if fault["kind"] == "error":
            await asyncio.wait({middle.task}, timeout=5)
            with pytest.raises(ShardlineError, match="the script says so"):
                middle.task.result()
        else:
            entry = await shown(cluster, middle.node)
            assert [shard["state"] for shard in entry["shards"]] == ["loading"]
        await is_refused(cluster, [[10, 20]])
    finally:
        await cluster.stop()


async def test_a_worker_that_dies_while_its_node_lives(tmp_path: Path) -> None:
    """From the loss of its engine to the end of the next self-test its layers are missing, with the reason in the
    Tracker's list; then they are back by themselves."""
    fault = {"kind": "exit", "phase": "decode", "node": 10, "step": 1, "flag": "die"}
    async with api_cluster(tmp_path, layers=TENS, script={**THIRTY, "faults": [fault]}, settings=QUICK) as cluster:
        (tmp_path / "die").touch()
        answer = await cluster.ask(max_tokens=9)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_lost")
        await is_refused(cluster, [[10, 20]])
        entry = await shown(cluster, cluster.nodes[1].node)
        assert entry["state"] == "out" and entry["reason"]
        await is_served(cluster)


async def test_what_is_listed_is_what_is_served(tmp_path: Path) -> None:
    """Before the last Node, with it, and right after it has left: list, readiness and router agree each time, and a
    Node that comes late is there within about a heartbeat."""
    async with api_cluster(tmp_path, layers=[(0, 3)], script=COUNTING, settings=QUICK) as cluster:
        await is_refused(cluster, [[3, 6]])
        late = await cluster.start_node(3, 6)
        await late.until("ready")
        await is_served(cluster)
        await late.end()
        answer = await cluster.ask(max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["missing"]) == (503, [[3, 6]])


# ---- addresses and identities ------------------------------------------------------------------------------------


async def failed(role: Role) -> ShardlineError:
    assert role.task is not None
    await asyncio.wait({role.task}, timeout=5)
    assert role.task.done(), "it should have given up"
    with pytest.raises(ShardlineError) as caught:
        role.task.result()
    return caught.value


async def test_two_nodes_with_one_identity(tmp_path: Path) -> None:
    """The second one is refused with the address of the first, which serves on; in the list there is one."""
    key = tmp_path / "node.key"
    async with api_cluster(tmp_path, layers=[(0, 6)], script=COUNTING, identity_path=key) as cluster:
        error = await failed(await cluster.start_node(0, 6, identity_path=key))
        assert error.code == "identity_in_use" and cluster.nodes[0].url in error.message
        assert len((await cluster.tracker_client.nodes())["nodes"]) == 1
        cluster.nodes.pop()
        await is_served(cluster)


async def test_a_node_comes_back_under_another_address(tmp_path: Path) -> None:
    """Routes, probes and pools follow it at once. At its old address a foreign program answers 200 to everything, and
    is asked for nothing."""
    key = tmp_path / "node.key"
    async with api_cluster(tmp_path, layers=[(0, 3)], script=COUNTING, settings=QUICK) as cluster:
        tail = await cluster.start_node(3, 6, identity_path=key)
        await tail.until("ready")
        await is_served(cluster)
        await tail.end()
        seen: list[bytes] = []

        async def foreign(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.readline())
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(foreign, "127.0.0.1", int(tail.url.rsplit(":", 1)[1]))
        async with server:
            moved = await cluster.start_node(3, 6, identity_path=key)
            await moved.until("ready")
            assert moved.node == tail.node and moved.url != tail.url
            await is_served(cluster)
            answer = await cluster.answer(max_tokens=5)
            hops = (await cluster.record(answer["session"]))["route"]["hops"]
            assert [hop["node"] for hop in hops] == [cluster.nodes[0].node, tail.node]
            assert not [line for line in seen if b"/v1/steps" in line or b"/v1/sessions" in line]
            assert (await shown(cluster, tail.node))["dialled_url"] == moved.url


@pytest.mark.parametrize("knows_the_id", [False, True])
async def test_a_foreign_program_at_the_advertised_address(tmp_path: Path, knows_the_id: bool) -> None:
    """It answers 200, even with the Node's id: refused all the same, as only the key of the Node can sign."""
    key = tmp_path / "node.key"
    node = node_id_of(public_bytes(identity_key(key)))
    body = json.dumps({"id": node, "protocol": 1, "proof": "e30.AAAA"} if knows_the_id else {}).encode()

    async def foreign(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async with (
        api_cluster(tmp_path, layers=[(0, 3)], script=COUNTING, settings=QUICK) as cluster,
        await asyncio.start_server(foreign, "127.0.0.1", 0) as server,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        error = await failed(await cluster.start_node(3, 6, advertise_url=url, identity_path=key))
        assert error.code == "registration_refused" and url in error.message
        cluster.nodes.pop()
        await is_refused(cluster, [[3, 6]])


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1", "registration_refused"),
        ("169.254.7.7", "address_refused"),
        ("169.254.169.254", "address_refused"),
        ("0.0.0.0", "address_refused"),
        ("[fe80::1%25eth0]", "address_refused"),
    ],
)
async def test_an_address_that_nobody_reaches(tmp_path: Path, host: str, code: str) -> None:
    """A Node that reaches the Tracker but advertises what leads nowhere, or to another machine on each network: its
    join is refused at once, with the address and the reason."""
    settings = msgspec.structs.replace(QUICK, dial_back_s=0.5)
    async with api_cluster(tmp_path, layers=[(0, 3)], script=COUNTING, settings=settings) as cluster:
        url = f"http://{host}:{free_port()}"
        role = await cluster.start_node(3, 6, advertise_url=url)
        error = await failed(role)
        cluster.nodes.pop()
        assert error.code == code and host.strip("[]").partition("%")[0] in error.message
        await is_refused(cluster, [[3, 6]])


async def hosts(cluster: ApiCluster, tracker: str, nodes: list[str], gateway: str) -> None:
    """Start every part on a loopback address of its own family."""
    await cluster.start_tracker(host=tracker)
    cluster.tracker_client = TrackerClient(cluster.client, cluster.tracker.url)
    for number, host in enumerate(nodes):
        role = await cluster.start_node(3 * number, 3 * number + 3, host=host)
        await role.until("listening")
    await cluster.start_gateway(host=gateway)
    for role in cluster.nodes:
        await role.until("ready")


@pytest.mark.parametrize(
    ("tracker", "nodes", "gateway"),
    [
        ("::1", ["::1", "::1"], "::1"),
        ("::1", ["127.0.0.1", "::1"], "localhost"),
        ("localhost", ["::1", "localhost"], "::1"),
    ],
)
@pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here")
async def test_ipv6_alone_and_mixed(tmp_path: Path, tracker: str, nodes: list[str], gateway: str) -> None:
    """All parts on `::1`, and each on another family: every URL that one part tells another can be called."""
    cluster = ApiCluster(tmp_path, QUICK)
    cluster.script.write_text(json.dumps({"model": cluster.model, **COUNTING}))
    try:
        await hosts(cluster, tracker, nodes, gateway)
        await is_served(cluster)
        urls = [cluster.tracker.url, *(node.url for node in cluster.nodes), cluster.url]
        for host, url in zip([tracker, *nodes, gateway], urls, strict=True):
            assert url.startswith("http://[::1]:" if host == "::1" else "http://127.0.0.1:")
        await cluster.until_free()
    finally:
        await cluster.stop()


# ---- files -------------------------------------------------------------------------------------------------------


async def test_other_files_under_the_same_name(tmp_path: Path) -> None:
    """The second Node's model has the same name and other content: no route joins them, and the explanation has both
    digests."""
    async with api_cluster(tmp_path, layers=[(0, 3)], script=COUNTING, settings=QUICK) as cluster:
        other = tmp_path / "other.json"
        other.write_text(json.dumps({"model": cluster.model, **COUNTING, "sharpness": 39.0}))
        tail = await cluster.start_node(3, 6, model=str(other))
        await tail.until("ready")
        answer = await cluster.ask(max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        explained = json.dumps(await cluster.tracker_client.explain(cluster.model))
        digests = [(await cluster.info(number)).shards[0].content_id for number in (0, 1)]
        assert digests[0] != digests[1] and all(digest in explained for digest in digests)
        right = await cluster.start_node(3, 6)
        await right.until("ready")
        await is_served(cluster)


# ---- the Tracker goes, or cannot be reached ----------------------------------------------------------------------


async def test_a_restarted_tracker_while_requests_come(tmp_path: Path) -> None:
    """One stream runs through it. New requests are told 503 and to come again, for as long as it takes, and nothing
    else; nobody restarts a Node."""
    async with api_cluster(tmp_path, script={**COUNTING, "decode_ms": 15}, settings=QUICK) as cluster:
        answers = []
        async with cluster.streamed(max_tokens=60) as stream:
            await stream.read_tokens(2)
            port = int(cluster.tracker.url.rsplit(":", 1)[1])
            await cluster.tracker.end()
            for number in range(100):
                answers.append(await cluster.ask(max_tokens=1))
                if number == 2:
                    await cluster.start_tracker(port)
                if answers[-1].status_code == 200:
                    break
                await asyncio.sleep(0.05)
            assert not stream.done
            await stream.read_all()
        assert (stream.text, stream.error) == ("".join(f" t{i}" for i in range(60)), None)
        codes = {a.json()["error"]["code"] for a in answers[:-1]}
        assert answers[-1].status_code == 200 and {a.status_code for a in answers[:-1]} == {503}, codes
        assert codes <= {"tracker_unreachable", "model_unavailable"}, codes


async def test_a_node_that_only_the_tracker_does_not_reach(tmp_path: Path) -> None:
    """Between one Node and the Tracker nothing passes: it leaves new routes, its session ends whole, and when the
    network heals it returns by itself."""
    script = {**COUNTING, "decode_ms": 10}
    async with (
        api_cluster(tmp_path, layers=[(0, 3)], script=script, settings=QUICK) as cluster,
        Relay(int(cluster.tracker.url.rsplit(":", 1)[1])) as relay,
    ):
        tail = await cluster.start_node(3, 6, tracker_url=relay.url)
        await tail.until("ready")
        await is_served(cluster)
        async with cluster.streamed(max_tokens=90) as stream:
            await stream.read_tokens(1)
            relay.hold()

            async def out() -> bool:
                return (await shown(cluster, tail.node))["state"] == "expired"

            await until(out)
            await is_refused(cluster, [[3, 6]])
            assert not stream.done
            await stream.read_all()
        assert (stream.finish_reason, stream.error) == ("length", None)
        relay.release()
        await is_served(cluster)
        await tail.end()
        cluster.nodes.pop()


# ---- ports, keys -------------------------------------------------------------------------------------------------


def role(name: str, tmp_path: Path, port: int) -> Any:
    common: Json = {"settings": QUICK, "host": "127.0.0.1", "port": port, "credential": CREDENTIAL}
    common["state_dir"] = tmp_path
    if name == "tracker":
        return tracker_run.run(TrackerOptions(**common))
    common["tracker_url"] = "http://127.0.0.1:9"
    if name == "gateway":
        return gateway_run.run(GatewayOptions(**common))
    # There is no such file: a Node that looked at its model first would say so.
    return node_run.run(NodeOptions(**common, model=str(tmp_path / "missing"), engine="scripted", first=0, last=1))


@pytest.mark.parametrize("name", ["tracker", "gateway", "node"])
async def test_a_port_that_another_one_has(tmp_path: Path, name: str) -> None:
    """Of the same kind, or a foreign program: the second one ends at once, with the port in the message and before it
    has looked at a model; it takes no other port."""
    async with api_cluster(tmp_path, layers=[(0, 6)], script=COUNTING, settings=QUICK) as cluster:
        same = {"tracker": cluster.tracker.url, "gateway": cluster.url, "node": cluster.nodes[0].url}[name]
        async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as foreign:
            for port in (int(same.rsplit(":", 1)[1]), foreign.sockets[0].getsockname()[1]):
                began = time.monotonic()
                with pytest.raises(ShardlineError) as caught:
                    await asyncio.wait_for(role(name, tmp_path, port), 5)
                assert caught.value.code == "address_in_use" and str(port) in caught.value.message
                assert time.monotonic() - began < 2
        await is_served(cluster)


KEY = "sk-alice-0123456789"


async def test_an_api_key_gives_no_rights_over_the_cluster(tmp_path: Path) -> None:
    """With the key of a chat client, or none, nothing of the control plane answers, on the Tracker and on a Node; the
    cluster's credential is no API key; no other site gets leave, and its requests are refused."""
    async with api_cluster(tmp_path, layers=[(0, 6)], script=COUNTING, settings=QUICK, api_keys=[KEY]) as cluster:
        node, tracker = cluster.nodes[0], cluster.tracker.url
        writes = [
            ("POST", f"{tracker}/v1/{p}") for p in ("nodes", "routes", "placement", f"nodes/{node.node}/heartbeat")
        ]
        writes += [("DELETE", f"{tracker}/v1/nodes/{node.node}"), ("POST", f"{tracker}/v1/routes/r-1/outcome")]
        writes += [("GET", f"{tracker}/v1/nodes"), ("GET", f"{tracker}/v1/routes/explain?model=x")]
        writes += [("POST", f"{node.url}/v1/{p}") for p in ("steps", "sessions", "beats", "tokenize")]
        writes += [("DELETE", f"{node.url}/v1/sessions/{'0' * 32}"), ("GET", f"{node.url}/v1/node")]
        for method, url in writes:
            for headers in ({"authorization": f"Bearer {KEY}"}, {}):
                answer = await cluster.http.request(method, url, headers={**headers, "shardline-protocol": "1"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized"), url
            page = {"authorization": f"Bearer {CREDENTIAL}", "shardline-protocol": "1", "origin": "http://evil.test"}
            answer = await cluster.http.request(method, url, headers=page)
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers, url
        for key in (CREDENTIAL, "wrong"):
            headers = {"authorization": f"Bearer {key}"}
            for path in (TEXT, CHAT):
                answer = await cluster.http.post(cluster.url + path, json=cluster.body(), headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
            for path in ("/v1/route-sessions", "/v1/route-sessions/rs-1/telemetry", "/v1/models"):
                assert (await cluster.http.get(cluster.url + path, headers=headers)).status_code == 401
        headers = {"authorization": f"Bearer {KEY}", "origin": "http://evil.test"}
        answer = await cluster.http.post(cluster.url + TEXT, json=cluster.body(max_tokens=1), headers=headers)
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
