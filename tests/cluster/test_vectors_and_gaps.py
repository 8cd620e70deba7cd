"""Two Nodes with an engine worker each: vectors of prompts, and gaps in texts that a model fills, with both engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cluster import Cluster, model_cluster
from tests.support.embedded import vector

pytestmark = [pytest.mark.llama, pytest.mark.torch, pytest.mark.timeout(240)]
pytest.importorskip("llama_cpp")
pytest.importorskip("torch")

LAYERS = 8
NODE = ["--threads", "1", "--kv-tokens", "512"]
TEXTS = ["the cat", "a longer text about the sea and the ships that are on it " * 3]


@pytest.fixture(scope="module", params=["torch", "llama"])
async def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
async def marks_and_cluster(
    engine: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Path, tuple[int, int, int], Cluster]]:
    from tests.support.infilling import write_infilling_gguf

    folder = tmp_path_factory.mktemp(engine)
    path = folder / "infilling.gguf"
    marks = write_infilling_gguf(path, pooling_type=1)
    async with model_cluster(folder, path, layers=("0:3", "3:8"), engine=engine, node_arguments=NODE) as cluster:
        yield path, marks, cluster


async def ids_of(cluster: Cluster, text: str, *, add_special: bool) -> list[int]:
    body = {"text": text, "add_special": add_special}
    answer = await cluster.control("POST", f"{cluster.nodes[0].url}/v1/tokenize", json=body)
    return list(answer.json()["tokens"])


async def post(cluster: Cluster, path: str, **fields: Any) -> dict[str, Any]:
    answer = await cluster.http.post(f"{cluster.gateway.url}/v1/{path}", json={"model": cluster.model, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def in_one_process(engine: str, path: Path, ids: list[int], pooling: Any) -> np.ndarray:
    """The same of the whole model, in the engine alone, computed in chunks as the route has them."""
    from shardline.model.backend import ShardSpec
    from shardline.model.llama_shard import load as load_llama
    from shardline.model.torch_backend import load as load_torch

    if engine == "torch":
        whole = load_torch(ShardSpec(str(path), 0, LAYERS, threads=1))
        found = vector([whole], [ids], pooling)
    else:
        shard = load_llama(ShardSpec(str(path), 0, LAYERS, threads=1, options={"content_id": "x", "kv_tokens": 512}))
        found = vector([shard], [ids], pooling)
        shard.unload()
    return found / np.linalg.norm(found)


async def test_vectors_are_those_of_the_engine_alone(
    engine: str, marks_and_cluster: tuple[Path, tuple[int, int, int], Cluster]
) -> None:
    path, _, cluster = marks_and_cluster
    for fields, pooling in (({}, "mean"), ({"pooling": "mean"}, "mean"), ({"pooling": "last"}, "last")):
        answer = await post(cluster, "embeddings", input=TEXTS, **fields)
        assert answer["pooling"] == pooling, "the file names a mean"
        for text, item in zip(TEXTS, answer["data"], strict=True):
            wanted = in_one_process(engine, path, await ids_of(cluster, text, add_special=True), pooling)
            np.testing.assert_allclose(item["embedding"], wanted, atol=2e-3)
            assert np.dot(item["embedding"], wanted) > 0.9999
    again = await post(cluster, "embeddings", input=TEXTS, **fields)
    for one, other in zip(again["data"], answer["data"], strict=True):
        if engine == "torch":
            assert one == other
        # llama.cpp rounds by where in its one KV buffer the cells of a session lie.
        assert np.dot(one["embedding"], other["embedding"]) > 1 - 1e-6
    await cluster.until_free()


async def test_a_gap_is_filled(marks_and_cluster: tuple[Path, tuple[int, int, int], Cluster]) -> None:
    """The prompt is what infilling models were trained on: prefix, suffix, middle, each behind its mark."""
    _, (prefix, suffix, middle), cluster = marks_and_cluster
    before, behind = "the cat ", " on the mat"
    asked = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = await post(cluster, "completions", prompt=before, suffix=behind, **asked)
    bos = await ids_of(cluster, "", add_special=True)
    ids = [*bos, prefix, *await ids_of(cluster, before, add_special=False)]
    ids += [suffix, *await ids_of(cluster, behind, add_special=False), middle]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    by_hand = await post(cluster, "completions", prompt=ids, **asked)
    assert answer["choices"][0]["text"] == by_hand["choices"][0]["text"] != ""
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"]
    await cluster.until_free()
