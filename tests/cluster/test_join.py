"""A cluster with keys in one process: joining, what strangers meet, certificates renewed while sessions run."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker import run as tracker_run
from shardline.transport.authority import Authority, key_pem, lifetime, new_key
from shardline.transport.failures import HttpFailure
from shardline.transport.http_client import HttpClient
from shardline.transport.join import join_line, joined
from shardline.transport.membership import keep_in, kept_in
from shardline.transport.tls import ClusterTls
from shardline.transport.tracker_client import TrackerClient
from tests.support.certificates import party
from tests.support.delay_proxy import DelayProxy
from tests.support.keyed_cluster import CREDENTIAL, KeyedCluster, keyed_cluster, url_of
from tests.support.local_cluster import Role, read
from tests.support.relay import free_port
from tests.transport.loopback import sockets, until

ENDLESS: dict[str, Any] = {"answer": [f" t{i}" for i in range(50)], "eos": False, "decode_ms": 2}


async def failure(role: Role) -> ShardlineError:
    """Why a Node that was started has ended."""
    assert role.task is not None
    await asyncio.wait({role.task}, timeout=20)
    error = role.task.exception()
    assert isinstance(error, ShardlineError)
    return error


async def test_a_route_over_nodes_that_joined(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        ids, end = await cluster.generate()
        assert (len(ids), end.reason) == (8, "length")
        assert all(node.url.startswith("https://") for node in cluster.nodes)
        assert len(set(cluster.tracker.lines)) == 1 + len(cluster.nodes)
        await cluster.until_free()


async def test_decode_takes_the_direct_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written from within the socket's read and answered from within it, as without TLS."""
    at_once: list[bool] = []
    post_now = HttpClient.post_now

    def counted(self: HttpClient, *given: Any, **more: Any) -> bool:
        at_once.append(post_now(self, *given, **more))
        return at_once[-1]

    monkeypatch.setattr(HttpClient, "post_now", counted)
    async with keyed_cluster(tmp_path, layers=((0, 3), (3, 6)), script={"eos": False}) as cluster:
        ids, _ = await cluster.generate(max_tokens=100)
        assert len(ids) == 100
        assert sum(at_once) > 190, "two hops a token, but for the first on each connection"


@pytest.mark.parametrize("caller", ["nobody", "another cluster", "expired"])
async def test_strangers(tmp_path: Path, caller: str) -> None:
    """Even with the credential: without a certificate there is nothing but joining at the Tracker, and no Node."""
    async with keyed_cluster(tmp_path, layers=((0, 6),)) as cluster:
        own = cluster.authority
        other = Authority.made(tmp_path / "other.pem", time.time())
        tls = {
            "nobody": ClusterTls(own.certificate_pem),
            "another cluster": party(other, "n-0123456789abcdef", trusts=own),
            "expired": party(own, "n-0123456789abcdef", ended_s=60),
        }[caller]
        client = HttpClient(cluster.settings, credential=CREDENTIAL, tls=tls)
        tracker = TrackerClient(client, cluster.tracker.url)
        for call in (tracker.models, tracker.nonce, tracker.nodes):
            with pytest.raises(ShardlineError) as caught:
                await call()
            assert caught.value.code == ("unauthorized" if caller == "nobody" else "tracker_unreachable")
        for path in ("/v1/node", "/v1/node?nonce=00", "/healthz", "/metrics"):
            with pytest.raises(HttpFailure):
                await client.request("GET", url_of(cluster.nodes[0]) + path, timeout_s=5, limit="x")
        if caller == "nobody":
            assert (await tracker.authority()).certificate == own.certificate_pem.decode()
        await client.aclose()
        assert len((await cluster.generate())[0]) == 8


async def test_a_certificate_alone_is_not_the_credential(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, layers=((0, 6),)) as cluster:
        client = HttpClient(cluster.settings, credential="wrong-" + "x" * 32, tls=cluster.own("gateway-x").tls)
        with pytest.raises(ShardlineError) as caught:
            await TrackerClient(client, cluster.tracker.url).models()
        assert caught.value.code == "unauthorized"
        with pytest.raises(ShardlineError) as caught:
            await client.json("GET", f"{url_of(cluster.nodes[0])}/v1/node", dict)
        assert caught.value.code == "unauthorized"
        await client.aclose()


async def test_only_the_operator_invites(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, layers=()) as cluster:
        url = cluster.tracker.url.replace("https://", "https://tracker@", 1) + "/v1/invitations"
        for name, allowed in (("operator", True), ("n-0123456789abcdef", False), ("gateway-x", False)):
            client = HttpClient(cluster.settings, credential=CREDENTIAL, tls=cluster.own(name).tls)
            answer = await client.request("POST", url, timeout_s=5, limit="x")
            assert answer.status == (200 if allowed else 403)
            await client.aclose()


