"""What a stranger, and a Gateway with a wrong ticket, cannot do to a Node."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.wire.messages import OpenSession, RouteAnswer, RouteRequest, Ticket
from shardline.wire.steps import LANE_PREFILL, TOKENS_ONLY, Entry, Step, encode
from shardline.wire.tickets import peek, sign
from tests.support.local_cluster import CREDENTIAL, LocalCluster, local_cluster

HEADERS = {"authorization": f"Bearer {CREDENTIAL}", "shardline-protocol": "1"}


async def a_route(cluster: LocalCluster) -> RouteAnswer:
    return await cluster.tracker_client.routes(RouteRequest(model=cluster.model, kv_tokens=32, gateway="g-test"))


def opening(ticket: str, /, **changes: Any) -> dict[str, Any]:
    terms = peek(ticket, Ticket)
    request = OpenSession(
        ticket=ticket,
        key=secrets.token_hex(16),
        prompt_tokens=8,
        max_tokens=8,
        layout_in=terms.layout_in,
        layout_out=terms.layout_out,
    )
    return {**msgspec.to_builtins(request), **changes}


async def refusal(http: httpx.AsyncClient, url: str, body: Any, headers: dict[str, str] = HEADERS) -> tuple[int, str]:
    answer = await http.post(url, json=body, headers=headers)
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/sessions"),
        ("DELETE", "/v1/sessions/" + "0" * 32),
        ("POST", "/v1/steps"),
        ("POST", "/v1/beats"),
        ("POST", "/v1/tokenize"),
        ("GET", "/v1/text/" + "0" * 64),
        ("GET", "/v1/node"),
        ("GET", "/metrics"),
        ("GET", "/nothing"),
    ],
)
async def test_everything_needs_the_credential(tmp_path: Path, method: str, path: str) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)]) as cluster, httpx.AsyncClient() as http:
        url = cluster.nodes[0].url + path
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {CREDENTIAL}"}):
            answer = await http.request(method, url, headers={**headers, "shardline-protocol": "1"})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "unauthorized"
        answer = await http.request(method, url, headers={"authorization": f"Bearer {CREDENTIAL}"})
        if path == "/metrics":
            assert answer.status_code == 200, "what collects numbers speaks no protocol of ours"
        elif path != "/nothing":
            assert (answer.status_code, answer.json()["error"]["code"]) == (426, "protocol_mismatch")


async def test_without_credential_a_node_says_who_it_is_and_nothing_else(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)]) as cluster, httpx.AsyncClient() as http:
        answer = await http.get(cluster.nodes[0].url + "/v1/node?nonce=abcdefgh")
        assert set(answer.json()) == {"id", "protocol", "proof"}
        for nonce in ("short", "x" * 129, "a b c d e f g", "ünïcödeee"):
            assert (await http.get(cluster.nodes[0].url + "/v1/node", params={"nonce": nonce})).status_code == 400
        assert (await http.get(cluster.nodes[0].url + "/healthz")).json() == {"state": "ready"}


async def test_a_ticket_opens_one_session_once_and_only_as_it_says(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 3), (3, 6)]) as cluster, httpx.AsyncClient() as http:
        url = cluster.nodes[0].url + "/v1/sessions"
        ticket, other = (await a_route(cluster)).tickets
        forged = sign(Ed25519PrivateKey.generate(), "ticket", peek(ticket, Ticket))
        head, _, signature = ticket.partition(".")
        refused = [
            (opening(ticket, ticket=forged), "ticket_invalid"),
            (opening(ticket, ticket="nonsense"), "ticket_invalid"),
            (opening(ticket, ticket=f"{head}.{signature[:-4]}AAAA"), "ticket_invalid"),
            (opening(other), "ticket_invalid"),  # for the other Node
            (opening(ticket, prompt_tokens=30), "ticket_invalid"),  # more KV than it grants
            (opening(ticket, layout_out="0" * 16), "invalid_value"),
            (opening(ticket, key="../../etc/passwd"), "invalid_value"),
            (opening(ticket, key="0" * 31), "invalid_value"),
            (opening(ticket, max_tokens=0), "invalid_value"),
            (opening(ticket, prompt_tokens=-1), "invalid_value"),
        ]
        for body, code in refused:
            status, got = await refusal(http, url, body)
            assert (got, status >= 400) == (code, True), body
        async with http.stream("POST", url, json=opening(ticket), headers=HEADERS) as stream:
            first = await anext(stream.aiter_lines())
            assert msgspec.json.decode(first)["event"] == "opened"
            assert await refusal(http, url, opening(ticket)) == (409, "ticket_used")
        await cluster.until_free()
        assert await refusal(http, url, opening(ticket)) == (409, "ticket_used")


async def test_an_expired_ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)]) as cluster, httpx.AsyncClient() as http:
        (ticket,) = (await a_route(cluster)).tickets
        later = time.time() + cluster.settings.ticket_ttl_s + 1
        monkeypatch.setattr("shardline.node.app.time.time", lambda: later)
        assert await refusal(http, cluster.nodes[0].url + "/v1/sessions", opening(ticket)) == (403, "ticket_invalid")


async def test_steps_need_the_session_key(tmp_path: Path) -> None:
    """With the credential, but without the key of a session, nothing of it can be reached: not even its existence."""
    async with local_cluster(tmp_path, layers=[(0, 6)], script={"eos": False, "decode_ms": 20}) as cluster:
        generation = cluster.start(prompt=8, max_tokens=100)
        await generation.wait_open()
        url = cluster.nodes[0].url
        async with httpx.AsyncClient() as http:
            for key in (bytes(16), b"\xff" * 16, secrets.token_bytes(16)):
                entry = Entry(key, 0, 0, 4, 0, LANE_PREFILL, 0)
                body = b"".join(encode([Step(entry, bytes(16), ())], TOKENS_ONLY))
                answer = await http.post(url + "/v1/steps", content=body, headers=HEADERS)
                assert answer.status_code == 202
                assert [r["code"] for r in answer.json()["rejected"]] == ["session_gone"]
                closed = await http.delete(f"{url}/v1/sessions/{key.hex()}", headers=HEADERS)
                assert closed.json() == {"closed": False}
            wrong = await http.delete(f"{url}/v1/sessions/{generation.id}", headers=HEADERS)
            assert wrong.status_code == 400, "the public id is not the key"
        assert (await cluster.info(0)).kv.sessions == 1
        await generation.cancel("done")


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80\x04\x95", b"PK\x03\x04" + bytes(100), b"{}", b"\x00" * 64, b"\xff" * 64, b"[" * 5000],
    ids=["empty", "pickle", "zip", "json", "zeros", "ones", "nested"],
)
async def test_garbage_as_a_step_document(tmp_path: Path, body: bytes) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)]) as cluster, httpx.AsyncClient() as http:
        answer = await http.post(cluster.nodes[0].url + "/v1/steps", content=body, headers=HEADERS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "frame_invalid")
        assert (await cluster.generate(max_tokens=2))[1].reason == "length"


async def test_a_body_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)]) as cluster:
        port = int(cluster.nodes[0].url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = [f"{k}: {v}" for k, v in HEADERS.items()]
        size = cluster.settings.step_body_bytes + 1
        lines = ["POST /v1/steps HTTP/1.1", "host: x", f"content-length: {size}", *head, "", ""]
        writer.write("\r\n".join(lines).encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_a_web_page_cannot_reach_a_node_and_a_wrong_method_names_the_right_one(tmp_path: Path) -> None:
    async with local_cluster(tmp_path, layers=[(0, 6)]) as cluster, httpx.AsyncClient() as http:
        answer = await http.get(cluster.nodes[0].url + "/v1/node", headers={**HEADERS, "origin": "http://evil.test"})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        paths = {"/v1/beats": "POST", "/v1/steps": "POST", "/v1/sessions/x": "DELETE", "/healthz": "GET"}
        for path, allowed in paths.items():
            answer = await http.request("PUT", cluster.nodes[0].url + path, headers=HEADERS)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
            assert answer.json()["error"]["message"].endswith(f"it has {allowed}")
