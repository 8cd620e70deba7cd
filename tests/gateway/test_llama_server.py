"""llama-server's small questions, in its shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.gateway.template import Templates
from tests.support.gateway_stand import BOS, CHATML, MODEL, START, Json, Stand, bundle, standing

KEY = "sk-alice-0123456789"


@pytest.fixture
async def stand(tmp_path: Path, shared_templates: Templates) -> AsyncIterator[Stand]:
    made = Stand()
    async with standing(
        tmp_path, stand=made, templates=shared_templates, text=bundle(add_bos=True), kv_capacity_tokens=2048
    ):
        yield made


async def test_tokenize_and_back(stand: Stand) -> None:
    text = "Grüße 😀<|im_start|>"
    tokens = (await stand.post("/tokenize", {"content": text})).json()["tokens"]
    assert tokens == [*"Grüße 😀".encode(), START]
    assert (await stand.post("/detokenize", {"tokens": tokens})).json() == {"content": text}
    assert (await stand.post("/detokenize", {"tokens": []})).json() == {"content": ""}
    assert (await stand.post("/detokenize", {"tokens": [0xF0, 0x9F]})).json() == {"content": "�"}
    special = (await stand.post("/tokenize", {"content": "Hi", "add_special": True})).json()
    assert special == {"tokens": [BOS, *b"Hi"]}
    assert not stand.generations


async def test_pieces(stand: Stand) -> None:
    answer = await stand.post("/tokenize", {"content": "aü", "with_pieces": True, "parse_special": True})
    assert answer.json() == {
        "tokens": [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xBC, "piece": [0xBC]}]
    }


async def test_props(stand: Stand) -> None:
    props = (await stand.get("/props")).json()
    assert props == (await stand.get(f"/props?model={MODEL}")).json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["chat_template"] == CHATML
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert props["modalities"] == {"vision": False, "audio": False}
    assert (await stand.get("/props?model=nope")).status_code == 404


async def test_health(stand: Stand) -> None:
    answer = await stand.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    stand.models[:] = [msgspec.structs.replace(stand.models[0], ready=False, missing=[(2, 4)])]
    answer = await stand.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
    assert answer.json()["error"]["missing"] == {MODEL: [[2, 4]]}


async def test_which_of_several_models(stand: Stand) -> None:
    stand.models.append(msgspec.structs.replace(stand.models[0], model="other", content_id="d" * 64))
    for path, body in (("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [97]})):
        answer = await stand.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "other" in answer.json()["error"]["message"]
        assert (await stand.post(path, {**body, "model": "other"})).status_code == 200
    assert (await stand.get("/props")).status_code == 400
    assert (await stand.get("/props?model=other")).json()["model_alias"] == "other"
    stand.models.clear()
    assert (await stand.get("/props")).status_code == 503


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": [1, 2]}, "content"),
        ("/tokenize", {"content": "a" * 200_000}, "content"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"content": "a", "what": 1}, "what"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_what_is_refused_is_named(stand: Stand, path: str, body: Json, param: str) -> None:
    answer = await stand.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_keys(tmp_path: Path, shared_templates: Templates) -> None:
    """All but /health need one."""
    async with standing(tmp_path, templates=shared_templates, keys=[KEY]) as stand:
        good: Any = {"authorization": f"Bearer {KEY}"}
        for path, body in (("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [97]})):
            assert (await stand.post(path, body)).status_code == 401
            assert (await stand.post(path, body, **good)).status_code == 200
        assert (await stand.get("/props")).status_code == 401
        assert (await stand.get("/props", **good)).status_code == 200
        assert (await stand.get("/health")).status_code == 200