async def test_tokens_that_let_nobody_in(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, layers=((0, 6),), settings=Settings(drain_s=0.5, invitation_s=1.0)) as cluster:
        used, fresh = cluster.tracker.lines
        error = await failure(await cluster.start_node(0, 6, join=used))
        assert (error.code, error.details["reason"]) == ("join_refused", "used")
        head, _, pin = fresh.rpartition(".")
        guessed = f"{head.partition('#')[0]}#{'A' * 22}.{pin}"
        error = await failure(await cluster.start_node(0, 6, join=guessed))
        assert (error.code, error.details["reason"]) == ("join_refused", "unknown")
        await asyncio.sleep(1.0)
        error = await failure(await cluster.start_node(0, 6, join=fresh))
        assert (error.code, error.details["reason"]) == ("join_refused", "expired")
        for _ in range(10):
            error = await failure(await cluster.start_node(0, 6, join=guessed))
        assert error.code == "queue_full" and error.details["retry_after"] > 1
        assert all("AAAA" not in text for text in (str(error), repr(error.details)))


async def test_a_node_comes_back_without_a_token_and_so_does_the_tracker(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, layers=((0, 6),)) as cluster:
        (node,) = cluster.nodes
        line, pin = cluster.tracker.lines[0], cluster.authority.pin
        home = tmp_path / "machine-0"
        await node.end()
        port = int(cluster.tracker.url.rsplit(":", 1)[1])
        await cluster.tracker.end()
        await cluster.start_tracker(port)
        assert cluster.authority.pin == pin
        # The same line finds what it once led to; so does the URL alone.
        for join in (line, cluster.tracker.url):
            again = await cluster.start_node(0, 6, join=join, state_dir=home)
            await again.until("ready")
            assert again.node == node.node
            taken = await failure(await cluster.start_node(0, 6, join=join, state_dir=home))
            assert taken.code == "identity_in_use"
            await again.end()


async def test_a_tracker_that_was_away_lets_its_nodes_go_on(tmp_path: Path) -> None:
    """Restarted with the same state folder, it has the same authority: Nodes that run register again by themselves."""
    async with keyed_cluster(tmp_path, layers=((0, 3), (3, 6))) as cluster:
        port = int(cluster.tracker.url.rsplit(":", 1)[1])
        await cluster.tracker.end()
        await cluster.start_tracker(port)

        async with asyncio.timeout(10):
            while len((await cluster.tracker_client.nodes())["nodes"]) < 2:
                await asyncio.sleep(0.05)
            while not (await cluster.tracker_client.models()).models[0].ready:
                await asyncio.sleep(0.05)
        assert len((await cluster.generate())[0]) == 8


async def test_certificates_are_renewed_while_a_session_runs(tmp_path: Path) -> None:
    """Several lives of every certificate pass under one generation, which notices nothing; new connections use the
    new ones."""
    settings = Settings(drain_s=0.5, certificate_s=1.2, tracker_heartbeat_s=0.1)
    layers = ((0, 3), (3, 6))
    async with keyed_cluster(tmp_path, layers=layers, script=ENDLESS, settings=settings) as cluster:
        folders = [next((tmp_path / f"machine-{i}" / "joined").iterdir()) for i in range(2)]
        first = [kept_in(folder) for folder in folders]
        started = time.monotonic()
        ids, end = await read(cluster.start(max_tokens=1200))
        assert time.monotonic() - started > 2.4
        assert (len(ids), end.reason) == (1200, "length")
        for before, folder in zip(first, folders, strict=True):
            after = kept_in(folder)
            assert before is not None and after is not None
            assert after.certificate != before.certificate and after.key != before.key
        fresh = HttpClient(settings, credential=CREDENTIAL, tls=cluster.own("gateway-fresh").tls)
        for node in cluster.nodes:
            assert (await fresh.request("GET", f"{url_of(node)}/healthz", timeout_s=5, limit="x")).status == 200
        await fresh.aclose()


def lapse(folder: Path, authority: Authority, ended_s: float) -> None:
    """Exchange what is kept in `folder` for a certificate that ended so long ago."""
    kept = kept_in(folder)
    assert kept is not None
    key = new_key()
    start = time.time() - 86400 - ended_s
    pem = authority.issue(key.public_key(), kept.node, [], now=start, seconds=86400)
    keep_in(folder, msgspec.structs.replace(kept, certificate=pem.decode(), key=key_pem(key).decode()))


