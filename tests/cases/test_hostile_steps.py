"""Reported bugs of such servers, tried on the sockets of real Nodes: steps out of order, documents whose header and
body do not fit together, and objects that other programs would unpickle."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import struct
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shardline.wire.messages import OpenSession, RouteRequest, Ticket
from shardline.wire.steps import LANE_PREFILL, TOKENS_ONLY, Entry, LayoutTensor, SeamLayout, Step, encode
from shardline.wire.tickets import peek
from tests.support.api_cluster import ApiCluster, api_cluster, until
from tests.support.local_cluster import CREDENTIAL

HEADERS = {"authorization": f"Bearer {CREDENTIAL}", "shardline-protocol": "1"}
HIDDEN = SeamLayout([LayoutTensor("hidden", "F32", (8,))])
"""What crosses a Seam of the script."""
PROMPT = 12


class Session:
    """A session opened by hand on one Node. Its stream is read by nobody."""

    def __init__(self, cluster: ApiCluster, number: int, ticket: str) -> None:
        self.cluster = cluster
        self.number = number
        self.ticket = ticket
        self.key = secrets.token_bytes(16)

    @property
    def url(self) -> str:
        return self.cluster.nodes[self.number].url

    def step(self, seq: int, position: int, rows: int = 4, *, token: int = 65) -> Step:
        hidden = () if self.number == 0 else (struct.pack("<8f", *range(8)) * rows,)
        entry = Entry(self.key, seq, position, rows, self.number, LANE_PREFILL, 0)
        return Step(entry, token.to_bytes(4, "little") * rows, hidden)

    async def push(self, *steps: Step) -> list[str]:
        """Codes of what was rejected."""
        layout = TOKENS_ONLY if self.number == 0 else HIDDEN
        answer = await self.post(b"".join(encode(steps, layout)))
        assert answer.status_code == 202, answer.text
        return [reject["code"] for reject in answer.json()["rejected"]]

    async def post(self, body: bytes) -> httpx.Response:
        return await self.cluster.http.post(f"{self.url}/v1/steps", content=body, headers=HEADERS)

    async def close(self) -> bool:
        answer = await self.cluster.http.delete(f"{self.url}/v1/sessions/{self.key.hex()}", headers=HEADERS)
        return bool(answer.json()["closed"])

    async def holds(self, tokens: int) -> None:
        """Wait until the caches of the Node hold so many tokens."""

        async def there() -> bool:
            return (await self.cluster.info(self.number)).kv.used_tokens == tokens

        await until(there)


async def tickets(cluster: ApiCluster) -> list[str]:
    request = RouteRequest(model=cluster.model, kv_tokens=32, gateway="g-test")
    return (await cluster.tracker_client.routes(request)).tickets


def opening(ticket: str, key: bytes) -> bytes:
    terms = peek(ticket, Ticket)
    layouts = {"layout_in": terms.layout_in, "layout_out": terms.layout_out}
    return msgspec.json.encode(OpenSession(ticket=ticket, key=key.hex(), prompt_tokens=PROMPT, max_tokens=8, **layouts))


@asynccontextmanager
async def opened(cluster: ApiCluster, number: int) -> AsyncIterator[Session]:
    session = Session(cluster, number, (await tickets(cluster))[number])
    body = opening(session.ticket, session.key)
    async with cluster.http.stream("POST", f"{session.url}/v1/sessions", content=body, headers=HEADERS) as stream:
        assert stream.status_code == 200
        lines = stream.aiter_lines()  # to be kept: without it the stream is closed
        assert json.loads(await anext(lines))["event"] == "opened"
        yield session


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ApiCluster]:
    async with api_cluster(tmp_path) as made:
        yield made


# ---- order -------------------------------------------------------------------------------------------------------


async def test_steps_out_of_order_leave_the_cache_as_it_is(cluster: ApiCluster) -> None:
    """Step 3 behind step 1, step 1 once more with other bytes, position 10 where 8 are held, no rows at all: each is
    refused by itself, and 8 tokens stay 8. The right one is still taken, also beside a wrong one of a neighbour."""
    async with opened(cluster, 0) as session, opened(cluster, 0) as neighbour:
        assert await session.push(session.step(0, 0)) == []
        assert await session.push(session.step(1, 4)) == []
        await session.holds(8)
        assert await session.push(session.step(3, 8)) == ["seam_gap"]
        assert await session.push(session.step(1, 4, token=66)) == ["duplicate"]
        assert await session.push(session.step(2, 10)) == ["seam_gap"]
        assert await session.push(session.step(2, 7)) == ["seam_gap"]
        answer = await session.post(b"".join(encode([session.step(2, 8, rows=0)], TOKENS_ONLY)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "frame_invalid")
        await session.holds(8)
        assert (await cluster.info(0)).kv.sessions == 2
        assert await session.push(neighbour.step(5, 0), session.step(2, 8, rows=2)) == ["seam_gap"]
        await session.holds(10)


async def test_open_twice_close_twice_and_steps_of_nobody(cluster: ApiCluster) -> None:
    """A ticket opens once, a key is in use once; closing is idempotent; a step behind the close, or of a session that
    never was, is rejected by itself."""
    another = (await tickets(cluster))[0]
    async with opened(cluster, 0) as session:
        assert await session.push(session.step(0, 0)) == []
        await session.holds(4)
        new_key = secrets.token_bytes(16)
        for ticket, key, code in ((session.ticket, new_key, "ticket_used"), (another, session.key, "session_exists")):
            answer = await cluster.http.post(
                f"{session.url}/v1/sessions", content=opening(ticket, key), headers=HEADERS
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, code)
        unknown = Session(cluster, 0, "")
        assert await session.push(unknown.step(0, 0)) == ["session_gone"]
        await session.holds(4)
        assert [await session.close(), await session.close()] == [True, False]
        assert await session.push(session.step(1, 4)) == ["session_gone"]
        await session.holds(0)
    assert await unknown.close() is False


# ---- documents ---------------------------------------------------------------------------------------------------


def document(session: Session) -> tuple[dict[str, Any], bytes]:
    """Header and data of a right step for the second Node."""
    body = b"".join(encode([session.step(0, 0)], HIDDEN))
    (length,) = struct.unpack_from("<Q", body)
    return json.loads(body[8 : 8 + length]), body[8 + length :]


def packed(header: dict[str, Any], data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


CHANGES: list[tuple[str, Any]] = [
    ("shape", [1, 4, 8]),
    ("shape", [2**31, 2**31]),
    ("shape", [4, 7]),
    ("shape", [-4, 8]),
    ("shape", [1, 1, 1, 4, 8]),
    ("shape", [2, 4, 8]),
    ("shape", []),
    ("shape", [4, 8.0]),
    ("dtype", "float8"),
    ("dtype", "F8_E4M3"),
    ("dtype", "object"),
    ("dtype", ""),
    ("dtype", "F16"),
    ("data_offsets", [0, 2**63]),
    ("data_offsets", [176, 176]),
]


async def test_header_and_body_that_do_not_fit_together(cluster: ApiCluster) -> None:
    """Shapes, types and sizes that are not what was agreed, token ids for a Node in the middle, rows for the first one,
    and pieces of a document: 400 that says what was expected and what came; the session goes on as if nothing was."""
    async with opened(cluster, 1) as session, opened(cluster, 0) as head:
        header, data = document(session)
        bodies = [packed({**header, "hidden": {**header["hidden"], field: value}}, data) for field, value in CHANGES]
        whole = packed(header, data)
        bodies += [whole[:-1], whole + b"\0", whole[: len(whole) // 2], whole[:9], b"", packed({}, b""), data]
        bodies += [b"".join(encode([head.step(0, 0)], TOKENS_ONLY))]
        for body in bodies:
            answer = await session.post(body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "frame_invalid"), body
        expected = await session.post(bodies[2])
        assert "[4, 7]" in expected.json()["error"]["message"] and "[4, 8]" in expected.json()["error"]["message"]
        rows = await head.post(whole)
        assert (rows.status_code, rows.json()["error"]["code"]) == (400, "frame_invalid")
        await session.holds(0)
        assert await session.push(session.step(0, 0)) == []
        await session.holds(4)
        assert await head.push(head.step(0, 0)) == []


async def test_a_content_length_that_lies(cluster: ApiCluster) -> None:
    """More announced than sent, and less: the Node neither hangs nor takes the rest for a request, and lives."""
    async with opened(cluster, 0) as session:
        body = b"".join(encode([session.step(0, 0)], TOKENS_ONLY))
        fields = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
        port = int(session.url.rsplit(":", 1)[1])
        for announced in (len(body) + 100, len(body) - 10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /v1/steps HTTP/1.1\r\nhost: localhost\r\n{fields}content-length: {announced}\r\n\r\n"
            writer.write(head.encode() + body)
            if announced > len(body):
                writer.write_eof()
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert b" 202 " not in answer and answer.count(b"HTTP/1.1 400") == (announced < len(body)) * 2, answer
            writer.close()
        await session.holds(0)
        assert await session.push(session.step(0, 0)) == []
        await session.holds(4)


# ---- pickles -----------------------------------------------------------------------------------------------------


def objects(trace: Path) -> dict[str, bytes]:
    """What a program that unpickles would run: it makes the file `trace`."""
    pickled = b"cposix\nsystem\n(S'touch %s'\ntR." % str(trace).encode()
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    described = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    described += b" " * (-(len(described) + 11) % 64) + b"\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(described)) + described + pickled
    return {"pickle": pickled, "torch.save": saved.getvalue(), "numpy objects": array}


def places(cluster: ApiCluster) -> list[tuple[str, str]]:
    """Every path that takes a body."""
    tracker, gateway = cluster.tracker.url, cluster.url
    node = cluster.nodes[1].node
    paths = [("POST", f"{tracker}{path}") for path in ("/v1/nodes", "/v1/routes", "/v1/placement")]
    paths += [("POST", f"{tracker}/v1/nodes/{node}/heartbeat"), ("DELETE", f"{tracker}/v1/nodes/{node}")]
    paths += [("POST", f"{tracker}/v1/routes/r-1/outcome")]
    paths += [("POST", f"{gateway}{path}") for path in ("/v1/chat/completions", "/v1/completions")]
    for role in cluster.nodes:
        paths += [("POST", f"{role.url}/v1/{path}") for path in ("steps", "sessions", "beats", "tokenize")]
    return paths


async def test_nothing_is_ever_unpickled(cluster: ApiCluster, tmp_path: Path) -> None:
    """A pickle, a torch.save file and a numpy array of objects, under every type of content, at every path of every
    part that takes a body: refused with an error object, nothing run, and the cluster serves on."""
    trace = tmp_path / "ran"
    kinds = ["application/octet-stream", "application/json", "application/python-pickle"]
    for method, url in places(cluster):
        for body in objects(trace).values():
            for kind in kinds:
                headers = {**HEADERS, "content-type": kind}
                answer = await cluster.http.request(method, url, content=body, headers=headers)
                assert 400 <= answer.status_code < 500, (url, kind, answer.text)
                assert answer.json()["error"]["code"] in ("frame_invalid", "invalid_json", "unsupported_media_type"), (
                    url
                )
    assert not trace.exists()
    assert await cluster.text(max_tokens=2) == " alpha beta"
