"""`POST /v1/embeddings` on a whole cluster: the official client, batches, what is refused, and what stays behind."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from shardline.gateway.embeddings import AT_A_TIME
from shardline.settings import Settings
from tests.support.api_cluster import ApiCluster, api_cluster, until

Json = dict[str, Any]
CHUNKED = Settings(drain_s=0.5, prefill_chunk_max=16)
CONTEXT = 300
SCRIPT: Json = {"context_length": CONTEXT, "layout": [["hidden", "F32", [24]]]}
LONG = "a longer text " * 10
"""140 bytes, each a token: nine chunks."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ApiCluster]:
    async with api_cluster(tmp_path, script=SCRIPT, settings=CHUNKED) as made:
        yield made


async def ask(cluster: ApiCluster, sent: Any, **fields: Any) -> httpx.Response:
    body = {"model": cluster.model, "input": sent, **fields}
    return await cluster.http.post(f"{cluster.url}/v1/embeddings", json=body)


async def vectors(cluster: ApiCluster, sent: Any, **fields: Any) -> list[list[float]]:
    answer = await ask(cluster, sent, **fields)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


async def free_at_once(cluster: ApiCluster) -> None:
    """Nothing is used, promised or kept anywhere."""
    async with asyncio.timeout(2):
        await cluster.until_free()
    for number in range(len(cluster.nodes)):
        assert (await cluster.info(number)).kv.cached_tokens == 0


