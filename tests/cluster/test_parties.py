"""What each party of a cluster with keys may do: members that want more than is theirs, and those that are out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from shardline.gateway import run as gateway_run
from shardline.options import GatewayOptions
from shardline.settings import Settings
from shardline.transport.authority import OPERATOR, key_pem, new_key
from shardline.transport.failures import HttpFailure
from shardline.transport.http_client import HttpClient
from shardline.transport.membership import kept_in
from shardline.transport.tls import ClusterTls
from shardline.transport.tracker_client import TrackerClient
from shardline.wire.joining import Expulsion, Invitation
from shardline.wire.messages import Outcome, RouteRequest
from tests.support.keyed_cluster import CREDENTIAL, KeyedCluster, keyed_cluster, url_of
from tests.support.local_cluster import Role
from tests.transport.loopback import until


@asynccontextmanager
async def as_party(cluster: KeyedCluster, party: str) -> AsyncIterator[HttpClient]:
    client = HttpClient(cluster.settings, credential=CREDENTIAL, tls=cluster.own(party).tls)
    try:
        yield client
    finally:
        await client.aclose()


async def failure(role: Role) -> ShardlineError:
    """Why a role that was started has ended."""
    assert role.task is not None
    await asyncio.wait({role.task}, timeout=10)
    error = role.task.exception()
    assert isinstance(error, ShardlineError)
    return error


def tracker_url(cluster: KeyedCluster) -> str:
    return cluster.tracker.url.replace("https://", "https://tracker@", 1)


async def expel(cluster: KeyedCluster, party: str) -> Expulsion:
    async with as_party(cluster, OPERATOR) as client:
        return await client.json("POST", f"{tracker_url(cluster)}/v1/parties/{party}/expulsion", Expulsion)


async def gateway_line(cluster: KeyedCluster) -> str:
    async with as_party(cluster, OPERATOR) as client:
        url = f"{tracker_url(cluster)}/v1/invitations?part=gateway"
        return (await client.json("POST", url, Invitation)).line


async def test_a_node_is_no_gateway(tmp_path: Path) -> None:
    """With a certificate and the credential: no routes, no word on how sessions ended, no sessions at other Nodes."""
    async with keyed_cluster(tmp_path, layers=((0, 6),)) as cluster:
        node = url_of(cluster.nodes[0])
        async with as_party(cluster, "n-0123456789abcdef") as client:
            tracker = TrackerClient(client, cluster.tracker.url)
            ask = RouteRequest(model="scripted", kv_tokens=1, gateway="g")
            for call in (tracker.routes(ask), tracker.outcome("r-1", Outcome(status="failed"))):
                with pytest.raises(ShardlineError) as caught:
                    await call
                assert caught.value.code == "forbidden"
            for method, path in (
                ("POST", "/v1/sessions"),
                ("DELETE", f"/v1/sessions/{'0' * 32}"),
                ("POST", "/v1/beats"),
                ("POST", "/v1/tokenize"),
                ("GET", "/v1/text/x"),
                ("GET", "/v1/log"),
            ):
                assert (await client.request(method, node + path, timeout_s=5, limit="x")).status == 403
            assert (await client.request("GET", f"{node}/healthz", timeout_s=5, limit="x")).status == 200
            assert (await tracker.nodes())["nodes"]
            for path in ("/v1/invitations", "/v1/parties/n-0123456789abcdef/expulsion"):
                answer = await client.request("POST", tracker_url(cluster) + path, timeout_s=5, limit="x")
                assert answer.status == 403
        assert len((await cluster.generate())[0]) == 8


async def test_an_expelled_node_ends_and_stays_out(tmp_path: Path) -> None:
    settings = Settings(drain_s=0.5, tracker_heartbeat_s=0.1)
    async with keyed_cluster(tmp_path, layers=((0, 6), (0, 6)), settings=settings) as cluster:
        bad, good = cluster.nodes
        assert (await expel(cluster, bad.node)).expelled == [bad.node]
        error = await failure(bad)
        assert (error.code, error.details["reason"]) == ("join_refused", "expelled")
        states = {n["id"]: n["state"] for n in (await cluster.tracker_client.nodes())["nodes"]}
        assert states[bad.node] == "expelled" and states[good.node] == "ready"
        assert len((await cluster.generate())[0]) == 8
        # Neither what it has, nor a line for another Node, brings it back; the Tracker may have been away.
        port = int(cluster.tracker.url.rsplit(":", 1)[1])
        await cluster.tracker.end()
        await cluster.start_tracker(port)
        for join in (cluster.tracker.url, cluster.tracker.lines[-1]):
            home = tmp_path / "machine-0"
            identity = next((home / "joined").iterdir()) / "identity.key"
            again = await cluster.start_node(0, 6, join=join, state_dir=home, identity_path=identity)
            assert (await failure(again)).code == "join_refused"


async def test_nodes_refuse_who_is_out_with_their_next_heartbeat(tmp_path: Path) -> None:
    """Over a connection that was open before, with a certificate that has not ended."""
    settings = Settings(drain_s=0.5, tracker_heartbeat_s=0.1)
    party = "gateway-0123456789abcdef"
    async with keyed_cluster(tmp_path, layers=((0, 6),), settings=settings) as cluster:
        async with as_party(cluster, party) as client:
            node = url_of(cluster.nodes[0])

            async def status(path: str) -> int:
                return (await client.request("GET", node + path, timeout_s=5, limit="x")).status

            assert await status("/healthz") == 200
            await expel(cluster, party)
            async with asyncio.timeout(5):
                while await status("/healthz") != 403:
                    await asyncio.sleep(0.02)
            assert await status("/v1/node") == 403 and await status("/v1/text/x") == 403
            with pytest.raises(ShardlineError) as caught:
                await TrackerClient(client, cluster.tracker.url).models()
            assert caught.value.code == "join_refused"
        assert len((await cluster.generate())[0]) == 8


def gateway_of(cluster: KeyedCluster, folder: Path, join: str) -> Role:
    role = Role()
    options = GatewayOptions(
        settings=cluster.settings,
        tracker_url="",
        host="127.0.0.1",
        port=0,
        credential="",
        state_dir=folder,
        join=join,
        announce=role,
    )
    role.task = asyncio.create_task(gateway_run.run(options))
    return role


async def test_a_gateway_of_another_machine(tmp_path: Path) -> None:
    """It joins by a line of its own, renews by itself, comes back without a token, and ends when it is expelled."""
    settings = Settings(drain_s=0.5, certificate_s=1.5, tracker_heartbeat_s=0.1)
    async with keyed_cluster(tmp_path, layers=((0, 6),), settings=settings) as cluster:
        home = tmp_path / "elsewhere"
        greedy = await failure(gateway_of(cluster, tmp_path / "greedy", cluster.tracker.lines[-1]))
        assert greedy.details["reason"] == "part"
        gateway = gateway_of(cluster, home, await gateway_line(cluster))
        await gateway.until("ready")
        (folder,) = (home / "joined").iterdir()
        first = kept_in(folder)
        assert first is not None and first.node.startswith("gateway-") and first.credential == CREDENTIAL

        started = time.monotonic()
        async with asyncio.timeout(20):
            while time.monotonic() - started < 2 * settings.certificate_s:
                assert await answer_of(gateway.url) == 8
                await asyncio.sleep(0.05)
        after = kept_in(folder)
        assert after is not None and after.certificate != first.certificate and after.node == first.node
        assert await answer_of(gateway.url) == 8
        await gateway.end()

        again = gateway_of(cluster, home, cluster.tracker.url)
        await again.until("ready")
        assert await answer_of(again.url) == 8
        await expel(cluster, first.node)
        assert (await failure(again)).details["reason"] == "expelled"


async def test_an_idle_gateway_that_is_expelled_ends_long_before_its_certificate(tmp_path: Path) -> None:
    settings = Settings(drain_s=0.5, tracker_heartbeat_s=0.1)
    async with keyed_cluster(tmp_path, layers=((0, 6),), settings=settings) as cluster:
        gateway = gateway_of(cluster, tmp_path / "elsewhere", await gateway_line(cluster))
        await gateway.until("ready")

        async def listed() -> dict[str, str]:
            known = (await cluster.tracker_client.nodes())["gateways"]
            return {entry["id"]: entry["state"] for entry in known}

        (folder,) = (tmp_path / "elsewhere" / "joined").iterdir()
        kept = kept_in(folder)
        assert kept is not None
        async with asyncio.timeout(5):
            while kept.node not in await listed():
                await asyncio.sleep(0.02)
        await expel(cluster, kept.node)
        error = await failure(gateway)
        assert (error.code, error.details["reason"], error.details["party"]) == ("join_refused", "expelled", kept.node)
        assert error.advice.endswith(f"expel --undo {kept.node}")
        assert (await listed())[kept.node] == "expelled"


async def test_a_client_of_an_expelled_gateway_hears_that_it_is(tmp_path: Path) -> None:
    """In the moment before the process ends."""
    settings = Settings(drain_s=0.5, tracker_heartbeat_s=60.0, tracker_expiry_s=180.0)
    async with keyed_cluster(tmp_path, layers=((0, 6),), settings=settings) as cluster:
        home = tmp_path / "elsewhere"
        gateway = gateway_of(cluster, home, await gateway_line(cluster))
        await gateway.until("ready")
        (folder,) = (home / "joined").iterdir()
        kept = kept_in(folder)
        assert kept is not None
        await expel(cluster, kept.node)
        client = HttpClient(Settings())
        try:
            for path in ("/readyz", "/v1/models"):
                response = await client.request("GET", f"{gateway.url}{path}", timeout_s=5, limit="x")
                error = json.loads(response.body)["error"]
                assert (response.status, error["code"], error["retryable"]) == (503, "gateway_expelled", False)
        finally:
            await client.aclose()
        await gateway.end()


async def answer_of(url: str) -> int:
    """How many tokens a Gateway gives for one short request."""
    client = HttpClient(Settings())
    body = b'{"model": "scripted", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}'
    try:
        response = await client.request(
            "POST",
            f"{url}/v1/chat/completions",
            body=body,
            content_type="application/json",
            timeout_s=10,
            limit="x",
        )
        assert response.status == 200, response.body
        return int(response.body.split(b'"completion_tokens":')[1].split(b",")[0].strip(b" }"))
    finally:
        await client.aclose()


async def test_an_expelled_node_keeps_no_connection_beyond_its_certificate(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, layers=((0, 6),)) as cluster:
        own, key, now = cluster.authority, new_key(), time.time()
        pem = own.issue(key.public_key(), "n-0123456789abcdef", [], now=now, seconds=1.0)
        client = HttpClient(
            cluster.settings, credential=CREDENTIAL, tls=ClusterTls(own.certificate_pem, pem, key_pem(key))
        )
        url = f"{url_of(cluster.nodes[0])}/healthz"
        with pytest.raises(HttpFailure):
            async with asyncio.timeout(10):
                while True:
                    await client.request("GET", url, timeout_s=5, limit="x")
                    await asyncio.sleep(0.02)
        assert time.time() > now + 1.0
        await until(lambda: client.connections == 0)
        await client.aclose()
