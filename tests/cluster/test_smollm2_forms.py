"""The real small model held to a form, on a route of two Nodes of each engine: JSON of the schema, and nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, model_cluster

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(400)]
pytest.importorskip("llguidance")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "water"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
ASKED = [{"role": "user", "content": "Describe a person named Alice, as JSON."}]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.long]),
        pytest.param("llama", marks=pytest.mark.llama),
    ],
)
async def two_nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    from shardline.cli.demo_model import demo_model

    pytest.importorskip("torch" if request.param == "torch" else "llama_cpp")
    folder: Path = tmp_path_factory.mktemp(request.param)
    layers = ["0:15", "15:30"]
    async with model_cluster(folder, demo_model(), layers=layers, engine=request.param) as cluster:
        yield cluster


async def chat(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    body = {"model": cluster.model, "messages": ASKED, "max_tokens": 200, **fields}
    answer = await cluster.http.post(f"{cluster.gateway.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "age", "likes"}
    assert isinstance(value["name"], str) and len(value["name"]) <= 30
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    assert 1 <= len(value["likes"]) <= 3 and set(value["likes"]) <= {"tea", "coffee", "water"}


async def test_a_schema_is_kept_to(two_nodes: Cluster) -> None:
    for fields in ({"temperature": 0}, {"temperature": 1.5, "seed": 1}, {"temperature": 1.5, "seed": 2, "top_p": 0.9}):
        choice = await chat(two_nodes, response_format=FORM, **fields)
        assert choice["finish_reason"] == "stop"
        check(choice["message"]["content"])
    free = await chat(two_nodes, temperature=0, max_tokens=20)
    with pytest.raises(ValueError):
        json.loads(free["message"]["content"])


async def test_the_same_seed_gives_the_same_form(two_nodes: Cluster) -> None:
    asked = {"response_format": FORM, "temperature": 1.0, "seed": 7}
    assert (await chat(two_nodes, **asked))["message"] == (await chat(two_nodes, **asked))["message"]


async def test_a_refusal_and_a_cut_answer(two_nodes: Cluster) -> None:
    cut = await chat(two_nodes, response_format=FORM, temperature=0, max_tokens=4)
    assert cut["finish_reason"] == "length" and cut["message"]["content"].lstrip().startswith("{")
    body = {
        "model": two_nodes.model,
        "messages": ASKED,
        "response_format": {**FORM, "json_schema": {"schema": {"not": {}}}},
    }
    answer = await two_nodes.http.post(f"{two_nodes.gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "grammar_invalid")
    await two_nodes.until_free()
