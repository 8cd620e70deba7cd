"""Who may speak to whom: both ends of a connection judge the other's certificate, and the caller whom it reached."""

from __future__ import annotations

import os
import ssl
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.transport.authority import Authority, key_pem, new_key
from shardline.transport.bodies import send_json
from shardline.transport.failures import BeforeResponse, ConnectFailed, HttpFailure
from shardline.transport.guard import PARTIES
from shardline.transport.http_client import HttpClient
from shardline.transport.tls import ClusterTls, public_tls
from tests.support.certificates import authority, party
from tests.transport.loopback import serving, until

NODE_A, NODE_B = "n-aaaaaaaaaaaaaaaa", "n-bbbbbbbbbbbbbbbb"


async def who(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, sorted(scope["state"].get(PARTIES, ())))


@asynccontextmanager
async def calling(tls: ClusterTls | ssl.SSLContext | None) -> AsyncIterator[HttpClient]:
    client = HttpClient(Settings(), tls=tls)
    try:
        yield client
    finally:
        await client.aclose()


async def call(client: HttpClient, port: int, name: str | None) -> list[str]:
    url = f"https://{name + '@' if name else ''}127.0.0.1:{port}/"
    return await client.json("GET", url, list[str])


async def test_two_parties_of_one_cluster(tmp_path: Path) -> None:
    own = authority(tmp_path)
    async with serving(who, tls=party(own, NODE_B).server()) as server, calling(party(own, NODE_A)) as client:
        for _ in range(3):
            assert await call(client, server.port, NODE_B) == [f"shardline:node:{NODE_A}"]
        assert client.connections == 1


async def test_the_right_authority_and_the_wrong_party(tmp_path: Path) -> None:
    """Node A's certificate at Node B's address: the caller says no before it has said anything."""
    own = authority(tmp_path)
    async with serving(who, tls=party(own, NODE_A).server()) as server, calling(party(own, "gateway-1")) as client:
        with pytest.raises(ConnectFailed, match=f"another party of the cluster answers there, not {NODE_B}"):
            await call(client, server.port, NODE_B)
        with pytest.raises(ConnectFailed, match="another party"):
            await call(client, server.port, "tracker")
        assert client.connections == 0
        assert await call(client, server.port, NODE_A)


@pytest.mark.parametrize("fault", ["another cluster", "expired"])
async def test_a_server_that_is_not_one_of_ours(tmp_path: Path, fault: str) -> None:
    own, other = authority(tmp_path), authority(tmp_path, "other")
    false = party(other, NODE_B) if fault == "another cluster" else party(own, NODE_B, ended_s=60)
    async with serving(who, tls=false.server()) as server, calling(party(own, NODE_A)) as client:
        why = "not one of this cluster" if fault == "another cluster" else "look at both clocks"
        with pytest.raises(ConnectFailed, match=f"its certificate .*{why}"):
            await call(client, server.port, NODE_B)


@pytest.mark.parametrize("fault", ["none", "another cluster", "expired"])
async def test_a_client_that_is_not_one_of_ours(tmp_path: Path, fault: str) -> None:
    own, other = authority(tmp_path), authority(tmp_path, "other")
    callers = {
        "none": ClusterTls(own.certificate_pem),
        "another cluster": party(other, NODE_A, trusts=own),
        "expired": party(own, NODE_A, ended_s=60),
    }
    async with serving(who, tls=party(own, NODE_B).server()) as server, calling(callers[fault]) as client:
        # A server of TLS 1.3 judges the client after the client has judged it: the connection breaks at first use.
        with pytest.raises((BeforeResponse, ConnectFailed)):
            await call(client, server.port, NODE_B)


async def test_a_listener_for_strangers_knows_who_is_none(tmp_path: Path) -> None:
    own, other = authority(tmp_path), authority(tmp_path, "other")
    async with serving(who, tls=party(own, "tracker").server(strangers=True)) as server:
        async with calling(ClusterTls(own.certificate_pem)) as stranger:
            assert await call(stranger, server.port, "tracker") == []
        async with calling(party(own, NODE_A)) as node:
            assert await call(node, server.port, "tracker") == [f"shardline:node:{NODE_A}"]
        async with calling(party(other, NODE_A, trusts=own)) as false:
            with pytest.raises(HttpFailure):
                await call(false, server.port, "tracker")