async def test_a_lapsed_membership_is_renewed_at_the_start_or_refused(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, layers=((0, 6),)) as cluster:
        (node,) = cluster.nodes
        home = tmp_path / "machine-0"
        (folder,) = (home / "joined").iterdir()
        await node.end()
        lapse(folder, cluster.authority, 3 * 86400)
        again = await cluster.start_node(0, 6, join=cluster.tracker.url, state_dir=home)
        await again.until("ready")
        assert again.node == node.node
        await again.end()
        lapse(folder, cluster.authority, 8 * 86400)
        error = await failure(await cluster.start_node(0, 6, join=cluster.tracker.url, state_dir=home))
        assert error.code == "join_refused" and "too long to be renewed" in error.message


async def test_a_tracker_that_was_away_for_longer_than_a_certificate_lives(tmp_path: Path) -> None:
    settings = Settings(drain_s=0.5, certificate_s=1.0, tracker_heartbeat_s=0.1)
    async with keyed_cluster(tmp_path, layers=((0, 6),), settings=settings) as cluster:
        (folder,) = (tmp_path / "machine-0" / "joined").iterdir()
        port = int(cluster.tracker.url.rsplit(":", 1)[1])
        await cluster.tracker.end()
        kept = kept_in(folder)
        assert kept is not None
        await until(lambda: time.time() > lifetime(kept.certificate.encode())[1] + 0.2)
        await cluster.start_tracker(port)
        await cluster.client.aclose()
        cluster.client = HttpClient(settings, credential=CREDENTIAL, tls=cluster.own("gateway-later").tls)
        tracker = TrackerClient(cluster.client, cluster.tracker.url)
        async with asyncio.timeout(10):
            while not (await tracker.nodes())["nodes"]:
                await asyncio.sleep(0.05)
        assert len(cluster.tracker.lines) == 1, "no token was spent"


async def test_a_node_at_the_address_of_another(tmp_path: Path) -> None:
    """The Gateway means Node A, and Node B answers there: nothing of the session reaches B."""
    async with keyed_cluster(tmp_path, layers=((0, 6),)) as cluster:
        port = free_port()
        with DelayProxy("127.0.0.1", int(cluster.nodes[0].url.rsplit(":", 1)[1])) as to_first:
            moved = await cluster.start_node(0, 6, port=port, advertise_url=to_first.address)
            # Dialled back at what it advertises, it is not the one that answers.
            error = await failure(moved)
        assert error.code == "registration_refused"
        assert "another party of the cluster answers there" in error.message


async def test_a_route_through_proxies_that_know_no_tls(tmp_path: Path) -> None:
    """Opaque bytes, held back on their way: what is measured with a delay is measured over TLS as well."""
    async with keyed_cluster(tmp_path, layers=()) as cluster:
        ports = [free_port(), free_port()]
        with DelayProxy("127.0.0.1", ports[0]) as first, DelayProxy("127.0.0.1", ports[1]) as second:
            for proxy, port, (low, high) in zip((first, second), ports, ((0, 3), (3, 6)), strict=True):
                node = await cluster.start_node(low, high, port=port, advertise_url=proxy.address)
                await node.until("ready")
            for proxy in (first, second):
                proxy.set(delay_s=0.005)
            started = time.monotonic()
            ids, end = await cluster.generate()
            assert (len(ids), end.reason) == (8, "length")
            assert time.monotonic() - started > 7 * 2 * 0.005


async def test_a_tracker_without_its_authority(tmp_path: Path) -> None:
    """What cannot be read is named, and nothing is left open."""
    before = sockets()
    cluster = KeyedCluster(tmp_path, Settings(drain_s=0.5))
    path = tmp_path / "authority.pem"
    path.mkdir()
    with pytest.raises(ShardlineError) as caught:
        await tracker_run.run(cluster.tracker_options(0, "127.0.0.1"))
    assert caught.value.code == "setting_invalid" and str(path) in caught.value.message
    path.rmdir()
    path.write_text("junk")
    path.chmod(0o600)
    with pytest.raises(ShardlineError, match="holds no key and certificate"):
        await tracker_run.run(cluster.tracker_options(0, "127.0.0.1"))
    await cluster.client.aclose()
    await until(lambda: sockets() == before)


async def test_two_machines_and_one_line(tmp_path: Path) -> None:
    """At the same moment: one is let in."""
    async with keyed_cluster(tmp_path, layers=()) as cluster:
        line = join_line(cluster.tracker.lines[0])

        async def attempt(name: str) -> str:
            try:
                async with joined(line, state_dir=tmp_path / name, settings=cluster.settings):
                    return "in"
            except ShardlineError as error:
                return error.code

        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(attempt(name)) for name in ("a", "b")]
        assert sorted(task.result() for task in both) == ["in", "join_refused"]


async def test_a_port_that_is_taken_spends_no_token(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, layers=()) as cluster:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            error = await failure(await cluster.start_node(0, 6, port=taken.getsockname()[1]))
            assert error.code == "address_in_use"
        node = await cluster.start_node(0, 6)
        await node.until("ready")