async def test_the_official_client(cluster: ApiCluster) -> None:
    """Which asks for base64 by itself and decodes it."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model=cluster.model, input=["one", LONG], user="somebody")
        plain = await client.embeddings.create(model=cluster.model, input=[LONG, "one"], encoding_format="float")
        short = await client.embeddings.create(model=cluster.model, input="one", dimensions=5)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model=cluster.model, input="one", dimensions=25)
    assert answer.object == "list"
    assert answer.model == cluster.model
    assert [item.index for item in answer.data] == [0, 1]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (143, 143)
    one, two = (np.array(item.embedding) for item in answer.data)
    assert one.shape == two.shape == (24,)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-6)
    assert not np.array_equal(one, two)
    for item, packed in zip(plain.data, (two, one), strict=True):
        assert np.array_equal(np.float32(item.embedding), np.float32(packed)), "numbers are these float32 exactly"
    first = np.array(short.data[0].embedding)
    assert np.allclose(first, one[:5] / np.linalg.norm(one[:5]), atol=1e-6)
    assert refused.value.body["param"] == "dimensions"  # type: ignore[index]
    await free_at_once(cluster)


async def test_one_two_and_three_nodes_give_the_same(tmp_path: Path, cluster: ApiCluster) -> None:
    asked = ["Hi", LONG, [1, 2, 3]]
    wanted = {how: [await vectors(cluster, text, pooling=how) for text in asked] for how in ("mean", "last")}
    assert wanted["mean"] != wanted["last"]
    assert [await vectors(cluster, text) for text in asked] == wanted["last"], "the default, as the model names none"
    for number, layers in enumerate([((0, 6),), ((0, 1), (1, 4), (4, 6))]):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with api_cluster(folder, script=SCRIPT, settings=CHUNKED, layers=layers) as other:
            for how, found in wanted.items():
                assert [await vectors(other, text, pooling=how) for text in asked] == found


async def test_a_batch_of_64_is_64_sessions_and_leaves_nothing(cluster: ApiCluster) -> None:
    texts = [f"text number {number} " * (1 + number % 5) for number in range(64)]
    answer = await ask(cluster, texts)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["pooling"], len(body["data"])) == ("last", 64)
    assert body["usage"]["total_tokens"] == sum(len(text) for text in texts)
    sessions = answer.headers["shardline-route-session"].split(",")
    assert len(set(sessions)) == 64
    for text, session, item in list(zip(texts, sessions, body["data"], strict=True))[::21]:
        record = await cluster.record(session)
        assert (record["phase"], record["decode"]["tokens"]) == ("completed", 0)
        assert (record["prefill"]["done"], record["prefill"]["total"]) == (len(text), len(text))
        assert [item["embedding"]] == await vectors(cluster, text)
    await free_at_once(cluster)


async def test_text_and_vectors_of_one_prompt_do_not_mix(cluster: ApiCluster) -> None:
    """A vector begins with no kept cache, and leaves none; what a text left stays where it is."""
    text = "the same beginning of both kinds " * 4
    alone = await vectors(cluster, text, pooling="mean")
    answer = await cluster.answer(text, max_tokens=4)
    assert answer["telemetry"]["prefill"]["cached"] == 0
    kept = [(await cluster.info(number)).kv.cached_tokens for number in range(2)]
    assert min(kept) > 0
    assert await vectors(cluster, text, pooling="mean") == alone
    assert [(await cluster.info(number)).kv.cached_tokens for number in range(2)] == kept
    again = await cluster.answer(text, max_tokens=4)
    assert again["telemetry"]["prefill"]["cached"] > 0
    assert again["choices"] == answer["choices"]


@pytest.mark.parametrize(
    ("sent", "fields", "status", "code", "param"),
    [
        ("x" * (CONTEXT + 1), {}, 400, "context_length_exceeded", "input"),
        ([[1], [7] * (CONTEXT + 1)], {}, 400, "context_length_exceeded", "input"),
        (["ok", ""], {}, 400, "invalid_value", "input"),
        ([[1], [1 << 30]], {}, 400, "invalid_value", "input"),
        ([-1], {}, 400, "invalid_value", "input"),
        ("ok", {"model": "another"}, 404, "model_not_found", "model"),
        ("ok", {"dimensions": 25}, 400, "invalid_value", "dimensions"),
        ("ok", {"temperature": 1}, 400, "unsupported_parameter", "temperature"),
    ],
    ids=[
        *("too long", "too many ids", "empty", "no id of the model", "below 0", "no such model", "too wide"),
        "not of embeddings",
    ],
)
async def test_refusals_name_the_field(
    cluster: ApiCluster, sent: Any, fields: Json, status: int, code: str, param: str
) -> None:
    answer = await ask(cluster, sent, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    await free_at_once(cluster)


async def test_an_input_may_fill_the_context(cluster: ApiCluster) -> None:
    (found,) = await vectors(cluster, "x" * CONTEXT)
    assert len(found) == 24


async def test_a_client_that_leaves_frees_every_node(tmp_path: Path) -> None:
    """In the middle of the prefill of many inputs: those that run are cancelled, the others never begin."""
    slow = {**SCRIPT, "prefill_ms_per_row": 2.0}
    async with api_cluster(tmp_path, script=slow, settings=CHUNKED) as cluster:
        asking = asyncio.create_task(ask(cluster, [LONG] * 30))
        await cluster.in_phase("prefill")

        async def computing() -> bool:
            return min(await cluster.kv_used()) > 0

        await until(computing)
        asking.cancel()
        await asyncio.wait({asking})

        async def ended() -> bool:
            return all(session["phase"] in ("cancelled", "completed") for session in await cluster.sessions())

        await until(ended, 3)
        await free_at_once(cluster)
        phases = [session["phase"] for session in await cluster.sessions()]
        assert "cancelled" in phases
        assert len(phases) <= AT_A_TIME + phases.count("completed")
        assert len(await vectors(cluster, "still here")) == 1


async def test_a_session_that_its_owner_cancels_ends_the_request(tmp_path: Path) -> None:
    slow = {**SCRIPT, "prefill_ms_per_row": 2.0}
    async with api_cluster(tmp_path, script=slow, settings=CHUNKED) as cluster:
        asking = asyncio.create_task(ask(cluster, ["one", LONG, LONG]))
        session = (await cluster.in_phase("prefill"))["id"]
        await cluster.http.delete(f"{cluster.url}/v1/route-sessions/{session}")
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        await free_at_once(cluster)


FAULTS = [
    ({"kind": "error", "phase": "prefill", "layer": 1}, 502, "engine_error"),
    ({"kind": "nan", "phase": "prefill", "layer": 5}, 502, "numerical_error"),
    ({"kind": "nan", "phase": "prefill", "layer": 0}, 502, "numerical_error"),
    ({"kind": "garbage", "phase": "prefill", "layer": 0}, 502, "engine_error"),
    ({"kind": "exit", "phase": "prefill", "layer": 4}, 502, "engine_lost"),
]


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS, ids=[f"{f['kind']} {f['layer']}" for f, _, _ in FAULTS])
async def test_what_fails_says_which_input(tmp_path: Path, fault: Json, status: int, code: str) -> None:
    script = {**SCRIPT, "faults": [{**fault, "contains": "spoil"}]}
    async with api_cluster(tmp_path, script=script, settings=CHUNKED) as cluster:
        answer = await ask(cluster, ["one", "two", "spoil this", "four"], pooling="mean")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["node"] != "") == (status, code, True)
        if code != "engine_lost":  # which ends all that run there
            assert error["input"] == 2
        assert error["route_sessions"]
        await free_at_once(cluster)


async def test_more_than_the_route_holds_waits_its_turn(tmp_path: Path) -> None:
    """KV for two inputs at a time: the others queue, and all come."""
    async with api_cluster(tmp_path, script=SCRIPT, settings=CHUNKED, kv_tokens=CONTEXT) as cluster:
        found = await vectors(cluster, [LONG + str(number) for number in range(12)])
        assert len({tuple(vector) for vector in found}) == 12
        await free_at_once(cluster)


async def test_base64_is_little_endian_float32(cluster: ApiCluster) -> None:
    (numbers,) = await vectors(cluster, "Hi")
    answer = (await ask(cluster, "Hi", encoding_format="base64")).json()
    packed = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack(f"<{len(numbers)}f", packed) == tuple(np.float32(number) for number in numbers)


async def test_keys_and_usage(tmp_path: Path) -> None:
    keys: Sequence[str] = ("sk-test-key-0123456789abcdef",)
    async with api_cluster(tmp_path, script=SCRIPT, settings=CHUNKED, api_keys=keys) as cluster:
        assert (await ask(cluster, "Hi")).status_code == 401
        body = {"model": cluster.model, "input": ["Hi", "you"]}
        headers = {"authorization": f"Bearer {keys[0]}"}
        answer = await cluster.http.post(f"{cluster.url}/v1/embeddings", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.json()["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
        session = answer.headers["shardline-route-session"].split(",")[0]
        assert (await cluster.http.get(f"{cluster.url}/v1/route-sessions/{session}")).status_code == 401


async def test_other_methods_and_types(cluster: ApiCluster) -> None:
    assert (await cluster.http.get(f"{cluster.url}/v1/embeddings")).status_code == 405
    plain = {"content-type": "text/plain"}
    answer = await cluster.http.post(f"{cluster.url}/v1/embeddings", content=b"{}", headers=plain)
    assert answer.status_code == 415