async def test_nobody_is_called_without_saying_who_must_answer(tmp_path: Path) -> None:
    own = authority(tmp_path)
    async with serving(who, tls=party(own, NODE_B).server()) as server, serving(who) as plain:
        async with calling(party(own, NODE_A)) as client:
            with pytest.raises(ConnectFailed, match="nobody said which party"):
                await call(client, server.port, None)
            with pytest.raises(ConnectFailed, match="nobody said which party"):
                await client.json("GET", f"{plain.url}/", list[str])
        async with calling(None) as keyless:
            with pytest.raises(ConnectFailed, match="this process has none"):
                await call(keyless, server.port, NODE_B)


async def test_a_renewed_certificate_serves_the_next_handshake(tmp_path: Path) -> None:
    """Connections that are open go on; new ones show the new certificate."""
    own = authority(tmp_path)
    server_tls, client_tls = party(own, NODE_A), party(own, "gateway-old")
    async with serving(who, tls=server_tls.server()) as server, calling(client_tls) as client:
        assert await call(client, server.port, NODE_A) == ["shardline:gateway:old"]
        renewed(server_tls, own, NODE_A)
        renewed(client_tls, own, "gateway-new")
        assert await call(client, server.port, NODE_A) == ["shardline:gateway:old"]
        assert client.connections == 1
        assert await client.json("GET", f"https://{NODE_A}@127.0.0.1:{server.port}/", list[str])
        answer = await client.request(
            "GET", f"https://{NODE_A}@127.0.0.1:{server.port}/", timeout_s=5, limit="x", fresh=True
        )
        assert answer.body == b'["shardline:gateway:new"]'


def renewed(tls: ClusterTls, signer: Authority, name: str) -> None:
    key = new_key()
    tls.swap(signer.issue(key.public_key(), name, [], now=time.time(), seconds=60), key_pem(key))


async def test_tls_1_2_is_refused(tmp_path: Path) -> None:
    own = authority(tmp_path)
    tls = party(own, NODE_A)
    tls.client.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.client.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(who, tls=party(own, NODE_B).server()) as server, calling(tls) as client:
        with pytest.raises(ConnectFailed, match=r"no (TLS )?connection"):
            await call(client, server.port, NODE_B)


def test_a_pair_that_is_none(tmp_path: Path) -> None:
    own = authority(tmp_path)
    certificate = own.issue(new_key().public_key(), NODE_A, [], now=1.8e9, seconds=60)
    with pytest.raises(ShardlineError) as caught:
        ClusterTls(own.certificate_pem, certificate, key_pem(new_key()))
    assert caught.value.code == "internal"


def test_files_of_a_public_listener(tmp_path: Path) -> None:
    own = authority(tmp_path)
    key = new_key()
    chain, private = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(own.issue(key.public_key(), NODE_A, [], now=1.8e9, seconds=60))
    private.write_bytes(key_pem(key))
    assert public_tls(chain, private).verify_mode == ssl.CERT_NONE
    for first, second in ((tmp_path / "none", private), (chain, chain), (private, chain)):
        with pytest.raises(ShardlineError) as caught:
            public_tls(first, second)
        assert caught.value.code == "setting_invalid"


async def test_nothing_new_begins_when_the_callers_certificate_is_over(tmp_path: Path) -> None:
    """One that was shut out must not stay by never hanging up; one that has a new certificate notices nothing."""
    own = authority(tmp_path)
    key = new_key()
    now = time.time()
    short = own.issue(key.public_key(), NODE_A, [], now=now, seconds=1.0)
    tls = ClusterTls(own.certificate_pem, short, key_pem(key))
    async with serving(who, tls=party(own, NODE_B).server()) as server, calling(tls) as client:
        assert await call(client, server.port, NODE_B) and client.connections == 1
        await until(lambda: time.time() > now + 2.1)
        # What was open answers once more, and that is all.
        assert await call(client, server.port, NODE_B)
        await until(lambda: client.connections == 0)
        with pytest.raises(HttpFailure):
            await call(client, server.port, NODE_B)
        tls.swap(own.issue(key.public_key(), NODE_A, [], now=time.time(), seconds=600), key_pem(key))
        assert await call(client, server.port, NODE_B)


def test_a_key_is_on_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert party(authority(tmp_path), NODE_A).client


def test_where_there_is_no_memory_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    own = authority(tmp_path)
    assert party(own, NODE_A).client
    assert [path.name for path in tmp_path.iterdir()] == ["authority.pem"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ShardlineError, match="cannot be handed on"):
        party(own, NODE_A)
